"""Results of several systems side by side, for the same prompts at the same times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tutti.base.terminal import table
from tutti.errors import ConfigError


def compare_results(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows by rate and system, and ratios to the first system.

    Raises ConfigError if prompts, arrivals, start state or client differ: the systems would not be
    the only difference.
    """
    if len(results) < 2:
        raise ConfigError("give --compare at least two results")
    first = results[0]
    for other in results:
        if other["benchmark"] != "ttft":
            raise ConfigError("--compare takes results over rates; draw prefixes with figures")
        for name, what in (("digest", "prompts"), ("seed", "workload seeds")):
            if other["workload"][name] != first["workload"][name]:
                raise ConfigError(_differs(first, other, what))
        for name in ("start", "client", "arrivals", "seconds"):
            if other[name] != first[name]:
                raise ConfigError(_differs(first, other, f"--{name}"))
        if _seeds(other) != _seeds(first):
            raise ConfigError(_differs(first, other, "seeds of arrivals"))
    names = [result["system"] for result in results]
    if len(set(names)) < len(names):
        raise ConfigError("two results have the same --system; name them apart")
    rows = [_row(result, row, first) for result in results for row in result["rates"]]
    return {
        "benchmark": "ttft-compare",
        "systems": names,
        "rows": sorted(rows, key=lambda row: (row["rate"], names.index(row["system"]))),
        "max_rate": {result["system"]: result["max_rate"] for result in results},
        "partial": any(result["partial"] for result in results),
    }


def comparison_report(result: dict[str, Any]) -> str:
    headers = ["req/s", "system", "TTFT ms", "/ first", "ITL ms", "hits", ""]
    rows = [
        [
            row["rate"],
            row["system"],
            _number(row["ttft_ms"]),
            _number(row["ttft_ratio"]),
            _number(row["itl_ms"]),
            "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}",
            row["flags"],
        ]
        for row in result["rows"]
    ]
    lines = [table(headers, rows)]
    if "files" in result:
        lines.append(f"wrote {', '.join(result['files'])}")
    return "\n".join(lines + (["PARTIAL results are among them"] if result["partial"] else []))


def _row(result: dict[str, Any], row: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = next((r for r in first["rates"] if r["rate"] == row["rate"]), {})
    ttft, itl = _mean(row, "ttft_ms"), _mean(row, "itl_ms")
    base_ttft = _mean(base, "ttft_ms")
    return {
        "rate": row["rate"],
        "system": result["system"],
        "ttft_ms": ttft,
        "ttft_ratio": ttft / base_ttft if ttft and base_ttft else None,
        "itl_ms": itl,
        "hit_rate": row.get("hit_rate"),
        "flags": ", ".join(name for name in ("unstable", "partial") if row[name]).upper(),
    }


def _mean(row: dict[str, Any], name: str) -> float | None:
    interval = row.get(name)
    return None if interval is None else float(interval["mean"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seeds(result: dict[str, Any]) -> set[int]:
    return {point["seed"] for point in result["points"]}


def _differs(first: dict[str, Any], other: dict[str, Any], what: str) -> str:
    return (
        f"{first['system']} and {other['system']} have other {what}; measure both with the same "
        "arguments"
    )

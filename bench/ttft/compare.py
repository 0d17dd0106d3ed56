"""Results of several systems side by side, for the same prompts at the same times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.base.terminal import table
from tutti.errors import ConfigError


@dataclass(frozen=True)
class _System:
    """One result.  shared: by name, what must be equal in all results.  rows: by rate."""

    name: str
    shared: dict[str, Any]
    rows: list[dict[str, Any]]
    max_rate: dict[str, Any]
    partial: bool


def compare_results(files: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Rows by rate and system, and ratios to the first system.  files: paths and their results.

    Raises ConfigError if prompts, arrivals, start state or client differ: the systems would not be
    the only difference; and for a result without one of the fields.
    """
    if len(files) < 2:
        raise ConfigError("give --compare at least two results")
    systems = [_system(path, result) for path, result in files]
    first = systems[0]
    for other in systems:
        for what, value in other.shared.items():
            if value != first.shared[what]:
                raise ConfigError(
                    f"{first.name} and {other.name} have other {what}; measure both with the same "
                    "arguments"
                )
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise ConfigError("two results have the same --system; name them apart")
    base = {row["rate"]: row["ttft_ms"] for row in first.rows}
    rows = []
    for system in systems:
        for row in system.rows:
            ttft, base_ttft = row["ttft_ms"], base.get(row["rate"])
            ratio = ttft / base_ttft if ttft and base_ttft else None
            rows.append({**row, "system": system.name, "ttft_ratio": ratio})
    return {
        "benchmark": "ttft-compare",
        "systems": names,
        "rows": sorted(rows, key=lambda row: (row["rate"], names.index(row["system"]))),
        "max_rate": {system.name: system.max_rate for system in systems},
        "partial": any(system.partial for system in systems),
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


def _system(path: Path, result: dict[str, Any]) -> _System:
    if result["benchmark"] != "ttft":
        raise ConfigError("--compare takes results over rates; draw prefixes with figures")
    conditions = ("start", "client", "arrivals", "seconds")
    try:
        return _System(
            name=result["system"],
            shared={
                "prompts": result["workload"]["digest"],
                "workload seeds": result["workload"]["seed"],
                **{f"--{name}": result[name] for name in conditions},
                "seeds of arrivals": {point["seed"] for point in result["points"]},
            },
            rows=[_row(row) for row in result["rates"]],
            max_rate=result["max_rate"],
            partial=result["partial"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a whole result ({error!r}); measure it again") from error


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "rate": row["rate"],
        "ttft_ms": _mean(row, "ttft_ms"),
        "itl_ms": _mean(row, "itl_ms"),
        "hit_rate": row.get("hit_rate"),
        "flags": ", ".join(name for name in ("unstable", "partial") if row[name]).upper(),
    }


def _mean(row: dict[str, Any], name: str) -> float | None:
    interval = row.get(name)
    return None if interval is None else float(interval["mean"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

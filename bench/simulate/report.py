"""Tables and notes of `tutti simulate`, for the terminal and for the page of results."""

from __future__ import annotations

from math import isclose
from typing import Any

from tutti.base.terminal import table
from tutti.bench.simulate.intervals import DRIVE_SHARES, SHARES

HEAD = (
    *("system", "router", "requests/s", "TTFT ms: mean", "p50", "p99", "TPOT ms", "ITL ms"),
    *("hit HBM", "hit store", "bubble", "GPUs busy", "drives read, write", "most pages waiting"),
    "queue grows",
    "simulated requests per s of wall time",
)
POINTS_HEAD = (
    "published point",
    "use, by",
    "server",
    "published",
    "simulated",
    "interval",
    "off by",
)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    return [
        [
            f"{system_of(row)}{' (queue grows)' if row['unstable'] else ''}",
            *(row["router"], f"{row['rate']:.2f}"),
            *(_cell(row, "ttft_ms", name, ".0f") for name in ("mean", "p50", "p99")),
            *(_cell(row, name, "mean", ".1f") for name in ("tpot_ms", "itl_ms")),
            *(_cell(row, name, "", ".1%") for name in SHARES),
            ", ".join(_cell(row, name, "", ".1%") for name in DRIVE_SHARES),
            _cell(row, "backlog_pages_max", "", "d"),
            _grows(row),
            f"{row['speed']['requests_per_s']:.0f}",
        ]
        for row in result["rows"]
    ]


def _cell(row: dict[str, Any], name: str, part: str, form: str) -> str:
    """A number and, if computed, its interval."""
    if not row[name] and part:
        return ""
    number = format(row[name][part] if part else row[name], form)
    span = row.get("intervals", {}).get(f"{name}_{part}" if part else name)
    return f"{number} [{', '.join(format(end, form) for end in span)}]" if span else number


def _grows(row: dict[str, Any]) -> str:
    if row["unstable"] or not row.get("settings_unstable"):
        return "yes" if row["unstable"] else "no"
    return f"in {row['settings_unstable']} of {row['settings']} settings"


def system_of(row: dict[str, Any]) -> str:
    """Name of the row's system, with the bandwidth of its second tier if it has one."""
    if "remote" not in row:
        return str(row["system"])
    return f"{row['system']}, {row['remote']['bytes_per_s'] / 1e9:g} GB/s"


def point_rows(result: dict[str, Any]) -> list[list[object]]:
    return [
        [
            point["name"],
            f"{' with '.join(filter(None, (point['use'], point.get('with'))))}, {point['by']}",
            point["server"],
            f"{point['value']:g} {point['unit']}",
            *_simulated_cells(point),
        ]
        for point in result.get("points", ())
    ]


def _simulated_cells(point: dict[str, Any]) -> list[str]:
    if point["simulated"] is None:
        return ["queue grows", "", "not compared"]
    interval = f"{point['low']:.3g} to {point['high']:.3g}" if _varies(point) else "nothing to vary"
    off = f"{point['error']:+.1%}{', by accident' if 'accident' in point else ''}"
    return [f"{point['simulated']:.3g}", interval, off]


def _varies(point: dict[str, Any]) -> bool:
    """Whether a setting changes the point; rounding of steps to nanoseconds does not count."""
    return point["low"] is not None and not isclose(point["low"], point["high"], rel_tol=1e-6)


def notes_of(result: dict[str, Any]) -> list[str]:
    if "points" in result:
        return [*_tested_notes(result["points"]), *fitted_notes(result["fitted"])]
    workload = result["workload"]
    estimated = [
        f"the profile's {half} is an estimate, not measured"
        for half in result.get("profile_estimated", ())
    ]
    return [
        f"simulated: {result['servers']} servers, {result['servers_per_node']} per machine with "
        f"{result['media_per_node']} of {result['drive']}; GPU {result['gpu']}, server "
        f"{result['server']}; {workload['requests']} requests of {workload['name']}, "
        f"{workload['input_tokens_mean']} tokens on the mean"
        + (f"; {result['hbm_tokens']} tokens in HBM" if "hbm_tokens" in result else ""),
        *(
            [f"intervals: as assumed, and with one setting changed: {', '.join(varied)}"]
            if (varied := result.get("varied"))
            else []
        ),
        *estimated,
        *["where the queue grows, latencies depend on the run's length: do not compare them"]
        * any(row["unstable"] for row in result["rows"]),
        *_remote_notes(result),
    ]


def _remote_notes(result: dict[str, Any]) -> list[str]:
    """Shares of all prompt tokens that the second tier fetched, copied, or had late."""
    return [
        f"second tier of {system_of(row)}, {row['router']}, {row['rate']:.2f} requests/s: "
        f"{row['remote_fetched']:.1%} of the tokens fetched, {row['remote_copied']:.1%} copied, "
        f"{row['remote_late']:.1%} late"
        for row in result["rows"]
        if "remote_fetched" in row
    ]


def _tested_notes(found: list[dict[str, Any]]) -> list[str]:
    """Errors of points outside the fit, separately for simulation and closed formulas."""
    notes = []
    for by in ("simulation", "formula"):
        tested = [p for p in found if p["use"] == "test" and p["by"] == by]
        known = sorted(abs(p["error"]) for p in tested if p["error"] is not None)
        if tested and not known:
            notes.append(
                f"by {by}: of {len(tested)} points that were not fitted {len(tested)} are "
                "saturated: nothing is compared"
            )
        elif known:
            near = [p for p in tested if p["error"] is not None and abs(p["error"]) <= 0.1]
            apart = [p for p in near if "accident" in p]
            ends = [(p["low"], p["high"], p["value"]) for p in near if p not in apart]
            sure = sum(0.9 * value <= low <= high <= 1.1 * value for low, high, value in ends)
            spread = [p for p in tested if _varies(p)]
            notes.append(
                f"by {by}: of {len(tested)} points that were not fitted {len(tested) - len(known)} "
                f"are saturated; of the others {len(near)} are within 10 % as assumed, "
                f"{len(apart)} of them by accident and {sure} in their whole interval; the "
                f"middle one is off by {known[len(known) // 2]:.1%}; unpublished settings change "
                f"{len(spread)}"
                + (f", of which {sum(p['within'] for p in spread)} lie within" if spread else "")
            )
            notes += [f"{p['name']}, by accident: {p['accident']}" for p in apart]
    return notes


def fitted_notes(fitted: dict[str, float]) -> list[str]:
    return [f"{name} = {value:g} (fitted)" for name, value in fitted.items()]


def report(result: dict[str, Any]) -> str:
    if "files" in result:
        return f"simulated: wrote {', '.join(result['files'])}"
    parts = []
    if result["rows"]:
        parts.append(table(HEAD, rows_of(result)))
    if result.get("points"):
        parts.append(table(POINTS_HEAD, point_rows(result)))
    return "\n\n".join([*parts, *notes_of(result)])

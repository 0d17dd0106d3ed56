"""Tables of the GPU benchmarks' results, and a line per row while they run."""

from __future__ import annotations

from typing import Any

from tutti.bench.statistics import interval_text

HEAD = ("row", "measured", "bar", "ratio", "noise", "beside")


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The cells of HEAD for each measured row; the default bar, `one`, is not named."""
    rows = [row for row in result["rows"] if "not_run" not in row]
    return [[row["name"].removesuffix(", against one"), *_cells(row)] for row in rows]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes: GPU, clocks, and rows that were not run."""
    gpu = result["gpu"]
    names = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "pcie.link.gen.current")
    facts = ", ".join(f"{name} {gpu[name]}" for name in names if name in gpu)
    notes = [facts] if facts else []
    notes += [f"Not run: {r['name']} ({r['not_run']})." for r in result["rows"] if "not_run" in r]
    if not result.get("complete"):
        notes.append(f"Not complete: {result.get('stopped', 'it was cut')}.")
    return notes


def line_of(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{row['name']}: NOT RUN, {row['not_run']}"
    named = zip(HEAD[1:], _cells(row), strict=True)
    return f"{row['name']}: " + "; ".join(f"{name} {cell}" for name, cell in named if cell)


def _cells(row: dict[str, Any]) -> list[str]:
    """The cells of HEAD after the name."""
    if "verdict" in row:
        return [row["verdict"], "", "", "", ""]
    if "speed_ratio" in row:
        speeds = [_speed(row[system]["median_gb_per_s"]) for system in ("a", "b")]
        intervals = [interval_text(found["speed_ratio"]) for found in (row, row["noise"])]
        return [*speeds, *intervals, f"{row['a']['median_cpu_s_per_gb']:.3f} CPU-s/GB"]
    if "slowdown" in row:
        times = [_middle(row["raw"][f"{way}_ms"]) for way in ("beside", "alone")]
        more = f"{_speed(row['gb_per_s'])} of {_speed(row['gb_per_s_alone'])}, partition "
        more += interval_text(row["partition_ratio"])
        shown = (f"{times[0]:.2f} ms", f"{times[1]:.2f} ms alone")
        return [*shown, interval_text(row["slowdown"]), interval_text(row["noise"]), more]
    if "keeps_up" in row:
        speeds = [_speed(row[f"{n}_gb_per_s"]["median"]) for n in ("beside", "mover")]
        alone, link = (_speed(row[f"{n}_gb_per_s"]["median"]) for n in ("alone", "link"))
        more = f"{alone} without the mover, mover {link} without it"
        return [*speeds, interval_text(row["keeps_up"]), "", more]
    bar = max(row["io_ms"], row["compute_ms"])
    more = f"loads {row['io_ms']:.2f} ms, compute {row['compute_ms']:.2f} ms"
    return [f"{row['both_ms']:.2f} ms", f"{bar:.2f} ms", interval_text(row["ratio"]), "", more]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f} GB/s"

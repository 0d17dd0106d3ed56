"""Pictures of results, where matplotlib is installed."""

from __future__ import annotations

import os
from typing import Any

from tutti.units import format_nbytes

_COLOURS = {"store": "#4c72b0", "retrieve": "#55a868", "layerwise": "#8172b3", "mixed": "#c44e52"}


def plot_demo(results: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """Draws the results of `tutti.bench.bandwidth` and `tutti.bench.replay` into one picture.

    results: {"bandwidth": ..., "replay": ...}, either of which may be missing.
    Returns False, and draws nothing, without matplotlib.
    """
    canvas = blank_figure(("bandwidth" in results) + ("replay" in results))
    if canvas is None:
        return False
    figure, axes = canvas
    places = iter(axes)
    if "bandwidth" in results:
        _draw_bandwidth(next(places), results["bandwidth"])
    if "replay" in results:
        _draw_replay(next(places), results["replay"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def plot_compare(result: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """Draws the speed ratios of one case with their intervals and the noise floor.

    Returns False, and draws nothing, without matplotlib or without a ratio to draw.
    """
    cells = {name: cell for name, cell in result["cells"].items() if "speed_ratio" in cell}
    canvas = blank_figure(1) if cells else None
    if canvas is None:
        return False
    figure, (axis,) = canvas
    for row, cell in enumerate(cells.values()):
        _draw_interval(axis, row, cell["speed_ratio"], "#4c72b0")
        if "noise" in cell:
            _draw_interval(axis, row + 0.25, cell["noise"]["speed_ratio"], "#aaaaaa")
    names = [f"{name}\n{cell['a']['name']} / {cell['b']['name']}" for name, cell in cells.items()]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("ratio of GB/s, median and 95 % interval; grey: b against itself")
    axis.set_title(result["case"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def plot_paths(result: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """Draws GB/s and p99 of reads over the depth, a line for each path and size of block.

    Returns False, and draws nothing, without matplotlib.
    """
    canvas = blank_figure(2)
    if canvas is None:
        return False
    figure, axes = canvas
    reads = [row for row in result["rows"] if row["direction"] == "read"]
    for line in dict.fromkeys((row["path"], row["block_nbytes"]) for row in reads):
        rows = [row for row in reads if (row["path"], row["block_nbytes"]) == line]
        label = f"{line[0]}, {format_nbytes(line[1])}"
        for axis, name in zip(axes, ("gb_per_s", "p99_us"), strict=True):
            axis.plot(
                [row["depth"] for row in rows], [row[name] for row in rows], "o-", label=label
            )
    for axis, title in zip(axes, ("reads, GB/s", "reads, p99 in microseconds"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("commands in flight")
        axis.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def blank_figure(columns: int) -> tuple[Any, Any] | None:
    """A figure with axes side by side, that needs no display; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7.5 * max(1, columns), 4.5))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, max(1, columns), i + 1) for i in range(columns)]
    return figure, axes


def _draw_bandwidth(axis: Any, result: dict[str, Any]) -> None:
    rows = result["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    width = 0.8 / max(1, len(phases))
    for i, phase in enumerate(phases):
        found = {row["shape"]: row["gb_per_s"] for row in rows if row["phase"] == phase}
        places = [shapes.index(shape) + (i - (len(phases) - 1) / 2) * width for shape in found]
        axis.bar(places, list(found.values()), width, label=phase, color=_COLOURS.get(phase))
    axis.set_xticks(range(len(shapes)), shapes)
    axis.set_xlabel("object: layers x slice")
    axis.set_ylabel("GB/s")
    axis.set_title(f"{result['controller']} controller, verify {result['verify']}")
    axis.legend()


def _draw_replay(axis: Any, result: dict[str, Any]) -> None:
    run = result["runs"][-1]
    bars = {
        "store": run["block_hit_rate"],
        "LRU, blocks": run["lru_hit_rate"],
        "MIN": run["minimum_hit_rate"],
        "unlimited": run["unlimited_hit_rate"],
    }
    axis.bar(list(bars), [100 * rate for rate in bars.values()], color="#4c72b0")
    axis.set_ylabel("block hits, %")
    title = f"{result['requests']} requests, {run['capacity_objects']} objects"
    axis.set_title(f"{title}, {run['wrong']} pages wrong")


def _draw_interval(axis: Any, row: float, interval: dict[str, float], colour: str) -> None:
    median = interval["median"]
    errors = [[median - interval["low"]], [interval["high"] - median]]
    axis.errorbar([median], [row], xerr=errors, fmt="o", color=colour, capsize=3)

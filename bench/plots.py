"""Pictures of results, if matplotlib is installed."""

from __future__ import annotations

import os
from typing import Any

from tutti.base.units import format_nbytes

#: Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#000000", "#999999"),
)
_STYLES = ("-", "--", ":", "-.")


def plot_paths(result: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """Draws GB/s and p99 of reads over the depth, a line for each path and size of block.

    Returns False, and draws nothing, without matplotlib.
    """
    canvas = blank_figure(2)
    if canvas is None:
        return False
    figure, axes = canvas
    reads = [row for row in result["rows"] if row["direction"] == "read"]
    colours = list(dict.fromkeys((row["path"], row["place"]) for row in reads))
    blocks = list(dict.fromkeys(row["block_nbytes"] for row in reads))
    for line in dict.fromkeys((row["path"], row["place"], row["block_nbytes"]) for row in reads):
        rows = [r for r in reads if (r["path"], r["place"], r["block_nbytes"]) == line]
        style = {
            "label": ", ".join(filter(None, (*line[:2], format_nbytes(line[2])))),
            "color": COLOURS[colours.index(line[:2]) % len(COLOURS)],
            "linestyle": _STYLES[blocks.index(line[2]) % len(_STYLES)],
        }
        for axis, name in zip(axes, ("gb_per_s", "p99_us"), strict=True):
            axis.plot([row["depth"] for row in rows], [row[name] for row in rows], "o", **style)
    for axis, title in zip(axes, ("reads, GB/s", "reads, p99 in microseconds"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("commands in flight")
        axis.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8, handlelength=3)
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
    figure = Figure(figsize=(min(7.0, 16 / max(1, columns)) * max(1, columns), 4.5))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, max(1, columns), i + 1) for i in range(columns)]
    for axis in axes:
        axis.set_prop_cycle(color=COLOURS)
    return figure, axes

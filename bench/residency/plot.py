"""Draws the result of `tutti bench residency`, where matplotlib is installed."""

from __future__ import annotations

import os
from typing import Any

_COLOURS = ("#c44e52", "#8172b3", "#4c72b0", "#55a868")


def plot_residency(result: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """Hit ratio, GB/s and p99 over the memory limit, a line for each configuration.

    Returns False, and draws nothing, without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(15, 4.5))
    FigureCanvasAgg(figure)
    hits, speed, late = (figure.add_subplot(1, 3, i + 1) for i in range(3))
    names = list(dict.fromkeys(cell["configuration"] for cell in result["cells"]))
    for name, colour in zip(names, _COLOURS, strict=False):
        cells = [cell for cell in result["cells"] if cell["configuration"] == name]
        limits = [cell["limit"] for cell in cells]
        hits.plot(limits, [c["hit_ratio"] for c in cells], "o-", color=colour, label=name)
        middle = [c["read_gb_per_s"] for c in cells]
        noise = [
            [m - c["read_gb_per_s_range"][0] for m, c in zip(middle, cells, strict=True)],
            [c["read_gb_per_s_range"][1] - m for m, c in zip(middle, cells, strict=True)],
        ]
        speed.errorbar(limits, middle, yerr=noise, fmt="o-", color=colour, capsize=3, label=name)
        late.plot(limits, [c["read_p99_ms"] for c in cells], "o-", color=colour, label=name)
    limits = sorted({cell["limit"] for cell in result["cells"]})
    ideal = [min(1.0, x) for x in limits]
    hits.plot(limits, ideal, "--", color="black", linewidth=0.8, label="limit / W")
    labels = ("hit ratio", "read GB/s, median and range", "p99 of a batch, ms")
    for axis, label in zip((hits, speed, late), labels, strict=True):
        axis.set_xlabel("memory limit / working set")
        axis.set_ylabel(label)
    hits.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True

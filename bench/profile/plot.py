"""Draws a profile, where matplotlib is installed."""

from __future__ import annotations

import os
from typing import Any

from tutti.units import format_nbytes

_DIRECTIONS = (("read", 2, "o-"), ("write", 2, "s-"), ("both", 2, "o--"), ("both", 3, "s--"))


def plot_profile(document: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """GB/s over bytes for each slice size, and compute over tokens.

    Returns False, and draws nothing, without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 4.5))
    FigureCanvasAgg(figure)
    io, compute = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for i, slice_nbytes in enumerate(sorted({row[1] for row in document["io"]["read"]})):
        for name, column, style in _DIRECTIONS:
            rows = [row for row in document["io"][name] if row[1] == slice_nbytes]
            label = f"{name if name != 'both' else ('read', 'write')[column - 2] + ' in both'}"
            io.plot(
                [row[0] for row in rows],
                [row[0] / row[column] / 1e3 for row in rows],
                style,
                color=f"C{i}",
                label=f"{label}, {format_nbytes(int(slice_nbytes))}",
            )
    io.set(xscale="log", xlabel="bytes of a transfer", ylabel="GB/s", title="medium")
    io.set_ylim(bottom=0)
    io.legend(fontsize=7, ncols=3, loc="lower center")
    for prefix in sorted({row[1] for row in document["compute"]["prefill"]}):
        rows = [row for row in document["compute"]["prefill"] if row[1] == prefix]
        times_ms = [row[2] / 1e3 for row in rows]
        compute.plot([row[0] for row in rows], times_ms, label=f"prefix {int(prefix)}")
    kind = "estimated" if document["compute"]["estimated"] else "measured"
    compute.set(xscale="log", yscale="log", xlabel="new tokens", ylabel="ms a layer")
    compute.set_title(f"prefill, {document['model']['name']} on {document['gpu']}, {kind}")
    compute.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True

"""Draws a profile, if matplotlib is installed."""

from __future__ import annotations

import itertools
import os
from typing import Any

from tutti.base.units import format_nbytes
from tutti.bench.plots import COLOURS, blank_figure

#: Rows of a profile that are drawn: key, column of the time, colour and label.
_DIRECTIONS = (
    ("read", 2, COLOURS[0], "read alone"),
    ("write", 2, COLOURS[1], "write alone"),
    ("both", 2, COLOURS[0], "read during a write"),
    ("both", 3, COLOURS[1], "write during a read"),
)
_MARKERS = "osD^v"


def plot_profile(document: dict[str, Any], path: str | os.PathLike[str]) -> bool:
    """GB/s over bytes for each slice size, and compute over tokens.

    Returns False, and draws nothing, without matplotlib.
    """
    canvas = blank_figure(2)
    if canvas is None:
        return False
    figure, (io, compute) = canvas
    slices = sorted({row[1] for row in document["io"]["read"]})
    for (name, column, colour, label), line in zip(
        _DIRECTIONS, ("-", "-", "--", "--"), strict=True
    ):
        for slice_nbytes, marker in zip(slices, itertools.cycle(_MARKERS), strict=False):
            rows = [row for row in document["io"][name] if row[1] == slice_nbytes]
            io.plot(
                [row[0] for row in rows],
                [row[0] / row[column] / 1e3 for row in rows],
                line,
                marker=marker,
                color=colour,
                label=f"{label}, {format_nbytes(int(slice_nbytes))}",
            )
    io.set(xscale="log", xlabel="bytes of a transfer", ylabel="GB/s (10^9 bytes)")
    io.set_title("medium, by size of slice: measured")
    io.set_ylim(bottom=0)
    io.legend(fontsize=7, loc="upper center", ncols=4, bbox_to_anchor=(0.5, -0.15))
    for prefix in sorted({row[1] for row in document["compute"]["prefill"]}):
        rows = [row for row in document["compute"]["prefill"] if row[1] == prefix]
        times_ms = [row[2] / 1e3 for row in rows]
        compute.plot([row[0] for row in rows], times_ms, label=f"prefix {int(prefix)}")
    kind = "estimated" if document["compute"]["estimated"] else "measured"
    compute.set(xscale="log", yscale="log", xlabel="new tokens", ylabel="ms per layer")
    compute.set_title(f"prefill, {document['model']['name']} on {document['gpu']}, {kind}")
    compute.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None}, bbox_inches="tight")
    return True

"""How reads of a medium overlap with what follows them: chosen by trials, for each path on its own.

The idea is the adaptive pipeline of the paper Dual-Blade (arXiv 2604.26557).  INTRA overlaps within
a transfer: a part is moved on while the other parts arrive.  CROSS overlaps across transfers: one
is moved on as a whole while the next one arrives.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class Overlap(Enum):
    """Which way to overlap."""

    INTRA = "intra"
    CROSS = "cross"


#: Trials of each way, after a warm-up.
TRIALS = 2


class PipelineChooser:
    """The choice for one path.  The same measurements give the same choice.  Not thread-safe.

    gain: CROSS is chosen if it is more than so many times as fast as INTRA.
    """

    def __init__(self, gain: float) -> None:
        self._gain = gain
        self._is_warm = False
        self._found: dict[Overlap, list[tuple[int, float]]] = {way: [] for way in Overlap}

    @property
    def is_decided(self) -> bool:
        """Whether all trials are done; nothing is measured after that."""
        return all(len(found) == TRIALS for found in self._found.values())

    @property
    def overlap(self) -> Overlap:
        """How the next transfer is to overlap."""
        if not self.is_decided:
            is_tried = len(self._found[Overlap.INTRA]) == TRIALS
            return Overlap.CROSS if is_tried else Overlap.INTRA
        intra, cross = (sum(s for _, s in f) / sum(n for n, _ in f) for f in self._found.values())
        return Overlap.CROSS if cross * self._gain < intra else Overlap.INTRA

    def observe(self, way: Overlap, nbytes: int, seconds: float) -> Overlap:
        """Takes the time of a transfer that overlapped this way; returns the way of the next one.

        Invalid measurements (no bytes, no time, a clock that jumped) are ignored.
        """
        if nbytes > 0 and 0 < seconds < float("inf"):
            if self._is_warm and len(self._found[way]) < TRIALS:
                self._found[way].append((nbytes, seconds))
            self._is_warm = True
        return self.overlap

    def stats(self) -> dict[str, Any]:
        """The choice, and what each trial measured."""
        trials = {
            f"{way.value}_gb_per_s": [nbytes / seconds / 1e9 for nbytes, seconds in found]
            for way, found in self._found.items()
        }
        return {"overlap": self.overlap.value, "decided": self.is_decided, **trials}

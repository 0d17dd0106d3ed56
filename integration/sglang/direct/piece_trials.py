"""Finds out whether one or two pieces at a time are read ahead faster, by trials per pool and path.

One at a time (INTRA) leaves the medium idle between pieces. Two (CROSS) do not, and use the medium
better if one alone does not keep it busy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tutti.base.arrays import Keys
from tutti.base.pipeline import Overlap, PipelineChooser
from tutti.integration.sglang.direct.stored_pool import StoredPool

_log = logging.getLogger(__name__)

#: CROSS must be this much faster: a load that is due waits for issued reads, now twice as many.
_GAIN = 1.1


@dataclass(eq=False)
class Flight:
    """A piece in flight.  is_whole: not the short end of a chain.  shared: with another piece."""

    stored_pool: StoredPool
    path: str
    chooser: PipelineChooser
    nbytes: int
    is_whole: bool
    began_s: float
    shared: bool = False

    @property
    def most(self) -> int:
        """Number of pieces that may be in flight."""
        return 2 if self.chooser.overlap is Overlap.CROSS else 1


class PieceTrials:
    """The choices of one read-ahead thread, and the times of its pieces."""

    def __init__(self) -> None:
        self._choosers: dict[tuple[str, str], PipelineChooser] = {}
        self._path_changes: dict[str, int] = {}
        self._last: dict[str, Flight] = {}  # by pool
        self._ended_s = 0.0
        self._first: tuple[Flight, float] | None = None  # first of two shared pieces, its time

    def begin(self, stored_pool: StoredPool, keys: Keys, most: int, now_s: float) -> Flight:
        """Begins a piece of these keys.  most: pages of a whole piece."""
        path, changes = stored_pool.store.path_of(keys)
        if self._path_changes.get(stored_pool.name) != changes:
            self._path_changes[stored_pool.name] = changes
            for key in [key for key in self._choosers if key[0] == stored_pool.name]:
                del self._choosers[key]
        chooser = self._choosers.setdefault((stored_pool.name, path), PipelineChooser(_GAIN))
        nbytes = len(keys) * stored_pool.page_nbytes
        flight = Flight(stored_pool, path, chooser, nbytes, len(keys) == most, now_s)
        self._last[stored_pool.name] = flight
        return flight

    def most(self, stored_pool: StoredPool) -> int:
        """Number of pieces that may be in flight, on the path of the pool's last piece."""
        last = self._last.get(stored_pool.name)
        return 1 if last is None else last.most

    def end(self, flight: Flight, now_s: float) -> float:
        """Ends a piece; returns the seconds since its begin, or since the end of the one before."""
        seconds = now_s - max(flight.began_s, self._ended_s)
        self._ended_s = now_s
        return seconds

    def observe(self, flight: Flight, seconds: float) -> tuple[int, float]:
        """Evaluates a piece that was read; returns (bytes, seconds) to measure the medium's speed.

        Of two shared pieces, the first one returns zeros and the second one the sums.
        """
        nbytes, is_whole, way = flight.nbytes, flight.is_whole, Overlap.INTRA
        if flight.shared:
            first, self._first = self._first, None
            if first is None or first[0].chooser is not flight.chooser:
                self._first = flight, seconds
                return 0, 0.0
            nbytes, seconds = nbytes + first[0].nbytes, seconds + first[1]
            is_whole, way = is_whole and first[0].is_whole, Overlap.CROSS
        was_decided = flight.chooser.is_decided
        if is_whole:
            flight.chooser.observe(way, nbytes, seconds)
        if flight.chooser.is_decided != was_decided:
            _log.info(
                "Tutti: %s (%s) reads %d pieces ahead at once; trials: %s",
                flight.stored_pool.name,
                flight.path,
                flight.most,
                flight.chooser.stats(),
            )
        flight.stored_pool.metrics.level("ahead_pieces", flight.most, flight.path)
        return nbytes, seconds

    def rest(self) -> None:
        """Called when nothing is in flight."""
        self._first = None

    def stats(self, stored_pool: StoredPool) -> dict[str, Any]:
        """The choice and the GB/s of the trials, by path."""
        found = list(self._choosers.items())
        return {path: one.stats() for (name, path), one in found if name == stored_pool.name}

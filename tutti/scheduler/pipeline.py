"""How loading and moving overlap: chosen by one trial of each, for each path on its own.

The idea is the adaptive pipeline of the paper Dual-Blade (arXiv 2604.26557).  Bytes come from the
medium into staging and are moved from there to their place.  INTRA overlaps within one transfer: a
part is moved while the rest of the same transfer arrives.  CROSS overlaps between transfers: one is
moved as a whole while the next one arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Overlap(Enum):
    """Which way to overlap."""

    INTRA = "intra"
    CROSS = "cross"


#: Warm-up, then one trial each.
_SCHEDULE = (Overlap.INTRA, Overlap.INTRA, Overlap.CROSS)


@dataclass
class _Trials:
    done: int = 0
    bytes_per_us: dict[Overlap, float] = field(default_factory=dict)


class PipelineChooser:
    """Deterministic: the same measurements give the same choices.  Not thread-safe.

    Paths are named by the caller, "direct" and "buffered" for instance.
    """

    def __init__(self) -> None:
        self._paths: dict[str, _Trials] = {}

    def next(self, path: str) -> Overlap:
        """How the next iteration on a path is to overlap."""
        trials = self._paths.get(path, _Trials())
        if trials.done < len(_SCHEDULE):
            return _SCHEDULE[trials.done]
        rates = trials.bytes_per_us
        # At equal speed the one that needs one transfer's staging, not two.
        return Overlap.CROSS if rates[Overlap.CROSS] > rates[Overlap.INTRA] else Overlap.INTRA

    def record(self, path: str, nbytes: int, elapsed_us: float) -> None:
        """What the iteration that ``next`` announced has taken.

        Measurements that mean nothing (no bytes, no time, a clock that jumped back) are left out
        and the trial is repeated.  After the trials nothing is recorded: see ``reset``.
        """
        trials = self._paths.setdefault(path, _Trials())
        if trials.done >= len(_SCHEDULE) or nbytes <= 0 or not 0 < elapsed_us < float("inf"):
            return
        # The trial that follows replaces what the warm-up said.
        trials.bytes_per_us[_SCHEDULE[trials.done]] = nbytes / elapsed_us
        trials.done += 1

    def decided(self, path: str) -> Overlap | None:
        """The choice, None while trials are missing."""
        trials = self._paths.get(path)
        return self.next(path) if trials and trials.done == len(_SCHEDULE) else None

    def rates(self, path: str) -> dict[Overlap, float]:
        """Bytes per microsecond of the trials so far."""
        return dict(self._paths.get(path, _Trials()).bytes_per_us)

    def reset(self, path: str) -> None:
        """Tries again, after a new plan of residency for instance."""
        self._paths.pop(path, None)

"""Policy for the page cache: which groups of a pool use it, and how much of the free memory.

The idea and the budget are those of the paper Dual-Blade (arXiv 2604.26557): what fits the memory
that is really free stays in the page cache, all the rest bypasses it, so that the rest cannot push
out what fits.  One knob X lies between 0 and the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import ConfigError

_CALM_S = 1.0
_CALM_MAX_S = 60.0
#: A growth that is taken back sooner than this was wrong.
_REGRET_S = 30.0
#: A growth by less than this share of the plan is not worth a change; a fall by more is a jump.
_GROWTH_MIN = 0.125
#: What may enter, as a share of the bytes that move: without hits, and more at a hit ratio of 1.
#: A byte that enters takes the drive two to three times as long as one by direct I/O, a hit at most
#: a quarter, so loads lose 1/20 of their speed at most while the plan grows.
_ENTER_SHARE, _ENTER_PER_HIT = 1 / 40, 1 / 4
#: What may enter each second where nothing moves; what moves is taken from it.
_IDLE_NBYTES_PER_S = 32 << 20
#: Share of the time in which tasks waited for memory: the plan shrinks; the plan does not grow.
_STALL_MAX, _STALL_CALM = 0.2, 0.02


def plan_groups(
    group_nbytes: npt.ArrayLike,
    budget_nbytes: int,
    *,
    share: float = 1.0,
    heat: npt.ArrayLike | None = None,
) -> npt.NDArray[np.bool_]:
    """True for each group that goes through the page cache (Dual-Blade's Algorithm 1).

    group_nbytes: (n,) what each group takes.  The knob X is ``share`` of the budget, from 0 (all
    by direct I/O) to 1.  Groups are taken whole, the hottest first and at equal heat in their
    order, until the next one would not fit: a group that is cached in part gains nothing when it is
    read as a whole.  heat: (n,), any numbers.  Raises ConfigError.
    """
    sizes = np.asarray(group_nbytes, np.int64)
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ConfigError("group_nbytes must have one number per group, none of them negative")
    if not 0.0 <= share <= 1.0 or budget_nbytes < 0:
        raise ConfigError(f"share is {share}, budget {budget_nbytes}; pass 0 to 1, and 0 or more")
    order = np.arange(sizes.size)
    if heat is not None:
        warmth = np.asarray(heat, float)
        if warmth.shape != sizes.shape or np.isnan(warmth).any():
            raise ConfigError(f"heat has the shape {warmth.shape}; pass one number per group")
        order = np.argsort(-warmth, kind="stable")
    taken = np.cumsum(sizes[order]) <= math.floor(share * budget_nbytes)
    buffered = np.zeros(sizes.size, np.bool_)
    buffered[order[taken]] = True
    return buffered


@dataclass(frozen=True)
class Look:
    """What the governor is told at a moment.

    free_nbytes: memory that the page cache may use.  planned_nbytes: what the plan takes now, of
    whole_nbytes in all groups of group_nbytes.  moved_nbytes: by loads and puts since the last
    look.  stall_share: share of the time since then in which tasks waited for memory.
    """

    now_s: float
    free_nbytes: int
    planned_nbytes: int
    whole_nbytes: int
    group_nbytes: int
    moved_nbytes: int = 0
    stall_share: float = 0.0


@dataclass
class Governor:
    """Decides how much may go through the page cache: shrinks it at once, grows it after a calm.

    share: of the memory that is free.  A growth that had to be taken back doubles the calm that
    the next one needs, up to a minute, so a limit that swings is followed a bounded number of
    times.  Growth is slow: a byte that enters is read more slowly than by direct I/O, so only a
    small part of the bytes that move may enter, and more where hits make up for that.
    Deterministic: time is passed in, in seconds.
    """

    share: float
    calm_s: float = _CALM_S
    _calm_since_s: float | None = None
    _grew_at_s: float | None = None
    _looked_s: float | None = None
    _free_nbytes: int = 0  # at the look before
    _may_grow_nbytes: float = 0.0  # beyond the plan, so far

    def target(self, look: Look) -> int:
        """Bytes to plan for; planned_nbytes when nothing should change."""
        planned, now_s = look.planned_nbytes, look.now_s
        goal = min(math.floor(self.share * self._free_ahead(look)), look.whole_nbytes)
        if look.stall_share > _STALL_MAX:  # shrink by a quarter, whatever is reported as free
            goal = min(goal, planned * 3 // 4)
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        if goal < planned:
            if self._grew_at_s is not None and now_s - self._grew_at_s < _REGRET_S:
                self.calm_s = min(2 * self.calm_s, _CALM_MAX_S)
            self._grew_at_s = None
            return self._wait(goal)
        if goal <= planned * (1 + _GROWTH_MIN) or goal < planned + look.group_nbytes:
            return self._wait(planned)
        if self._calm_since_s is None or now_s < self._calm_since_s:  # or the clock jumped back
            self._calm_since_s = now_s
        if now_s - self._calm_since_s < self.calm_s or look.stall_share > _STALL_CALM:
            return planned
        hits = planned / look.whole_nbytes
        idle_nbytes = _IDLE_NBYTES_PER_S * min(elapsed_s, 1.0) - look.moved_nbytes
        enter_share = _ENTER_SHARE + _ENTER_PER_HIT * hits
        self._may_grow_nbytes += max(enter_share * look.moved_nbytes, idle_nbytes)
        groups = int(self._may_grow_nbytes // look.group_nbytes)
        if not groups:
            return planned
        self._may_grow_nbytes -= groups * look.group_nbytes
        self._grew_at_s = now_s
        return min(goal, planned + groups * look.group_nbytes)

    def _free_ahead(self, look: Look) -> int:
        """The memory that will be free at the next look if it keeps falling evenly.

        Otherwise the kernel takes pages of groups that stay in the plan before it has shrunk.
        """
        fall, self._free_nbytes = self._free_nbytes - look.free_nbytes, look.free_nbytes
        is_even = 0 < fall <= look.free_nbytes * _GROWTH_MIN
        return look.free_nbytes - fall if is_even else look.free_nbytes

    def _wait(self, nbytes: int) -> int:
        self._calm_since_s, self._may_grow_nbytes = None, 0.0
        return nbytes

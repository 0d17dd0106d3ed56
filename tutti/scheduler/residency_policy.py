"""Policy for the page cache: which groups of a pool use it, and how much of the free memory.

The idea and the budget are those of the paper Dual-Blade (arXiv 2604.26557): what fits the memory
that is really free stays in the page cache, all the rest bypasses it, so that the rest cannot push
out what fits.  One knob X lies between 0 and the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from tutti.errors import ConfigError, Unsupported

#: Version 1 writes "no limit" as a page-aligned number near 2^63.
_UNLIMITED_NBYTES = 1 << 60
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
#: What may enter each second where nothing moves.
_IDLE_NBYTES_PER_S = 32 << 20
#: Share of the time in which tasks waited for memory: the plan shrinks; the plan does not grow.
_STALL_MAX, _STALL_CALM = 0.2, 0.02


@dataclass(frozen=True)
class MemoryFacts:
    """What this process may still use.

    available_nbytes: MemAvailable of the machine, which counts page cache that can be reclaimed.
    limit_nbytes: of the tightest control group around the process, None without one; anon_nbytes,
    shmem_nbytes: what is used in that group and cannot be reclaimed.  source: which group.
    """

    available_nbytes: int
    limit_nbytes: int | None = None
    anon_nbytes: int = 0
    shmem_nbytes: int = 0
    source: str = "no control group"

    @property
    def free_nbytes(self) -> int:
        """The smaller of what the machine and the control group leave, not below 0."""
        if self.limit_nbytes is None:
            return self.available_nbytes
        left = self.limit_nbytes - self.anon_nbytes - self.shmem_nbytes
        return max(0, min(self.available_nbytes, left))


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
        raise ConfigError("sizes of groups are one number for each, and not negative")
    if not 0.0 <= share <= 1.0 or budget_nbytes < 0:
        raise ConfigError(f"share is {share}, budget {budget_nbytes}; X lies from 0 to the budget")
    order = np.arange(sizes.size)
    if heat is not None:
        warmth = np.asarray(heat, float)
        if warmth.shape != sizes.shape or np.isnan(warmth).any():
            raise ConfigError(f"heat has the shape {warmth.shape}; give one number for each group")
        order = np.argsort(-warmth, kind="stable")
    taken = np.cumsum(sizes[order]) <= math.floor(share * budget_nbytes)
    buffered = np.zeros(sizes.size, np.bool_)
    buffered[order[taken]] = True
    return buffered


@dataclass(frozen=True)
class Look:
    """What the governor is told at a moment.

    free_nbytes: memory that the page cache may use.  planned_nbytes: what the plan takes now, of
    whole_nbytes in all groups of group_nbytes.  moved_nbytes: of loads and puts since the look
    before.  stall_share: of the time since then, in which tasks waited for memory.
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
    """How much may go through the page cache from now on: shrinks at once, grows after a calm.

    share: of the memory that is free.  A growth that had to be taken back doubles the calm that
    the next one needs, up to a minute, so a limit that swings is followed a bounded number of
    times.  A growth is braked: what enters is read from the drive once more slowly than by direct
    I/O, so it may only be a small part of the bytes that move, and more where hits pay for it.
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
        if look.stall_share > _STALL_MAX:  # a quarter goes, whatever is said to be free
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
        self._may_grow_nbytes += (_ENTER_SHARE + _ENTER_PER_HIT * hits) * look.moved_nbytes
        if not look.moved_nbytes:
            self._may_grow_nbytes += _IDLE_NBYTES_PER_S * min(elapsed_s, 1.0)
        groups = int(self._may_grow_nbytes // look.group_nbytes)
        if not groups:
            return planned
        self._may_grow_nbytes -= groups * look.group_nbytes
        self._grew_at_s = now_s
        return min(goal, planned + groups * look.group_nbytes)

    def _free_ahead(self, look: Look) -> int:
        """What will be free at the next look if memory goes on to fall evenly.

        Otherwise the kernel takes pages of groups that stay in the plan before it has shrunk.
        """
        fall, self._free_nbytes = self._free_nbytes - look.free_nbytes, look.free_nbytes
        is_even = 0 < fall <= look.free_nbytes * _GROWTH_MIN
        return look.free_nbytes - fall if is_even else look.free_nbytes

    def _wait(self, nbytes: int) -> int:
        self._calm_since_s, self._may_grow_nbytes = None, 0.0
        return nbytes


def read_stall_us(root: Path = Path("/")) -> int | None:
    """Microseconds in which tasks waited for memory, in all; None without PSI (proc(5)).

    Of the control group of version 2 around the process, else of the machine.
    """
    for folder, is_v2 in _groups_around(root):
        stalled = _stall_us(folder / "memory.pressure") if is_v2 else None
        if stalled is not None:
            return stalled
    return _stall_us(root / "proc/pressure/memory")


def _stall_us(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        total = line.rpartition("total=")[2]
        if line.startswith("some ") and total.isdigit():
            return int(total)
    return None


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """What the kernel says now: proc(5), and control groups of version 1 or 2.

    root: of the file system that holds proc and sys.  Raises Unsupported without MemAvailable,
    which Linux has had since 3.14.
    """
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        raise Unsupported("/proc/meminfo has no MemAvailable; mount /proc to plan residency")
    tightest = MemoryFacts(available * 1024)
    for folder, is_v2 in _groups_around(root):
        facts = _group_facts(folder, is_v2, tightest.available_nbytes)
        if facts is not None and facts.free_nbytes <= tightest.free_nbytes:
            tightest = facts
    return tightest


def _group_facts(folder: Path, is_v2: bool, available_nbytes: int) -> MemoryFacts | None:
    """None for a group without a limit."""
    try:
        text = (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).read_text().strip()
    except OSError:
        return None
    if not text.isdigit() or int(text) >= _UNLIMITED_NBYTES:
        return None
    stat = _numbers(folder / "memory.stat")
    # "total_" counts the groups below as well; version 2 always does.
    anon = stat.get("anon", 0) if is_v2 else stat.get("total_rss", stat.get("rss", 0))
    shmem = stat.get("shmem", 0) if is_v2 else stat.get("total_shmem", stat.get("shmem", 0))
    version = "version 2" if is_v2 else "version 1"
    return MemoryFacts(available_nbytes, int(text), anon, shmem, f"control group, {version}")


def _groups_around(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the memory controller for this process and the groups around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for mount, mounted_root, is_v2 in _memory_mounts(root):
        for line in lines:
            number, controllers, path = line.split(":", 2)
            wanted = number == "0" and not controllers if is_v2 else "memory" in controllers
            if not wanted:
                continue
            below = PurePosixPath(path)
            if below.is_relative_to(mounted_root):
                below = below.relative_to(mounted_root)
            for part in (below, *below.parents):
                folder = mount / str(part).lstrip("/")
                if folder.is_dir():
                    yield folder, is_v2


def _memory_mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath, bool]]:
    """(where, which part of the hierarchy, version 2?) of mounts that may limit memory."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # proc(5): the fields behind " - " are type, source and options
        left, _, right = line.partition(" - ")
        fields, facts = left.split(), right.split()
        if len(fields) < 5 or len(facts) < 3:
            continue
        is_v2 = facts[0] == "cgroup2"
        if is_v2 or (facts[0] == "cgroup" and "memory" in facts[2].split(",")):
            yield root / fields[4].lstrip("/"), PurePosixPath(fields[3]), is_v2


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; empty for a file that is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {p[0]: int(p[1]) for p in pairs if len(p) >= 2 and p[1].isdigit()}

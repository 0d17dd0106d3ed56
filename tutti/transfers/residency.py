"""Dual-path residency of an open pool: which of its groups go through the page cache.

The plan is the scheduler's (`tutti/scheduler/residency_policy.py`); the two paths are the file
controller's.  Tables, superblocks and snapshots always bypass the page cache.  A thread watches
how much memory is free and moves groups from one path to the other, a few at a time and only
those that no transfer uses, so nothing waits and no look-up misses for it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti.base.checks import optional, takes, whole
from tutti.base.checks import share as share_of
from tutti.base.interrupts import uninterrupted
from tutti.base.memory_pressure import read_memory, read_stall_us
from tutti.base.process import Owned
from tutti.base.threads import start_thread
from tutti.errors import TuttiError, Unsupported
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import BlockRange, FileController
from tutti.medium.keys import as_keys
from tutti.placement.index import MISSING, SlotState
from tutti.scheduler.residency_policy import Governor, Look, plan_groups
from tutti.transfers.core import Core

_log = logging.getLogger(__name__)

_bytes = partial(whole, low=0, high=2**62)

_INTERVAL_S = 0.1
#: Groups that change path under one lock, and the longest time spent on changes in one interval.
_STEP_GROUPS = 4
_STEP_S = 0.2
_COMPLAINTS_MAX = 16


@dataclass(frozen=True)
class ResidencyPlan:
    """The plan in force.  groups, buffered_groups: of all members that are open.

    budget_nbytes: page cache that may be used; planned_nbytes: what the buffered groups take.
    """

    budget_nbytes: int
    share: float
    groups: int
    buffered_groups: int
    planned_nbytes: int


class Residency(Owned):
    """Two paths to one pool's groups.  Thread-safe.

    plan: the last one, None while everything bypasses the page cache.
    """

    def __init__(self, core: Core, controller: NativeController) -> None:
        """With a ``page_cache_share`` in the config, recovery must end with ``plan_opening``.

        Raises Unsupported as ``replan`` does, and CapacityError without a thread.
        """
        self._core = core
        self._controller = controller
        self.plan: ResidencyPlan | None = None
        self._switches = self._moved_nbytes = self._seen_nbytes = 0
        self._moving_s = 0.0
        self._changing = threading.Lock()  # one thread at a time changes paths
        self._stopping = threading.Event()
        self._monitor: threading.Thread | None = None
        geometry, members = core.geometry, core.members
        group, member = np.divmod(np.arange(geometry.groups * members.count), members.count)
        present = np.isin(member, members.present)
        # In the order in which an empty pool fills: over all members, then the next group.
        self._member, self._group = member[present], group[present]
        self._chosen = np.zeros(self._group.size, np.bool_)
        if core.config.page_cache_share > 0:
            files = self._file_controller()
            for each in members.present:
                files.check_has_both(members.nsid(each))
            if core.config.residency == "dynamic":
                self.follow(core.config.page_cache_share)

    def plan_opening(self) -> None:
        """Plans by the index that was recovered, before it is ready for transfers.  Lock held."""
        if self._core.config.page_cache_share > 0:
            self._apply(self._core.config.page_cache_share, None)

    def follow(self, share: float, *, root: Path = Path("/")) -> None:
        """Keeps the plan at ``share`` of the memory that is free, until ``close``.

        root: of the file system that holds proc and sys.  Raises CapacityError without a thread.
        """
        given = "the thread that follows free memory", self._run, Governor(share), root
        self._monitor = threading.Thread(target=self._core.guard.call, args=given, daemon=True)
        start_thread(self._monitor, "tutti-residency")

    def close(self) -> None:
        """Ends the thread that follows the free memory."""
        self._stopping.set()
        if self._monitor is not None and self._monitor is not threading.current_thread():
            self._monitor.join(self._core.config.timeout_s)

    def stats(self) -> dict[str, float]:
        """Changes of path since the opening, the plan, and whether it follows free memory."""
        return {
            "residency_switches": self._switches,
            "residency_moved_nbytes": self._moved_nbytes,
            "residency_moving_ms": 1e3 * self._moving_s,
            "page_cache_planned_nbytes": 0 if self.plan is None else self.plan.planned_nbytes,
            "residency_follows_memory": self._monitor is not None and self._monitor.is_alive(),
        }

    @uninterrupted()
    @takes(share=share_of, budget_nbytes=optional(_bytes))
    def replan(self, *, share: float = 1.0, budget_nbytes: int | None = None) -> ResidencyPlan:
        """Chooses anew which groups go through the page cache: those that were used last.

        share: of the budget, from 0 to 1.  budget_nbytes: by default the memory that the machine
        and its control groups have free now.  Waits for all transfers; look-ups miss meanwhile.
        Raises ConfigError, DeviceTimeout, MediumError when a write-back fails, and Unsupported for
        a pool that is not on files with direct I/O; the old plan stays then.
        """
        with self._changing, self._core.quiesced("a replan"):
            return self._apply(share, budget_nbytes)

    def move_towards(self, target_nbytes: int, share: float, budget_nbytes: int) -> bool:
        """Moves at most a few idle groups so that the plan comes closer to the target.

        The hottest come first and the coldest go first.  False when nothing moved: nothing is left
        to move, all that could is in use, or the pool is not ready or closes.  Raises MediumError
        when a write-back fails.
        """
        core = self._core
        with self._changing:
            if not core.ready:  # the index is not complete, or a clear is under way
                return False
            begin_s = time.monotonic()
            moving = self._next_groups(target_nbytes)
            if moving.size == 0:
                return False
            controller = self._file_controller()
            leaving = self._chosen[moving]
            # Written back before the lock is taken, so that little is left to do below it.
            for place in moving[leaving]:
                controller.drop(self._blocks(int(self._member[place]), int(self._group[place]), 1))
            with core.lock:
                moving = moving[~self._in_use()[moving]]
                chosen = self._chosen.copy()
                chosen[moving] = ~chosen[moving]
                taken = moving.size > 0 and core.ready and not core.closing
                if taken:
                    self._take(chosen, share, budget_nbytes)
                    self._switches += moving.size
                    self._moved_nbytes += moving.size * core.geometry.group_nbytes
            self._moving_s += time.monotonic() - begin_s
            return taken

    def groups_of(self, keys: npt.NDArray[np.uint8]) -> list[BlockRange]:
        """The blocks of each group that holds one of these objects; keys as for ``match``.

        With the controller's `resident_nbytes` they tell what the page cache holds of objects.
        """
        with self._core.lock:
            slots = self._core.index.find(as_keys(keys))
        slots = slots[slots != MISSING]
        members, groups = np.divmod(
            np.unique(slots // self._core.geometry.group_slots), self._core.geometry.groups
        )
        pairs = zip(members.tolist(), groups.tolist(), strict=True)
        return [self._blocks(member, group, 1) for member, group in pairs]

    def resident_nbytes(self) -> int:
        """How many bytes of the buffered groups the page cache holds now.  Raises MediumError."""
        controller = self._file_controller()
        return sum(controller.resident_nbytes(blocks) for blocks in controller.buffered)

    def _apply(self, share: float, budget_nbytes: int | None) -> ResidencyPlan:
        self._file_controller()
        geometry = self._core.geometry
        if budget_nbytes is None:
            budget_nbytes = read_memory().free_nbytes
        sizes = np.full(self._group.size, geometry.group_nbytes)
        chosen = plan_groups(sizes, budget_nbytes, share=share, heat=self._heat())
        return self._take(chosen, share, budget_nbytes)

    def _take(
        self, chosen: npt.NDArray[np.bool_], share: float, budget_nbytes: int
    ) -> ResidencyPlan:
        """Puts a plan into force; no transfer may use a group that changes."""
        self._file_controller().set_buffered(self._ranges(chosen))
        self._chosen = chosen
        count = int(np.count_nonzero(chosen))
        planned_nbytes = count * self._core.geometry.group_nbytes
        self.plan = ResidencyPlan(budget_nbytes, share, chosen.size, count, planned_nbytes)
        return self.plan

    def _next_groups(self, target_nbytes: int) -> npt.NDArray[np.int64]:
        """The groups, idle now, that are to change path next; at most a few."""
        group_nbytes = self._core.geometry.group_nbytes
        count = int(np.count_nonzero(self._chosen))
        missing = target_nbytes // group_nbytes - count
        heat = self._heat()
        with self._core.lock:
            idle = ~self._in_use()
        if missing < 0:
            places = np.flatnonzero(self._chosen & idle)
            ordered = places[np.argsort(heat[places], kind="stable")]
        else:
            places = np.flatnonzero(~self._chosen & idle)
            ordered = places[np.argsort(-heat[places], kind="stable")]
        found: npt.NDArray[np.int64] = ordered[: min(abs(missing), _STEP_GROUPS)]
        return found

    def _in_use(self) -> npt.NDArray[np.bool_]:
        """Groups that a transfer reads or writes now, by place.  Lock held."""
        core = self._core
        slots = (core.index.pins > 0) | (core.index.state == SlotState.WRITING)
        groups = slots.reshape(core.members.count, core.geometry.groups, -1).any(axis=2)
        used: npt.NDArray[np.bool_] = groups[self._member, self._group]
        return used | ~np.isin(self._member, core.members.present)  # a lost one stays as it is

    def _run(self, governor: Governor, root: Path) -> None:
        watch = _Watch(root)
        while not self._stopping.wait(_INTERVAL_S):
            try:
                self._step(governor, watch)
            except TuttiError as error:
                watch.complain(f"the page cache keeps its groups: {error}")

    def _step(self, governor: Governor, watch: _Watch) -> None:
        """One look at the memory, and the changes that follow from it."""
        begin_s = time.monotonic()
        core = self._core
        free_nbytes, stall_share = watch.look(begin_s)
        counters = core.counters
        moved_nbytes = counters.payload_read_nbytes + counters.payload_written_nbytes
        before_nbytes, self._seen_nbytes = self._seen_nbytes, moved_nbytes
        if free_nbytes is None:
            return
        look = Look(
            begin_s,
            free_nbytes,
            0 if self.plan is None else self.plan.planned_nbytes,
            self._group.size * core.geometry.group_nbytes,
            core.geometry.group_nbytes,
            moved_nbytes - before_nbytes,
            stall_share,
        )
        target = governor.target(look)
        while not self._stopping.is_set() and time.monotonic() - begin_s < _STEP_S:
            if not self.move_towards(target, governor.share, free_nbytes):
                break

    def _heat(self) -> npt.NDArray[np.int64]:
        """When a group was last used, by look-ups; 0 for one that holds nothing."""
        core = self._core
        with core.lock:
            used = np.where(core.index.resident(), core.index.access, 0).astype(np.int64)
        newest = used.reshape(core.members.count, core.geometry.groups, -1).max(axis=2)
        heat: npt.NDArray[np.int64] = newest[self._member, self._group]
        return heat

    def _ranges(self, chosen: npt.NDArray[np.bool_]) -> list[BlockRange]:
        """The blocks of the chosen groups; neighbours are one range."""
        ranges = []
        for member in np.unique(self._member).tolist():
            groups = np.sort(self._group[chosen & (self._member == member)])
            breaks = np.flatnonzero(np.diff(groups) != 1) + 1
            runs = np.split(groups, breaks) if groups.size else ()
            ranges += [self._blocks(member, int(run[0]), run.size) for run in runs]
        return ranges

    def _blocks(self, member: int, group: int, count: int) -> BlockRange:
        geometry = self._core.geometry
        nlb = geometry.layers * geometry.layer_stride_nlb
        slba = geometry.groups_offset // geometry.lba_nbytes + group * nlb
        return BlockRange(self._core.members.nsid(member), slba, count * nlb)

    def _file_controller(self) -> FileController:
        if not isinstance(self._controller, FileController):
            raise Unsupported(
                f"{type(self._controller).__name__} has no page cache; open the pool from files"
            )
        return self._controller


class _Watch:
    """Reads free memory and stalls for lack of memory; logs each kind of trouble once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder: Path | None = None  # of the control group whose limit counts
        self._stall_us: int | None = None
        self._looked_s = 0.0
        self._said: set[str] = set()

    def look(self, now_s: float) -> tuple[int | None, float]:
        """Bytes that are free, None when that cannot be told now; and the share of the time since
        the look before in which tasks waited for memory.
        """
        facts = read_memory(self._root)
        stall_us, before_us = read_stall_us(self._root), self._stall_us
        elapsed_us = 1e6 * (now_s - self._looked_s)
        stall_share = 0.0
        if stall_us is not None and before_us is not None and elapsed_us > 0:
            stall_share = (stall_us - before_us) / elapsed_us
        self._stall_us, self._looked_s = stall_us, now_s
        # A group whose limit was removed, or that the process left, no longer counts.
        if self._folder is not None and not (facts.told and facts.told.get(self._folder, True)):
            self.complain(
                f"the limit of memory is gone ({self._folder}); the page cache keeps its groups"
            )
            return None, stall_share
        self._folder = facts.folder
        if facts.free_nbytes == 0:
            self.complain(f"no memory is free ({facts.source}); the page cache keeps no group")
        return facts.free_nbytes, stall_share

    def complain(self, text: str) -> None:
        """Logs a text once."""
        if text not in self._said and len(self._said) < _COMPLAINTS_MAX:
            self._said.add(text)
            _log.warning("%s", text)

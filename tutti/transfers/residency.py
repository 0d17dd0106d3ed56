"""Dual-path residency of an open pool: which of its groups go through the page cache.

The plan is the scheduler's (`tutti/scheduler/residency.py`); the two paths are the file
controller's.  Tables, superblocks and snapshots always bypass the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import Unsupported
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import BlockRange, FileController
from tutti.interrupts import uninterrupted
from tutti.medium.keys import as_keys
from tutti.placement.index import MISSING
from tutti.process import Owned
from tutti.scheduler.residency import plan_groups, read_memory
from tutti.transfers.core import Core


@dataclass(frozen=True)
class ResidencyPlan:
    """What was decided.  groups, buffered_groups: of all members that are open.

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
        """Plans at once when the store's config has a ``page_cache_share``, before any transfer."""
        self._core = core
        self._controller = controller
        self.plan: ResidencyPlan | None = None
        geometry, members = core.geometry, core.members
        group, member = np.divmod(np.arange(geometry.groups * members.count), members.count)
        present = np.isin(member, members.present)
        # In the order in which an empty pool fills: over all members, then the next group.
        self._member, self._group = member[present], group[present]
        if core.config.page_cache_share > 0:
            self._apply(core.config.page_cache_share, None)

    @uninterrupted()
    def replan(self, *, share: float = 1.0, budget_nbytes: int | None = None) -> ResidencyPlan:
        """Chooses anew what goes through the page cache: the groups that were used last.

        share: of the budget, the knob X.  budget_nbytes: instead of what the machine and its
        control groups leave now.  Waits until nothing is under way; look-ups miss meanwhile.
        Raises ConfigError, DeviceTimeout, MediumError when a write-back fails, and Unsupported for
        a pool that is not on files with direct I/O; the old plan stays then.
        """
        with self._core.quiesced():
            return self._apply(share, budget_nbytes)

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
        controller = self._file_controller()
        geometry = self._core.geometry
        if budget_nbytes is None:
            budget_nbytes = read_memory().free_nbytes
        sizes = np.full(self._group.size, geometry.group_nbytes)
        chosen = plan_groups(sizes, budget_nbytes, share=share, heat=self._heat())
        controller.set_buffered(self._ranges(chosen))
        count = int(np.count_nonzero(chosen))
        self.plan = ResidencyPlan(
            budget_nbytes, share, chosen.size, count, count * geometry.group_nbytes
        )
        return self.plan

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
        for member in self._core.members.present:
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

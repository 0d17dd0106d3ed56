"""Members that fail while a pool is open: it goes on with the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np

from tutti.base.arrays import U32, Mask, Slots
from tutti.gio_uring.nvme_spec import (
    STATUS_CAPACITY_EXCEEDED,
    STATUS_DEVICE_GONE,
    STATUS_NAMESPACE_WRITE_PROTECTED,
    STATUS_UNRECOVERED_READ,
    STATUS_WRITE_FAULT,
    STATUS_WRITE_TO_READ_ONLY_RANGE,
)
from tutti.gio_uring.status import status_name
from tutti.placement.index import SlotState
from tutti.transfers.core import Core

_log = logging.getLogger(__name__)

_UNREAD_MAX, _UNREAD_S = 3, 5.0
_PAUSE_S = 30.0
_READ_ONLY = (STATUS_NAMESPACE_WRITE_PROTECTED, STATUS_WRITE_TO_READ_ONLY_RANGE)
_NOT_WRITABLE = (STATUS_CAPACITY_EXCEEDED, STATUS_WRITE_FAULT, *_READ_ONLY)


class MemberFaults:
    """Leaves failing members of one pool out.  Methods are called with the core's lock held.

    A member whose drive is gone is lost: its objects are misses, and no put is given a slot there,
    until the next open.  The same goes, if others are left, for a member of which _UNREAD_MAX loads
    in a row could read nothing, not just for a moment.  A member that could not be written is
    paused, if it is read-only or puts can use another one: it gets no puts for _PAUSE_S, and
    nothing on it is evicted.
    unread: by member, when loads in a row could read nothing of it.
    paused: by member, until when, and its slots that are free then.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._size = core.geometry.slots
        self.unread: dict[int, list[float]] = {}
        self.paused: dict[int, tuple[float, Slots]] = {}
        self._warned: set[tuple[int, int]] = set()  # member and status

    def of_load(self, slots: Slots, status: U32) -> None:
        """Judges members by the status (n,) of slots that were read, before their state changes."""
        state = self._core.index.state[slots]
        held = (state == SlotState.READY) | (state == SlotState.UNPROVEN)
        for member, mine in self._remaining(slots, status):
            ends = status[mine]
            if not ends.all():
                self.unread.pop(member, None)
            elif (ends == STATUS_UNRECOVERED_READ).all() and held[mine].any():
                # Once, where loads of the same objects fail together.
                times = self.unread.setdefault(member, [])
                times.append(time.monotonic())
                is_long = len(times) >= _UNREAD_MAX and times[-1] - times[0] >= _UNREAD_S
                if is_long and len(self._core.members.present) > 1:
                    self._lose(member, "nothing of it can be read")

    def of_write(self, slots: Slots, status: U32) -> None:
        """Judges members by the status (n,) of slots that were written, after failed ones were
        given up.
        """
        for member, mine in self._remaining(slots, status):
            if np.isin(status[mine], _NOT_WRITABLE).all():
                self._pause(member, int(status[mine][0]))

    def end_pauses(self) -> None:
        """Ends the pauses that are over."""
        for member, (until_s, _) in list(self.paused.items()):
            if time.monotonic() >= until_s:
                self._resume(member)

    def _remaining(self, slots: Slots, status: U32) -> Iterator[tuple[int, Mask]]:
        """The members of these slots whose drive is not gone, and a mask of their slots."""
        members = slots // self._size
        for member in np.unique(members).tolist():
            mine = members == member
            # A lost member may have been given slots back by what was under way.
            if member in self._core.members.lost or (status[mine] == STATUS_DEVICE_GONE).any():
                self._lose(member, "its drive is gone")
            else:
                yield member, mine

    def _slots(self, member: int) -> Slots:
        return np.arange(member * self._size, (member + 1) * self._size, dtype=np.int64)

    def _lose(self, member: int, why: str) -> None:
        core, every = self._core, self._slots(member)
        self.unread.pop(member, None)
        self._resume(member)
        free, held = core.allocator.is_free(every), core.index.resident()[every]
        core.allocator.take(every[free])
        core.index.set_state(every[free], SlotState.QUARANTINED)
        core.remove(every[held], SlotState.QUARANTINED)
        if member not in core.members.lost:
            core.members.lost.add(member)
            core.leave_open |= member in core.members.present  # the last one: it holds its objects
            name, lost = core.members.name(member), np.count_nonzero(held)
            _log.error("%s: %s; %d objects are misses until the next open", name, why, lost)

    def _pause(self, member: int, status: int) -> None:
        core, every = self._core, self._slots(member)
        others = set(core.members.present) - {member, *self.paused}
        if not others and status not in _READ_ONLY:
            return
        self._resume(member)
        free = every[core.allocator.is_free(every)]
        core.allocator.take(free)
        self.paused[member] = time.monotonic() + _PAUSE_S, free
        if (member, status) not in self._warned:
            self._warned.add((member, status))
            name, why = core.members.name(member), status_name(status)
            _log.warning("%s: %s; puts try it every %g s until it works", name, why, _PAUSE_S)

    def _resume(self, member: int) -> None:
        if member in self.paused:
            self._core.allocator.free(self.paused.pop(member)[1])

"""Pins of look-ups, which protect objects from eviction; an object counts once for all holders.

Not thread-safe: the store holds a lock around it, as around the index.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Slots
from tutti.native import address, quick


class LookupPins:
    """Pins by holder: one request, or one unnamed look-up.

    kept: u16 (slots,), number of pins on each slot, at most 65535; above 0 it is not evicted.
    lookups: a pin ends after so many later look-ups, and never by wall clock: ranks must agree.
    slots_max: slots that all holders together may pin.
    changes: counts changes by which slots may have become pinned or unpinned.
    holders: by name or number the look-up of each, and the slots that it pins.
    """

    def __init__(self, kept: npt.NDArray[np.uint16], *, lookups: int, slots_max: int) -> None:
        assert lookups > 0, "a hold has to end"
        self._kept = kept
        self._lookups = lookups
        self._slots_max = slots_max
        self._clock = 0
        self.holders: OrderedDict[str | int, tuple[int, Slots]] = OrderedDict()
        self._nameless = itertools.count()
        self.count = 0  # pinned slots
        self.reserved = 0  # slots that the catalogue pins, within the same slots_max
        self.changes = 0
        self.is_changing = False  # stays True if an interrupt ends a change; see _recount

    def set_lookups(self, lookups: int) -> None:
        """Pins end after so many later look-ups from now on."""
        assert lookups > 0, "a hold has to end"
        self._lookups = lookups

    def lookup(self) -> None:
        """Counts a look-up, and releases pins of those too long ago; needed if any has some."""
        if self.is_changing:
            self._recount()
        self._clock += 1
        self.changes += 1
        while self.holders:  # bounded: each turn takes one out
            holder, (since, _) = next(iter(self.holders.items()))
            if since >= self._clock - self._lookups:
                break
            self.release(holder)

    def pin(self, holder: str | bool, slots: Slots, *, last: bool = False) -> int:
        """Pins slots (n,) for a holder, instead of those that it pinned before; True: a new holder.

        Returns how many were pinned, from the first on (with ``last``: the last ones).  Slots that
        others pin already take no room; the others are pinned until ``slots_max`` is reached.
        """
        name: str | int
        if not isinstance(holder, str):
            name = next(self._nameless)
        else:
            name, before = holder, self.holders.get(holder)
            if before is not None and np.array_equal(before[1], slots):
                self.holders[name] = self._clock, before[1]
                self.holders.move_to_end(name)
                return slots.size
            self.release(name)
        self.is_changing = True
        room = max(0, self._slots_max - self.reserved - self.count)
        fresh = ctypes.c_uint64()
        arguments = (address(slots), slots.size, room, last, ctypes.byref(fresh))
        most = int(quick().tutti_pins_take(address(self._kept), *arguments))
        self.count += fresh.value
        if most:
            taken = slots[slots.size - most :] if last else slots[:most]
            self.holders[name] = self._clock, taken.copy()
        self.is_changing = False
        return most

    def release(self, holder: str | int) -> None:
        """Releases all pins of a holder, if it has any."""
        if self.is_changing:
            self._recount()
        self.is_changing = True
        held = self.holders.pop(holder, None)
        if held is not None:
            arguments = (address(self._kept), address(held[1]), held[1].size)
            self.count -= int(quick().tutti_pins_give_back(*arguments))
            self.changes += 1
        self.is_changing = False

    def release_all(self, prefix: str) -> None:
        """As `release`, for every named holder whose name begins so."""
        names = [name for name in self.holders if isinstance(name, str) and name.startswith(prefix)]
        for name in names:
            self.release(name)

    def reserve(self, change: int) -> None:
        """The catalogue pins ``change`` slots more, or less if it is negative; see `reserved`."""
        self.reserved = max(0, self.reserved + change)
        self.changes += 1

    def forget(self, slots: Slots) -> None:
        """Removes all pins of slots that lose their objects."""
        for name, (since, held) in list(self.holders.items()):
            self.holders[name] = since, held[~np.isin(held, slots)]
        self._recount()

    def clear(self) -> None:
        """Releases all pins."""
        self.holders.clear()
        self._recount()

    def _recount(self) -> None:
        """Recomputes the counts from the holders, which an interrupt may have left different."""
        self._kept.fill(0)
        for _, slots in self.holders.values():
            np.add.at(self._kept, slots, 1)
        self.count = int(np.count_nonzero(self._kept))
        self.changes += 1
        self.is_changing = False

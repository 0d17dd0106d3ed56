"""Memory for pages that wait to be written: what is copied or dropped, and when writes press."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Protocol

from tutti.scheduler.loads_and_writes import PageLocation, Phase, Write
from tutti.scheduler.state import Space, State

#: So many known loads, and so many unannounced puts, are considered.
_AHEAD_MAX = 8
#: Share of what can be written before an unannounced put; the rest is a reserve.
_MARGIN = 0.9


class MemoryLimits(Protocol):
    """The limits of memory of a policy; see Limits."""

    @property
    def locked_pages(self) -> int:
        """See Limits."""

    @property
    def staged_pages(self) -> int:
        """See Limits."""

    @property
    def pressing_pages(self) -> int | None:
        """See Limits."""


def bounds_of(space: Space, limits: MemoryLimits) -> tuple[int, int]:
    """Pages that a space may lock, and pages of staging."""
    return (
        limits.locked_pages if space.locked_max is None else space.locked_max,
        limits.staged_pages if space.staged_max is None else space.staged_max,
    )


def pressure_of(state: State, limits: MemoryLimits) -> float:
    """The share of the device's time that writes need to avoid drops of pages; 0 or less: none.

    All of it where an expected put would not fit although writes got all of the time until then.
    On a drive that slows down under them, also where one of the largest would not fit now.
    """
    if limits.pressing_pages is not None:
        return 2 * state.waiting_pages / limits.pressing_pages - 1
    for name, space in state.spaces.items():
        if not space.source + space.staged:
            continue
        locked, staged = bounds_of(space, limits)
        room, longest = _Room(state, name, space, locked, staged), max(locked, staged)
        largest = min(longest, space.largest or room.largest())
        if state.estimates.write.slowed > 1 and largest > room.free():
            now = _Room(state, name, space, locked, staged)
            if now.needed_for(largest):
                return 1.0
        for pages, before in _expected(state, space, largest):
            # A put that fits nowhere is dropped in any case.
            if 0 < pages <= longest and room.needed_for(pages) > before:
                return 1.0
    return 0.0


def _expected(state: State, space: Space, largest: int) -> Iterator[tuple[int, float]]:
    """Yields the next puts: (pages, pages that can be written before it).

    The running step ends with a put, and so do the steps of the known loads.  Then a run of the
    largest puts may follow, with one more of them than were ever seen in a row.
    """
    step, layer, before = state.step, state.estimates.layer.factor, 0.0
    if state.prefill_tokens:
        pages_per_token = space.pages / state.prefill_tokens
        if step.phase is Phase.PREFILL:
            # No time: a step that loads is as long as writes make it.
            yield math.ceil(step.tokens * pages_per_token), before
        known = (load for load in state.loads.values() if load.offer is None)
        for load in itertools.islice(known, _AHEAD_MAX):
            if not (load.running or load.background):
                before += load.layers * load.compute_ns * layer / space.page_ns
                yield math.ceil(load.tokens * pages_per_token), before
    for _ in range(min(_AHEAD_MAX, space.puts_ahead(state.now_ns))):
        before += _MARGIN * (largest - space.more_max)
        yield largest, before


#: Of a put in memory, as a list because it is made several times in a decision: its pages, those
#: that are not written, whether they are locked, and whether it cannot be copied.
_PAGES, _LEFT, _LOCKED, _FIXED = range(4)


class _Room:
    """Both memories of a space while puts come and the oldest are written; see overflow."""

    def __init__(self, state: State, name: str, space: Space, locked: int, staged: int) -> None:
        self._state, self._name = state, name
        self._locked, self._staged = locked - space.source, staged - space.staged
        self._queue: list[list[int]] = []
        self._is_listed = False  # what waits now, once a put does not fit
        self._oldest = self._written = 0

    def free(self) -> int:
        """Pages of a put that fits as things are."""
        return max(self._locked, self._staged)

    def largest(self) -> int:
        """Pages of a put that waits now."""
        writes = self._state.writes.values()
        return max((one.pages for one in writes if one.space == self._name), default=0)

    def needed_for(self, pages: int) -> int:
        """Pages to write until one more put fits, those for the puts before included."""
        if not self._take(pages):
            if not self._is_listed:
                self._queue, self._is_listed = self._listed() + self._queue, True
            queue = self._queue
            while not (self._take(pages) or self._copies(pages)) and self._oldest < len(queue):
                write = queue[self._oldest]
                self._oldest += 1
                self._written += write[_LEFT]
                if write[_LOCKED]:
                    self._locked += write[_PAGES]
                else:
                    self._staged += write[_PAGES]
        return self._written

    def _listed(self) -> list[list[int]]:
        source = PageLocation.SOURCE
        return [
            [one.pages, one.pages - one.written, one.place is source, one.began]
            for one in self._state.writes.values()
            if one.space == self._name
        ]

    def _take(self, pages: int) -> bool:
        is_locked = pages <= self._locked
        if is_locked:
            self._locked -= pages
        elif pages <= self._staged:
            self._staged -= pages
        else:
            return False
        self._queue.append([pages, pages, is_locked, False])
        return True

    def _copies(self, pages: int) -> bool:
        """Takes a put, if copies of the newest that fit make room for it."""
        staged, excess, copied = self._staged, pages - self._locked, []
        if staged < excess:
            return False
        for write in reversed(self._queue[self._oldest :]):
            if excess > 0 and write[_LOCKED] and not write[_FIXED] and write[_PAGES] <= staged:
                staged, excess = staged - write[_PAGES], excess - write[_PAGES]
                copied.append(write)
        if excess > 0:
            return False
        for write in copied:
            write[_LOCKED] = False
            self._locked += write[_PAGES]
        self._staged = staged
        return self._take(pages)


def overflow(state: State, limits: MemoryLimits) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(copy_outs, drops) that keep the locked pages of every space within its bounds.

    Writes that fit nowhere are dropped.  Of the others the newest go first: they are copied, and
    dropped only where copies do not help.  Only what was not issued at all can go.  Pages that are
    being copied count as gone.
    """
    copy_outs: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    for name, space in state.spaces.items():
        locked, staged = bounds_of(space, limits)
        if space.source <= locked:
            continue
        newest = [
            write
            for write in reversed(state.writes.values())
            if write.space == name and write.place is PageLocation.SOURCE and not write.began
        ]
        excess, room, longest = space.source - locked, staged - space.staged, max(locked, staged)
        copied, dropped = _overflow(newest, excess, room, longest)
        copy_outs += copied
        drops += dropped
    return copy_outs, drops


def _overflow(
    newest: list[Write], excess: int, room: int, longest: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of one space: pages too many, and free in staging.  More than ``longest`` fit nowhere."""
    copy_outs: list[str] = []
    drops = [write.name for write in newest if write.pages > longest]
    excess -= sum(write.pages for write in newest if write.pages > longest)
    for write in newest:
        if excess > 0 and write.pages <= room:
            excess -= write.pages
            room -= write.pages
            copy_outs.append(write.name)
    for write in newest:
        if excess > 0 and write.name not in copy_outs and write.pages <= longest:
            excess -= write.pages
            drops.append(write.name)
    return tuple(copy_outs), tuple(drops)

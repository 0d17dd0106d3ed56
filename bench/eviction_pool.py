"""A pool without a medium, for `tutti bench eviction`: index, allocator, policy and history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.base.arrays import Keys, Mask, Slots
from tutti.bench.traces import block_keys
from tutti.placement.allocator import Allocator
from tutti.placement.eviction import (
    POLICIES,
    EvictionPolicy,
    EvictionView,
    expected_slots,
    reserve_slots,
)
from tutti.placement.index import MISSING, Index, SlotState
from tutti.placement.reuse import ReuseHistory

GROUPS = "groups"
GROUP_SLOTS = 128
WINDOW = 256  # pages of one load or put
_FINGERPRINT = bytes(16)


class _LeastRecentGroups:
    """Evicts the groups whose last look-up is oldest; within these the ends of chains first."""

    def victims(self, view: EvictionView, n: int) -> Slots:
        rows = (-1, view.group_slots)
        resident, busy = view.resident.reshape(rows), view.busy.reshape(rows)
        access = np.where(resident, view.access.reshape(rows), 0).max(axis=1)
        depth = np.where(resident, view.depth.reshape(rows), 0).max(axis=1).astype(np.int64)
        evictable = resident & ~busy
        groups = np.lexsort((-depth, access, busy.any(axis=1)))
        enough = int(np.searchsorted(np.cumsum(evictable.sum(axis=1)[groups]), n)) + 1
        row, column = np.nonzero(evictable[groups[:enough]])
        slots: Slots = groups[row] * view.group_slots + column
        return slots


@dataclass(frozen=True)
class _Parts:
    """Evicts parts of groups, in the order in which a policy would evict the last slot of each;
    parts with busy slots come last.
    """

    policy: EvictionPolicy
    slots: int

    def victims(self, view: EvictionView, n: int) -> Slots:
        order = self.policy.victims(view, view.resident.size)
        if n <= 0 or order.size == 0:
            return order[:0]
        last = np.zeros(view.resident.size, np.int64)  # by the first slot of a part
        last[self._part(order, view)] = np.arange(order.size)
        last[self._part(np.flatnonzero(view.busy), view)] += order.size
        rank = last[self._part(order, view)]
        by_part = np.argsort(rank, kind="stable")
        least = rank[by_part[min(n, order.size) - 1]]
        victims: Slots = order[by_part[: np.searchsorted(rank[by_part], least, side="right")]]
        return victims

    def _part(self, slots: Slots, view: EvictionView) -> Slots:
        first: Slots = slots - slots % view.group_slots % self.slots
        return first


_POLICIES: dict[str, EvictionPolicy] = {**POLICIES, GROUPS: _LeastRecentGroups()}


@dataclass
class Pool:
    """A pool without a medium, of at least `blocks` slots in whole groups."""

    blocks: int
    policy: str
    group_slots: int = GROUP_SLOTS
    part_slots: int | None = None

    def __post_init__(self) -> None:
        groups = max(1, -(-self.blocks // self.group_slots))
        slots = groups * self.group_slots
        self.index = Index(slots, seed=1)
        self.allocator = Allocator(1, groups, self.group_slots)
        self.history = ReuseHistory(slots, chooses=self.policy == "mq")
        self.reserve = reserve_slots(slots)
        self._kept: Mask = np.zeros(slots, np.bool_)
        self.hits = self.loaded = self.runs = self.evicted = 0
        self._free_sum = self._puts = 0  # since the pool was full

    @property
    def free_slots(self) -> int:
        """Average number of free slots after a put, since the pool was full."""
        return self._free_sum // self._puts if self._puts else 0

    def play(self, keys: Keys) -> int:
        """Plays a request: looks up, loads the hits, puts the rest; returns the number of hits."""
        found = self.index.match(keys)
        self._kept[:] = False
        self._kept[found] = True
        self.hits += found.size
        self._top_up(expected_slots(self.index.slots, len(keys) - found.size))
        for start in range(0, found.size, WINDOW):
            self._load(found[start : start + WINDOW])
        for start in range(found.size, len(keys), WINDOW):
            self._put(keys, start, min(len(keys), start + WINDOW))
        return found.size

    def _load(self, slots: Slots) -> None:
        self.index.begin_use()
        self.index.access[slots] = self.index.uses
        self.history.loaded(slots, self.index.uses)
        self.loaded += slots.size
        self.runs += 1 + int(np.count_nonzero(_breaks(slots, self.group_slots)))

    def _put(self, keys: Keys, start: int, end: int) -> None:
        index = self.index
        if start == 0:
            index.begin_use()
        rows = start + index.absent(keys[start:end])
        if rows.size == 0:
            return
        self._top_up(rows.size, keys[rows])
        after = int(index.find(keys[start - 1 : start])[0]) if start else MISSING
        slots = self.allocator.allocate(rows.size, after=None if after == MISSING else after)
        self._top_up(0)
        rows = rows[: slots.size]
        fresh = np.ascontiguousarray(keys[rows])
        index.insert(slots, fresh, 0, rows.astype(np.uint32))
        index.set_state(slots, SlotState.READY)
        self.history.stored(slots, fresh, index.uses)
        if self.evicted:
            self._free_sum += self.allocator.free_slots
            self._puts += 1

    def _top_up(self, extra: int, fresh: Keys | None = None) -> None:
        index, free, history = self.index, self.allocator.free_slots, self.history
        history.choose()
        if history.by_uses and fresh is None:
            return
        reserve = 0 if history.by_uses else self.reserve
        if free >= reserve + extra:
            return
        resident = index.resident()
        if history.by_uses and fresh is not None:
            resident &= history.uses < history.missed(fresh, index.uses)
        view = EvictionView(
            resident,
            self._kept,
            index.access,
            index.depth,
            self.group_slots,
            history.uses,
            index.uses,
            history.lifetime_bits,
            history.by_uses,
        )
        policy = _POLICIES[self.policy]
        if self.part_slots is not None:
            policy = _Parts(policy, self.part_slots)
        victims = policy.victims(view, 2 * reserve + extra - free)
        if victims.size == 0:
            return
        history.evicted(victims, index.key[victims])
        victims = np.sort(victims)
        index.remove(victims)
        index.set_state(victims, SlotState.VOIDED)
        self.allocator.free(victims)
        self.evicted += victims.size


def _breaks(slots: Slots, group_slots: int) -> Mask:
    breaks: Mask = (np.diff(slots) != 1) | (slots[1:] % group_slots == 0)
    return breaks


def play(pool: Pool, blocks: Sequence[Sequence[int]]) -> float:
    """Plays all requests; returns the share of the blocks' second references that hit."""
    references: Counter[int] = Counter()
    second = found = 0
    for ids in blocks:
        hits = pool.play(block_keys(_FINGERPRINT, ids))
        for place, block in enumerate(ids):
            references[block] += 1
            second += references[block] == 2
            found += references[block] == 2 and place < hits
    return found / second if second else 0.0

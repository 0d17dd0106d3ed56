"""What is stored where: least recently used blocks of a tier, by their hash ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Blocks:
    """A tier of so many blocks.  A prefix is matched up to the first block that is missing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(0, capacity)
        self.evicted = 0
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def match(self, ids: Sequence[int], first: int = 0) -> int:
        """How many leading blocks are here, those before ``first`` not asked for."""
        end = first
        while end < len(ids) and ids[end] in self._held:  # bounded by the ids
            end += 1
        return end

    def touch(self, ids: Iterable[int]) -> None:
        """The blocks that are here were used; the first of a prefix stays longest."""
        for block in reversed(list(ids)):
            if block in self._held:
                self._held.move_to_end(block)

    def add(self, ids: Sequence[int]) -> None:
        """Keeps blocks, and drops the least recently used beyond the capacity."""
        for block in reversed(ids):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self.capacity:  # bounded by what is held
            self._held.popitem(last=False)
            self.evicted += 1

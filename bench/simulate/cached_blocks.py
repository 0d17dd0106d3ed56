"""Models the content of a cache tier: blocks by hash id, the least recently used evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Blocks:
    """A tier with a capacity in blocks.  A prefix is matched up to the first missing block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(0, capacity)
        self.evicted = 0
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def match(self, ids: Sequence[int], first: int = 0) -> int:
        """Number of leading blocks in the tier; those before ``first`` are assumed to be."""
        held = self._held
        for end in range(first, len(ids)):
            if ids[end] not in held:
                return end
        return len(ids)

    def absent(self, ids: Sequence[int], besides: set[int]) -> list[int]:
        """The blocks that are neither in the tier nor in ``besides``."""
        held = self._held
        return [block for block in ids if block not in held and block not in besides]

    def touch(self, ids: Sequence[int]) -> None:
        """Marks blocks in the tier as used; the first of a prefix becomes the most recent."""
        held = self._held
        for block in reversed(ids):
            if block in held:
                held.move_to_end(block)

    def add(self, ids: Sequence[int]) -> None:
        """Keeps blocks, and drops the least recently used beyond the capacity."""
        held = self._held
        for block in reversed(ids):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = None
        for _ in range(len(held) - self.capacity):
            held.popitem(last=False)
            self.evicted += 1

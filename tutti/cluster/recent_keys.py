"""Keys that failed, were copied or were deleted lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

_KEYS_MAX = 1 << 17


class RecentKeys:
    """Keys that are remembered for ``ttl_s`` seconds: the newest 131,072."""

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # in order of expiry

    def add(self, keys: Iterable[bytes]) -> None:
        """Remembers keys from now on."""
        now_s = self._now_s()
        for key in keys:
            self._until_s[key] = now_s + self._ttl_s
            self._until_s.move_to_end(key)
        while self._until_s:
            key, until_s = self._until_s.popitem(last=False)
            if until_s > now_s and len(self._until_s) < _KEYS_MAX:
                self._until_s[key] = until_s
                self._until_s.move_to_end(key, last=False)
                break

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forgets keys."""
        for key in keys:
            self._until_s.pop(key, None)

    def __len__(self) -> int:
        """Number of keys, including expired ones that were not dropped yet."""
        return len(self._until_s)

    def __contains__(self, key: bytes) -> bool:
        return self._until_s.get(key, 0.0) > self._now_s()

"""The catalogue of an agent's pool, as its clients call it; see tutti.transfers.catalogue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.checks import optional, seconds, takes, text
from tutti.errors import CapacityError
from tutti.medium.keys import KEY_NBYTES, as_keys
from tutti.node.messages import DESCRIBED_MAX, LISTED_MAX, keys_of
from tutti.transfers.catalogue import ObjectInfo

_EXTRA_S = 5.0


class RemoteCatalogue:
    """See Catalogue.  Raises AgentLost as well.

    call: an operation of the agent by name, with a time-out in seconds (None: the usual one).
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @takes(namespace=optional(text))
    def keys(self, namespace: str | None = None) -> Keys:
        """See Catalogue; objects that are stored or evicted meanwhile may be missing."""
        parts: list[Keys] = [np.zeros((0, 16), np.uint8)]
        start, more = 0, True
        while more:  # bounded by the pool's slots
            raw, start = self._call("list", start=start, namespace=namespace)
            parts.append(keys_of(raw))
            more = len(parts[-1]) == LISTED_MAX
        return np.concatenate(parts)

    def objects(self, keys: Keys) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        for some in parts_of(keys, DESCRIBED_MAX):
            found += [ObjectInfo(**info) for info in self._call("objects", keys=some)]
        return found

    @takes(timeout_s=seconds)
    def delete(self, keys: Keys, *, timeout_s: float = 30.0) -> int:
        deadline_s, gone = time.monotonic() + timeout_s, 0
        for some in parts_of(keys, LISTED_MAX):
            left_s = max(0.0, deadline_s - time.monotonic())
            gone += self._call("delete", left_s + _EXTRA_S, keys=some, seconds=left_s)
        return gone

    def pin(self, keys: Keys) -> int:
        parts = list(parts_of(keys, LISTED_MAX))
        if len(parts) == 1:
            return int(self._call("pin", keys=parts[0]))
        before = {info.key for info in self.objects(keys) if info.pinned}
        try:
            return sum(self._call("pin", keys=some) for some in parts)
        except CapacityError:  # the agent pinned the parts before this one
            fresh = [key for key in as_keys(keys) if key.tobytes() not in before]
            self.unpin(np.array(fresh, np.uint8).reshape(-1, KEY_NBYTES))
            raise

    def unpin(self, keys: Keys) -> int:
        return sum(self._call("unpin", keys=some) for some in parts_of(keys, LISTED_MAX))

    def expire(self, keys: Keys, ttl_s: float | None) -> int:
        parts = parts_of(keys, LISTED_MAX)
        return sum(self._call("expire", keys=some, ttl_s=ttl_s) for some in parts)


def parts_of(keys: Keys, n: int) -> Iterator[bytes]:
    """The bytes of keys, ``n`` keys at a time."""
    keys = as_keys(keys)
    for start in range(0, len(keys), n):
        yield keys[start : start + n].tobytes()

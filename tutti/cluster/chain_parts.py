"""Splits chains of keys into parts."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys


def split(keys: Keys, most: int) -> list[Keys]:
    """Splits keys into parts of at most ``most``; each is half of what is left, or a third of most.

    The last parts are smaller because nothing else is read while the last one is stored.  They are
    not smaller still because each get has a fixed cost.
    """
    parts, least = [], -(-most // 3)
    while len(keys):
        size = min(most, max(-(-len(keys) // 2), least))
        parts.append(keys[:size])
        keys = keys[size:]
    return parts


def take(parts: deque[Keys], most: int) -> Keys:
    """Removes and returns the first part, or only the first ``most`` keys of it."""
    keys = parts.popleft()
    if len(keys) > most:
        parts.appendleft(keys[most:])
    return keys[:most]


def prefix(keys: Keys, good: npt.NDArray[np.bool_]) -> Keys:
    """Keys before the first whose ``good`` is False."""
    wrong = np.flatnonzero(~good)
    return keys[: wrong[0]] if wrong.size else keys

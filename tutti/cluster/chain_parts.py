"""Parts of chains of keys."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys


def split(keys: Keys, most: int) -> list[Keys]:
    """Parts to get.  Those at the end are small, as the last one lands while no other is read.

    Not below a third of the most, as each get has a cost of its own.
    """
    parts, least = [], -(-most // 3)
    while len(keys):
        size = min(most, max(-(-len(keys) // 2), least))
        parts.append(keys[:size])
        keys = keys[size:]
    return parts


def take(parts: deque[Keys], most: int) -> Keys:
    """The first of parts, or so many of its keys: the others stay."""
    keys = parts.popleft()
    if len(keys) > most:
        parts.appendleft(keys[most:])
    return keys[:most]


def prefix(keys: Keys, good: npt.NDArray[np.bool_]) -> Keys:
    """Keys before the first that is not good."""
    wrong = np.flatnonzero(~good)
    return keys[: wrong[0]] if wrong.size else keys

"""Which prefixes can be restored, when several pools have to have their part.  Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.arrays import Mask


@dataclass(frozen=True)
class Window:
    """Pages (n,) that a pool of states holds; a prefix needs the last ``pages`` of its own."""

    held: Mask
    pages: int


def restorable(pages: int, windows: Sequence[Window]) -> Mask:
    """For each length 0 to ``pages`` whether a prefix of that length can be restored, (pages + 1,).

    pages: how many leading pages every pool has that needs them all.  A window that is longer than
    the prefix needs the whole prefix.  Length 0 is never an answer.
    """
    good = np.ones(pages + 1, np.bool_)
    good[0] = False
    lengths = np.arange(pages + 1)
    for window in windows:
        counted = np.concatenate(([0], np.cumsum(window.held[:pages])))
        first = np.maximum(lengths - window.pages, 0)
        good &= counted[lengths] - counted[first] == lengths - first
    return good

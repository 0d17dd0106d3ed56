"""Selects the pages that are worth writing: those that are offered for the second time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tutti.base.arrays import Keys, Mask
from tutti.integration.sglang.metrics import Metrics

_TOUCHED_MAX = 1 << 20


class SecondTouch:
    """Remembers the last 2**20 pages that one pool was offered.

    metrics: counts declined pages.  counts: whether an offer counts; see `around_offers`.
    """

    counts = True

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._touched: OrderedDict[bytes, None] = OrderedDict()

    def admitted(self, keys: Keys) -> Mask:
        """Which of these keys (n, 16) were offered before, (n,); none if it does not count."""
        if not self.counts:
            return np.zeros(len(keys), np.bool_)
        wanted = np.ones(len(keys), np.bool_)
        for row, key in enumerate(keys):
            name = key.tobytes()
            # Taken out and put at the end: another thread may clear in between.
            wanted[row] = self._touched.pop(name, False) is None
            self._touched[name] = None
        for _ in range(len(self._touched) - _TOUCHED_MAX):
            self._touched.popitem(last=False)
        self._metrics.count("declined_pages", len(keys) - int(np.count_nonzero(wanted)))
        return wanted

    def clear(self) -> None:
        """Forgets all pages."""
        self._touched.clear()


def around_offers(original: Callable[..., Any], wrapper: Any, nodes: Sequence[int]) -> None:
    """SGLang's plugin: of a chain of nodes that SGLang offers to a linker, the last one counts.

    SGLang adds those before it because they are not stored yet: with each chunk of a prompt, and
    with the answer to it.  Otherwise a prompt that never returns would be stored.
    """
    for node in nodes:
        SecondTouch.counts = node == nodes[-1]
        original(wrapper, [node])

"""SGLang's older storage calls, with one flat tensor per page, which are copied through staging."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from tutti.gio_uring.memory import view_at
from tutti.integration.sglang.host.host_store import HostStore
from tutti.memory.host_memory import PAGE_FIRST, PAGE_FIRST_DIRECT, HostMemory

_STAGING_NBYTES = 64 << 20
_STAGING_PAGES_MAX = 64


class FlatPages:
    """Pages as flat tensors: K of all layers, then V of all layers, as SGLang flattens a page.

    Staging is ordered [segment][page][layer], so that a page's part of each segment is contiguous.
    """

    def __init__(self, store: HostStore) -> None:
        self._host_store = store
        self._lock = threading.Lock()
        self._pool: HostMemory | None = None

    def read(
        self, keys: Sequence[str], targets: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Fills the tensors; None for each page that is not stored or does not fit its tensor."""
        answers: list[torch.Tensor | None] = []
        with self._lock:
            pool = self._staging()
            for start in range(0, len(keys), pool.pages if pool else 1):
                if pool is None:
                    break
                part = keys[start : start + pool.pages]
                good = self._host_store.load_pages(part, np.arange(len(part)), pool)
                for page, right in enumerate(good):
                    target = targets[start + page]
                    filled = right and self._copy_out(pool, page, target)
                    answers.append(target if filled else None)
        return answers + [None] * (len(keys) - len(answers))

    def write(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> bool:
        """Stores the tensors; returns whether all of them are stored."""
        with self._lock:
            pool = self._staging()
            if pool is None:
                return False
            for start in range(0, len(keys), pool.pages):
                part = keys[start : start + pool.pages]
                if not all(self._copy_in(pool, i, values[start + i]) for i in range(len(part))):
                    return False
                if not all(self._host_store.put_pages(part, np.arange(len(part)), pool)):
                    return False
        return True

    def _staging(self) -> HostMemory | None:
        if self._pool is None:
            layout = self._host_store.store.layout
            pages = max(1, min(_STAGING_PAGES_MAX, _STAGING_NBYTES // layout.object_nbytes))
            order = PAGE_FIRST_DIRECT if layout.layers > 1 else PAGE_FIRST
            self._pool = self._host_store.staging(pages, order)
        return self._pool

    @staticmethod
    def _pieces(pool: HostMemory, page: int) -> list[np.ndarray]:
        layers, memory = pool.layout.layers, pool.memory
        return [
            view_at(int(memory.bases[0, k]) + page * memory.stride_nbytes[k], nbytes * layers)
            for k, nbytes in enumerate(memory.segment_nbytes)
        ]

    def _copy_out(self, pool: HostMemory, page: int, target: torch.Tensor) -> bool:
        flat = target.view(torch.uint8).reshape(-1).numpy()
        if flat.size != pool.layout.object_nbytes:
            return False
        np.concatenate(self._pieces(pool, page), out=flat)
        return True

    def _copy_in(self, pool: HostMemory, page: int, value: torch.Tensor) -> bool:
        flat = value.contiguous().view(torch.uint8).reshape(-1).numpy()
        if flat.size != pool.layout.object_nbytes:
            return False
        start = 0
        for piece in self._pieces(pool, page):
            piece[:] = flat[start : start + piece.size]
            start += piece.size
        return True

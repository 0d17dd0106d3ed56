"""Hugepages below a host pool, with a stand-in for the kernel's madvise."""

from __future__ import annotations

import errno
import threading

import pytest

from tutti.integration.sglang.host import host_pools as host_memory

HUGE = 2 << 20
PAGES = 4096  # 8 GiB
RANGES = [(HUGE * 8 + 4096, HUGE * (PAGES + 1) - 4096), (7, 100)]
FIRST = 9


class Kernel:
    """Collapses page after page up to the first one that it has no memory for, or that is pinned.

    free: large pages that it can build in each round.  pinned: pages that never move.
    """

    def __init__(self, free: list[int], pinned: set[int]) -> None:
        self.free, self.pinned = [0, *free], pinned
        self.huge: set[int] = set()
        self.advised: list[tuple[int, int]] = []
        self.refusals: list[int] = [0]

    def next_round(self) -> None:
        self.free.pop(0)
        self.refusals.append(0)

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        assert not address % HUGE and not nbytes % HUGE and nbytes
        if advice == host_memory._MADV_HUGEPAGE:
            self.advised.append((address, nbytes))
            return 0
        for page in range(address // HUGE, (address + nbytes) // HUGE):
            if page in self.huge:
                continue
            if page in self.pinned or not self.free[0]:
                self.refusals[-1] += 1
                return errno.EAGAIN if page in self.pinned else errno.ENOMEM
            self.huge.add(page)
            self.free[0] -= 1
        return 0


class Stop(threading.Event):
    """Pauses take no time."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def wait(self, timeout: float | None = None) -> bool:
        if timeout in host_memory._COLLAPSE_PAUSES_S:  # others are rests after a piece
            self._kernel.next_round()
        return self.is_set()


def collapse(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> str:
    monkeypatch.setattr(host_memory, "_madvise", kernel.madvise)
    return host_memory.advise_hugepages(RANGES, "collapse", Stop(kernel))


def test_what_the_kernel_has_no_large_page_for_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel([PAGES // 2, 100, PAGES, 0, 0], set())
    assert collapse(monkeypatch, kernel) == ""
    assert kernel.huge == set(range(FIRST, FIRST + PAGES))
    assert kernel.advised == [(FIRST * HUGE, PAGES * HUGE)]
    assert len(kernel.free) == 3, "nothing left to do: no further round"
    assert max(kernel.refusals) <= host_memory._COLLAPSE_FAILURES, "each costs a compaction"


def test_pinned_pages_keep_neither_their_neighbours_nor_the_rest_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pieces at the beginning refuse in every round; those behind them get their turn."""
    pinned = {FIRST + 32 * piece + 31 for piece in range(20)}
    kernel = Kernel([PAGES] * 5, pinned)
    why = collapse(monkeypatch, kernel)
    assert "MADV_COLLAPSE of the last 40 MiB" in why
    assert kernel.huge == set(range(FIRST, FIRST + PAGES)) - pinned
    assert len(kernel.free) == 1, "so many rounds, and no more"


def test_a_kernel_that_cannot_and_a_storage_that_closes_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_madvise", lambda *_: errno.EINVAL)
    assert "madvise: " in host_memory.advise_hugepages(RANGES, "advise", threading.Event())
    kernel = Kernel([PAGES] * 5, set())
    stop = Stop(kernel)
    stop.set()
    monkeypatch.setattr(host_memory, "_madvise", kernel.madvise)
    assert host_memory.advise_hugepages(RANGES, "collapse", stop) == ""
    assert not kernel.huge

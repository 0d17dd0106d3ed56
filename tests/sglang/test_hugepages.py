"""Hugepages below a host pool: as SGLang allocates it, and later, with a stand-in for madvise."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import (
    ParallelContext,
    RuntimeContext,
    SpawnRanks,
    create_context,
    use_context,
)
from sglang.srt.server_args import ServerArgs

from tutti.gio_uring.memory import hugepage_nbytes
from tutti.gio_uring.probe import probe_memory
from tutti.integration.sglang import launch, weights
from tutti.integration.sglang.host import host_pools as host_memory
from tutti.integration.sglang.options import HICACHE

HUGE = 2 << 20
MAP_FIXED = 0x10  # include/uapi/asm-generic/mman-common.h
PAGES = 4096  # 8 GiB
RANGES = [(HUGE * 8 + 4096, HUGE * (PAGES + 1) - 4096), (7, 100)]
FIRST = 9


class Kernel:
    """Collapses page after page up to the first one that it has no memory for, or that is pinned.

    free: large pages that it can build in each round.  pinned: pages that never move.  never: no
    large pages, ever.
    """

    def __init__(self, free: list[int], pinned: set[int], never: set[int] | None = None) -> None:
        self.free, self.pinned, self.never = [0, *free], pinned, never or set()
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
            if page in self.never:
                return errno.EINVAL
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
    assert "MADV_COLLAPSE of 40 MiB: EAGAIN" in why
    assert kernel.huge == set(range(FIRST, FIRST + PAGES)) - pinned
    assert len(kernel.free) == 1, "so many rounds, and no more"


def test_what_is_never_collapsed_does_not_end_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece, and one large page further on; a pinned one is tried in all rounds."""
    never = {*range(FIRST + 32, FIRST + 64), FIRST + 100}
    kernel = Kernel([PAGES] * 5, {FIRST}, never)
    why = collapse(monkeypatch, kernel)
    assert kernel.huge == set(range(FIRST + 1, FIRST + PAGES)) - never
    assert "of 2 MiB: EAGAIN" in why and "of 66 MiB: EINVAL" in why
    kernel = Kernel([PAGES] * 5, set(), set(range(FIRST, FIRST + PAGES)))
    assert f"of {2 * PAGES} MiB: EINVAL" in collapse(monkeypatch, kernel)
    assert len(kernel.free) == 5, "no further round"


@pytest.mark.parametrize("shift", [0, 4096])
def test_shared_memory_that_is_shifted_against_its_large_pages_is_named(shift: int) -> None:
    """By this kernel, in memory as SGLang allocates it without the plugin."""
    if probe_memory().collapse_refusal:
        pytest.skip("this kernel collapses nothing")
    with mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        address, nbytes = -(-start // HUGE) * HUGE + shift, 4 * HUGE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_FIXED
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
        placed = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert placed == address
        ctypes.memset(address, 1, nbytes)
        why = host_memory.advise_hugepages([(address, nbytes)], "collapse", threading.Event())
        if not shift and "EINVAL" in why:
            pytest.skip("this kernel collapses no shared memory")
        assert ("not a multiple of 2 MiB" in why) == bool(shift), why


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


TUTTI = {
    **launch.extra_config(HICACHE, {"path": ["/pools"], "capacity": "1GiB"}),
}


def dynamic(config: str) -> dict[str, str]:
    """SGLang's flags for a storage of this extra config."""
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": config,
    }


#: SGLang's flags with which nothing of the allocation changes.
UNTOUCHED: dict[str, dict[str, str]] = {
    "no storage": {},
    "a storage of SGLang's": {"hicache_storage_backend": "file"},
    "another class": dynamic(json.dumps({**TUTTI, "class_name": "Other"})),
    "the option off": dynamic(json.dumps({**TUTTI, "hugepages": "off"})),
    "no JSON": dynamic("{"),
}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any server of this environment loads it."""
    monkeypatch.setattr(weights.WATCH, "watched", weights.WATCH.watched)
    load_plugins()
    for name in ("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", "SGLANG_HUGEPAGE_SIZE"):
        monkeypatch.delenv(name, raising=False)


def host_pool(flags: dict[str, str]) -> Any:
    """A pool of 24 MiB as a server with these flags allocates it."""
    given: dict[str, Any] = {"model_path": "dummy", "device": "cpu", **flags}
    args = ServerArgs(**given)
    with use_context(create_context(args, role="test", ranks=SpawnRanks(world_rank=0))):
        return hp.mha_pool("page_first", heads=64)


def mapping_of(pool: Any) -> tuple[str, set[str]]:
    """Permissions and flags (proc(5), smaps) of the memory that a pool lies on."""
    address, permissions = pool.kv_buffer.data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            permissions = rest[0] if first <= address < last else ""
        elif permissions and head == "VmFlags:":
            return permissions, set(rest)
    raise AssertionError("the pool lies nowhere")


@pytest.mark.parametrize("written", ["in the flag", "in a file"])
def test_tuttis_host_pool_is_allocated_on_large_pages(
    written: str, plugin: None, tmp_path: Path
) -> None:
    config = json.dumps(TUTTI)
    if written == "in a file":
        (tmp_path / "tutti.json").write_text(config)
        config = f"@{tmp_path / 'tutti.json'}"
    before = dict(os.environ)
    pool = host_pool(dynamic(config))
    assert os.environ == before
    permissions, flags = mapping_of(pool)
    assert (permissions, {"hg", "dc"} <= flags) == ("rw-p", True), flags
    buffer = pool.kv_buffer
    nbytes = buffer.numel() * buffer.element_size()
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert hugepage_nbytes([(buffer.data_ptr(), nbytes)]) >= nbytes // 2


@pytest.mark.parametrize("case", UNTOUCHED)
def test_other_host_pools_are_allocated_as_without_the_plugin(case: str, plugin: None) -> None:
    permissions, flags = mapping_of(host_pool(UNTOUCHED[case]))
    assert (permissions, "hg" in flags) == ("rw-s", False)


def test_what_the_operator_has_set_stays(plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", "0")
    permissions, _ = mapping_of(host_pool(dynamic(json.dumps(TUTTI))))
    assert permissions == "rw-s"


def test_a_pool_without_a_server_is_allocated_as_without_the_plugin(plugin: None) -> None:
    with use_context(RuntimeContext(parallel=ParallelContext())):  # another test may have one
        assert mapping_of(hp.mha_pool("page_first"))[0] == "rw-s"

"""The store on real files: every way to open them, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tutti
from store.pools import LAYOUT, fill, some_keys
from tutti.errors import ConfigError, DeviceTimeout, PoolMismatch, PoolNotFound
from tutti.gio_uring.controller_file import FileController, uring_refusal
from tutti.gio_uring.engine import Engine
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.store import format as format_pool
from tutti.transfers.reclaim import deallocate_empty
from tutti.transfers.resources import _STUCK

SMALL = KVLayout.mha(
    layers=2, kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", model="test-model"
)
SHARED = Path("/dev/shm")


def kernel_threads() -> int:
    """Threads of this process, the native ones included."""
    return len(os.listdir("/proc/self/task"))


def open_files() -> dict[str, str]:
    links = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            links[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own
            continue
    return links


def ring_memory_nbytes() -> int:
    """Mappings of io_uring rings."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "io_uring" in line:
            first, last = line.split(maxsplit=1)[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    gc.collect()
    before = (kernel_threads(), set(threading.enumerate()), open_files(), ring_memory_nbytes())
    yield
    gc.collect()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and (
        # A joined thread is in the list for a moment, one that waits for calls for half a second.
        kernel_threads() > before[0] or not set(threading.enumerate()) <= before[1]
    ):
        time.sleep(0.01)
    assert kernel_threads() <= before[0], "native threads are left"
    assert set(threading.enumerate()) <= before[1], "Python threads are left"
    assert open_files().items() <= before[2].items(), "open files are left"
    assert ring_memory_nbytes() <= before[3], "rings are left"


def round_trip(
    store: ObjectStore, pool: HostMemory, rng: np.random.Generator, n: int
) -> tuple[np.ndarray, list[bytes]]:
    """Puts pages 0 to n-1, loads them into n to 2n-1 and compares."""
    keys = some_keys(rng, n)
    contents = fill(pool, range(n), rng)
    assert store.put(keys, np.arange(n), memory=pool).wait(10).stored == n
    read_back(store, pool, keys, contents)
    return keys, contents


def read_back(
    store: ObjectStore, pool: HostMemory, keys: np.ndarray, contents: list[bytes]
) -> None:
    n = len(keys)
    assert store.match(keys) == n
    pages = np.arange(n, 2 * n)
    for page in pages.tolist():
        pool.write(page, bytes(pool.layout.object_nbytes))
    store.load(keys, pages, memory=pool).wait(10)
    assert [pool.read(page) for page in pages.tolist()] == contents


def test_a_clear_gives_the_blocks_back(
    executor: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    paths = [tmp_path / f"member{i}" for i in range(2)]
    with tutti.open(paths, LAYOUT, "24MiB", executor=executor) as store:
        memory = store.allocate_memory(24)
        round_trip(store, memory, rng, 12)
        before = [path.stat().st_blocks * 512 for path in paths]
        store.clear()
        given_back = store.stats()["deallocated_nbytes"]
        assert given_back > store.geometry.member_nbytes, "of both"
        after = [path.stat().st_blocks * 512 for path in paths]
        assert sum(before) - sum(after) == pytest.approx(given_back, abs=2 << 20)
        keys, contents = round_trip(store, memory, rng, 12)
        read_back(store, memory, keys, contents)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("durability", ["process", "flush"])
def test_open_formats_and_reopens(
    executor: str, durability: str, members: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    paths = [tmp_path / f"member{i}" for i in range(members)]
    options = {"executor": executor, "durability": durability}
    with nothing_left_behind():
        with tutti.open(paths, LAYOUT, 12 * members << 20, **options) as store:
            assert isinstance(store.controller, FileController)
            assert store.controller.executor_name == executor
            assert store.members.count == members
            keys, contents = round_trip(store, store.allocate_memory(24), rng, 12)
        for path in paths:
            assert path.stat().st_size == store.geometry.member_nbytes
            assert path.stat().st_blocks * 512 >= store.geometry.member_nbytes, "not allocated"
            assert path.stat().st_mode & 0o077 == 0, "others may read the pool"
        with tutti.open(paths, **options) as store:
            assert store.layout == LAYOUT
            read_back(store, store.allocate_memory(24), keys, contents)
            assert store.stats()["slots"]["unproven"] == 0


def test_what_one_executor_wrote_the_other_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    if reason := uring_refusal():
        pytest.skip(f"io_uring is refused here: {reason}")
    path = tmp_path / "member0"
    with tutti.open(path, LAYOUT, 12 << 20, executor="uring") as store:
        keys, contents = round_trip(store, store.allocate_memory(8), rng, 4)
    with tutti.open(path, executor="threads") as store:
        read_back(store, store.allocate_memory(8), keys, contents)


def test_format_with_force_forgets(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "member0"
    with tutti.open(path, LAYOUT, 12 << 20) as store:
        keys, _ = round_trip(store, store.allocate_memory(8), rng, 4)
    done: list[tuple[int, int]] = []
    geometry = format_pool(
        path, SMALL, 30 << 20, force=True, prewrite=True, progress=lambda *at: done.append(at)
    )
    assert path.stat().st_size == geometry.member_nbytes
    assert done[-1] == (geometry.member_nbytes, geometry.member_nbytes)
    assert [nbytes for nbytes, _ in done] == sorted(nbytes for nbytes, _ in done)
    with tutti.open(path, SMALL) as store:
        assert store.match(keys) == 0
        round_trip(store, store.allocate_memory(8), rng, 4)


def test_tmpfs_goes_through_the_page_cache(executor: str, rng: np.random.Generator) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    if not re.search(rf"^\S+ {SHARED} tmpfs ", mounts, re.MULTILINE):
        pytest.skip(f"{SHARED} is not a tmpfs")
    with tempfile.TemporaryDirectory(dir=SHARED) as folder, nothing_left_behind():
        path = Path(folder) / "member0"
        with tutti.open(path, LAYOUT, 12 << 20, executor=executor, durability="flush") as store:
            assert isinstance(store.controller, FileController)
            if store.controller.direct:
                pytest.skip("tmpfs has direct I/O here")
            keys, contents = round_trip(store, store.allocate_memory(24), rng, 12)
            store.clear()
            assert store.match(keys) == 0
            keys, contents = round_trip(store, store.allocate_memory(24), rng, 12)
        with tutti.open(path, executor=executor) as store:
            read_back(store, store.allocate_memory(24), keys, contents)


def test_close_leaves_nothing_behind(
    executor: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """After a normal end, after one in the middle of transfers, and after an open that failed."""
    path = tmp_path / "member0"
    format_pool(path, LAYOUT, 12 << 20)
    with nothing_left_behind():
        for busy in (False, True):
            store = tutti.open(path, executor=executor)
            pool = store.allocate_memory(24)
            keys, _ = round_trip(store, pool, rng, 12)
            if busy:
                put = store.put(some_keys(rng, 12), np.arange(12))
                load = store.load(keys, np.arange(12, 24))
            store.close()
            store.close()
            if busy:
                assert put.wait(5).stored == 12
                assert load.wait_settled(5)
            controller = store.controller
            assert controller.is_closed
            assert not controller._buffers, "memory is still registered"
            with pytest.raises(ConfigError, match="not registered"):
                store.unregister(pool)
    with nothing_left_behind():
        for wrong in ({"layout": SMALL}, {"verify": "maybe"}, {"executor": "magic"}):
            with pytest.raises((PoolMismatch, ConfigError)):
                tutti.open(path, **wrong)
    with tutti.open(path) as store:
        assert store.match(keys) == 12


def test_a_wrong_executor_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an NVMe generic device"):
        tutti.open(tmp_path / "pool", LAYOUT, 12 << 20, executor="passthrough")
    assert not list(tmp_path.iterdir())


def test_an_opening_that_gets_stuck_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that its controller cannot be closed either."""
    path = tmp_path / "pool"
    format_pool(path, LAYOUT, 12 << 20)
    path.write_bytes(bytes(path.stat().st_size))
    engines: list[Engine] = []

    def stuck(engine: Engine, timeout_s: float = 0.0) -> None:
        engines.append(engine)
        raise DeviceTimeout("stuck")

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "close", stuck)
        with pytest.raises(PoolNotFound) as caught:
            tutti.open(path)
    assert caught.value.__notes__ == ["stuck"]
    stuck_resources = _STUCK.pop()
    engines[0].close()
    for part in stuck_resources.parts:
        part.close()
    stuck_resources.controller.close()


def test_two_pools_in_one_process(tmp_path: Path, rng: np.random.Generator) -> None:
    with (
        nothing_left_behind(),
        tutti.open(tmp_path / "one", LAYOUT, 12 << 20) as one,
        tutti.open(tmp_path / "two", SMALL, 30 << 20) as two,
        tutti.open(tmp_path / "three", LAYOUT, 12 << 20) as three,
    ):
        shared = HostMemory.allocate(LAYOUT, 24)
        for store in (one, three):  # the same memory serves two pools
            store.register(shared)
        mine = two.allocate_memory(8)
        keys, contents = round_trip(one, shared, rng, 12)
        others, _ = round_trip(two, mine, rng, 4)
        assert three.match(keys) == one.match(others) == 0
        tickets = [three.put(keys, np.arange(12)), two.put(some_keys(rng, 4), np.arange(4))]
        for ticket in tickets:
            assert ticket.wait(10).dropped == 0
        one.close()
        read_back(three, shared, keys, contents)


@pytest.mark.parametrize("hugepages", [True, False])
def test_memory_on_either_kind_of_page(
    hugepages: bool, executor: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    with tutti.open(tmp_path / "member0", LAYOUT, 24 << 20, executor=executor) as store:
        pool = store.allocate_memory(96, hugepages=hugepages)
        aligned = pool.buffers[0][0] % (2 << 20) == 0
        assert aligned or not hugepages
        round_trip(store, pool, rng, 48)


@pytest.mark.parametrize("offset", [1, 8, 511, 2048])
def test_unaligned_memory_bounces(
    offset: int, executor: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Any place of a caller's memory; no byte around it changes."""
    pages = 8
    nbytes = pages * LAYOUT.object_nbytes
    memory = bytearray(rng.bytes(nbytes + 2 * 4096))
    before = bytes(memory)
    view = np.frombuffer(memory, np.uint8)
    start = (offset - view.ctypes.data) % 4096
    with tutti.open(tmp_path / "member0", LAYOUT, 12 << 20, executor=executor) as store:
        pool = HostMemory.from_buffer(LAYOUT, view[start : start + nbytes], pages)
        assert pool.buffers[0][0] % 4096 == offset
        store.register(pool)
        round_trip(store, pool, rng, pages // 2)
        assert isinstance(store.controller, FileController)
        bounced = int(store.controller.stats().bounced)
        needed = store.controller.direct and any(
            offset % member.memory_alignment for member in store.controller.members
        )
        assert (bounced > 0) == needed
    assert bytes(memory[:start]) == before[:start]
    assert bytes(memory[start + nbytes :]) == before[start + nbytes :]


def test_a_deletion_gives_the_blocks_of_empty_groups_back(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "pool"
    with tutti.open(path, layout=SMALL, capacity="48MiB") as store:
        size = store.geometry.group_slots
        keys = some_keys(rng, 2 * size)
        memory = store.allocate_memory(2 * size)
        fill(memory, range(2 * size), rng)
        store.put(keys, range(2 * size), memory=memory).wait(10)
        full = path.stat().st_blocks
        assert store.delete(keys[1:size]) == size - 1
        assert path.stat().st_blocks >= full, "a page of the group is still there"
        assert store.delete(keys[:1]) == 1
        group_nbytes = size * SMALL.object_nbytes
        assert (full - path.stat().st_blocks) * 512 >= group_nbytes
        assert store.stats()["deallocated_nbytes"] >= group_nbytes
        assert store.match(keys[size:]) == size, "the other group is as it was"
        free = store.stats()["free_objects"]
        store.put(keys[:size], range(size), memory=memory).wait(10)
        assert store.stats()["free_objects"] == free - size
        assert store.load(keys, range(2 * size), memory=memory).wait(10) is None


def test_many_empty_groups_are_given_back_in_few_commands_and_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with tutti.open(paths, layout=SMALL, capacity="96MiB") as store:
        geometry, engine = store.geometry, store.engine
        size, groups = geometry.group_slots, geometry.groups
        assert groups >= 4, "the groups of a member"
        kept = [1, 2 * groups - 2]
        slots = np.concatenate([np.arange(size) + group * size for group in kept])
        core, counts, deallocate = store._core, [], engine.deallocate
        with core.lock:  # as if objects were in two of the groups
            core.allocator.take(slots)

        def counted(slba: Any, nsid: Any, nlb: Any, **more: Any) -> Any:
            counts.append((np.asarray(slba).size, int(np.asarray(nlb).sum())))
            job = deallocate(slba, nsid, nlb, **more)
            assert job.wait_released(10) and job.report().status == 0
            return job

        monkeypatch.setattr(engine, "deallocate", counted)
        monkeypatch.setattr("tutti.transfers.core._RANGES", 3)
        deallocate_empty(store._core, store._reclaimer, np.arange(2 * groups * size))
        group_nlb = geometry.layers * geometry.layer_stride_nlb
        assert [ranges for ranges, _ in counts] == [3, 1], "two runs of neighbours on each member"
        assert sum(nlb for _, nlb in counts) == (2 * groups - 2) * group_nlb
        given_back = store.stats()["deallocated_nbytes"]
        assert given_back == (2 * groups - 2) * group_nlb * geometry.lba_nbytes
        counts.clear()
        with core.lock:
            core.allocator.free(slots)
        deallocate_empty(store._core, store._reclaimer, slots[:size])
        assert counts == [(1, group_nlb)]


def test_expired_objects_give_their_blocks_back(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.transfers.expiry._INTERVAL_S", 0.05)
    with tutti.open(tmp_path / "pool", layout=SMALL, capacity="48MiB") as store:
        size = store.geometry.group_slots
        keys = some_keys(rng, size)
        memory = store.allocate_memory(size)
        store.put(keys, range(size), memory=memory).wait(10)
        store.catalogue.expire(keys, 1.0)
        store._core.index.expiry[store._core.index.expiry > 0] = 1  # long ago
        wait_until(lambda: store.stats()["deallocated_nbytes"], lambda: str(store.stats()))
        assert len(store) == 0


def test_an_object_takes_64_bytes_of_memory_at_most(tmp_path: Path) -> None:
    layout = KVLayout.mha(1, 1, 64, 64, "bfloat16", model="test-model")
    format_pool(str(tmp_path / "pool"), layout, 128 << 20)
    with tutti.open(str(tmp_path / "pool"), layout=layout, profile=None) as store:
        memory, keys = store.allocate_memory(1), tutti.chain_keys(layout.fingerprint, range(64), 64)
        store.put(keys, [0], memory=memory).wait(10.0)
        store.load(keys, [0], memory=memory).wait(10.0)
        assert store.stats()["eviction"] == "mq"
        core = store._core
        arrays = [*vars(core.index).items(), *vars(core.history).items()]
        # The others are the sizes of namespaces, gaps and numbers of uses, in any pool.
        of_slots = sum(
            # What takes no memory yet has a stride of 0; `key` is a view of another.
            array.shape[0] * array.strides[0]
            for name, array in arrays
            if isinstance(array, np.ndarray)
            and name not in {"key", "tenant_slots", "_gaps", "_known"}
        )
        assert of_slots / core.index.slots == store.stats()["index_nbytes_per_object"] <= 64
        assert core.index.slots > 1000 and core.index.hits[0] == 1

"""An open pool with two paths: what is cached, what changes with a plan, and what survives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.objects import when_unlocked
from waiting import wait_until

import tutti
from store.limited_memory import machine_of, set_limit
from store.pools import Bytes, fill, formatted, opened, some_keys
from tutti.base.memory_pressure import MemoryFacts, read_memory
from tutti.base.units import MiB
from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.controller_file import BlockRange, FileController
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.store import format as format_pool
from tutti.transfers import residency
from tutti.transfers.store_config import StoreConfig

# 256 KiB a page: eight to a group of 2 MiB.
LAYOUT = KVLayout.mha(
    layers=1, kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", model="test-model"
)
PAGES = 48
CAPACITY_NBYTES = 30 * MiB


def open_pool(paths: list[Path], **config: object) -> ObjectStore:
    options = StoreConfig(**config)  # type: ignore[arg-type]
    store = tutti.open(paths, LAYOUT, config=options)
    controller = store.controller
    assert isinstance(controller, FileController)
    if not controller.direct:
        store.close()
        pytest.skip(f"no direct I/O here: {controller.members[0].buffered_reason}")
    return store


@pytest.fixture(params=[1, 3])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    names = [tmp_path / f"pool{i}.tutti" for i in range(request.param)]
    format_pool(names, LAYOUT, CAPACITY_NBYTES)
    return names


def file_of(store: ObjectStore) -> FileController:
    assert isinstance(store.controller, FileController)
    return store.controller


def groups_resident_nbytes(store: ObjectStore) -> int:
    """What the page cache holds of all groups, buffered or not."""
    geometry, controller = store.geometry, file_of(store)
    first = geometry.groups_offset // geometry.lba_nbytes
    nlb = geometry.groups * geometry.group_nbytes // geometry.lba_nbytes
    nsids = store.members.nsids()
    return sum(controller.resident_nbytes(BlockRange(nsid, first, nlb)) for nsid in nsids)


def test_bytes_survive_every_plan(paths: list[Path], rng: np.random.Generator) -> None:
    """Objects are put under one plan and loaded under the next, and after a new opening."""
    keys = some_keys(rng, PAGES)
    step = PAGES // 6
    with open_pool(paths) as store:
        pool = store.allocate_memory(2 * PAGES)
        contents = fill(pool, range(PAGES), rng)
        for i, budget_groups in enumerate((3, 0, 7, 1, 100, 2)):
            budget_nbytes = budget_groups * store.geometry.group_nbytes
            plan = store.residency.replan(budget_nbytes=budget_nbytes)
            assert plan.buffered_groups == min(budget_groups, plan.groups)
            fresh = slice(i * step, (i + 1) * step)
            store.put(keys[fresh], np.arange(PAGES)[fresh]).wait(30)
            assert store.match(keys) == fresh.stop
            check_load(store, pool, keys[: fresh.stop], contents)
    with open_pool(paths) as store:
        assert store.residency.plan is None
        check_load(store, store.allocate_memory(2 * PAGES), keys, contents)


def check_load(store: ObjectStore, pool: HostMemory, keys: Bytes, contents: list[bytes]) -> None:
    """Loads into the second half of the pool."""
    targets = PAGES + np.arange(len(keys))
    for page in targets.tolist():
        pool.write(page, bytes(store.layout.object_nbytes))
    store.load(keys, targets).wait(30)
    assert [pool.read(page) for page in targets.tolist()] == contents[: len(keys)]


def test_the_page_cache_holds_what_was_planned_and_no_more(paths: list[Path]) -> None:
    keys, pages = some_keys(np.random.default_rng(1), PAGES), np.arange(PAGES)
    with open_pool(paths) as store:
        pool = store.allocate_memory(PAGES)
        group_nbytes = store.geometry.group_nbytes
        store.residency.replan(budget_nbytes=4 * group_nbytes)
        store.put(keys, pages).wait(30)
        store.load(keys, pages, memory=pool).wait(30)
        assert 0 < groups_resident_nbytes(store) <= 4 * group_nbytes
        assert groups_resident_nbytes(store) == store.residency.resident_nbytes()
        store.residency.replan(budget_nbytes=0)
        assert groups_resident_nbytes(store) == 0
        assert file_of(store).buffered == ()


def test_the_hottest_groups_are_chosen(tmp_path: Path) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    with open_pool([tmp_path / "pool"]) as store:
        store.allocate_memory(PAGES)
        slots = store.geometry.group_slots
        count = 4 * slots
        if count > PAGES:
            pytest.skip("groups are larger than this test expects")
        keys = some_keys(np.random.default_rng(1), count)
        store.put(keys, np.arange(count)).wait(30)
        hot = slice(2 * slots, 3 * slots)
        assert store.match(keys[hot]) == slots
        store.residency.replan(budget_nbytes=store.geometry.group_nbytes)
        before = file_of(store).stats().buffered
        store.load(keys[hot], np.arange(slots)).wait(30)
        assert file_of(store).stats().buffered > before
        before = file_of(store).stats().buffered
        store.load(keys[:slots], np.arange(slots)).wait(30)
        assert file_of(store).stats().buffered == before


def test_a_share_in_the_config_plans_at_the_opening(paths: list[Path]) -> None:
    with open_pool(paths, page_cache_share=1.0, residency="static") as store:
        plan = store.residency.plan
        assert plan is not None
        # The machine that runs this has more memory than the pool has bytes.
        assert plan.buffered_groups == plan.groups > 0
    with open_pool(paths, page_cache_share=1e-12) as store:
        plan = store.residency.plan
        assert plan is not None
        assert plan.buffered_groups == 0
    with pytest.raises(ConfigError, match="page_cache_share"):
        StoreConfig(page_cache_share=1.5)


@pytest.mark.parametrize("clean", [True, False])
def test_the_plan_of_the_opening_knows_what_recovery_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    keys = some_keys(np.random.default_rng(3), PAGES)
    with open_pool([tmp_path / "pool"]) as store:
        store.allocate_memory(PAGES)
        store.put(keys, np.arange(PAGES)).wait(30)
        full = store.residency.groups_of(keys)
        assert store.catalogue.delete(keys[: -store.geometry.group_slots]) > 0
        used = store.residency.groups_of(keys)
        assert set(used) < set(full)
        group_nbytes = store.geometry.group_nbytes
        store._core.leave_open = not clean
    go, recover = threading.Event(), tutti.store.recover

    def late(*arguments: Any, **options: Any) -> None:
        assert go.wait(30)
        recover(*arguments, **options)

    monkeypatch.setattr("tutti.store.recover", late)
    facts = MemoryFacts(len(used) * group_nbytes)
    monkeypatch.setattr(residency, "read_memory", lambda *_: facts)
    if clean:
        go.set()
    share = {"page_cache_share": 1.0, "residency": "static"}
    with open_pool([tmp_path / "pool"], **share) as store:
        assert store.recovered == clean
        go.set()
        store.wait_recovered(30)
        assert sum(found.nlb for found in file_of(store).buffered) == sum(r.nlb for r in used)
        assert {found.slba for found in file_of(store).buffered} <= {r.slba for r in used}


def test_flushed_puts_through_the_page_cache_leave_nothing_dirty(paths: list[Path]) -> None:
    keys, pages = some_keys(np.random.default_rng(1), PAGES), np.arange(PAGES)
    with open_pool(paths, durability="flush", page_cache_share=1.0, residency="static") as store:
        store.allocate_memory(PAGES)
        store.put(keys, pages).wait(30)
        assert groups_resident_nbytes(store) > 0
        assert dirty_nbytes_after_advice(store) == 0


def dirty_nbytes_after_advice(store: ObjectStore) -> int:
    """Only dirty pages stay when the kernel is told to drop all."""
    for member in file_of(store).members:
        assert member.buffered_fd is not None
        os.posix_fadvise(member.buffered_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return groups_resident_nbytes(store)


_VICTIM = """
import os, signal, sys
import numpy as np, tutti
from tutti.transfers.store_config import StoreConfig
store = tutti.open(sys.argv[1:], config=StoreConfig(page_cache_share=1.0, residency="static"))
pages, nbytes = 16, store.layout.object_nbytes
pool = store.allocate_memory(pages)
for page in range(pages):
    pool.write(page, bytes([page]) * nbytes)
keys = np.arange(pages * 16, dtype=np.uint8).reshape(pages, 16)
store.put(keys, np.arange(pages)).wait(30)
assert store.controller.stats().buffered > 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_in_the_page_cache_is_read_directly(paths: list[Path]) -> None:
    command = [sys.executable, "-c", _VICTIM, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    keys = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
    with when_unlocked(lambda: open_pool(paths)) as store:
        store.wait_recovered()
        assert store.match(keys) == 16
        pool = store.allocate_memory(16)
        store.load(keys, np.arange(16)).wait(30)
        assert file_of(store).stats().buffered == 0
        nbytes = store.layout.object_nbytes
        assert [pool.read(page) for page in range(16)] == [bytes([p]) * nbytes for p in range(16)]


def test_a_share_that_a_file_cannot_have_is_refused_before_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    with open_pool([tmp_path / "pool"]) as store:
        store._core.leave_open = True

    def refuse(*_: Any) -> None:
        raise Unsupported("made up: no direct I/O")

    monkeypatch.setattr(FileController, "check_has_both", refuse)
    with pytest.raises(Unsupported, match="no direct I/O"):
        open_pool([tmp_path / "pool"], page_cache_share=1.0)


@pytest.mark.parametrize(
    "given", [{"share": "1"}, {"share": 5}, {"budget_nbytes": "1GiB"}, {"budget_nbytes": -1}]
)
def test_a_wrong_plan_is_refused_before_anything_waits(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    with open_pool([tmp_path / "pool"]) as store:
        with pytest.raises(ConfigError, match=f"{next(iter(given))} is "):
            store.residency.replan(**given)
        assert store.residency.replan(share=0).buffered_groups == 0


def test_a_pool_in_memory_has_no_page_cache() -> None:
    with opened(formatted()) as store:
        with pytest.raises(Unsupported, match="no page cache"):
            store.residency.replan()
        assert store.recovered
        assert store.match(some_keys(np.random.default_rng(1), 1)) == 0
    with pytest.raises(Unsupported, match="no page cache"):
        opened(formatted(), page_cache_share=0.5)


def test_what_was_admitted_ends_before_a_standstill_and_the_next_waits() -> None:
    order: list[str] = []
    with opened(formatted()) as store:
        core = store._core
        inside, leave = threading.Event(), threading.Event()

        def stand() -> None:
            with core.quiesced("a test"):
                order.append("still")
                inside.set()
                assert leave.wait(10)
                order.append("moving")

        def enter() -> None:
            assert inside.wait(10)
            with core.admitted(10):
                order.append("admitted")

        threads = [threading.Thread(target=stand), threading.Thread(target=enter)]
        with core.admitted(10):
            threads[0].start()
            wait_until(lambda: not core.ready)
            assert not inside.wait(0.1), "it stood still during an operation"
            order.append("first")
        threads[1].start()
        assert inside.wait(10)
        wait_until(lambda: threads[1].is_alive())
        leave.set()
        for thread in threads:
            thread.join(10)
    assert order == ["first", "still", "moving", "admitted"]


def planned_groups(store: ObjectStore) -> int:
    return int(store.stats()["page_cache_planned_nbytes"]) // store.geometry.group_nbytes


def test_groups_follow_the_memory_and_no_look_up_misses(paths: list[Path], tmp_path: Path) -> None:
    root = machine_of(tmp_path / "root", 0)
    keys = some_keys(np.random.default_rng(4), PAGES)
    with open_pool(paths) as store:
        pool = store.allocate_memory(2 * PAGES)
        contents = fill(pool, range(PAGES), np.random.default_rng(5))
        store.put(keys, np.arange(PAGES)).wait(30)
        store.residency.follow(1.0, root=root)
        for groups in (4, 0, 6, 2):
            set_limit(root, groups * store.geometry.group_nbytes)
            misses = 0

            def arrived(store: ObjectStore = store, groups: int = groups) -> bool:
                nonlocal misses
                misses += store.match(keys) != PAGES
                check_load(store, pool, keys, contents)
                return planned_groups(store) == groups

            wait_until(arrived, f"{groups} groups fit, but others are planned")
            assert misses == 0
            assert len(file_of(store).buffered) <= groups
        stats = store.stats()
        assert stats["residency_switches"] >= 4 + 4 + 6 + 4
        moved_nbytes = stats["residency_switches"] * store.geometry.group_nbytes
        assert stats["residency_moved_nbytes"] == moved_nbytes
        assert stats["residency_moving_ms"] > 0


def test_a_control_group_that_vanishes_changes_nothing(
    paths: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = machine_of(tmp_path / "root", 1 << 40)
    with open_pool(paths) as store:
        store.residency.follow(1.0, root=root)
        whole = store.residency.replan(budget_nbytes=1 << 40).buffered_groups
        set_limit(root, 0)
        wait_until(lambda: planned_groups(store) == 0)
        assert "no memory is free (control group, version 2)" in caplog.text
        set_limit(root, 2 * store.geometry.group_nbytes)
        wait_until(lambda: planned_groups(store) == 2)
        for name in ("memory.max", "memory.stat"):
            (root / "sys/fs/cgroup/job" / name).unlink()
        wait_until(lambda: "limit of memory is gone" in caplog.text)
        (root / "proc/meminfo").unlink()
        wait_until(lambda: "keeps its groups: " in caplog.text)
        assert planned_groups(store) == 2 < whole
        assert caplog.text.count("limit of memory is gone") == 1


def test_a_page_cache_that_cannot_be_dropped_is_tried_again(
    paths: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    root = machine_of(tmp_path / "root", 1 << 40)
    with open_pool(paths) as store:
        store.residency.follow(1.0, root=root)
        store.residency.replan(budget_nbytes=1 << 40)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fadvise", fails)
            set_limit(root, 0)
            wait_until(lambda: "keeps its groups: cannot use" in caplog.text)
            assert planned_groups(store) > 0
        wait_until(lambda: planned_groups(store) == 0)


def test_after_a_limit_is_lifted_the_plan_follows_the_machine(
    paths: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = machine_of(tmp_path / "root", 0)
    with open_pool(paths) as store:
        store.residency.follow(1.0, root=root)
        set_limit(root, 2 * store.geometry.group_nbytes)
        wait_until(lambda: planned_groups(store) == 2)
        set_limit(root, "max")
        wait_until(lambda: planned_groups(store) > 2)
        available_kib = store.geometry.group_nbytes // 1024
        (root / "proc/meminfo").write_text(f"MemAvailable: {available_kib} kB\n")
        wait_until(lambda: planned_groups(store) == 1)
        assert "limit of memory is gone" not in caplog.text


def test_without_free_memory_a_pool_opens_and_all_goes_by_direct_io(
    paths: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = machine_of(tmp_path / "root", 0)
    monkeypatch.setattr(residency, "read_memory", lambda *_: read_memory(root))
    keys = some_keys(np.random.default_rng(7), PAGES)
    with open_pool(paths, page_cache_share=1.0) as store:
        pool = store.allocate_memory(2 * PAGES)
        contents = fill(pool, range(PAGES), np.random.default_rng(8))
        assert store.put(keys, np.arange(PAGES)).wait(30).stored == PAGES
        check_load(store, pool, keys, contents)
        wait_until(lambda: "no memory is free" in caplog.text)
        assert planned_groups(store) == 0 == store.residency.resident_nbytes()
        assert store.stats()["residency_switches"] == 0


def test_an_unexpected_error_ends_the_thread_and_is_told(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(root: Path) -> None:
        raise RuntimeError("no such counter")

    keys = some_keys(np.random.default_rng(9), PAGES)
    with open_pool(paths, page_cache_share=1.0) as store:
        pool = store.allocate_memory(2 * PAGES)
        contents = fill(pool, range(PAGES), np.random.default_rng(10))
        assert store.stats()["residency_follows_memory"]
        plan = store.residency.plan
        monkeypatch.setattr(residency, "read_stall_us", broken)
        wait_until(lambda: not store.stats()["residency_follows_memory"])
        assert caplog.text.count("follows free memory failed") == 1
        assert "no such counter" in caplog.text
        assert store.stats()["callback_errors"] == 1
        assert store.residency.plan == plan
        assert store.put(keys, np.arange(PAGES)).wait(30).stored == PAGES
        check_load(store, pool, keys, contents)


def test_a_group_in_use_stays_where_it_is(tmp_path: Path) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    with open_pool([tmp_path / "pool"]) as store:
        store.allocate_memory(PAGES)
        keys = some_keys(np.random.default_rng(6), PAGES)
        store.put(keys, np.arange(PAGES)).wait(30)
        slots = store._core.index.find(keys)
        store._core.index.pin(slots)
        while store.residency.move_towards(1 << 40, 1.0, 1 << 40):
            pass
        used = np.unique(slots // store.geometry.group_slots).size
        assert planned_groups(store) == store.geometry.groups - used
        store._core.index.unpin(slots)
        while store.residency.move_towards(1 << 40, 1.0, 1 << 40):
            pass
        assert planned_groups(store) == store.geometry.groups


@pytest.mark.parametrize("state", [{"ready": False}, {"closing": True}])
def test_a_pool_that_is_not_ready_or_closes_moves_no_group(
    tmp_path: Path, state: dict[str, bool]
) -> None:
    format_pool([tmp_path / "pool"], LAYOUT, CAPACITY_NBYTES)
    with open_pool([tmp_path / "pool"]) as store:
        core = store._core
        with pytest.MonkeyPatch.context() as patch:
            for name, value in state.items():
                patch.setattr(core, name, value)
            assert not store.residency.move_towards(1 << 40, 1.0, 1 << 40)
        assert planned_groups(store) == 0
        assert store.residency.move_towards(1 << 40, 1.0, 1 << 40)


def test_a_share_is_followed_by_default_and_the_thread_ends(paths: list[Path]) -> None:
    def running() -> bool:
        return any(thread.name == "tutti-residency" for thread in threading.enumerate())

    with open_pool(paths, page_cache_share=1.0, residency="static"):
        assert not running()
    with open_pool(paths, page_cache_share=1.0):
        assert running()
    assert not running()
    with pytest.raises(ConfigError, match="residency"):
        StoreConfig(residency="sometimes")

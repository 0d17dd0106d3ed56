"""Calls that overlap, and what comes late: nothing is lost, exceeded, or counted twice."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from waiting import wait_until

import tutti
from store.pools import GEOMETRY, LAYOUT, controller_of, fill, formatted, opened, some_keys
from tutti.errors import CapacityError, DeviceTimeout, MediumError
from tutti.medium.superblock import PoolState
from tutti.pool.record_table import RecordTable
from tutti.pool.replacement import superblock_of
from tutti.store import ObjectStore
from tutti.transfers.core import Core
from tutti.transfers.put_limits import Quota

LARGE = replace(GEOMETRY, group_slots=16, groups=16)  # 256 slots
OBJECT_NBYTES = LAYOUT.object_nbytes + 4096


def filled(store: ObjectStore, keys: Any) -> None:
    store.allocate_memory(len(keys))
    assert store.put(keys, np.arange(len(keys))).wait(20).stored == len(keys)


def at_once(calls: list[Any]) -> list[BaseException | None]:
    """What the calls raised, which began together."""
    barrier = threading.Barrier(len(calls))

    def call(what: Any) -> None:
        barrier.wait(10)
        what()

    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call, what) for what in calls]
        return [future.exception(30) for future in futures]


def test_a_pool_that_two_threads_close_is_clean(tmp_path: Path, rng: np.random.Generator) -> None:
    store = tutti.open(tmp_path / "pool", LAYOUT, "16MiB", profile=None)
    keys = some_keys(rng, 100)
    filled(store, keys)
    assert at_once([store.close] * 3) == [None] * 3
    with tutti.open(tmp_path / "pool", profile=None) as again:
        assert again.match(keys, proven=True) == len(keys)


def test_a_close_that_waits_for_another_has_a_deadline(tmp_path: Path) -> None:
    store = tutti.open(tmp_path / "pool", LAYOUT, "16MiB", profile=None)
    with store._closing, pytest.raises(DeviceTimeout, match="another thread is still closing"):
        store.close(timeout_s=0.01)
    store.close()


def test_a_close_waits_for_a_clear(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tutti.open(tmp_path / "pool", LAYOUT, "16MiB", profile=None)
    keys = some_keys(rng, 100)
    filled(store, keys)
    core, begun = store._core, threading.Event()
    deallocate = core.deallocate

    def slowly() -> None:
        begun.set()
        time.sleep(0.3)
        deallocate()

    monkeypatch.setattr(core, "deallocate", slowly)

    def close() -> None:
        assert begun.wait(10)
        store.close()

    assert at_once([store.clear, close]) == [None] * 2
    superblock = superblock_of(str(tmp_path / "pool"))
    assert superblock is not None
    assert superblock.state == PoolState.CLEAN


def test_a_load_that_a_clear_overtakes_holds_nothing_up(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts that waited for it kept the clear waiting, which kept the load waiting."""
    with tutti.open(tmp_path / "pool", LAYOUT, "16MiB") as store:
        keys = some_keys(rng, 4)
        filled(store, keys)
        core, dispatcher = store._core, store._queue.dispatcher
        assert dispatcher is not None
        alone, under_way = dispatcher.alone, list[str]()

        def end_clear() -> None:
            under_way.extend(dispatcher.under_way)
            core.ready = True
            with core.lock:
                core.changed.notify_all()

        def alone_until_a_clear(known: Any, over: int = 0) -> bool:
            monkeypatch.undo()
            assert alone(known, over)
            core.ready = False
            threading.Timer(0.2, end_clear).start()
            return True

        monkeypatch.setattr(dispatcher, "alone", alone_until_a_clear)
        store.load(keys, range(4)).wait(10)
        assert not under_way


def test_a_pool_is_cleared_after_a_record_that_could_not_be_submitted(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted(geometry=LARGE)) as store:
        keys = some_keys(rng, 40)
        filled(store, keys)
        with monkeypatch.context() as patched:
            patched.setattr(RecordTable, "write", _refuse)
            assert store.catalogue.delete(keys[:2]) == 2
        assert store.stats()["slots"]["quarantined"] == 2
        store.clear()
        assert store.match(keys[2:]) == 0
        assert store.put(keys, np.arange(40)).wait(20).stored == 40


def _refuse(*_: object, **__: object) -> None:
    raise CapacityError("no memory")


def test_a_clear_that_fails_halfway_serves_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted(), verify="off") as store:
        keys = some_keys(rng, 4)
        filled(store, keys)
        with monkeypatch.context() as patched:
            patched.setattr(type(store._core.index), "clear", _refuse)
            with pytest.raises(CapacityError):
                store.clear()
        with pytest.raises(CapacityError):
            store.match(keys)


def test_a_record_that_is_written_late_replaces_no_other(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller, timeout_s=0.3) as store:
        keys = some_keys(rng, 2)
        filled(store, keys[:1])
        controller.set_faults(Faults(stall_from=2))  # the record is read, and then written
        with pytest.raises((DeviceTimeout, MediumError)):
            store.catalogue.pin(keys[:1])
        with pytest.raises(DeviceTimeout, match="still being transferred"):
            store.catalogue.delete(keys[:1], timeout_s=0.1)
        controller.recover()
        wait_until(lambda: store._core.in_flight == 0)
        assert store.catalogue.delete(keys[:1]) == 1
        contents = fill(store._resources.memories[0], [0], rng)
        assert store.put(keys[1:], [0]).wait(5).stored == 1
        store.load(keys[1:], [0]).wait(5)
        assert store._resources.memories[0].read(0) == contents[0]
        assert store.match(keys[1:]) == 1


def test_a_deletion_without_time_removes_what_is_idle(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        keys = some_keys(rng, 4)
        filled(store, keys)
        with suppress(DeviceTimeout):  # their records may not be voided yet
            assert store.delete(keys, timeout_s=0) == 4
        assert not store.present(keys).any()


def test_a_deletion_ends_in_time_though_the_medium_deallocates_slowly(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    deallocate, goes_on = Core.deallocate, threading.Event()

    def slowly(core: Core, groups: Any = None) -> None:
        assert goes_on.wait(20)
        deallocate(core, groups)

    monkeypatch.setattr(Core, "deallocate", slowly)
    with opened(formatted()) as store:
        free = store.stats()["free_objects"]
        keys = some_keys(rng, GEOMETRY.group_slots)
        filled(store, keys)
        begin_s = time.monotonic()
        assert store.delete(keys, timeout_s=0.5) == len(keys)
        assert time.monotonic() - begin_s < 5
        goes_on.set()
        wait_until(lambda: store.stats()["free_objects"] == free)
        assert store.stats()["deallocated_nbytes"] > 0


def test_puts_at_once_stay_within_their_quota(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = RecordTable.reserve

    def late(table: RecordTable, timeout_s: float) -> int:
        time.sleep(0.05)
        return reserve(table, timeout_s)

    quota = Quota("small", nbytes=40 * OBJECT_NBYTES)
    with opened(formatted(geometry=LARGE), quotas=(quota,)) as store:
        store.allocate_memory(30)
        keys = some_keys(rng, 150)

        def put(first: int) -> int:
            ticket = store.put(keys[first : first + 30], range(30), namespace="small")
            return ticket.wait(20).stored

        with monkeypatch.context() as patched:
            patched.setattr(RecordTable, "reserve", late)
            calls = [lambda first=first: put(first) for first in range(0, 90, 30)]  # type: ignore[misc]
            assert at_once(calls) == [None] * 3
        assert len(store.catalogue.keys("small")) <= 40
        assert [put(90), put(120)] == [30, 30], "nothing is held back afterwards"


def test_what_is_pinned_is_counted_until_it_is_gone(rng: np.random.Generator) -> None:
    with opened(formatted(geometry=LARGE), pin_share=0.5) as store:
        keys = some_keys(rng, 100)
        filled(store, keys)
        store.catalogue.pin(keys)
        store.quarantine(keys[:20])
        assert store.stats()["pinned_objects"] == 80
        store.catalogue.delete(keys[20:30])
        assert store.stats()["pinned_objects"] == 70
        store.clear()
        assert store.stats()["pinned_objects"] == 0
        again = some_keys(rng, 100)
        assert store.put(again, np.arange(100)).wait(20).stored == 100
        assert store.match(again, pin="request") == 100


def test_pins_at_once_stay_within_their_share(rng: np.random.Generator) -> None:
    with opened(formatted(geometry=LARGE), pin_share=0.25) as store:
        keys = some_keys(rng, 160)
        filled(store, keys)
        calls = [lambda part=part: store.catalogue.pin(part) for part in np.split(keys, 4)]  # type: ignore[misc]
        refused = [error for error in at_once(calls) if error is not None]
        assert [type(error) for error in refused] == [CapacityError] * 3
        assert store.stats()["pinned_objects"] == 40

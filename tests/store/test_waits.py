"""Waits in a circle, memory of transfers that wait, and searches for victims that find none."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults, MemoryController
from scheduler.drive import Linear
from waiting import wait_until

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, opened, put_some, some_keys
from tutti.errors import ConfigError, DeviceTimeout, TuttiError
from tutti.medium.geometry import Geometry
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.policy import Limits
from tutti.store import ObjectStore
from tutti.transfers import transfer_queue
from tutti.transfers.put_request import OPEN_PARTS_MAX, PutGrant, PutPart, PutTogether, QueuedPut

MANY = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 64)


def test_a_short_put_does_not_wait_for_a_long_one_that_stopped(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load for which the long one stopped may wait for the short one, which was issued."""
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)
    controller, schedule = controller_of(formatted(geometry=MANY)), Schedule(Linear())
    with opened([], controller=controller, window_nbytes=1 << 15, schedule=schedule) as store:
        monkeypatch.setattr(store._queue, "_short", 2)
        keys = put_some(store, rng, 4, 64)
        controller.set_faults(Faults(stall_from=1))
        state = store.scheduler.state
        state.both_measured_ns, state.estimates._interference = store.scheduler.now_ns(), 3.0
        puts = [store.put(some_keys(rng, 20), np.arange(20))]
        wait_until(lambda: store._writer.active > 0)
        puts.append(store.put(some_keys(rng, 1), [20]))
        wait_until(lambda: bool(store._queue._held))
        load = store.load(keys, np.arange(30, 34))
        wait_until(lambda: not store._queue._held)  # though all batches under way stand still
        controller.recover()
        load.wait(10)
        assert all(put.wait(10).stored for put in puts)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put of four pages can stop, and goes in parts of two."""
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)
    unit_nbytes = 2 * MANY.slice_nbytes
    monkeypatch.setattr(transfer_queue, "UNIT_NBYTES", unit_nbytes)


def cut_store(schedule: Schedule, **more: Any) -> tuple[ObjectStore, MemoryController]:
    """A store of puts as in `cut`, and its drive."""
    controller = controller_of(formatted(geometry=MANY))
    store = opened(
        [], controller=controller, schedule=schedule, **{"window_nbytes": 1 << 15, **more}
    )
    store._queue._short = 2
    store.allocate_memory(64)
    return store, controller


LONG = 20  # pages: ten parts


@pytest.mark.parametrize("pages", [2, 8])
def test_a_put_behind_a_long_one_that_stopped_gets_staging(
    rng: np.random.Generator, cut: None, pages: int
) -> None:
    limits = Limits(staged_pages=0, probe_us=1e15)  # a load waits for writes, however long
    store, controller = cut_store(Schedule(Linear(), limits), timeout_s=2.0)
    with store, ThreadPoolExecutor(2) as callers:
        keys = some_keys(rng, 4)
        store.put(keys, range(4)).wait(10)
        controller.set_faults(Faults(stall_from=1))
        state = store.scheduler.state
        state.both_measured_ns, state.estimates._interference = store.scheduler.now_ns(), 3.0
        puts = [callers.submit(store.put, some_keys(rng, LONG), np.arange(LONG))]
        wait_until(lambda: len(state.writes) == 1 and store._writer.active >= OPEN_PARTS_MAX)
        puts.append(callers.submit(store.put, some_keys(rng, pages), LONG + np.arange(pages)))
        wait_until(lambda: len(state.writes) == 2)
        load = store.load(keys, np.arange(40, 44))
        wait_until(lambda: bool(state.loads) and not state.running_on)
        controller.recover()
        load.wait(10)
        assert [put.result(10).wait(10).stored for put in puts] == [LONG, pages]
        store._queue.stop(10.0)
        counters = store.scheduler.counters()
        assert (counters["written_pages"], counters["ignored"]) == (4 + LONG + pages, 0)


def test_parts_of_a_long_put_start_in_their_order_and_few_at_a_time(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: None
) -> None:
    store, _ = cut_store(Schedule(Linear()))
    firsts: list[int] = []
    with store:
        start = store._writer.put

        def started(parts: list[PutPart]) -> BaseException | None:
            firsts.append(int(parts[0].rows[0]))
            assert sum(not part.is_over for part in store._queue._open) <= OPEN_PARTS_MAX
            return start(parts)

        monkeypatch.setattr(store._writer, "put", started)
        assert store.put(some_keys(rng, LONG), np.arange(LONG)).wait(10).stored == LONG
        assert firsts == list(range(0, LONG, 2))
        assert store._core.wait_quiet(10)
        assert not store._queue._open


def test_a_part_is_one_batch_and_takes_one_block(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: None
) -> None:
    monkeypatch.setattr(transfer_queue, "UNIT_NBYTES", 1 << 30)
    store, _ = cut_store(Schedule(Linear()))
    with store:
        monkeypatch.setattr(store._writer, "batch_pages", 8)
        rows: list[int] = []
        start = store._writer.put

        def started(parts: list[PutPart]) -> BaseException | None:
            rows.append(parts[0].rows.size)
            return start(parts)

        monkeypatch.setattr(store._writer, "put", started)
        assert store.put(some_keys(rng, 17), np.arange(17)).wait(10).stored == 17
        assert rows == [8, 7, 2], "none above a batch, and no short rest"


def test_parts_that_wait_are_written_when_the_store_closes(
    rng: np.random.Generator, cut: None
) -> None:
    store, controller = cut_store(Schedule(Linear()), timeout_s=20.0)
    with ThreadPoolExecutor(1) as others:
        controller.set_faults(Faults(stall_from=1))
        put = store.put(some_keys(rng, LONG), np.arange(LONG))
        closed = others.submit(store.close)
        wait_until(lambda: store._queue._stopping)
        controller.recover()
        closed.result(20)
        assert put.wait(10).stored == LONG


def test_of_a_part_that_cannot_be_started_the_waiting_ones_fail_too(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: None
) -> None:
    store, controller = cut_store(Schedule(Linear()))
    with store:
        start, starts = store._writer.put, itertools.count(1)

        def started(parts: list[PutPart]) -> BaseException | None:
            if next(starts) <= OPEN_PARTS_MAX:
                return start(parts)
            PutTogether(parts).refuse(error := MemoryError("none left"))
            return error

        monkeypatch.setattr(store._writer, "put", started)
        controller.set_faults(Faults(stall_from=1))
        put = store.put(some_keys(rng, LONG), np.arange(LONG))
        controller.recover()
        with pytest.raises(TuttiError):
            put.wait(10)
        assert put.failed().tolist() == list(range(2 * OPEN_PARTS_MAX, LONG))
        assert store._core.wait_quiet(10)
        monkeypatch.setattr(store._writer, "put", start)
        assert store.put(some_keys(rng, LONG), np.arange(LONG)).wait(10).stored == LONG
        assert not store._queue._open


def test_a_grant_that_fails_ends_no_put_twice(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)
    with opened(formatted(), timeout_s=0.5, schedule=Schedule(Linear())) as store:
        monkeypatch.setattr(store._queue, "_short", 2)
        store.allocate_memory(16)

        def fails(*given: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(PutGrant, "begin", fails)
            assert store.put(some_keys(rng, 4), range(4)).wait_ended(10)
        assert store._core.wait_quiet(10)
        assert store._writer.active == 0


def held_clear(
    store: ObjectStore, others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Future[None], threading.Event]:
    """A clear that has begun, and what lets it go on."""
    inside, goes_on, new_epoch = threading.Event(), threading.Event(), store.members.new_epoch

    def slowly() -> None:
        inside.set()
        assert goes_on.wait(30)
        new_epoch()

    monkeypatch.setattr(store.members, "new_epoch", slowly)
    clear = others.submit(store.clear)
    assert inside.wait(10)
    return clear, goes_on


def test_memory_of_a_put_that_waits_for_a_clear_stays_registered(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted()) as store, ThreadPoolExecutor(3) as others:
        memory = store.allocate_memory(2)
        clear, goes_on = held_clear(store, others, monkeypatch)
        put = others.submit(store.put, some_keys(rng, 2), range(2), memory=memory)
        wait_until(lambda: bool(store._core._uses))
        over = others.submit(store.unregister, memory)
        wait_until(lambda: bool(store._core._withdrawn))
        assert not over.done()
        goes_on.set()
        clear.result(10)
        with pytest.raises(ConfigError, match="being unregistered"):
            put.result(10)
        over.result(10)


def test_memory_of_a_put_that_gave_up_waiting_is_unregistered_at_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted(), timeout_s=1.0) as store, ThreadPoolExecutor(3) as others:
        memory = store.allocate_memory(2)
        clear, goes_on = held_clear(store, others, monkeypatch)
        put = others.submit(store.put, some_keys(rng, 2), range(2), memory=memory)
        wait_until(lambda: bool(store._core._uses))
        object.__setattr__(store.config, "timeout_s", 60.0)
        over = others.submit(store.unregister, memory)
        with pytest.raises(DeviceTimeout, match="a clear is not done after 1 s"):
            put.result(10)
        over.result(10)
        goes_on.set()
        clear.result(10)


def test_victims_are_not_looked_for_again_while_all_is_pinned(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted(), pin_lookups=1000) as store:
        store.allocate_memory(2)
        keys = some_keys(rng, GEOMETRY.slots)
        for key in keys:
            store.put(key[None], [0]).wait(5)
        assert store._core.wait_quiet(5)
        for key in keys[store.present(keys)]:
            store.match(key[None], pin=key.tobytes().hex())
        while store.put(key := some_keys(rng, 1), [0]).wait(5).stored:  # bounded by the slots
            assert store._core.wait_quiet(5)
            store.match(key, pin=key.tobytes().hex())
        looks, choose = [0], store._core.choose_victims

        def counted(*given: Any) -> Any:
            looks[0] += 1
            return choose(*given)

        monkeypatch.setattr(store._core, "choose_victims", counted)
        for _ in range(10):
            assert store.put(some_keys(rng, 2), range(2)).wait(5).dropped
        assert looks[0] <= 2


def test_blocks_of_expired_objects_whose_records_took_long_are_given_back(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.transfers.expiry._INTERVAL_S", 0.02)
    controller = controller_of(formatted(geometry=MANY))
    with opened([], controller=controller) as store:
        store.allocate_memory(MANY.group_slots)
        keys = some_keys(rng, MANY.group_slots)
        store.put(keys, range(len(keys))).wait(10)
        expiry = store.catalogue.expiry
        sweep, found = expiry.sweep, []
        monkeypatch.setattr(expiry, "sweep", lambda: found.append(sweep()) or found[-1])
        store.catalogue.expire(keys, 60.0)
        controller.set_faults(Faults(stall_from=1))
        with store._core.lock:
            store._core.index.expiry[store._core.index.expiry > 0] = 1  # long ago
        wait_until(lambda: len(found) > 2 and found[-2].size + found[-1].size == 0)
        assert store._reclaimer.busy
        controller.recover()
        wait_until(lambda: store.stats()["deallocated_nbytes"] > 0)
        assert len(store) == 0


def test_parts_are_begun_in_the_order_in_which_the_scheduler_heard_of_their_puts(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: None
) -> None:
    """Otherwise an older put could wait for the parts of a younger one that was stopped."""
    store, controller = cut_store(Schedule(Linear()))
    with store, ThreadPoolExecutor(1) as callers:
        controller.set_faults(Faults(stall_from=1))
        first = store.put(some_keys(rng, LONG), range(LONG))
        announce, gate = store._queue._post_put, threading.Event()

        def late(dispatcher: Dispatcher, put: QueuedPut) -> None:
            monkeypatch.undo()
            assert gate.wait(10)
            announce(dispatcher, put)

        monkeypatch.setattr(store._queue, "_post_put", late)
        second = callers.submit(store.put, some_keys(rng, LONG), range(LONG))
        wait_until(lambda: len(store._queue._puts) == 2)
        third = store.put(some_keys(rng, LONG), range(LONG))
        gate.set()
        puts = [first, second.result(10), third]
        state = store.scheduler.state
        wait_until(lambda: len(state.writes) == 3)
        assert list(store._queue._puts) == list(state.writes)
        controller.recover()
        assert [put.wait(10).stored for put in puts] == [LONG] * 3


def test_long_puts_end_on_a_drive_that_does_not_answer(rng: np.random.Generator, cut: None) -> None:
    store, controller = cut_store(Schedule(Linear()), timeout_s=0.5, window_nbytes=1 << 22)
    with store:
        controller.set_faults(Faults(stall_from=1))
        puts = [store.put(some_keys(rng, LONG), range(LONG)) for _ in range(2)]
        wait_until(lambda: puts[1].done)
        controller.recover()
        for put in puts:
            with pytest.raises(TuttiError):
                put.wait(10)

"""Waits in a circle, memory of transfers that wait, and searches for victims that find none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_until

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, opened, some_keys
from tutti.errors import ConfigError
from tutti.gio_uring.job import Job
from tutti.medium.geometry import Geometry
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers import transfer_queue

MANY = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 64)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_a_short_put_does_not_wait_for_a_long_one_that_stopped(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load for which the long one stopped may wait for the short one, which was issued."""
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)
    controller, schedule = controller_of(formatted(geometry=MANY)), Schedule(Linear())
    with opened([], controller=controller, window_nbytes=1 << 15, schedule=schedule) as store:
        monkeypatch.setattr(store._queue, "_short", 2)
        store.allocate_memory(64)
        keys = some_keys(rng, 4)
        store.put(keys, range(4)).wait(5)
        controller.set_faults(Faults(stall_from=1))
        state = store.scheduler.state
        state.both_measured_ns, state.estimates._interference = store.scheduler.now_ns(), 3.0
        puts = [store.put(some_keys(rng, 20), np.arange(20))]
        wait_until(lambda: store._writer.active > 0)
        puts.append(store.put(some_keys(rng, 1), [20]))
        wait_until(lambda: bool(store._queue._held))
        load = store.load(keys, np.arange(30, 34))
        wait_until(lambda: not store._queue._held)  # though all batches under way stand still
        controller.set_faults(None)
        controller.release()
        load.wait(10)
        assert all(put.wait(10).stored for put in puts)


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
            patch.setattr(Job, "grant", fails)
            assert store.put(some_keys(rng, 4), range(4)).wait_ended(10)
        assert store._core.wait_quiet(10)
        assert store._writer.active == 0


def test_memory_of_a_put_that_waits_for_a_clear_stays_registered(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted()) as store, ThreadPoolExecutor(3) as others:
        memory, inside, goes_on = store.allocate_memory(2), threading.Event(), threading.Event()
        new_epoch = store.members.new_epoch

        def slowly() -> None:
            inside.set()
            assert goes_on.wait(10)
            new_epoch()

        monkeypatch.setattr(store.members, "new_epoch", slowly)
        clear = others.submit(store.clear)
        assert inside.wait(10)
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

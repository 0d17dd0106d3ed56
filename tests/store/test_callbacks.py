"""What a user passes in raises anything at all: no thread of the store ends, and nothing leaks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_until

from store.pools import GEOMETRY, controller_of, fill, formatted, opened, some_keys
from tutti.errors import ConfigError, MediumError
from tutti.placement.eviction import EvictionView, LeastRecentlyUsed, reserve_slots
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.state import Decision, State
from tutti.store import ObjectStore
from tutti.transfers.tickets import PutTicket

SLOTS = GEOMETRY.groups * GEOMETRY.group_slots
ERRORS = (asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit, ValueError)


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def call(*given: object) -> None:
        raise kind("on purpose")

    return call


def works(store: ObjectStore, rng: np.random.Generator) -> None:
    """A put, a load and a clear, which need every thread of the store, and a clean close."""
    keys = some_keys(rng, 3)
    assert store.put(keys, [0, 1, 2]).wait(10).stored == 3
    store.load(keys, [3, 4, 5]).wait(10)
    store.clear()
    store.close()


@pytest.mark.parametrize("verb", ["put", "load"])
def test_a_callback_cannot_close_the_store_that_calls_it(
    rng: np.random.Generator, verb: str
) -> None:
    """It runs on a thread that the close would wait for; the store goes on."""
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    store.allocate_memory(8)
    keys = some_keys(rng, 2)
    store.put(keys, [0, 1]).wait(10)
    raised: list[BaseException] = []
    called = threading.Event()

    def close(*_: object) -> None:
        try:
            store.close()
        except BaseException as error:
            raised.append(error)
        called.set()

    controller.set_faults(Faults(stall_from=1))
    if verb == "put":
        store.put(some_keys(rng, 2), [2, 3]).on_done(close)
    else:
        store.load(keys, [2, 3]).on_settled(close)
    controller.recover()
    assert called.wait(10)
    assert [type(error) for error in raised] == [ConfigError]
    works(store, rng)


@pytest.mark.parametrize("kind", ERRORS)
def test_callbacks_of_tickets(rng: np.random.Generator, kind: type[BaseException]) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    pool = store.allocate_memory(8)
    fill(pool, range(8), rng)
    keys = some_keys(rng, 2)
    controller.set_faults(Faults(stall_from=1))
    put = store.put(keys, [0, 1])
    put.on_done(raising(kind))
    called: list[PutTicket] = []
    put.on_done(called.append)
    controller.recover()
    assert put.wait(10).stored == 2
    put.on_done(raising(ValueError))  # at once
    controller.set_faults(Faults(stall_from=1))
    load = store.load(keys, [2, 3])
    load.on_settled(raising(kind))
    controller.recover()
    load.wait(10)
    assert load.wait_settled(10)
    load.on_settled(raising(ValueError))
    works(store, rng)
    assert called == [put], "a callback that raises keeps no other from being called"
    assert store.stats()["callback_errors"] == 4


def test_a_log_handler_that_raises(rng: np.random.Generator) -> None:
    store = opened(formatted())
    fill(store.allocate_memory(8), range(8), rng)

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit("on purpose")

    logger, handler = logging.getLogger("tutti"), Broken()
    logger.addHandler(handler)
    try:
        tickets = [store.put(some_keys(rng, 1), [page]) for page in range(4)]
        for ticket in tickets:
            ticket.on_done(raising(asyncio.CancelledError))
            ticket.wait(10)
    finally:
        logger.removeHandler(handler)
    works(store, rng)


class Moody(LeastRecentlyUsed):
    """An eviction policy that raises while it is told to."""

    kind: type[BaseException] | None = None

    def victims(self, view: EvictionView, count: int) -> npt.NDArray[np.int64]:
        if self.kind is not None:
            raise self.kind("on purpose")
        return super().victims(view, count)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("held", [False, True])
def test_eviction_policies(rng: np.random.Generator, kind: type[BaseException], held: bool) -> None:
    policy, images = Moody(), formatted()
    controller = controller_of(images)
    store = opened(images, controller=controller, eviction=policy)
    fill(store.allocate_memory(8), range(8), rng)
    for _ in range(SLOTS):  # until there is something to evict
        store.put(some_keys(rng, 1), [0]).wait(10)
    wait_until(lambda: store.stats()["free_objects"] > reserve_slots(SLOTS))
    free = store.stats()["free_objects"]
    if held:  # the second put is written by a thread of the store
        controller.set_faults(Faults(stall_from=1))
        first = store.put(some_keys(rng, 1), [0])
        policy.kind = kind
        held_back = [store.put(some_keys(rng, 3), [0] * 3) for _ in range(3)]
        controller.recover()
        first.wait(10)
        for ticket in held_back:
            with pytest.raises(MediumError, match="put of 3 objects"):
                ticket.wait(10)
    else:
        policy.kind = kind
        with pytest.raises(kind):
            store.put(some_keys(rng, 8), [0] * 8)
        assert store.stats()["free_objects"] == free
    policy.kind = None
    works(store, rng)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_policy_that_raises_in_the_middle_of_a_put_ends_only_the_rest(
    rng: np.random.Generator, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    policy, controller = Moody(), controller_of(formatted())
    store = opened([], controller=controller, eviction=policy)
    store._writer.batch_pages = 4
    fill(store.allocate_memory(12), range(12), rng)
    old = some_keys(rng, SLOTS)
    for row in range(SLOTS):
        store.put(old[row : row + 1], [0]).wait(10)
    policy.kind, keys = kind, some_keys(rng, 12)  # from here on nothing is evicted
    with store._core.lock:  # what was evicted ahead may still be on its way to being free
        assert store._core.changed.wait_for(lambda: not store._reclaimer.busy, 5)
    free = int(store.stats()["free_objects"])
    assert free < 6
    assert store.delete(old[free - 6 :]) == 6 - free
    controller.set_faults(Faults(stall_from=1))
    ticket = store.put(keys, range(12))
    assert not ticket.done, "the device still reads the pages of the first batch"
    controller.recover()
    with pytest.raises(MediumError, match="put of 8 objects"):
        ticket.wait(10)
    assert store.match(keys) == 4
    assert "the rest of a put failed" in caplog.text
    assert "on purpose" in caplog.text
    policy.kind = None
    works(store, rng)


class Strided(LeastRecentlyUsed):
    """Answers with smaller numbers, which do not lie side by side."""

    def victims(self, view: EvictionView, count: int) -> npt.NDArray[Any]:
        return np.repeat(super().victims(view, count).astype(np.int32), 2)[::2]


def test_a_policy_may_answer_with_a_view(rng: np.random.Generator) -> None:
    store = opened(formatted(), eviction=Strided())
    fill(store.allocate_memory(8), range(8), rng)
    for _ in range(3 * SLOTS):
        store.put(some_keys(rng, 1), [0]).wait(10)
    assert store.stats()["evicted"] > SLOTS
    works(store, rng)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("part", ["decide", "record", "answer"])
def test_schedules(rng: np.random.Generator, kind: type[BaseException], part: str) -> None:
    class Policy:
        def __init__(self, *given: Any) -> None: ...

        def decide(self, state: State) -> Decision:
            if part == "answer":
                return None  # type: ignore[return-value]
            raise kind("on purpose")

    record = raising(kind) if part == "record" else None
    policy = {} if part == "record" else {"policy": Policy}
    store = opened(formatted(), schedule=Schedule(Linear(), record=record, **policy))
    fill(store.allocate_memory(8), range(8), rng)
    works(store, rng)
    assert store.stats()["callback_errors"] > 0

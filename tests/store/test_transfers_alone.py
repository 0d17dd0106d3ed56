"""A transfer that meets no other starts at once; a policy decides on all that do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_idle, wait_until

from store.pools import GEOMETRY, controller_of, formatted, opened, put_some, some_keys
from tutti.errors import ConfigError, KeyMissing, PageRangeError
from tutti.scheduler import dispatcher
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import LoadGone, LoadKnown, PagesWritten, WriteKnown
from tutti.store import ObjectStore
from tutti.transfers import transfer_queue
from tutti.transfers.tickets import PutResult

PROFILE = Linear()


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop never looks by itself: it may be taking an event just when a transfer comes."""
    monkeypatch.setattr(dispatcher, "_NAP_S", 600.0)


def asleep(store: ObjectStore) -> Dispatcher:
    """Its scheduler, once the loop has had its first look."""
    scheduler = store.scheduler
    assert scheduler is not None
    wait_until(lambda: scheduler._sleeps_until_ns)
    return scheduler


@pytest.mark.parametrize("can_stop", [False, True])
def test_a_transfer_that_is_alone_starts_before_its_decision(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, *, can_stop: bool
) -> None:
    if can_stop:
        monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)
    seen: list[Any] = []
    schedule = Schedule(PROFILE, record=lambda event, _: seen.append(event))
    with opened(formatted(), schedule=schedule) as store:
        scheduler = asleep(store)
        monkeypatch.setattr(store._queue, "_short", 2)
        keys = put_some(store, rng, 4, 8)
        assert store.load(keys, np.arange(4, 8)).wait_settled(10)
        wait_until(lambda: any(isinstance(event, LoadGone) for event in list(scheduler._events)))
        with pytest.raises(KeyMissing):
            store.load(some_keys(rng, 1), [0])
        wait_idle(scheduler)
        counters = scheduler.counters()
        known = [one.at_once for one in seen if isinstance(one, LoadKnown | WriteKnown)]
        assert known == [True] * 3
        assert [one.can_stop for one in seen if isinstance(one, WriteKnown)] == [can_stop]
        assert counters["written_pages"] == 4
        assert counters["read_nbytes"] == 4 * GEOMETRY.slice_nbytes * GEOMETRY.layers
        assert counters["ignored"] == 0


@pytest.mark.parametrize("n", [1, 4])
def test_few_pages_that_are_there_and_alone_are_found_by_the_writer(
    rng: np.random.Generator, n: int
) -> None:
    seen: list[Any] = []
    schedule = Schedule(PROFILE, record=lambda event, _: seen.append(event))
    with opened(formatted(), schedule=schedule) as store:
        scheduler = asleep(store)
        store.allocate_memory(n)
        keys, pages = some_keys(rng, n), np.arange(n)
        assert store.put(keys, pages).wait(10) == PutResult(stored=n, present=0, dropped=0)
        assert store.put(keys, pages).wait(10) == PutResult(stored=0, present=n, dropped=0)
        wait_idle(scheduler)
        counters = scheduler.counters()
        assert [one.there for one in seen if isinstance(one, PagesWritten)] == [0, n]
        assert (counters["written_pages"], counters["measurements"]) == (n, 1)


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_a_load_checks_its_pages(rng: np.random.Generator, profile: Linear | None) -> None:
    schedule = None if profile is None else Schedule(profile)
    with opened(formatted(), schedule=schedule) as store:
        keys = put_some(store, rng, 4, 8)
        memory = store._resources.memories[0]
        content = [memory.read(page) for page in range(4)]
        index, loads = store._core.index, 3
        uses = index.uses + loads
        for dtype in (np.int64, np.uint32, np.uint8):
            pages = np.array([7, 4, 6, 5], dtype)  # in no order
            store.load(keys, pages).wait(10)
            assert [memory.read(int(page)) for page in pages] == content
        for pages, error in (([4, 5, 6, 8], PageRangeError), ([-1, 5, 6, 7], PageRangeError)):
            with pytest.raises(error, match="outside the registered memory"):
                store.load(keys, pages)
        with pytest.raises(ConfigError, match="named twice"):
            store.load(keys, [4, 5, 6, 4])
        with pytest.raises(ConfigError, match="4 keys and 3 pages"):
            store.load(keys, [4, 5, 6])
        assert index.uses == uses, "one use for each load, none for what was refused"
        assert store._core.wait_quiet(10)
        assert not store._core.index.pins.any()
        assert not store._engine._jobs


def test_transfers_that_meet_others_are_decided_on(rng: np.random.Generator) -> None:
    seen: list[Any] = []
    controller = controller_of(images := formatted())
    schedule = Schedule(PROFILE, record=lambda event, _: seen.append(event))
    with opened(images, controller=controller, schedule=schedule) as store:
        asleep(store)
        keys = put_some(store, rng, 4, 8)
        controller.set_faults(Faults(stall_from=1))
        tickets = [store.load(keys[at : at + 2], [at, at + 1]) for at in (0, 2)]
        controller.recover()
        for ticket in tickets:
            ticket.wait(10)
        assert [one.at_once for one in seen if isinstance(one, LoadKnown)] == [True, False]

"""A store that gets no more threads: errors that say so, and nothing left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scheduler.drive import Linear

from store.pools import controller_of, formatted, opened, some_keys
from store.test_recovery import filled, recovered
from tutti.errors import CapacityError
from tutti.scheduler import dispatcher
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Policy

Refuse = Callable[[str], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Makes threads of a name impossible."""
    start, refused = threading.Thread.start, set[str]()

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    return refused.add


def queue_threads() -> int:
    return sum(thread.name == "tutti-puts" for thread in threading.enumerate())


def test_a_store_without_a_thread_for_expiry_closes(
    rng: np.random.Generator, refuse: Refuse
) -> None:
    refuse("tutti-expiry")
    with opened(formatted()) as store:
        store.allocate_memory(2)
        keys = some_keys(rng, 2)
        for _ in range(2):
            with pytest.raises(CapacityError, match="tutti-expiry"):
                store.put(keys, [0, 1], ttl_s=60.0)
        assert store.put(keys, [0, 1]).wait(10).stored == 2


def test_an_opening_without_a_thread_for_puts_leaves_the_scheduler(refuse: Refuse) -> None:
    gc.collect()
    schedule, before = Schedule(Linear()), list(dispatcher._shared)
    controller = controller_of(formatted())
    refuse("tutti-puts")
    with pytest.raises(CapacityError, match="tutti-puts"):
        opened([], controller=controller, schedule=schedule)
    assert dispatcher._shared == before
    controller.close()


def test_an_opening_whose_policy_cannot_be_made_leaves_no_thread() -> None:
    def no_policy(limits: Limits) -> Policy:
        raise LookupError("no such policy")

    controller, before = controller_of(formatted()), queue_threads()
    with pytest.raises(LookupError):
        opened([], controller=controller, schedule=Schedule(Linear(), policy=no_policy))
    assert queue_threads() <= before
    controller.close()


def test_a_load_without_a_thread_for_its_records_ends(
    rng: np.random.Generator, refuse: Refuse
) -> None:
    """As of memory in a GPU, for which the engine stands in."""
    images, keys, _ = filled(rng, clean=False)
    store = recovered(images, timeout_s=2.0)
    memory = store.allocate_memory(10)
    elsewhere = replace(memory.memory, path=store.engine)
    pages = np.arange(10, dtype=np.uint32)
    refuse("tutti-records")
    for _ in range(4):  # more than there is staging for records
        with pytest.raises(CapacityError, match="tutti-records"):
            store._loader.load(keys, pages, elsewhere, admit=True)
        assert store._core.wait_quiet(10.0)
    store.load(keys, pages).wait(10)
    store.close()

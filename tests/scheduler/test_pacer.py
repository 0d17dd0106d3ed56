"""A pool whose puts and loads are scheduled: same results, other moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler.drive import Linear

from store.pools import fill, formatted, opened, some_keys
from tutti.errors import ConfigError, KeyMissing
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import StepBegan, StepEnded
from tutti.scheduler.policy import Limits
from tutti.scheduler.request import Phase
from tutti.scheduler.state import Decision, State
from tutti.store import ObjectStore

PROFILE = Linear()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class Never:
    """A policy that launches nothing."""

    def __init__(self, profile: Any, limits: Limits) -> None: ...

    def decide(self, state: State) -> Decision:
        return Decision()


class DropAll(Never):
    """A policy that gives up every write."""

    def decide(self, state: State) -> Decision:
        return Decision(drops=tuple(write.name for write in state.writes))


def scheduled(schedule: Schedule | None = None, **config: Any) -> ObjectStore:
    return opened(formatted(), schedule=schedule or Schedule(PROFILE), **config)


def test_what_was_put_is_loaded(rng: np.random.Generator) -> None:
    with scheduled() as store:
        pool = store.allocate_pool(16)
        contents = fill(pool, np.arange(8), rng)
        keys = some_keys(rng, 8)
        assert store.put(keys, np.arange(8)).wait(10).stored == 8
        store.load(keys, np.arange(8, 16)).wait(10)
        assert [pool.read(page) for page in range(8, 16)] == contents


def test_present_keys_count_as_such(rng: np.random.Generator) -> None:
    with scheduled() as store:
        store.allocate_pool(8)
        keys = some_keys(rng, 6)
        store.put(keys[::2], [0, 2, 4]).wait(10)
        result = store.put(keys, np.arange(6)).wait(10)
        assert (result.stored, result.present, result.dropped) == (3, 3, 0)
        assert store.put(keys, np.arange(6)).wait(10).present == 6
        assert store.put(keys[:0], []).wait(10).stored == 0


def test_a_missing_key_is_missing(rng: np.random.Generator) -> None:
    with scheduled() as store:
        store.allocate_pool(4)
        with pytest.raises(KeyMissing):
            store.load(some_keys(rng, 2), [0, 1])
        assert store.scheduler is not None
        store.load(some_keys(rng, 0), []).wait(10)


def test_drops_are_told_and_counted(rng: np.random.Generator) -> None:
    with scheduled(Schedule(PROFILE, policy=DropAll)) as store:
        store.allocate_pool(4)
        keys = some_keys(rng, 4)
        assert store.put(keys, np.arange(4)).wait(10).dropped == 4
        assert store.match(keys) == 0
        assert store.stats()["dropped"] == 4


def test_close_launches_what_waits(rng: np.random.Generator) -> None:
    store = scheduled(Schedule(PROFILE, policy=Never))
    store.allocate_pool(4)
    ticket = store.put(some_keys(rng, 4), np.arange(4))
    assert not ticket.done
    store.close()
    assert ticket.wait(10).stored == 4


def test_a_scheduler_that_is_stuck_costs_time_only(rng: np.random.Generator) -> None:
    with scheduled(timeout_s=0.2) as store:
        store.allocate_pool(8)
        keys = some_keys(rng, 2)
        store.put(keys, [0, 1]).wait(10)
        assert store.scheduler is not None
        store.scheduler.stop()
        store.load(keys, [2, 3]).wait(10)


def test_writes_wait_for_the_step_that_reads(rng: np.random.Generator) -> None:
    seen: list[tuple[Any, Decision]] = []
    schedule = Schedule(PROFILE, record=lambda event, decision: seen.append((event, decision)))
    with scheduled(schedule) as store:
        store.allocate_pool(8)
        assert store.scheduler is not None
        now_ns = store.scheduler.now_ns()
        store.scheduler.post(StepBegan(now_ns, Phase.DECODE, tokens=1, context_tokens=10))
        store.put(some_keys(rng, 4), np.arange(4)).wait(10)
        store.scheduler.post(StepEnded(store.scheduler.now_ns()))
    assert sum(launch.pages for _, decision in seen for launch in decision.writes) == 4


def test_a_pool_has_no_staging() -> None:
    with pytest.raises(ConfigError, match="staging"):
        Schedule(PROFILE, Limits(staged_pages=1))

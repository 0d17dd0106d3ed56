"""Long puts, which are granted layer by layer, and stop for a load."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_idle

from store.policies import Never, OneByOne
from store.pools import controller_of, fill, formatted, opened, some_keys
from store.test_transfer_queue import PROFILE, scheduled, writes_between_reads
from tutti.errors import CapacityError
from tutti.gio_uring.job import Job
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Decision, Issue, State
from tutti.transfers import transfer_queue
from tutti.transfers.put_request import PutGrant


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put of two pages can stop."""
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)


def test_a_long_put_is_one_job_that_stops_for_a_load(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stoppable: None
) -> None:
    controller = controller_of(formatted())
    decisions: list[Decision] = []
    limits = Limits(staged_pages=0, probe_us=1e15)
    schedule = Schedule(
        Linear(interference=4.0), limits, record=lambda _, decision: decisions.append(decision)
    )
    with opened([], controller=controller, schedule=schedule, window_nbytes=1 << 14) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        pool = store.allocate_memory(24)
        contents = fill(pool, np.arange(24), rng)
        keys, more = some_keys(rng, 8), some_keys(rng, 8)
        store.put(keys, np.arange(8)).wait(10)
        before, decisions[:] = store._writer.finished, []
        assert before == 1
        controller.set_faults(Faults(stall_from=1))
        trace = controller.trace(4096)
        put = store.put(more, np.arange(8, 16))
        load = store.load(keys[::2], np.arange(16, 20))
        for _ in range(10_000):  # ends when all is done
            if put.done and load.done:
                break
            controller.release()
            time.sleep(0.001)
        load.wait(10)
        assert put.wait(10).stored == 8
        controller.set_faults(None)
        assert store._writer.finished == before + 1
        assert writes_between_reads(trace) == 0
        assert any(decision.stops for decision in decisions)
        assert [pool.read(page) for page in range(16, 20)] == contents[:8:2]
        store.load(more, np.arange(16, 24)).wait(10)
        assert [pool.read(page) for page in range(16, 24)] == contents[8:16]
        wait_idle(store.scheduler)
        counters = store.scheduler.counters()
        assert (counters["written_pages"], counters["ignored"]) == (16, 0)


def test_a_long_put_that_meets_no_other_is_submitted_with_its_grant(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stoppable: None
) -> None:
    """A call for it would wake the threads of the drives once more."""
    grants: list[Job] = []
    with scheduled(Schedule(PROFILE), timeout_s=20.0) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        pool = store.allocate_memory(16)
        contents, keys = fill(pool, np.arange(8), rng), some_keys(rng, 8)
        with monkeypatch.context() as patch:
            patch.setattr(Job, "grant", lambda job, *_: grants.append(job))
            assert store.put(keys, np.arange(8)).wait(10).stored == 8
        assert not grants
        store.load(keys, np.arange(8, 16)).wait(10)
        assert [pool.read(page) for page in range(8, 16)] == contents


@pytest.mark.parametrize("late_s", [0.0, 0.02])
def test_a_stop_right_after_the_submission_with_a_grant_loses_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stoppable: None, late_s: float
) -> None:
    """The grant does not know the job yet, which may even have ended."""
    begin = PutGrant.begin
    stopped: list[tuple[str, int]] = []

    def stop_first(grant: PutGrant, job: Job, layers: int = 0) -> None:
        time.sleep(late_s)
        for name in [] if stopped else list(store._queue._puts):
            stopped.append((name, layers))
            store._queue.stop_write(name)
        begin(grant, job, layers)

    with scheduled(Schedule(PROFILE), timeout_s=20.0) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        pool = store.allocate_memory(16)
        contents, keys = fill(pool, np.arange(8), rng), some_keys(rng, 8)
        monkeypatch.setattr(PutGrant, "begin", stop_first)
        assert store.put(keys, np.arange(8)).wait(10).stored == 8
        assert [layers for _, layers in stopped] == [store._core.layers]
        store.load(keys, np.arange(8, 16)).wait(10)
        assert [pool.read(page) for page in range(8, 16)] == contents
        wait_idle(store.scheduler)
        counters = store.scheduler.counters()
        assert (counters["written_pages"], counters["ignored"]) == (8, 0)
        assert store._core.wait_quiet(10) and not store._queue._open


def test_puts_that_stop_lose_nothing(rng: np.random.Generator, stoppable: None) -> None:
    with scheduled(Schedule(Linear(write_gbps=0.01)), timeout_s=20.0) as store:
        pool = store.allocate_memory(24)
        contents = fill(pool, np.arange(12), rng)
        for _ in range(20):
            keys = some_keys(rng, 12)
            puts = [store.put(keys[at : at + 4], np.arange(at, at + 4)) for at in (0, 4, 8)]
            assert sum(put.wait(20).stored for put in puts[:1]) == 4
            loads = [store.load(keys[:4], np.arange(at, at + 4)) for at in (12, 16)]
            assert sum(put.wait(20).stored for put in puts[1:]) == 8
            for load in loads:
                load.wait(20)
            assert [pool.read(page) for page in range(12, 20)] == contents[:4] * 2
            loads.append(store.load(keys, np.arange(12, 24)))
            assert all(load.wait_settled(20) for load in loads)
            assert [pool.read(page) for page in range(12, 24)] == contents
        wait_idle(store.scheduler)
        counters = store.scheduler.counters()
        assert (counters["written_pages"], counters["ignored"]) == (20 * 12, 0)
        assert store.scheduler.state.writing.flying == 0


class OneThenTwo(Never):
    """A policy that launches one page of a write, then two whenever those before are written."""

    def decide(self, state: State) -> Decision:
        waiting = [write for write in state.unwritten.values() if write.written == write.issued]
        counts = [(w, min(2 if w.issued else 1, w.pages - w.issued)) for w in waiting]
        return Decision(writes=tuple(Issue(w.name, w.issued, count) for w, count in counts))


@pytest.mark.parametrize("granted", [0, 1])
def test_a_put_whose_grant_finds_no_memory_fails_and_leaves_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stoppable: None, granted: int
) -> None:
    """A job is granted in two steps; at the second one a part is made that follows it."""
    jobs: list[Job] = []
    grant = Job.grant

    def without_memory(job: Job, *arguments: Any) -> None:
        jobs.append(job)
        if jobs.count(job) > granted:
            raise CapacityError("no memory for a grant")
        grant(job, *arguments)

    with scheduled(Schedule(PROFILE, policy=OneThenTwo), timeout_s=60.0) as store:
        part_nbytes = 2 * store._core.object_nbytes // store._core.layers
        monkeypatch.setattr(transfer_queue, "UNIT_NBYTES", part_nbytes)
        monkeypatch.setattr(store._queue, "_short", 1)
        store.allocate_memory(8)
        keys, free = some_keys(rng, 8), store.stats()["free_objects"]
        with monkeypatch.context() as patch:
            patch.setattr(Job, "grant", without_memory)
            ticket = store.put(keys, np.arange(8))
            with pytest.raises(CapacityError, match="no memory for a grant"):
                ticket.wait(10)
        assert store._core.wait_quiet(10.0)
        stored = 8 - ticket.failed().size
        assert store.present(keys).sum() == stored
        assert store.stats()["free_objects"] == free - stored
        assert not store._queue._puts and not store._queue._open
        wait_idle(store.scheduler)
        assert store.put(keys, np.arange(8)).wait(10).stored == 8 - stored


def test_a_stopped_put_goes_on_when_the_store_closes(
    rng: np.random.Generator, stoppable: None
) -> None:
    store = scheduled(Schedule(PROFILE, policy=OneByOne), timeout_s=20.0)
    store.allocate_memory(8)
    ticket = store.put(some_keys(rng, 8), np.arange(8))
    store.close()
    assert ticket.wait(10).stored == 8

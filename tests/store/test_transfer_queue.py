"""A pool whose puts and loads are scheduled: same results, other moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_idle, wait_until

from store.policies import DropsLong, LayerByLayer, Never, OneByOne, WritesOnly
from store.pools import GEOMETRY, controller_of, formatted, opened, put_some, some_keys
from tutti.errors import CapacityError, ConfigError, KeyMissing, TuttiError
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import StepBegan, StepEnded, WriteKnown
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, State
from tutti.store import ObjectStore
from tutti.transfers.put_request import PutPart, PutTogether
from tutti.transfers.tickets import Outcome, PutResult

PROFILE = Linear()


class DropAll(Never):
    """A policy that gives up every write."""

    def decide(self, state: State) -> Decision:
        return Decision(drops=tuple(write.name for write in state.writes.values()))


def scheduled(schedule: Schedule | None = None, **config: Any) -> ObjectStore:
    return opened(formatted(), schedule=schedule or Schedule(PROFILE), **config)


def test_a_missing_key_is_missing(rng: np.random.Generator) -> None:
    with scheduled() as store:
        store.allocate_memory(4)
        with pytest.raises(KeyMissing):
            store.load(some_keys(rng, 2), [0, 1])
        assert store.scheduler is not None
        store.load(some_keys(rng, 0), []).wait(10)


def test_drops_are_told_and_counted(rng: np.random.Generator) -> None:
    with scheduled(Schedule(PROFILE, policy=DropAll)) as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        assert store.put(keys, np.arange(4)).wait(10).dropped == 4
        assert store.match(keys) == 0
        assert store.stats()["dropped"] == 4


def test_a_page_that_another_put_brings_meanwhile_is_not_dropped(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduled(Schedule(PROFILE, policy=DropsLong)) as store:
        store.allocate_memory(2)
        keys = some_keys(rng, 2)
        ticket = store.put(keys, [0, 1])
        assert store.put(keys[:1], [0]).wait(10).stored == 1
        assert not ticket.done
        monkeypatch.setattr(DropsLong, "drops", True)
        assert store.scheduler is not None
        store.scheduler.post(StepEnded(store.scheduler.now_ns()))
        assert ticket.wait(10) == PutResult(stored=0, present=1, dropped=1)
        assert ticket.outcome.tolist() == [Outcome.PRESENT, Outcome.DROPPED]
        assert (store.stats()["present"], store.stats()["dropped"]) == (1, 1)


def test_a_page_that_another_put_brings_is_there_also_where_no_slot_is_left(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted()) as store:
        store.allocate_memory(1)
        key = some_keys(rng, 1)
        core, taken, others = store._core, [], []

        def make_room(*_: object) -> None:  # waits for space, and has none in time
            patch.undo()
            others.append(store.put(key, [0]))
            taken.append(core.allocator.allocate(core.allocator.free_slots))

        with monkeypatch.context() as patch:
            patch.setattr(store._writer._quick, "start", lambda *_: None)
            patch.setattr(store._reclaimer, "make_room", make_room)
            assert store.put(key, [0]).wait(10) == PutResult(stored=0, present=1, dropped=0)
        assert others[0].wait(10).stored == 1
        core.allocator.free(taken[0])


def test_close_launches_what_waits(rng: np.random.Generator) -> None:
    store = scheduled(Schedule(PROFILE, policy=Never))
    store.allocate_memory(4)
    ticket = store.put(some_keys(rng, 4), np.arange(4))
    assert not ticket.done
    store.close()
    assert ticket.wait(10).stored == 4


def test_a_scheduler_that_is_stuck_costs_time_only(rng: np.random.Generator) -> None:
    with scheduled(timeout_s=1.0) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 2)
        store.put(keys, [0, 1]).wait(10)
        assert store.scheduler is not None
        store.scheduler.stop()
        store.load(keys, [2, 3]).wait(10)


def test_writes_wait_for_the_step_that_reads(rng: np.random.Generator) -> None:
    seen: list[tuple[Any, Decision]] = []
    schedule = Schedule(PROFILE, record=lambda event, decision: seen.append((event, decision)))
    with scheduled(schedule) as store:
        store.allocate_memory(8)
        assert store.scheduler is not None
        now_ns = store.scheduler.now_ns()
        store.scheduler.post(StepBegan(now_ns, Phase.DECODE, tokens=1, context_tokens=10))
        store.put(some_keys(rng, 4), np.arange(4)).wait(10)
        store.scheduler.post(StepEnded(store.scheduler.now_ns()))
    assert [event.at_once for event, _ in seen if isinstance(event, WriteKnown)] == [True]


def test_a_pool_has_no_staging() -> None:
    with pytest.raises(ConfigError, match="staging"):
        Schedule(PROFILE, Limits(staged_pages=1))


def in_time(call: Callable[[], object], seconds: float = 10.0) -> None:
    """What must not wait for a deadline of the store, which tests set much later."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits"


def test_what_comes_while_the_store_closes_does_not_wait(rng: np.random.Generator) -> None:
    with scheduled(timeout_s=60.0) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 4)
        store._queue.stop(10.0)
        assert store.put(keys, np.arange(4)).wait(10).stored == 4
        in_time(lambda: store.load(keys, np.arange(4, 8)).wait(10))


def test_a_load_does_not_wait_for_a_put_that_waits_for_space(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduled(Schedule(PROFILE, policy=ImmediatePolicy), timeout_s=60.0) as store:
        keys = put_some(store, rng, 4, 8)
        there, space, put = threading.Event(), threading.Event(), store._writer.put

        def full(parts: list[PutPart]) -> BaseException | None:
            there.set()
            space.wait(30)
            return put(parts)

        monkeypatch.setattr(store._writer, "put", full)
        tickets: list[Any] = []
        more = some_keys(rng, 2)
        putting = threading.Thread(target=lambda: tickets.append(store.put(more, [0, 1])))
        putting.start()
        try:
            assert there.wait(10)
            in_time(lambda: store.load(keys, np.arange(4, 8)).wait(10))
        finally:
            space.set()
        putting.join(10)
        assert tickets[0].wait(10).stored == 2


@pytest.mark.parametrize("error", [MemoryError("none left"), TuttiError("none left")])
def test_a_put_that_cannot_be_started_ends(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = scheduled(Schedule(PROFILE, policy=OneByOne), timeout_s=5.0)
    store.allocate_memory(4)
    parts: list[PutPart] = []
    began = threading.Event()

    def once(given: list[PutPart]) -> BaseException | None:
        if parts:
            PutTogether(given).refuse(error)
            return error
        parts.extend(given)
        began.set()
        return None

    monkeypatch.setattr(store._writer, "put", once)
    monkeypatch.setattr(store._queue, "_short", 1)  # pages are not written together
    ticket = store.put(some_keys(rng, 4), np.arange(4))
    assert began.wait(10)
    store._queue.stop(0.5)  # starts the others
    PutTogether(parts).tell(np.array([0]), Outcome.STORED)
    parts[0].ended(parts[0], None)
    with pytest.raises(TuttiError):
        ticket.wait(10)
    assert ticket.failed().tolist() == [1, 2, 3]
    assert store._core.wait_quiet(0.0)
    store.close()


def test_a_load_that_is_interrupted_is_forgotten(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with scheduled() as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 2)
        store.put(keys, [0, 1]).wait(10)
        with monkeypatch.context() as patch:
            patch.setattr(store._loader, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.load(keys, [2, 3])
        assert not store._queue._loads
        assert store._core.wait_quiet(10.0), "nothing of it is under way"


def stored(policy: Callable[[Limits], Any], rng: np.random.Generator, **more: Any) -> Any:
    """A scheduled store, with four keys that it has."""
    store = scheduled(Schedule(PROFILE, policy=policy, record=more.pop("record", None)), **more)
    keys = put_some(store, rng, 4, 8)
    return store, keys


def test_layers_are_read_as_they_are_granted(rng: np.random.Generator) -> None:
    seen: list[Decision] = []
    store, keys = stored(LayerByLayer, rng, record=lambda _, decision: seen.append(decision))
    with store:
        pool = store._resources.memories[0]
        ticket = store.load(keys, np.arange(4, 8))
        ticket.wait(10)
        assert ticket.wait_settled(10)
        reads = [issue for decision in seen for issue in decision.reads]
        layers = range(store.layout.model_layers)
        assert [(issue.first, issue.count) for issue in reads] == [(one, 1) for one in layers]
        assert [pool.read(page) for page in range(4)] == [pool.read(page) for page in range(4, 8)]


def test_a_load_whose_grant_finds_no_memory_says_so(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = Job.grant

    def without_memory(job: Job, layers: int, *report: Any) -> None:
        if layers > 1:
            raise CapacityError("no memory for a grant")
        grant(job, layers, *report)

    store, keys = stored(LayerByLayer, rng, timeout_s=60.0)
    with store:
        with monkeypatch.context() as patch:
            patch.setattr(Job, "grant", without_memory)
            ticket = store.load(keys, np.arange(4, 8))
            with pytest.raises(CapacityError, match="no memory for a grant"):
                ticket.wait(10)
            assert ticket.failed().size == 4
        wait_idle(store.scheduler)
        store.load(keys, np.arange(4, 8)).wait(10)


def test_a_load_that_is_never_granted_is_read_after_all(rng: np.random.Generator) -> None:
    store, keys = stored(WritesOnly, rng, timeout_s=1.0)
    with store:
        store.load(keys, np.arange(4)).wait(10)


def test_a_load_that_is_not_granted_can_be_cancelled(rng: np.random.Generator) -> None:
    store, keys = stored(WritesOnly, rng, timeout_s=60.0)
    with store:
        ticket = store.load(keys, np.arange(4))
        wait_until(lambda: store.scheduler.counters()["loads_waiting"] == 1)
        assert not ticket.done
        assert ticket.cancel(10)
        wait_idle(store.scheduler)


def test_no_load_is_too_long_to_be_launched(rng: np.random.Generator) -> None:
    limits = Limits(staged_pages=0, read_ahead_nbytes=1)
    with scheduled(Schedule(PROFILE, limits), timeout_s=60.0) as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 2)
        store.put(keys, [0, 1]).wait(10)
        in_time(lambda: store.load(keys, [2, 3]).wait(10))


def test_pages_that_were_not_stored_do_not_count_as_written(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(parts: list[PutPart]) -> BaseException | None:
        together = PutTogether(parts)
        together.tell(np.array([1, 2, 3]), Outcome.STORED)
        together.tell(np.array([0]), Outcome.FAILED, 0x280)  # write fault
        together.end_batch()
        return None

    with scheduled(Schedule(PROFILE, policy=ImmediatePolicy)) as store:
        store.allocate_memory(4)
        monkeypatch.setattr(store._writer, "put", broken)
        with pytest.raises(TuttiError):
            store.put(some_keys(rng, 4), np.arange(4)).wait(10)
        assert store.scheduler is not None
        store._queue.stop(10.0)
        store.scheduler.run_due()
        counters = store.scheduler.counters()
        assert (counters["written_pages"], counters["failed_pages"]) == (3, 1)


def writes_between_reads(trace: npt.NDArray[np.uint64]) -> int:
    """Write commands that came between the first and the last read of a layer's data."""
    trace = trace[trace[:, 0] != 0]
    first = GEOMETRY.groups_offset // GEOMETRY.lba_nbytes
    stretch = GEOMETRY.layer_stride_nlb
    data = trace[trace[:, 1] >= first]
    layers = (data[:, 1] - np.uint64(first)) // np.uint64(stretch) % np.uint64(GEOMETRY.layers)
    found = 0
    for layer in range(GEOMETRY.layers):
        reads = np.flatnonzero((data[:, 0] == OPCODE_READ) & (layers == layer))
        assert reads.size > 1, "a layer has several commands"
        found += int(np.count_nonzero(data[reads[0] : reads[-1], 0] == OPCODE_WRITE))
    return found


def interleaved(policy: Callable[[Limits], Any], rng: np.random.Generator) -> int:
    """Of five loads whose layers are due, during puts, on a drive that answers slowly."""
    controller = controller_of(formatted())
    found = 0
    limits = Limits(staged_pages=0, probe_us=1e15)  # the interference is known
    schedule = Schedule(Linear(interference=4.0), limits, policy=policy)
    with opened(
        [], controller=controller, schedule=schedule, verify="off", window_nbytes=1 << 15
    ) as store:
        keys = put_some(store, rng, 16, 24)
        assert store.match(keys, pin="prefix") == 16
        controller.set_faults(Faults(stall_from=1))
        scheduler = store.scheduler
        assert scheduler is not None
        for number in range(5):
            layers, loads = GEOMETRY.layers, (str(number),)
            step = StepBegan(scheduler.now_ns(), Phase.PREFILL, layers, tokens=1, loads=loads)
            scheduler.post(step)
            trace = controller.trace(4096)
            puts = [store.put(some_keys(rng, 4), np.arange(16, 20))]
            ticket = store.load(keys[::2], np.arange(0, 16, 2), batch=str(number))
            puts += [store.put(some_keys(rng, 4), np.arange(20, 24)) for _ in range(3)]
            for _ in range(10_000):  # ends when all is done
                if ticket.done and all(put.done for put in puts):
                    break
                controller.release()
                time.sleep(0.001)
            ticket.wait(10)
            assert [put.wait(10).stored for put in puts] == [4] * 4
            scheduler.post(StepEnded(scheduler.now_ns()))
            found += writes_between_reads(trace)
        controller.recover()
    return found


def test_no_write_is_issued_between_the_reads_of_a_due_layer(rng: np.random.Generator) -> None:
    """Seen by the drive.  A policy that issues all at once shows that it would see them."""
    assert interleaved(SlackPolicy, rng) == 0
    assert interleaved(ImmediatePolicy, rng) > 0


@pytest.mark.parametrize("policy", [SlackPolicy, OneByOne])
def test_a_put_that_a_close_overtakes_is_not_left_in_a_shared_queue(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, policy: Callable[[Limits], Any]
) -> None:
    schedule = Schedule(PROFILE, policy=policy)
    with scheduled(schedule) as other:
        store = scheduled(schedule)
        queue, store_closes = store._queue, store.close
        assert queue.dispatcher is other.scheduler
        store.allocate_memory(4)
        announce = queue._post_put

        def close_first(*arguments: Any) -> None:
            in_time(store_closes)
            announce(*arguments)

        monkeypatch.setattr(queue, "_post_put", close_first)
        assert store.put(some_keys(rng, 4), np.arange(4)).wait(10).stored == 4
        assert other.scheduler is not None
        other.scheduler.run_due()  # takes what was posted
        assert not other.scheduler._events and not other.scheduler.state.writes

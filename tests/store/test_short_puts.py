"""Short puts are held back while others are under way, and lose nothing by it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from memory_controller import Faults, MemoryController
from scheduler.drive import Linear
from waiting import wait_until

from store.pools import (
    GEOMETRY,
    controller_of,
    fill,
    formatted,
    images_of,
    opened,
    some_keys,
)
from tutti.errors import CapacityError
from tutti.gio_uring.nvme_spec import OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED
from tutti.medium.slot_record import RECORD_DTYPE
from tutti.scheduler.dispatcher import Schedule
from tutti.store import ObjectStore
from tutti.transfers.tickets import Outcome
from tutti.transfers.writer import Writer


def stalled() -> tuple[ObjectStore, MemoryController]:
    """A store whose device is busy: the next command and all later ones wait for `release`."""
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    controller.set_faults(Faults(stall_from=1))
    return store, controller


def test_tails_of_many_chains_share_a_batch(rng: np.random.Generator) -> None:
    store, controller = stalled()
    with store:
        pool = store.allocate_memory(24)
        contents = fill(pool, range(12), rng)
        keys = some_keys(rng, 12)
        first = store.put(keys[:1], [0])
        tails = [store.put(keys[i : i + 1], [i]) for i in range(1, 12)]
        assert not any(ticket.done for ticket in tails)
        controller.recover()
        assert first.wait(5).stored == 1
        assert [ticket.wait(5).stored for ticket in tails] == [1] * 11
        assert store.stats()["jobs"] < 12 + 4
        for i in range(12):
            store.load(keys[i : i + 1], [12 + i]).wait(5)
        assert [pool.read(12 + i) for i in range(12)] == contents


def test_a_chain_of_tails_is_one_run(rng: np.random.Generator) -> None:
    store, controller = stalled()
    with store:
        store.allocate_memory(8)
        other, keys = some_keys(rng, 1), some_keys(rng, 4)
        store.put(other, [0])
        tickets = []
        for i in range(4):
            parent = keys[i - 1].tobytes() if i else None
            tickets.append(store.put(keys[i : i + 1], [i], parent=parent, depth=i))
        controller.recover()
        for ticket in tickets:
            assert ticket.wait(5).stored == 1
        assert store.load(keys, [4, 5, 6, 7]).wait_settled(5)
        assert store.stats()["mean_run_length"] == 4.0


def test_each_put_learns_its_own_outcome(rng: np.random.Generator) -> None:
    store, controller = stalled()
    with store:
        store.allocate_memory(8)
        keys = some_keys(rng, 4)
        store.put(keys[:1], [0])
        again = store.put(keys[:1], [1])
        fresh = store.put(keys[1:3], [1, 2])
        twice = store.put(keys[2:4], [3, 4])
        controller.recover()
        assert again.wait(5).present == 1
        assert fresh.wait(5).stored == 2
        result = twice.wait(5)
        assert (result.stored, result.present) == (1, 1)


def test_a_failed_tail_says_so(rng: np.random.Generator) -> None:
    store, controller = stalled()
    with store:
        store.allocate_memory(8)
        keys = some_keys(rng, 4)
        store.put(keys[:1], [0])
        held = store.put(keys[1:4], [1, 2, 3])
        controller.set_faults(None)
        data_lba = GEOMETRY.groups_offset // 4096
        nlb = GEOMETRY.groups * GEOMETRY.layers * GEOMETRY.layer_stride_nlb
        fail = (OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED, 100)
        controller.fault_range(1, data_lba, nlb, *fail)
        controller.release()
        with pytest.raises(CapacityError):
            held.wait(5)
        assert held.outcome.tolist() == [Outcome.FAILED] * 3


def test_close_writes_what_is_held(rng: np.random.Generator) -> None:
    store, controller = stalled()
    store.allocate_memory(8)
    keys = some_keys(rng, 3)
    tickets = [store.put(keys[i : i + 1], [i]) for i in range(3)]
    controller.recover()
    store.close()
    assert [ticket.wait(1).stored for ticket in tickets] == [1, 1, 1]


@pytest.mark.parametrize("schedule", [None, Schedule(Linear(write_gbps=0.001))])
def test_a_put_longer_than_the_pool_keeps_its_prefix(
    rng: np.random.Generator, schedule: Schedule | None
) -> None:
    """Whether it is written whole, or in bursts of which the last find the pool full."""
    with opened(formatted(), schedule=schedule, timeout_s=20.0) as store:
        slots = store.stats()["capacity_objects"]
        store.allocate_memory(3 * slots)
        for _ in range(2):
            keys = some_keys(rng, 3 * slots)
            result = store.put(keys, np.arange(3 * slots)).wait(20)
            assert (result.stored, result.dropped) == (slots, 2 * slots)
            assert store.match(keys) == slots


def test_records_follow_their_data_while_a_callback_runs(rng: np.random.Generator) -> None:
    """The thread that runs callbacks has no part in it."""
    store, controller = stalled()
    with store:
        store.allocate_memory(8)
        keys, free, runs = some_keys(rng, 2), threading.Event(), threading.Event()
        first = store.put(keys[:1], [0])
        first.on_done(lambda _: (runs.set(), free.wait(20)))
        controller.recover()
        try:
            assert runs.wait(10)
            second = store.put(keys[1:], [1])
            table = controller.medium(1)[GEOMETRY.table_offset : GEOMETRY.groups_offset]
            wait_until(lambda: keys[1].tobytes() in table.tobytes(), "the record waits")
            assert not second.done
        finally:
            free.set()
        assert second.wait(10).stored == 1


@pytest.mark.parametrize("durability", ["process", "flush"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_put_of_any_length_is_found_again(
    rng: np.random.Generator, members: int, durability: str
) -> None:
    """Within a member or over all of them, with one native call or step by step."""
    controller = controller_of(formatted(members=members))
    with opened([], controller=controller, durability=durability) as store:
        pool = store.allocate_memory(24)
        contents, keys = fill(pool, range(12), rng), some_keys(rng, 12)
        assert store.put(keys[:1], [0]).wait(5).stored == 1
        assert store.put(keys[1:], range(1, 12), parent=keys[0].tobytes(), depth=1).wait(5)
        images = images_of(controller, members)
    with opened(images) as store:
        store.wait_recovered()
        pool = store.allocate_memory(24)
        assert store.match(keys) == 12
        store.load(keys, range(12, 24)).wait(5)
        assert [pool.read(12 + i) for i in range(12)] == contents


def test_records_of_a_short_put_name_its_chain(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        pool = store.allocate_memory(6)
        contents, keys = fill(pool, range(3), rng), some_keys(rng, 4)
        put = store.put(keys[1:], [2, 0, 1], parent=keys[0].tobytes(), depth=5)
        assert put.wait(5).stored == 3
        table = controller.medium(1)[GEOMETRY.table_offset :].tobytes()
        records = np.frombuffer(table, RECORD_DTYPE, GEOMETRY.slots)
        records = records[store._core.index.find(keys[1:])]
        assert np.array_equal(records["key"], keys[1:])
        assert np.array_equal(records["parent"], keys[:3])
        assert records["depth"].tolist() == [5, 6, 7]
        store.load(keys[1:], [3, 4, 5]).wait(5)
        assert [pool.read(page) for page in (3, 4, 5)] == [contents[page] for page in (2, 0, 1)]


@pytest.mark.parametrize("what", ["data", "records"])
def test_what_was_not_written_is_a_failure_and_a_miss(rng: np.random.Generator, what: str) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 3)
        start = {"data": GEOMETRY.groups_offset, "records": GEOMETRY.table_offset}[what] // 4096
        controller.fault_range(1, start, 1, OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED, 1)
        ticket = store.put(keys, [0, 1, 2])
        with pytest.raises(CapacityError):
            ticket.wait(5)
        failed = ticket.failed().tolist()
        assert failed
        assert [bool(store.match(keys[i : i + 1])) for i in range(3)] == [
            i not in failed for i in range(3)
        ]
        assert store.put(keys, [0, 1, 2]).wait(5).stored == len(failed)


def test_records_follow_their_data_without_python(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Also those of puts that some keys of are there, and that evict others."""
    monkeypatch.delattr(Writer, "_write_records")
    with opened(formatted()) as store:
        pool, keys = store.allocate_memory(40), some_keys(rng, 36)
        contents = fill(pool, range(20), rng)
        assert store.put(keys[:12], np.arange(12)).wait(5).stored == 12
        result = store.put(keys[:16], np.arange(16)).wait(5)
        assert (result.stored, result.present) == (4, 12)
        assert store.put(keys[16:], np.arange(20)).wait(5).stored == 20
        assert store.stats()["evicted"] > 0
        store.load(keys[16:], np.arange(20, 40)).wait(5)
        assert [pool.read(page) for page in range(20, 40)] == contents

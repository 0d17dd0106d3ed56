"""What must hold at the edges: arrays that change, errors that pass, devices that answer late."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_until

from store.policies import OneByOne
from store.pools import (
    GEOMETRY,
    LAYOUT,
    controller_of,
    fill,
    formatted,
    images_of,
    left_by,
    opened,
    put_some,
    some_keys,
)
from tutti.errors import ConfigError, DeviceTimeout, MediumError, TuttiError
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_CAPACITY_EXCEEDED,
    STATUS_DATA_TRANSFER_ERROR,
    STATUS_UNRECOVERED_READ,
    STATUS_WRITE_FAULT,
)
from tutti.medium.geometry import Geometry
from tutti.medium.superblock import Superblock, choose_superblock
from tutti.memory.host_memory import HostMemory
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.tickets import LoadProgress, LoadTicket

TABLE_LBA = GEOMETRY.table_offset // 4096


@pytest.mark.parametrize(("options", "found"), [({}, 8), ({"eviction": "lru"}, 0)])
def test_what_comes_back_again_and_again_outlasts_what_is_only_stored(
    rng: np.random.Generator, options: dict[str, str], found: int
) -> None:
    with opened(formatted(), pin_lookups=1, **options) as store:
        store.allocate_memory(8)
        often, last = some_keys(rng, 8), 0
        for _ in range(12):
            last = int(np.count_nonzero(store.present(often)))
            if last == 8:
                store.load(often, range(8)).wait(5)
            else:
                store.put(often, range(8)).wait(5)
            for _ in range(5):  # more than the pool has room for
                store.put(some_keys(rng, 8), range(8)).wait(5)
        assert last == found
        stats = store.stats()
        assert stats["eviction"] == options.get("eviction", "mq")
        assert stats["evicted_too_early"] > 0


def test_room_is_looked_for_again_once_a_load_has_ended(rng: np.random.Generator) -> None:
    """Also where as many others are under way as when there was none."""
    with opened(formatted()) as store:
        store._core.refill = lambda: None  # nothing is evicted ahead
        memory, keys = store.allocate_memory(40), some_keys(rng, GEOMETRY.slots)

        def held(some: np.ndarray) -> LoadProgress:
            pages = np.arange(len(some), dtype=np.uint32)
            return store._loader.load(some, pages, memory.memory, held=True)

        for key in keys:
            store.put(key[None], [0]).wait(5)
            assert store._core.wait_quiet(5)
        keys = keys[store.present(keys)]
        last = some_keys(rng, store._core.allocator.free_slots)
        loads = [held(keys)]
        store.put(last, np.arange(len(last))).wait(5)
        loads.append(held(last))
        assert store.put(some_keys(rng, 2), [32, 33]).wait(5).dropped == 2
        for load in loads:
            load.cancel(5)
            assert load.wait_settled(5)
        assert store._core.wait_quiet(5)
        loads = [held(keys[:1]) for _ in loads]
        assert store.put(some_keys(rng, 2), [32, 33]).wait(5).stored == 2
        for load in loads:
            load.cancel(5)


def test_a_put_keeps_nothing_of_the_callers_arrays(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        pool = store.allocate_memory(8)
        contents = fill(pool, range(4), rng)
        keys, other, pages = some_keys(rng, 2), some_keys(rng, 2), np.array([0, 1], np.uint32)
        mine, held = keys.copy(), some_keys(rng, 1)
        controller.set_faults(Faults(stall_from=1))
        tickets = [store.put(mine, pages)]
        held_pages = np.array([2], np.uint32)
        tickets.append(store.put(held, held_pages))  # held back, because a put is under way
        mine[:], pages[:], held_pages[:] = other, 3, 3
        controller.recover()
        for ticket in tickets:
            ticket.wait(5)
        after = images_of(controller)
    with opened(after) as store:
        store.wait_recovered(5)
        pool = store.allocate_memory(8)
        assert store.match(other) == 0
        store.load(keys, [4, 5]).wait(5)
        store.load(held, [6]).wait(5)
        assert [pool.read(page) for page in (4, 5, 6)] == contents[:3]


@pytest.mark.parametrize("kind", ["put", "held put", "load"])
def test_memory_is_unregistered_beside_transfers_of_other_memory(
    rng: np.random.Generator, kind: str
) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller, timeout_s=0.5) as store:
        used, unused = store.allocate_memory(4), store.allocate_memory(4)
        keys, others = some_keys(rng, 2), some_keys(rng, 2)
        store.put(keys, range(2), memory=used).wait(5)
        controller.set_faults(Faults(stall_from=1))
        tickets: list[Any] = []
        if kind == "held put":  # the writer is at work for other memory
            tickets.append(store.put(others[:1], [0], memory=unused))
        if kind == "load":
            tickets.append(store.load(keys, [2, 3], memory=used))
        else:
            tickets.append(store.put(others[1:], [0], memory=used))
        if kind != "held put":
            store.unregister(unused)
        with pytest.raises(DeviceTimeout, match="stays registered"):
            store.unregister(used)
        controller.recover()
        if kind != "load":
            assert tickets[-1].wait_ended(5)
        tickets.append(store.load(keys, [2, 3], memory=used))  # as before
        assert all(t.wait_settled(5) for t in tickets if isinstance(t, LoadTicket))
        store.unregister(used)
        with pytest.raises(ConfigError, match="not registered"):
            store.put(others, range(2), memory=used)


def test_no_transfer_begins_in_memory_that_is_being_unregistered(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        used, other = store.allocate_memory(4), store.allocate_memory(4)
        keys = some_keys(rng, 2)
        store.put(keys, range(2), memory=used).wait(5)
        controller.set_faults(Faults(stall_from=1))
        store.load(keys, [2, 3], memory=used)
        with ThreadPoolExecutor(1) as another:
            over = another.submit(store.unregister, used)
            wait_until(lambda: bool(store._core._withdrawn))
            for start in (store.put, store.load, store.unregister):
                given = () if start == store.unregister else (keys, range(2))
                with pytest.raises(ConfigError, match="being unregistered"):
                    start(*given, memory=used)
            ticket = store.load(keys, range(2), memory=other)
            controller.recover()
            over.result(5)
        ticket.wait(5)


def test_no_load_that_waits_for_its_turn_begins_in_memory_that_was_unregistered(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(Linear(), policy=OneByOne)
    with opened(formatted(), schedule=schedule, timeout_s=0.5) as store:
        store.allocate_memory(4)
        keys, other = some_keys(rng, 2), HostMemory.allocate(LAYOUT, 4)
        store.put(keys, range(2)).wait(5)
        on_gpu = replace(other.memory, path=NoGpu(lambda: used in store._resources.memories))
        store.register(used := HostMemory(LAYOUT, on_gpu, (), other.owner))
        monkeypatch.setattr(store._queue.dispatcher, "alone", lambda *given: False)
        with ThreadPoolExecutor(1) as another:
            load = another.submit(store.load, keys, range(2), memory=used)
            wait_until(lambda: bool(store._queue._loads))
            with suppress(DeviceTimeout):  # then the load goes on
                store.unregister(used)
            with pytest.raises(TuttiError, match=r"being unregistered|nothing moves"):
                load.result(5)


class NoGpu:
    """Moves nothing."""

    holds = False

    def __init__(self, is_registered: Callable[[], bool]) -> None:
        self._is_registered = is_registered

    def submit(self, *given: Any, **options: Any) -> None:
        assert self._is_registered()
        raise TuttiError("nothing moves")


def test_a_record_that_cannot_be_read_quarantines_nothing(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller, digest_cache_nbytes=0) as store:
        keys = put_some(store, rng, 8, 16)
        fault = (OPCODE_READ, STATUS_DATA_TRANSFER_ERROR)
        controller.fault_range(1, TABLE_LBA, GEOMETRY.slots, *fault)
        ticket = store.load(keys, np.arange(8, 16))
        with pytest.raises(MediumError, match="data transfer"):
            ticket.wait(5)
        assert ticket.wait_settled(5)
        store.load(keys, np.arange(8, 16)).wait(5)
        assert store.stats()["slots"]["quarantined"] == 0


def test_records_come_before_data(rng: np.random.Generator) -> None:
    """Digests that are not cached are there with the first layer, not after the last."""
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 64)
    controller = controller_of(formatted(geometry=geometry))
    with opened([], controller=controller, digest_cache_nbytes=0, window_nbytes=4 << 15) as store:
        keys = put_some(store, rng, 192)
        data_commands = 192 // 4 * LAYOUT.layers
        controller.set_faults(Faults(stall_from=data_commands // LAYOUT.layers + 4))
        ticket = store.load(keys, np.arange(192))  # returns when the digests are known
        ticket.wait_layer(0, 5)
        controller.recover()
        ticket.wait(5)


def test_a_void_that_fails_once_is_tried_again(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        store.allocate_memory(40)
        fault = (OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED)
        for _ in range(8):
            keys = some_keys(rng, 8)
            store.put(keys, np.arange(8)).wait(5)
            store._core.wait_quiet(5)
        with store._core.lock:
            controller.fault_range(1, TABLE_LBA, GEOMETRY.slots, *fault)
            store._reclaimer.top_up(24)
        assert store._core.wait_quiet(5)
        slots = store.stats()["slots"]
        assert (slots["quarantined"], slots["voiding"]) == (0, 0)


def test_a_void_that_keeps_failing_leaves_the_pool_open(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    store.allocate_memory(40)
    keys = some_keys(rng, 24)
    stored = store.put(keys, np.arange(24)).wait(5).stored
    store._core.wait_quiet(5)
    with store._core.lock:
        fault = (OPCODE_WRITE, STATUS_WRITE_FAULT, 100)
        controller.fault_range(1, TABLE_LBA, GEOMETRY.slots, *fault)
        store._reclaimer.top_up(24)
    assert store._core.wait_quiet(5)
    assert store.stats()["slots"]["quarantined"] > 0
    controller.set_faults(None)
    with opened(left_by(store, clean=True)) as again:
        again.wait_recovered(5)  # what could not be voided is still there, and right
        again.allocate_memory(24)
        assert sum(again.match(key[None]) for key in keys) == stored
        assert again.stats()["slots"]["unproven"] == stored


def test_a_clear_that_fails_closes_the_pool_to_calls(rng: np.random.Generator) -> None:
    images = formatted()
    controller = controller_of(images)
    store = opened([], controller=controller)
    keys = put_some(store, rng, 4, 8)
    controller.fault_range(1, 0, 2, OPCODE_WRITE, STATUS_WRITE_FAULT)
    with pytest.raises(MediumError):
        store.clear()
    for call in (store.match, lambda k: store.put(k, np.arange(4))):
        with pytest.raises(MediumError):
            call(keys)
    images = images_of(controller)
    store.close()
    with opened(images) as again:
        again.wait_recovered(5)
        assert again.match(keys) == 4


def test_a_superblock_write_that_failed_is_repeated_in_its_place() -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    winner = choose_superblock(
        controller.medium(1)[:4096].tobytes(), controller.medium(1)[4096:8192].tobytes(), "m"
    )[1]
    for _ in range(2):
        controller.fault_range(1, 0, 2, OPCODE_WRITE, STATUS_WRITE_FAULT)
        with pytest.raises(MediumError):
            store.members.mark_open(1)
        kept = controller.medium(1)[winner * 4096 :][:4096].tobytes()
        Superblock.decode(kept, "the copy that counts")
    store.close()


def test_a_late_deallocate_refuses_further_calls(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller, timeout_s=0.2, verify="off")
    store.allocate_memory(16)
    controller.set_faults(Faults(stall_from=5))  # two superblocks, two flushes, then this
    with pytest.raises(DeviceTimeout, match="may still erase"):
        store.clear()
    controller.set_faults(None)
    with pytest.raises(DeviceTimeout, match="may still erase"):
        store.put(some_keys(rng, 4), np.arange(4))
    store.close()


def test_one_unreadable_block_is_one_slot(rng: np.random.Generator) -> None:
    store = opened(formatted())
    keys = put_some(store, rng, 8)
    controller = controller_of(left_by(store, clean=False))
    controller.fault_range(1, TABLE_LBA + 5, 1, OPCODE_READ, STATUS_UNRECOVERED_READ, 2)
    with opened([], controller=controller) as store:
        store.wait_recovered(5)
        assert store.match(keys) == 5
        assert store.match(keys[6:]) == 2
        assert store.stats()["slots"]["quarantined"] == 1


def test_an_unreadable_snapshot_is_a_scan(rng: np.random.Generator) -> None:
    store = opened(formatted())
    keys = put_some(store, rng, 4)
    controller = controller_of(left_by(store, clean=True))
    blocks = GEOMETRY.snapshot_nbytes // 4096
    fault = (OPCODE_READ, STATUS_UNRECOVERED_READ, 10)
    controller.fault_range(1, GEOMETRY.snapshot_offset // 4096, blocks, *fault)
    with opened([], controller=controller) as store:
        assert store.match(keys) == 4


def test_proving_needs_no_memory_of_the_users(rng: np.random.Generator) -> None:
    store = opened(formatted())
    keys = put_some(store, rng, 8)
    with opened(left_by(store, clean=False)) as store:
        store.wait_recovered(5)
        assert store.prove() == 8
        assert store.match(keys, proven=True) == 8
        with pytest.raises(ConfigError, match="no memory is registered"):
            store.put(keys, np.arange(8))


def test_look_ups_go_on_during_a_clear(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller, timeout_s=0.5)
    store.allocate_memory(4)
    keys = some_keys(rng, 2)
    store.put(keys, [0, 1]).wait(5)
    controller.set_faults(Faults(stall_from=1))
    store.load(keys, [2, 3])
    with pytest.raises(TuttiError, match="nothing was done"):
        store.clear()
    assert store.match(keys) == 2
    store.close()


@pytest.mark.parametrize("what", ["memory", "file"])
def test_a_process_may_end_without_close(what: str, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        import numpy as np
        from store.pools import LAYOUT, formatted, opened
        import tutti.store
        if {what!r} == "memory":
            store = opened(formatted())
        else:
            store = tutti.store.open(sys.argv[1], LAYOUT, "64MiB", executor="threads")
        store.allocate_memory(4)
        store.put([b"0123456789abcdef"], [0]).wait(5)
        raise SystemExit(7)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "pool")],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr.decode()


def test_a_slice_that_commands_cannot_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="slice size"):
        Geometry(1, (1 << 30,) * 4, 4096, 1, 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_ahead_comes_after_one_that_is_waited_for(
    rng: np.random.Generator, ahead: bool
) -> None:
    """Both are under way before the drive answers the first command."""
    controller = controller_of(formatted())
    with opened([], controller=controller, window_nbytes=4096) as store:
        keys = put_some(store, rng, 16, 24)
        ended: list[str] = []
        controller.set_faults(Faults(stall_from=1))
        for name, first, is_ahead in (("first", 0, ahead), ("second", 8, False)):
            ticket = store.load(
                keys[first : first + 8], np.arange(first, first + 8), ahead=is_ahead
            )
            ticket.on_settled(partial(ended.append, name))
        controller.recover()
        assert store._core.wait_quiet(10)
        assert ended == (["second", "first"] if ahead else ["first", "second"])

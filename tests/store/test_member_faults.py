"""A member that fails while its pool is open: the pool goes on with the others."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crash.objects import check_books
from memory_controller import MemoryController

from store.pools import (
    GEOMETRY,
    LAYOUT,
    Bytes,
    controller_of,
    formatted,
    left_by,
    opened,
    put_some,
    some_keys,
)
from tutti.base.arrays import Mask
from tutti.errors import DeviceGone, MediumError, PoolReadOnly, TuttiError
from tutti.gio_uring.nvme_spec import (
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_CAPACITY_EXCEEDED,
    STATUS_DEVICE_GONE,
    STATUS_NAMESPACE_WRITE_PROTECTED,
    STATUS_UNRECOVERED_READ,
    STATUS_WRITE_FAULT,
)
from tutti.placement.index import MISSING
from tutti.store import ObjectStore
from tutti.transfers.put_limits import Quota
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadTicket, PutTicket

DATA_LBA = GEOMETRY.groups_offset // 4096
TABLE_LBA = GEOMETRY.table_offset // 4096
DATA_NLB = GEOMETRY.groups * GEOMETRY.layers * GEOMETRY.layer_stride_nlb
ALWAYS = 100_000
BAD = 1  # the member that fails


def filled(
    rng: np.random.Generator, **config: Any
) -> tuple[MemoryController, ObjectStore, Bytes, Mask]:
    """A pool of two members, the keys of 16 objects, and which of them the bad member holds."""
    controller = controller_of(formatted(members=2))
    store = opened([], controller=controller, **config)
    keys = put_some(store, rng, 16, pages=64)
    on_bad = members_of(store, keys) == BAD
    assert np.count_nonzero(on_bad) == 8
    return controller, store, keys, on_bad


def members_of(store: ObjectStore, keys: Bytes) -> Bytes:
    """The member of every key that is there."""
    slots = store._core.index.find(keys)
    return (slots[slots != MISSING] // GEOMETRY.slots).astype(np.uint8)


def fail(
    controller: MemoryController, opcode: int, status: int, count: int = ALWAYS, member: int = BAD
) -> None:
    """Commands to the data of a member fail from now on."""
    controller.fault_range(member + 1, DATA_LBA, DATA_NLB, opcode, status, count)


def fails_to_load(store: ObjectStore, key: Bytes) -> None:
    with pytest.raises(MediumError):
        store.load(key[None], [20]).wait(5)
    assert store._core.wait_quiet(5)


@pytest.mark.parametrize("verb", ["load", "put"])
def test_a_drive_that_is_gone_is_misses_and_gets_no_puts(
    rng: np.random.Generator, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also at the next open without it: the other member was closed cleanly."""
    controller, store, keys, on_bad = filled(rng)
    fail(controller, OPCODE_READ, STATUS_DEVICE_GONE)
    fail(controller, OPCODE_WRITE, STATUS_DEVICE_GONE)
    ticket: LoadTicket | PutTicket
    if verb == "load":
        ticket = store.load(keys, 20 + np.arange(16))
    else:
        ticket = store.put(some_keys(rng, 16), np.arange(16))
    with pytest.raises(DeviceGone):
        ticket.wait(5)
    assert store._core.wait_quiet(5)
    assert (store.present(keys) == ~on_bad).all()
    assert store.stats()["missing_members"] == 1
    store.load(keys[~on_bad], np.arange(8)).wait(5)
    for _ in range(5):  # more than the other member holds
        more = some_keys(rng, 8)
        assert store.put(more, np.arange(8)).wait(5).stored == 8
        assert not (members_of(store, more) == BAD).any()
    check_books(store)
    assert caplog.text.count("member1: its drive is gone; 8 objects are misses") == 1
    kept = store.catalogue.keys()
    images = left_by(store, clean=True)
    config = StoreConfig(degraded=True)
    with ObjectStore(controller_of(images[:BAD]), ["member0"], config=config) as again:
        assert again.present(kept).all()
        assert again.stats()["slots"]["unproven"] == 0


def test_the_only_drive_comes_back_with_its_objects(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    keys = put_some(store, rng, 8, pages=32)
    fail(controller, OPCODE_READ, STATUS_DEVICE_GONE, member=0)
    with pytest.raises(DeviceGone):
        store.load(keys, 20 + np.arange(8)).wait(5)
    assert store._core.wait_quiet(5)
    assert not store.present(keys).any()
    assert store.put(some_keys(rng, 4), np.arange(4)).wait(5).dropped == 4
    assert (store.stats()["missing_members"], store.stats()["usable_objects"]) == (1, 0)
    with opened(left_by(store, clean=True)) as again:
        again.wait_recovered(5)
        assert again.present(keys).all()


def test_a_clear_reaches_a_drive_that_comes_back(rng: np.random.Generator) -> None:
    controller, store, keys, on_bad = filled(rng)
    fail(controller, OPCODE_READ, STATUS_DEVICE_GONE)
    with pytest.raises(DeviceGone):
        store.load(keys[on_bad][:1], [20]).wait(5)
    assert store._core.wait_quiet(5)
    store.clear()
    images = left_by(store, clean=True)
    with opened(images) as again:
        again.wait_recovered(5)
        assert not again.present(keys).any()
        assert again.stats()["missing_members"] == 0


def test_what_is_under_way_gives_a_lost_member_no_slots_back(rng: np.random.Generator) -> None:
    _, store, keys, on_bad = filled(rng)
    with store:
        slots = store._core.index.find(keys[on_bad])
        with store._core.lock:
            store._reclaimer.discard(np.sort(slots[:4]))  # their void records are being written
            store._reclaimer.faults.of_load(slots[4:], np.full(4, STATUS_DEVICE_GONE, np.uint32))
        assert store._core.wait_quiet(5)
        for _ in range(8):
            more = some_keys(rng, 4)
            assert store.put(more, np.arange(4)).wait(5).stored == 4
            assert not (members_of(store, more) == BAD).any()
        check_books(store)


def test_a_member_that_cannot_be_read_is_given_up(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file system that has failed: otherwise each of its objects fails a load.  Many loads
    that fail at once may have met a moment that passes.
    """
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tutti.transfers.member_faults.time", clock)
    controller, store, keys, on_bad = filled(rng)
    with store:
        fail(controller, OPCODE_READ, STATUS_UNRECOVERED_READ)
        for key in keys[on_bad][:4]:
            fails_to_load(store, key)
        assert store.stats()["missing_members"] == 0
        now_s += 5.0
        fails_to_load(store, keys[on_bad][4])
        assert store.stats()["missing_members"] == 1
        assert (store.present(keys) == ~on_bad).all()
        store.load(keys[~on_bad], np.arange(8)).wait(5)


def test_of_members_that_cannot_be_read_one_is_kept(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the same loads fail on all of them, as of files on one file system."""
    monkeypatch.setattr("tutti.transfers.member_faults._UNREAD_S", 0.0)
    controller, store, keys, on_bad = filled(rng)
    with store:
        for member in range(2):
            fail(controller, OPCODE_READ, STATUS_UNRECOVERED_READ, member=member)
        for pair in zip(keys[on_bad][:5], keys[~on_bad][:5], strict=True):
            there = np.array([key for key in pair if store.present(key[None]).all()])
            with pytest.raises(MediumError):
                store.load(there, 20 + np.arange(len(there))).wait(5)
            assert store._core.wait_quiet(5)
        assert store.stats()["missing_members"] == 1
        assert store.present(keys).any()


def test_bad_places_of_a_member_cost_their_objects_alone(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.transfers.member_faults._UNREAD_S", 0.0)
    controller, store, keys, on_bad = filled(rng)
    with store:
        bad, good = keys[on_bad][:5], keys[on_bad][5:]
        for key in bad:
            fail(controller, OPCODE_READ, STATUS_UNRECOVERED_READ, 1)
            fails_to_load(store, key)
            store.load(good, np.arange(3)).wait(5)
        assert store._core.wait_quiet(5)
        assert store.stats()["missing_members"] == 0
        assert np.count_nonzero(store.present(keys)) == 11


def test_loads_of_the_same_objects_fail_together(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad place is not taken for several."""
    monkeypatch.setattr("tutti.transfers.member_faults._UNREAD_S", 0.0)
    _, store, keys, on_bad = filled(rng)
    with store:
        slots = store._core.index.find(keys[on_bad][:1])
        for _ in range(5):
            with store._core.lock:
                status = np.full(1, STATUS_UNRECOVERED_READ, np.uint32)
                store._loader._judge(slots, None, status)
        assert store.stats()["missing_members"] == 0


def test_the_only_member_is_not_given_up(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.transfers.member_faults._UNREAD_S", 0.0)
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        keys = put_some(store, rng, 8, pages=32)
        fail(controller, OPCODE_READ, STATUS_UNRECOVERED_READ, member=0)
        for key in keys[:5]:
            fails_to_load(store, key)
        fail(controller, OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED, member=0)
        with pytest.raises(TuttiError):
            store.put(some_keys(rng, 4), np.arange(4)).wait(5)
        controller.set_faults(None)
        assert store.put(some_keys(rng, 4), np.arange(4)).wait(5).stored == 4
        assert np.count_nonzero(store.present(keys)) == 3


@pytest.mark.parametrize(
    "status", [STATUS_CAPACITY_EXCEEDED, STATUS_NAMESPACE_WRITE_PROTECTED, STATUS_WRITE_FAULT]
)
def test_puts_leave_a_member_alone_that_cannot_be_written(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """What it holds is found, and not evicted for room that no put could use; later it is tried
    again.
    """
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tutti.transfers.member_faults.time", clock)
    controller, store, keys, on_bad = filled(rng)
    with store:
        fail(controller, OPCODE_WRITE, status)
        with pytest.raises(TuttiError):
            store.put(some_keys(rng, 16), np.arange(16)).wait(5)
        assert store._core.wait_quiet(5)
        for _ in range(5):  # more than the other member holds
            more = some_keys(rng, 8)
            assert store.put(more, np.arange(8)).wait(5).stored == 8
            assert not (members_of(store, more) == BAD).any()
        assert store.present(keys[on_bad]).all()
        store.load(keys[on_bad], np.arange(8)).wait(5)
        assert store.stats()["missing_members"] == 0
        check_books(store)
        controller.set_faults(None)
        now_s += 31.0
        more = some_keys(rng, 16)
        assert store.put(more, np.arange(16)).wait(5).stored == 16
        assert (members_of(store, more) == BAD).any()
        check_books(store)


def test_a_pause_ends_although_the_other_member_has_room(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the drives would not share the load again before one of them is full."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tutti.transfers.member_faults.time", clock)
    controller, store, _, _ = filled(rng)
    with store:
        fail(controller, OPCODE_WRITE, STATUS_CAPACITY_EXCEEDED)
        with pytest.raises(TuttiError):
            store.put(some_keys(rng, 8), np.arange(8)).wait(5)
        controller.set_faults(None)
        assert store._core.wait_quiet(5)
        now_s += 31.0
        more = some_keys(rng, 8)
        assert store.put(more, np.arange(8)).wait(5).stored == 8
        assert (members_of(store, more) == BAD).any()
        check_books(store)


def test_puts_while_a_drive_is_found_to_be_gone_are_stored(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not get the slots of those that failed."""
    controller, store, _, _ = filled(rng)
    with store:
        more, stored = some_keys(rng, 8), [0]

        def put() -> None:
            stored[0] = store.put(more, np.arange(8)).wait(5).stored

        meanwhile, drop = threading.Thread(target=put), store._writer._drop

        def dropped(*given: Any) -> None:
            drop(*given)
            if not meanwhile.ident:
                meanwhile.start()
                meanwhile.join(0.2)

        monkeypatch.setattr(store._writer, "_drop", dropped)
        fail(controller, OPCODE_WRITE, STATUS_DEVICE_GONE)
        with pytest.raises(DeviceGone):
            store.put(some_keys(rng, 8), np.arange(8)).wait(5)
        meanwhile.join(5)
        assert stored == [8]
        assert not (members_of(store, more) == BAD).any()


def test_eviction_notices_a_member_that_cannot_be_written(rng: np.random.Generator) -> None:
    """A full one is given no puts that could fail; yet its objects would go for nothing."""
    controller, store, _, _ = filled(rng)
    with store:
        for _ in range(5):
            store.put(some_keys(rng, 8), np.arange(8)).wait(5)
        fault = (OPCODE_WRITE, STATUS_NAMESPACE_WRITE_PROTECTED, ALWAYS)
        controller.fault_range(BAD + 1, TABLE_LBA, GEOMETRY.slots, *fault)
        with store._core.lock:
            store._reclaimer.top_up(24)
        assert store._core.wait_quiet(5)
        assert list(store._reclaimer.faults.paused) == [BAD]
        keys = store.catalogue.keys()
        left = keys[members_of(store, keys) == BAD]
        assert left.size
        for _ in range(8):
            assert store.put(some_keys(rng, 8), np.arange(8)).wait(5).stored == 8
        assert store.present(left).all()
        check_books(store)
        controller.set_faults(None)


def test_a_pool_that_became_read_only_keeps_its_objects(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is evicted for puts that cannot be written."""
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tutti.transfers.member_faults.time", clock)
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        keys = put_some(store, rng, 16, pages=32)
        fail(controller, OPCODE_WRITE, STATUS_NAMESPACE_WRITE_PROTECTED, member=0)
        with pytest.raises(PoolReadOnly):
            store.put(some_keys(rng, 4), np.arange(4)).wait(5)
        assert store._core.wait_quiet(5)
        looks, choose = [0], store._core.choose_victims

        def counted(*given: Any) -> Any:
            looks[0] += 1
            return choose(*given)

        monkeypatch.setattr(store._core, "choose_victims", counted)
        for _ in range(8):
            assert store.put(some_keys(rng, 8), np.arange(8)).wait(5).dropped == 8
        assert looks[0] <= 2, "that takes long in a large pool"
        assert store.present(keys).all()
        check_books(store)
        controller.set_faults(None)
        now_s += 31.0
        assert store.put(some_keys(rng, 8), np.arange(8)).wait(5).stored == 8


def test_a_namespace_keeps_what_it_has_on_a_pool_that_became_read_only(
    rng: np.random.Generator,
) -> None:
    """Its quota evicts nothing for puts that cannot be written."""
    controller = controller_of(formatted())
    quota = Quota("small", 8 * (LAYOUT.object_nbytes + 4096))
    with opened([], controller=controller, quotas=(quota,)) as store:
        store.allocate_memory(16)
        keys = some_keys(rng, 8)
        assert store.put(keys, np.arange(8), namespace="small").wait(5).stored == 8
        fail(controller, OPCODE_WRITE, STATUS_NAMESPACE_WRITE_PROTECTED, member=0)
        with pytest.raises(PoolReadOnly):
            store.put(some_keys(rng, 4), np.arange(4)).wait(5)
        assert store._core.wait_quiet(5)
        for _ in range(4):
            more = some_keys(rng, 4)
            assert store.put(more, np.arange(4), namespace="small").wait(5).dropped == 4
        assert store.present(keys).all()
        controller.set_faults(None)


def test_a_flush_that_fails_costs_the_objects_of_its_member(rng: np.random.Generator) -> None:
    controller, store, _, _ = filled(rng, durability="flush")
    with store:
        controller.fault_range(BAD + 1, 0, 1, OPCODE_FLUSH, STATUS_WRITE_FAULT, ALWAYS)
        keys = some_keys(rng, 16)
        for first in range(0, 16, 4):  # a group each, on one member
            with contextlib.suppress(MediumError):
                store.put(keys[first : first + 4], np.arange(4)).wait(5)
        assert members_of(store, keys).size >= 4
        assert not (members_of(store, keys) == BAD).any()
        controller.set_faults(None)

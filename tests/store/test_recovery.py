"""Opening again: after a clean close, after a crash, with damage, with members missing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from slot_addresses import slot_lba

from store.pools import (
    GEOMETRY,
    LAYOUT,
    Bytes,
    controller_of,
    fill,
    formatted,
    images_of,
    left_by,
    opened,
    some_keys,
)
from tutti import native
from tutti.errors import ChecksumMismatch, DeviceTimeout, KeyMissing
from tutti.medium.slot_record import RECORD_DTYPE
from tutti.medium.superblock import Superblock
from tutti.store import ObjectStore
from tutti.transfers.catalogue import Catalogue
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadProgress


def recovered(images: list[Bytes], **options: Any) -> ObjectStore:
    """The pool opened again, with all of it known."""
    store = opened(images, **options)
    store.wait_recovered(5)
    return store


def filled(
    rng: np.random.Generator, *, clean: bool, members: int = 1, n: int = 10, **config: object
) -> tuple[list[Bytes], Bytes, list[bytes]]:
    """Images of a pool with n objects, their keys and contents."""
    store = opened(formatted(members=members), **config)
    pool = store.allocate_memory(n)
    keys = some_keys(rng, n)
    contents = fill(pool, range(n), rng)
    assert store.put(keys, np.arange(n)).wait(5).stored == n
    return left_by(store, clean=clean), keys, contents


def check_all(store: ObjectStore, keys: Bytes, contents: list[bytes]) -> None:
    store.wait_recovered(5)
    assert store.match(keys) == len(keys)
    pool = store.allocate_memory(len(keys))
    ticket = store.load(keys, np.arange(len(keys)))
    ticket.wait(5)
    assert ticket.wait_settled(5)
    assert [pool.read(page) for page in range(len(keys))] == contents


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("clean", [True, False])
def test_objects_survive(clean: bool, members: int, rng: np.random.Generator) -> None:
    images, keys, contents = filled(rng, clean=clean, members=members)
    with opened(images) as store:
        check_all(store, keys, contents)
        assert store.stats()["slots"]["unproven"] == 0
        assert store.stats()["proven"] == (0 if clean else len(keys))


def test_the_order_of_use_survives(rng: np.random.Generator) -> None:
    store = opened(formatted())
    store.allocate_memory(32)
    first, second = some_keys(rng, 8), some_keys(rng, 8)
    store.put(first, np.arange(8)).wait(5)
    store.put(second, np.arange(8, 16)).wait(5)
    store.match(first)
    images = left_by(store, clean=True)
    with opened(images) as again:
        again.allocate_memory(32)
        again.put(some_keys(rng, 14), np.arange(14)).wait(5)
        assert again.match(first) >= again.match(second)


def test_a_damaged_snapshot_is_not_needed(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    images, keys, contents = filled(rng, clean=True, members=2)
    images[1][GEOMETRY.snapshot_offset + 4096 + 3] ^= 1
    with opened(images) as store:
        check_all(store, keys, contents)
    (warning,) = (r for r in caplog.records if r.name == "tutti.transfers.recovery")
    assert "member1: the snapshot" in warning.getMessage()


def test_without_digests_an_unclean_close_loses_objects(rng: np.random.Generator) -> None:
    images, keys, _ = filled(rng, clean=False, verify="off")
    with recovered(images) as store:
        assert store.match(keys) == 0
        store._core.wait_quiet(5)
        assert store.stats()["slots"]["ready"] == 0
    images, keys, contents = filled(rng, clean=True, verify="off")
    with opened(images, verify="always") as store:
        check_all(store, keys, contents)


def flip_payload(image: Bytes, slot: int, layer: int, byte: int) -> None:
    lba = int(slot_lba(GEOMETRY, np.array([slot]), layer)[0])
    image[lba * 4096 + byte] ^= 0x10


@pytest.mark.parametrize("clean", [True, False])
def test_a_flipped_payload_byte_is_never_served(clean: bool, rng: np.random.Generator) -> None:
    images, keys, contents = filled(rng, clean=clean)
    flip_payload(images[0], slot=4, layer=2, byte=100)
    with recovered(images) as store:
        pool = store.allocate_memory(10)
        ticket = store.load(keys, np.arange(10))
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait(5)
        assert caught.value.pages == (4,)
        assert ticket.wait_settled(5)
        assert store.match(keys) == 4
        good = [page for page in range(10) if page != 4]
        assert [pool.read(page) for page in good] == [contents[page] for page in good]
        store._core.wait_quiet(5)
        # What a crash left half written says nothing against the place it lies in.
        gone = 1 if clean else 0
        assert store.stats()["slots"]["quarantined"] == gone
        images = images_of(store.controller)
    with recovered(images) as store:  # the quarantine, or the void record, is on the medium
        assert store.match(keys) == 4
        assert store.stats()["slots"]["quarantined"] == gone
        store.clear()
        assert store.stats()["slots"]["quarantined"] == gone


def test_an_unproven_object_counts_only_as_a_whole(rng: np.random.Generator) -> None:
    """The first layer of an unproven object is not ready before its last was verified."""
    images, keys, _ = filled(rng, clean=False)
    flip_payload(images[0], slot=0, layer=LAYOUT.layers - 1, byte=0)
    with recovered(images) as store:
        store.allocate_memory(10)
        with pytest.raises(ChecksumMismatch):
            store.load(keys, np.arange(10)).wait_layer(0, 5)


def test_a_record_that_changed_under_a_clean_pool_is_not_served(rng: np.random.Generator) -> None:
    """Another object's valid record in the slot: the snapshot says one key, the medium another."""
    images, keys, _ = filled(rng, clean=True)
    table = GEOMETRY.table_offset
    images[0][table : table + 4096] = images[0][table + 4096 : table + 8192]
    with opened(images) as store:
        store.allocate_memory(10)
        ticket = store.load(keys, np.arange(10))
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait(5)
        assert caught.value.pages == (0,)


def test_a_torn_record_under_a_clean_pool_is_not_served(rng: np.random.Generator) -> None:
    """The snapshot names the object; its load finds the record torn, and from then on it misses."""
    images, keys, _ = filled(rng, clean=True)
    images[0][GEOMETRY.table_offset + 3 * 4096 + 130] ^= 1
    with opened(images) as store:
        store.allocate_memory(10)
        assert store.match(keys) == 10
        ticket = store.load(keys, np.arange(10))
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait(5)
        assert caught.value.pages == (3,)
        assert ticket.wait_settled(5)
        assert (store.match(keys), store.match(keys[4:])) == (3, 6)
        images = left_by(store, clean=True)
    with opened(images) as store:
        assert (store.match(keys), store.match(keys[4:])) == (3, 6)
        assert store.stats()["slots"]["quarantined"] == 1


def test_quarantine_by_key(rng: np.random.Generator) -> None:
    images, keys, _ = filled(rng, clean=True, verify="off")
    store = opened(images, verify="off")
    asked = np.concatenate([keys[4:6], keys[4:5], some_keys(rng, 1)])
    assert store.quarantine(asked) == 2
    assert (store.match(keys), store.quarantine(asked)) == (4, 0)
    with recovered(left_by(store, clean=False)) as again:  # on the medium, without a snapshot
        assert again.stats()["slots"]["quarantined"] == 2
        assert again.reuse_quarantined() == 2
        assert again.reuse_quarantined() == 0


def test_an_object_that_was_damaged_while_it_was_pinned_stays_in_quarantine(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewritten record must not be the last one: it says that the object is good."""
    images, keys, _ = filled(rng, clean=True)
    store = opened(images)
    write = store.catalogue._write

    def damaged(*arguments: Any) -> None:
        store.quarantine(keys[4:5])  # as a load does that finds a wrong digest
        core = store._core
        with core.lock:
            assert core.changed.wait_for(lambda: not store._reclaimer.busy, 5)
        write(*arguments)

    monkeypatch.setattr(store.catalogue, "_write", damaged)
    assert store.catalogue.pin(keys[3:6]) == 2
    assert store._core.lookup_pins.reserved == 2
    with recovered(left_by(store, clean=False)) as again:
        assert again.match(keys) == 4
        assert again.stats()["slots"]["quarantined"] == 1


def test_slots_are_reused_after_the_records_of_their_quarantine(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those records are written late: once something waits for what is under way."""
    images, keys, _ = filled(rng, clean=True)
    store = opened(images)
    store.allocate_memory(10)
    core, table, go = store._core, store._reclaimer._table, threading.Event()
    write, wait = table.write, core.changed.wait

    def late(*arguments: Any, **options: Any) -> None:
        def run() -> None:
            assert go.wait(5)
            with core.lock:
                write(*arguments, **options)

        threading.Thread(target=run).start()

    def waited(*arguments: Any) -> bool:
        go.set()
        return wait(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(table, "write", late)
        assert store.quarantine(keys[4:6]) == 2
    monkeypatch.setattr(core.changed, "wait", waited)
    assert store.reuse_quarantined() == 2
    assert store.put(keys[4:6], np.arange(2)).wait(5).stored == 2
    with recovered(left_by(store, clean=False)) as again:
        assert again.match(keys) == 10
        assert again.stats()["slots"]["quarantined"] == 0


def test_a_key_found_twice(rng: np.random.Generator) -> None:
    """The higher sequence number wins; with equal ones neither does."""
    images, keys, contents = filled(rng, clean=False)
    copy_object(images[0], source=2, target=20, sequence_step=5)
    copy_object(images[0], source=7, target=21, sequence_step=0)
    with recovered(images) as store:
        store._core.wait_quiet(5)
        assert store.match(keys) == 7
        pool = store.allocate_memory(7)
        store.load(keys[:7], np.arange(7)).wait(5)
        assert [pool.read(page) for page in range(7)] == contents[:7]
        with store._core.lock:
            assert store._core.index.find(keys[2:3])[0] == 20
        images = images_of(store.controller)
    with recovered(images) as store:
        assert store.match(keys) == 7


def copy_object(image: Bytes, *, source: int, target: int, sequence_step: int) -> None:
    """Forges a second copy of an object, record and all."""
    for layer in range(GEOMETRY.layers):
        a, b = (int(x) * 4096 for x in slot_lba(GEOMETRY, np.array([source, target]), layer))
        image[b : b + GEOMETRY.slice_nbytes] = image[a : a + GEOMETRY.slice_nbytes]
    table = GEOMETRY.table_offset
    record = image[table + source * 4096 :][:4096].copy().view(RECORD_DTYPE)
    record["slot"] = target
    record["sequence"] += sequence_step
    native.records_seal(record)
    image[table + target * 4096 :][:4096] = record.view(np.uint8)


def test_a_pool_goes_on_without_a_member(rng: np.random.Generator) -> None:
    images, keys, _ = filled(rng, clean=True, members=3, n=24)
    controller = controller_of([images[0], images[2]])
    config = StoreConfig(degraded=True)
    store = ObjectStore(controller, ["member0", "member2"], config=config)
    with store:
        store.wait_recovered(5)
        store.allocate_memory(24)
        present = [store.match(key[None]) for key in keys]
        assert 0 < sum(present) < 24
        found = keys[np.array(present, bool)]
        store.load(found, np.arange(len(found))).wait(5)
        store.put(some_keys(rng, 6), np.arange(6)).wait(5)
        assert store.quarantine(found[:2]) == 2
        assert store.reuse_quarantined() == 2, "not the slots of the member that is missing"


def test_a_deletion_without_a_member_keeps_what_others_hold(rng: np.random.Generator) -> None:
    images, keys, _ = filled(rng, clean=True, members=3, n=24)
    controller, config = controller_of(images[1:]), StoreConfig(degraded=True)
    with ObjectStore(controller, ["member1", "member2"], config=config) as store:
        store.wait_recovered(5)
        store.allocate_memory(24)
        index = store._core.index
        slots = index.find(keys)
        found = np.flatnonzero(slots >= 0)
        members = slots[found] // store.geometry.slots
        assert set(members.tolist()) == {1, 2}
        assert store.delete(keys[found[members == 1]]) == np.count_nonzero(members == 1)
        assert store.stats()["deallocated_nbytes"] > 0
        kept = keys[found[members == 2]]
        store.load(kept, np.arange(len(kept))).wait(5)


def test_an_interrupted_clear_is_finished(rng: np.random.Generator) -> None:
    images, keys, _ = filled(rng, clean=False, members=2)
    superblock = Superblock.decode(images[0][4096:8192].tobytes(), "member0")
    newer = replace(superblock, generation=superblock.generation + 1, epoch=12345)
    images[0][:4096] = np.frombuffer(newer.encode(), np.uint8)
    with recovered(images) as store:
        assert store.match(keys) == 0
        assert store.members.superblock(1).epoch == 12345


def test_lookups_miss_while_recovery_runs(rng: np.random.Generator) -> None:
    images, keys, contents = filled(rng, clean=False)
    controller = controller_of(images)
    controller.set_faults(Faults(stall_from=4))  # one of the recovery's reads
    store = opened(images, controller=controller)
    assert store.match(keys) == 0
    assert not store.recovered
    controller.recover()
    with store:
        check_all(store, keys, contents)


def test_what_is_pinned_counts_once_recovery_is_done(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, keys, _ = filled(rng, clean=True)
    store = opened(images)
    assert store.catalogue.pin(keys[:3]) == 3
    images, recount = left_by(store, clean=False), Catalogue.recount
    monkeypatch.setattr(Catalogue, "recount", lambda one: (time.sleep(0.2), recount(one)))
    with recovered(images) as again:
        assert again.stats()["pinned_objects"] == 3


def test_unproven_objects_stay_unproven_over_a_close(rng: np.random.Generator) -> None:
    """Opening and closing cleanly must not turn what a crash left into trusted objects."""
    images, keys, _ = filled(rng, clean=False)
    flip_payload(images[0], slot=3, layer=1, byte=7)
    store = recovered(images)
    images = left_by(store, clean=True)
    with recovered(images, verify="off") as store:
        store.allocate_memory(10)
        with pytest.raises(ChecksumMismatch) as caught:
            store.load(keys, np.arange(10)).wait(5)
        assert caught.value.pages == (3,)


def test_proving_goes_on_with_the_others_when_one_is_evicted(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, _, _ = filled(rng, clean=False)
    with recovered(images) as store:
        core, load, evictions = store._core, store._loader.load, [0, 0]

        def late(keys: Bytes, pages: Any, memory: Any, **order: Any) -> LoadProgress:
            if evictions:
                evictions.pop()
                with core.lock:
                    store._reclaimer.discard(core.index.find(keys[1:2]))
            return load(keys, pages, memory, **order)

        monkeypatch.setattr(store._loader, "load", late)
        assert [store.prove(4) for _ in range(3)] == [4, 4, 0]
        assert store.stats()["proven"] == 8


def test_proving_ends_when_all_is_evicted(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, _, _ = filled(rng, clean=False)
    with recovered(images) as store:

        def missing(*_: object, **order: object) -> LoadProgress:
            raise KeyMissing("evicted")

        monkeypatch.setattr(store._loader, "load", missing)
        with pytest.raises(DeviceTimeout, match="evicted"):
            store.prove(4)
        monkeypatch.undo()
        assert [store.prove(4) for _ in range(4)] == [4, 4, 2, 0]


def test_proving_verifies_and_quarantines(rng: np.random.Generator) -> None:
    images, keys, contents = filled(rng, clean=False)
    flip_payload(images[0], slot=6, layer=0, byte=7)
    store = recovered(images)
    assert store.match(keys, proven=True) == 0
    assert store.match(keys) == 10
    looked_at = 0
    for _ in range(10):
        looked_at += store.prove(4)
    assert looked_at == 10
    assert store.prove() == 0
    assert store.match(keys, proven=True) == 6
    images = left_by(store, clean=True)
    with opened(images) as store:  # clean now, so nothing is verified again
        assert store.match(keys, proven=True) == 6
        check_all(store, keys[:6], contents[:6])
        assert store.stats()["proven"] == 0

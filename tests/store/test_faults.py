"""A medium that fails, lies, or answers late: typed errors, and no memory reused too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from memory_controller import Faults
from slot_addresses import slot_lba
from waiting import wait_until

from store.pools import (
    GEOMETRY,
    LAYOUT,
    controller_of,
    fill,
    formatted,
    opened,
    put_some,
    some_keys,
)
from tutti.errors import (
    ChecksumMismatch,
    DeviceTimeout,
    MediumError,
    PagesInUse,
    PoolClosed,
    PoolCorrupt,
    TuttiError,
)
from tutti.gio_uring.nvme_spec import (
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_INTERNAL_ERROR,
    STATUS_UNRECOVERED_READ,
    STATUS_WRITE_FAULT,
)
from tutti.gio_uring.transfer import Transfer
from tutti.placement.index import SlotState
from tutti.transfers.loader import Loader
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.resources import _STUCK
from tutti.transfers.tickets import (
    LoadPart,
    LoadProgress,
    LoadTicket,
    Outcome,
    PutProgress,
    PutTicket,
)

DATA_LBA = GEOMETRY.groups_offset // 4096
DATA_NLB = GEOMETRY.groups * GEOMETRY.layers * GEOMETRY.layer_stride_nlb


class Held:
    """Calls of a method that wait for `go_on`; those behind it go through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls: list[Callable[[], object]] = []
        self._is_open = False
        self._method = getattr(owner, name)
        monkeypatch.setattr(owner, name, self._called)

    def _called(self, *args: object, **options: object) -> object:
        call = partial(self._method, *args, **options)
        return call() if self._is_open else self.calls.append(call)

    def go_on(self) -> None:
        self._is_open = True
        for call in self.calls:
            call()


def test_a_failed_write_takes_the_place_out_of_use(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        controller.fault_range(1, DATA_LBA, DATA_NLB, OPCODE_WRITE, STATUS_WRITE_FAULT)
        with pytest.raises(MediumError) as caught:
            store.put(keys, np.arange(4)).wait(5)
        failed = len(caught.value.pages)
        assert failed > 0
        store._core.wait_quiet(5)
        assert store.stats()["slots"]["quarantined"] == failed
        assert store.put(keys, np.arange(4)).wait(5).stored == failed


def test_a_record_that_fails_is_voided_before_reuse(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        table = GEOMETRY.table_offset // 4096
        controller.fault_range(1, table, GEOMETRY.slots, OPCODE_WRITE, STATUS_WRITE_FAULT)
        with pytest.raises(MediumError):
            store.put(keys, np.arange(4)).wait(5)
        store._core.wait_quiet(5)
        assert store.stats()["slots"]["voided"] == 4
        assert store.put(keys, np.arange(4)).wait(5).stored == 4


def test_a_slot_whose_void_record_fails_does_not_stop_a_clear(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        table = GEOMETRY.table_offset // 4096
        # One record of a put, and the three attempts to void it.
        controller.fault_range(1, table, GEOMETRY.slots, OPCODE_WRITE, STATUS_WRITE_FAULT, count=4)
        with pytest.raises(MediumError):
            store.put(keys, np.arange(4)).wait(5)
        assert store._core.wait_quiet(5)
        assert store.stats()["slots"]["quarantined"] == 4
        store.clear()
        assert store.put(keys, np.arange(4)).wait(5).stored == 4


@pytest.mark.parametrize("status", [STATUS_WRITE_FAULT, STATUS_INTERNAL_ERROR])
def test_a_failed_flush_fails_what_was_written_meanwhile(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The next flush may succeed: the loss is reported only once.  It condemns no place."""
    controller = controller_of(formatted())
    with opened([], controller=controller, durability="flush") as store:
        store.allocate_memory(12)
        keys = some_keys(rng, 12)
        flush = Held(monkeypatch, store.engine, "flush")
        tickets = [store.put(keys[:4], np.arange(4))]
        wait_until(lambda: flush.calls)
        tickets.append(store.put(keys[4:8], np.arange(4, 8)))  # waits for the next flush
        wait_until(lambda: store._writer._unflushed)
        written = Held(monkeypatch, store._writer, "_data_written")
        tickets.append(store.put(keys[8:], np.arange(8, 12)))  # comes too late for both
        wait_until(lambda: written.calls)
        controller.fault_range(1, 0, 1, OPCODE_FLUSH, status)
        flush.go_on()
        for ticket in tickets:
            if ticket is tickets[2]:
                written.go_on()
            with pytest.raises(MediumError, match=f"{status:#05x}"):
                ticket.wait(5)
        assert (store.match(keys), store.stats()["slots"]["quarantined"]) == (0, 0)
        assert store.put(keys, np.arange(12)).wait(5).stored == 12


def test_a_flush_fails_just_before_its_pages_wait_for_the_next(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads: one handles the end of a flush while the other brings what was written."""
    with opened(formatted(), durability="flush") as store:
        store.allocate_memory(4)
        keys, writer = some_keys(rng, 4), store._writer
        flush = writer._flush

        def late(*arguments: Any) -> None:
            writer._flushes_failed += 1 if arguments else 0
            flush(*arguments)

        monkeypatch.setattr(writer, "_flush", late)
        with pytest.raises(MediumError, match="write fault"):
            store.put(keys, np.arange(4)).wait(5)
        assert store.match(keys) == 0


def test_close_ends_what_waits_for_the_next_flush(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may bring a batch while a flush is refused: its put ends as well."""
    with opened(formatted(), durability="flush") as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 8)
        written = Held(monkeypatch, store._writer, "_data_written")
        tickets = [store.put(keys[i : i + 4], np.arange(i, i + 4)) for i in (0, 4)]
        wait_until(lambda: len(written.calls) == 2)

        def refuse(*_: object, **__: object) -> None:
            if len(written.calls) == 2:
                written.calls.pop()()
            raise PoolClosed("the engine is closing")

        with monkeypatch.context() as patched:
            patched.setattr(store.engine, "flush", refuse)
            written.calls[0]()
        for ticket in tickets:
            with pytest.raises(PoolClosed, match="cancelled"):
                ticket.wait(5)
        assert store._core.in_flight == 0


def test_an_unreadable_slice_fails_its_page_only(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    with opened([], controller=controller) as store:
        keys = put_some(store, rng, 8, 16)
        slba = int(slot_lba(GEOMETRY, np.array([5]), 1)[0])
        controller.fault_range(1, slba, 1, OPCODE_READ, STATUS_UNRECOVERED_READ)
        ticket = store.load(keys, np.arange(8, 16))
        with pytest.raises(MediumError) as caught:
            ticket.wait(5)
        # The command that failed holds the slices of one run in one layer.
        assert caught.value.pages == (4, 5, 6, 7)
        assert ticket.wait_settled(5)
        assert store.match(keys) == 4


def test_statuses_of_a_put_are_made_by_the_first_failure_and_kept() -> None:
    progress, error = PutProgress(3), DeviceTimeout("late")
    ticket = PutTicket(progress)
    progress.refuse(np.array([1]), error)
    assert ticket.failed().tolist() == [1]
    progress.refuse(np.array([2]), error)
    assert ticket.failed().tolist() == [1, 2]
    assert ticket.outcome.tolist() == [Outcome.PENDING, Outcome.FAILED, Outcome.FAILED]


def test_parts_of_a_load_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are late one after another do not add up."""
    now_s = 100.0
    waits: list[float] = []

    class Late:
        """Takes the most of two seconds, and says whether that was in time."""

        def wait(self, timeout_s: float) -> bool:
            nonlocal now_s
            waits.append(timeout_s)
            now_s += min(timeout_s, 2.0)
            return timeout_s >= 2.0

        def wait_layers(self, layers: int, timeout_s: float) -> bool:
            return self.wait(timeout_s)

        wait_released = wait

    monkeypatch.setattr("tutti.transfers.tickets.time", SimpleNamespace(monotonic=lambda: now_s))
    progress = LoadProgress(3, 1)
    ticket = LoadTicket(progress)
    late = cast("Transfer", Late())
    progress.parts.extend(LoadPart(late, np.array([i]), whole=False) for i in range(3))
    with pytest.raises(DeviceTimeout, match="after 3 s"):
        ticket.wait(3.0)
    assert waits == [3.0, 1.0]
    progress.settle()
    assert not ticket.wait_settled(3.0)
    assert waits == [3.0, 1.0] * 2


def test_late_answers_keep_their_memory(rng: np.random.Generator) -> None:
    """After a timeout the pages and slots stay owned until the device has answered."""
    controller = controller_of(formatted())
    store = opened([], controller=controller, timeout_s=1.0, window_nbytes=1 << 30)
    pool = store.allocate_memory(32)
    keys = some_keys(rng, 8)
    contents = fill(pool, range(8), rng)
    store.put(keys, np.arange(8)).wait(5)
    pool.write(16, bytes(LAYOUT.object_nbytes))
    controller.set_faults(Faults(stall_from=1))

    load = store.load(keys, np.arange(16, 24))
    with pytest.raises(DeviceTimeout):
        load.wait(5)
    assert not load.wait_settled(0.2)
    with store._core.lock:
        slots = store._core.index.find(keys)
        assert (store._core.index.pins[slots] == 1).all()
    more = some_keys(rng, 4)
    put = store.put(more, np.arange(24, 28))
    with pytest.raises(DeviceTimeout):
        put.wait(2.5)
    with store._core.lock:
        writing = store._core.index.find(more)
        assert (store._core.index.state[writing] == SlotState.WRITING).all()
        assert not store._core.allocator.is_free(writing).any()
    assert pool.read(16) == bytes(LAYOUT.object_nbytes)

    controller.recover()
    assert load.wait_settled(5)
    # The device wrote now, which is why nothing could be handed out before.
    assert pool.read(16) == contents[0]
    with pytest.raises(DeviceTimeout):
        put.wait(5)
    with store._core.lock:
        assert not store._core.index.pins[slots].any()
    store._core.wait_quiet(5)
    assert store.match(more) == 0
    assert store.put(more, np.arange(24, 28)).wait(5).stored == 4
    store.close()


@pytest.mark.parametrize("proof", [False, True])
def test_a_load_that_was_given_up_says_who_has_its_pages(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, proof: bool
) -> None:
    """Its data command is on its way, its records cannot be had: no ticket, yet pages in use."""
    controller = controller_of(formatted())
    store = opened([], controller=controller, timeout_s=1.0, window_nbytes=1 << 30)
    pool = store.allocate_memory(32)
    keys = some_keys(rng, 4)
    contents = fill(pool, range(4), rng)
    store.put(keys, np.arange(4)).wait(5)
    pool.write(16, bytes(LAYOUT.object_nbytes))
    slots = store._core.index.find(keys)
    with store._core.lock:
        store._core.digests._slot.fill(-1)
        if proof:  # as after an unclean close
            store._core.index.state[slots] = SlotState.UNPROVEN
    controller.set_faults(Faults(stall_from=1))

    def never(*_: object) -> None:
        wait_until(lambda: controller.stats().unanswered >= 2)  # the record's, and one of the data
        raise DeviceTimeout("the records were not read in time")

    monkeypatch.setattr(Loader, "_finish_records", never)
    if proof:
        with pytest.raises(DeviceTimeout, match="their memory stays in use"):
            store.prove(timeout_s=0.3)
        assert store._resources._lost
    else:
        with pytest.raises(PagesInUse, match="still owns its pages") as caught:
            store.load(keys, np.arange(16, 20))
        assert not caught.value.wait_settled(0.1)
        assert (store._core.index.pins[slots] == 1).all()
    controller.recover()
    if not proof:
        assert caught.value.wait_settled(5)
        assert pool.read(16) == contents[0]
    store._core.wait_quiet(5)
    assert not store._core.index.pins[slots].any()
    store.close()


@pytest.mark.parametrize("verb", ["put", "load"])
def test_what_a_close_cancels_is_closed_and_not_a_failed_drive(
    rng: np.random.Generator, verb: str
) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller)
    keys = put_some(store, rng, 4, 8)
    controller.set_faults(Faults(stall_from=1))
    pages = np.arange(4, 8)
    ticket = store.put(some_keys(rng, 4), pages) if verb == "put" else store.load(keys, pages)
    store.close(0.1)
    with pytest.raises(PoolClosed, match="cancelled"):
        ticket.wait(5)
    assert isinstance(ticket, PutTicket) or ticket.wait_settled(5)


def test_a_device_that_refuses_a_reset_keeps_its_memory(rng: np.random.Generator) -> None:
    controller = controller_of(formatted())
    store = opened([], controller=controller, timeout_s=1.0)
    keys = put_some(store, rng, 4, 8)
    controller.set_faults(Faults(stall_from=1, reset_fails=True))
    ticket = store.load(keys, np.arange(4, 8))
    with pytest.raises(DeviceTimeout, match="until the process ends"):
        store.close(0.3)
    assert not ticket.wait_settled(0.1)
    controller.release()
    assert ticket.wait_settled(5)


def test_an_opening_that_gets_stuck_keeps_its_error_and_its_memory() -> None:
    controller = controller_of(formatted())
    controller.set_faults(Faults(stall_from=1, reset_fails=True))
    with pytest.raises(DeviceTimeout) as caught:
        opened([], controller=controller, timeout_s=0.3)
    assert "until the process ends" not in str(caught.value)
    assert "until the process ends" in caught.value.__notes__[0]
    assert _STUCK[-1].parts[0]._region._unregister is not None  # the device may still write there
    controller.release()
    _STUCK.pop()


def test_an_opening_that_fails_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when one part cannot be closed; the error is that of the opening."""
    controller = controller_of(formatted())
    close = Reclaimer.close

    def closes_and_complains(reclaimer: Reclaimer) -> None:
        close(reclaimer)
        raise MediumError("no more")

    def fails(*_: object) -> None:
        raise PoolCorrupt("not a pool")

    monkeypatch.setattr(Reclaimer, "close", closes_and_complains)
    monkeypatch.setattr("tutti.store.TransferQueue", fails)
    with pytest.raises(PoolCorrupt) as caught:
        opened([], controller=controller)
    assert caught.value.__notes__ == ["no more"]
    controller.close()


@pytest.mark.parametrize("durability", ["process", "flush"])
def test_close_in_the_middle_of_puts(durability: str, rng: np.random.Generator) -> None:
    """Whatever is under way ends: stored, or an error; nothing hangs and the books are closed."""
    images = formatted()
    for stall in range(1, 12):
        controller = controller_of(images)
        store = opened(images, controller=controller, timeout_s=0.5, durability=durability)
        store.allocate_memory(8)
        controller.set_faults(Faults(stall_from=stall))
        keys = some_keys(rng, 8)
        tickets = [store.put(keys[i : i + 2], [i, i + 1]) for i in range(0, 8, 2)]
        with contextlib.suppress(DeviceTimeout):  # the snapshot may be what stalls
            store.close(0.2)
        for ticket in tickets:
            with contextlib.suppress(PoolClosed, DeviceTimeout):
                ticket.wait(5)
            assert ticket.done
        assert store._core.in_flight == 0


@pytest.mark.parametrize("kind", ["torn", "lost", "short", "status", "reorder", "delay"])
def test_seeded_faults_never_serve_other_bytes(kind: str, seed: int) -> None:
    """Whatever the medium does to writes and reads, a load gives the key's own bytes or fails."""
    rng = np.random.default_rng(seed)
    faults = {
        "torn": Faults(seed=seed, torn_ppm=150_000, torn_status=0),
        "lost": Faults(seed=seed, lost_ppm=100_000),
        "short": Faults(seed=seed, short_ppm=100_000),
        "status": Faults(seed=seed, status_ppm=100_000),
        "reorder": Faults(seed=seed, reorder_ppm=500_000),
        "delay": Faults(seed=seed, delay_ppm=300_000),
    }[kind]
    controller = controller_of(formatted())
    known: dict[bytes, bytes] = {}
    with opened([], controller=controller) as store:
        pool = store.allocate_memory(32)
        controller.set_faults(faults)
        for _ in range(30):
            n = int(rng.integers(1, 8))
            keys = some_keys(rng, n)
            known.update(zip((k.tobytes() for k in keys), fill(pool, range(n), rng), strict=True))
            with contextlib.suppress(TuttiError):
                store.put(keys, np.arange(n)).wait(10)
            check_some(store, pool, known, rng)
        controller.set_faults(Faults())


def check_some(store, pool, known, rng) -> None:  # type: ignore[no-untyped-def]
    names = list(known)
    for i in rng.integers(0, len(names), 6).tolist():
        key = np.frombuffer(names[i], np.uint8)[None].copy()
        if store.match(key) == 0:
            continue
        pool.write(20, bytes(LAYOUT.object_nbytes))
        try:
            ticket = store.load(key, [20])
            ticket.wait(10)
        except (ChecksumMismatch, MediumError, KeyError):
            ticket.wait_settled(10)
            continue
        assert pool.read(20) == known[names[i]]

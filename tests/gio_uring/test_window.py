"""The window of a drive, found on a virtual clock: it depends on the drive alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults, MemoryController, Parallelism
from waiting import wait_until

from tutti.base.units import KiB, MiB
from tutti.bench.window import least_ms
from tutti.gio_uring.engine import PRIORITY_LOAD, PRIORITY_STORE, Engine
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE

LAYERS, PAGES = 16, 32
SLICE_NBYTES = 64 * KiB
SLICE_NLB = SLICE_NBYTES // 4096
COMMAND_NBYTES = 256 * KiB
RATE = 4_000_000_000
LATENCY_NS = 100_000
#: What a drive with this rate and latency has in flight when it is just busy.
BUSY_NBYTES = RATE * LATENCY_NS // 10**9 + COMMAND_NBYTES
FOREVER = 2**63


class Rig:
    """An engine over a drive on a virtual clock."""

    def __init__(
        self,
        window_nbytes: int | None = None,
        parallelism: Parallelism | None = None,
        latency_ns: int = LATENCY_NS,
        rate: int = RATE,
        command_nbytes: int = COMMAND_NBYTES,
    ) -> None:
        self.controller = MemoryController(
            [LAYERS * PAGES * SLICE_NBYTES],
            mode="virtual",
            read_bandwidth=rate,
            latency_ns=latency_ns,
            parallelism=parallelism,
        )
        self.engine = Engine(
            self.controller, window_nbytes=window_nbytes, command_nbytes_max=command_nbytes
        )
        self.buffer = HostBuffer(LAYERS * PAGES * SLICE_NBYTES)
        self.region = self.controller.register(self.buffer)
        starts = np.arange(LAYERS, dtype=np.uint64) * np.uint64(PAGES * SLICE_NBYTES)
        bases = (np.uint64(self.buffer.address) + starts)[:, None]
        self.memory = PagedMemory(bases, (SLICE_NBYTES,), (SLICE_NBYTES,), PAGES)

    def close(self) -> None:
        self.engine.close(5)
        self.region.close()
        self.controller.close()

    def submit(
        self, pages: int, *, opcode: int = OPCODE_READ, **options: Any
    ) -> tuple[Job, np.ndarray]:
        extents = Extents([0], [1], [pages], SLICE_NLB, PAGES * SLICE_NLB)
        ready = np.zeros(LAYERS, np.uint64)
        numbers = self.memory.check_pages(np.arange(pages))
        options = {"priority": PRIORITY_LOAD, "layer_ns": ready, **options}
        return self.engine.submit(opcode, extents, numbers, self.memory, **options), ready

    def load(self, pages: int) -> np.ndarray:
        """Nanoseconds from submission until each layer was ready."""
        begin_ns = self.controller.now_ns
        job, ready = self.submit(pages)
        assert job.wait_released(20)
        assert job.report().status == 0
        return ready - np.uint64(begin_ns)


@pytest.fixture
def make() -> Iterator[object]:
    made: list[Rig] = []

    def build(**drive: Any) -> Rig:
        made.append(Rig(**drive))
        return made[-1]

    yield build
    for rig in made:
        rig.close()


@pytest.mark.parametrize(
    "parallelism",
    [None, Parallelism(8, RATE // 4), Parallelism(16, RATE // 8, crowd=32, crowd_factor=1.3)],
)
def test_the_window_is_small_and_the_drive_is_busy(make, parallelism) -> None:  # type: ignore[no-untyped-def]
    rig = make(parallelism=parallelism)
    deep = make(window_nbytes=32 * MiB, parallelism=parallelism)
    for _ in range(60):
        rig.load(PAGES)
    stats = rig.engine.windows()[0]
    assert stats.samples[0] > 100
    least = BUSY_NBYTES // 2
    most = 4 * BUSY_NBYTES if parallelism is None else 8 * BUSY_NBYTES
    assert least <= stats.window_nbytes[0] <= most
    assert rig.load(PAGES)[-1] <= deep.load(PAGES)[-1] / 0.97
    assert 0.9 * RATE <= stats.rate[0] <= 1.02 * RATE


def test_a_fast_and_distant_drive_gets_more_than_32_short_commands(make) -> None:  # type: ignore[no-untyped-def]
    """Of 14 GB/s and 200 us: 32 commands of 64 KiB, the first window, do not keep it busy."""
    drive = {"rate": 14_000_000_000, "latency_ns": 200_000, "command_nbytes": 64 * KiB}
    rig, deep = make(**drive), make(window_nbytes=16 * MiB, **drive)
    few = make(window_nbytes=2 * MiB, **drive)
    for _ in range(150):
        rig.load(PAGES)
    taken_ns, windows = [], []  # some loads compare with a smaller window
    for _ in range(50):
        taken_ns.append(int(rig.load(PAGES)[-1]))
        windows.append(rig.engine.windows()[0].window_nbytes[0])
    assert 2 * MiB < np.median(windows) <= 4 * 14 * 200_000  # latency times rate
    assert np.median(taken_ns) <= deep.load(PAGES)[-1] / 0.97
    assert np.median(taken_ns) <= few.load(PAGES)[-1] / 1.2


def test_a_window_is_no_smaller_than_what_is_in_flight_in_any_case(make) -> None:  # type: ignore[no-untyped-def]
    """On a drive that two commands keep busy; below, all windows would look alike."""
    rig = make(latency_ns=1000)
    for _ in range(60):
        rig.load(PAGES)
    assert rig.engine.windows()[0].window_nbytes[0] == 2 * COMMAND_NBYTES


def test_the_same_loads_find_the_same_window(make) -> None:  # type: ignore[no-untyped-def]
    rigs = [make(), make()]
    found = [[rig.load(8 + i % 24).tolist() for i in range(30)] for rig in rigs]
    assert found[0] == found[1]
    windows = [rig.engine.windows()[0].window_nbytes[0] for rig in rigs]
    assert windows[0] == windows[1]


def test_a_fixed_window_stays(make) -> None:  # type: ignore[no-untyped-def]
    rig = make(window_nbytes=3 * MiB)
    for _ in range(5):
        rig.load(PAGES)
    assert rig.engine.windows()[0].window_nbytes[0] == 3 * MiB


def test_layers_of_all_loads_are_issued_as_they_are_due(make) -> None:  # type: ignore[no-untyped-def]
    """A load that nothing waits for comes last; two that are waited for take turns by layer."""
    rig = make(window_nbytes=COMMAND_NBYTES)
    rig.controller.limit(rig.controller.now_ns)  # time stands still until all have arrived
    first, first_ns = rig.submit(PAGES)
    ahead, ahead_ns = rig.submit(PAGES, ahead=True)
    second, second_ns = rig.submit(PAGES)
    while rig.engine.stats().jobs < 3:
        pass
    rig.controller.limit(FOREVER)
    for job in (first, ahead, second):
        assert job.wait_released(20)
    assert (second_ns[:-1] < first_ns[1:]).all() or (first_ns[:-1] < second_ns[1:]).all()
    assert first_ns[LAYERS // 2] < second_ns[-1]
    assert second_ns[LAYERS // 2] < first_ns[-1]
    assert ahead_ns[1] > max(first_ns[-1], second_ns[-1])


def test_a_load_ahead_that_is_waited_for_takes_its_turn(make) -> None:  # type: ignore[no-untyped-def]
    rig = make(window_nbytes=COMMAND_NBYTES)
    rig.controller.limit(rig.controller.now_ns)
    first, first_ns = rig.submit(PAGES)
    ahead, ahead_ns = rig.submit(PAGES, ahead=True)
    while rig.engine.stats().jobs < 2:
        pass
    assert not ahead.wait_layers(1, 0.01)
    rig.controller.limit(FOREVER)
    for job in (first, ahead):
        assert job.wait_released(20)
    assert ahead_ns[LAYERS // 2] < first_ns[-1]


def test_a_load_ahead_does_not_starve(make) -> None:  # type: ignore[no-untyped-def]
    """It comes before a load that is waited for but begins more than a second later."""
    rig = make(window_nbytes=COMMAND_NBYTES)
    rig.controller.limit(rig.controller.now_ns)
    ahead, ahead_ns = rig.submit(PAGES, ahead=True)
    while not rig.engine.stats().commands:  # it has begun
        pass
    rig.controller.advance(1_200_000_000)
    late, late_ns = rig.submit(PAGES)
    rig.controller.limit(FOREVER)
    for job in (ahead, late):
        assert job.wait_released(20)
    assert (ahead_ns < late_ns).all()


def test_layers_do_not_all_come_at_the_end_of_a_drive_that_serves_them_together(make) -> None:  # type: ignore[no-untyped-def]
    """The first one in at most 1.5 times the time of its bytes and of a command.

    A short load pauses once for that, and its other layers come together.
    """
    shared = Parallelism(is_shared=True)
    rig, deep = make(parallelism=shared), make(window_nbytes=32 * MiB, parallelism=shared)
    for _ in range(20):
        for pages in (2, 4, PAGES):
            rig.load(pages)
    for pages in (2, 4, PAGES):
        layer_ns = pages * SLICE_NBYTES * 10**9 // RATE
        command_ns = min(pages * SLICE_NBYTES, COMMAND_NBYTES) * 10**9 // RATE + LATENCY_NS
        ready = rig.load(pages)
        assert ready[0] <= 1.5 * (layer_ns + command_ns), pages
    for pages in (2, 4):
        assert rig.load(pages)[-1] <= deep.load(pages)[-1] + 1.1 * LATENCY_NS, pages
    ready = rig.load(PAGES)
    assert ready[LAYERS // 4] <= 0.5 * ready[-1]
    assert ready[-1] <= deep.load(PAGES)[-1] / 0.97
    assert rig.engine.windows()[0].rate[0] <= RATE


@pytest.mark.parametrize("pace", [0.25, 1, 2, 4])
def test_layers_arrive_when_they_are_needed(make, pace: float) -> None:  # type: ignore[no-untyped-def]
    """On a drive that serves commands together, where each group of layers costs a pause.

    pace: computation with a layer over its time on the drive.  Where they are equal, no grouping
    hides all pauses: the best one takes 1.06 times the bound, and so more than the goal.
    """
    rig = make(parallelism=Parallelism(is_shared=True))
    for _ in range(20):
        rig.load(PAGES)
    plain_ns = rig.load(PAGES)
    compute_ns = int(pace * PAGES * SLICE_NBYTES * 10**9 / RATE)
    begin_ns = now_ns = computed_ns = rig.controller.now_ns
    rig.controller.limit(now_ns)
    job, _ = rig.submit(PAGES)
    layer = 0
    while layer < LAYERS:
        if now_ns >= computed_ns and job.wait_layers(layer + 1, 0):
            layer, computed_ns = layer + 1, now_ns + compute_ns
            continue
        now_ns = computed_ns if now_ns < computed_ns else now_ns + 50_000
        rig.controller.limit(now_ns)
        while rig.controller.now_ns < now_ns and not job.done:
            pass
        if job.done:
            rig.controller.advance(now_ns - rig.controller.now_ns)
    bound_ns = max(int(plain_ns[-1]), LAYERS * compute_ns) + int(plain_ns[0])
    layer_ns = PAGES * SLICE_NBYTES * 10**9 / RATE
    least_ns = least_ms(LAYERS, LATENCY_NS, layer_ns, compute_ns)
    assert computed_ns - begin_ns <= max(1.05 * bound_ns, 1.04 * least_ns)
    assert (least_ns > 1.05 * bound_ns) == (pace == 1)


def test_a_load_goes_on_as_the_consumers_of_the_last_loads_did(make) -> None:  # type: ignore[no-untyped-def]
    """Those asked for all layers once they had the first, so the rest is one group: one pause.

    It is two groups before consumers are known, and again after one that used a layer slowly.
    """
    pages, shared = 8, Parallelism(is_shared=True)
    rig, deep = make(parallelism=shared), make(window_nbytes=32 * MiB, parallelism=shared)
    for _ in range(12):  # in the 32nd, a command is alone
        rig.load(pages)
        deep_ns = int(deep.load(pages)[-1])

    def consume(compute_ns: int = 0) -> int:
        """Loads, waits for the first layer, computes, and waits for the rest."""
        begin_ns = rig.controller.now_ns
        rig.controller.limit(begin_ns)
        job, ready = rig.submit(pages)
        assert not job.wait_layers(1, 0)
        layer_ns = pages * SLICE_NBYTES * 10**9 // RATE
        limit_ns = begin_ns + layer_ns + 2 * LATENCY_NS
        rig.controller.limit(limit_ns)
        wait_until(lambda: rig.controller.now_ns == limit_ns)  # the next group was issued
        assert job.wait_layers(1, 20)
        if compute_ns:  # longer than the rest of the load
            rig.controller.limit(FOREVER)
            wait_until(lambda: job.done)
            rig.controller.advance(compute_ns)
        job.wait_layers(LAYERS, 0)
        rig.controller.limit(FOREVER)
        assert job.wait_layers(LAYERS, 20)
        return int(ready[-1]) - begin_ns

    at_first_ns = consume()
    for _ in range(10):
        consume()
    known_ns = consume()
    assert known_ns <= deep_ns + 1.1 * LATENCY_NS
    assert at_first_ns >= known_ns + 0.9 * LATENCY_NS
    consume(compute_ns=100 * LATENCY_NS)
    assert consume() >= known_ns + 0.9 * LATENCY_NS


def test_a_held_load_begins_as_others_do_also_if_it_is_granted_at_once(make) -> None:  # type: ignore[no-untyped-def]
    """Before the service thread has it, or after: the first layer does not wait for later ones."""
    rig = make(parallelism=Parallelism(is_shared=True))
    for _ in range(20):
        rig.load(PAGES)
    most_ns = 1.5 * max(int(rig.load(PAGES)[0]) for _ in range(20))
    for turn in range(40):
        begin_ns = rig.controller.now_ns
        job, ready = rig.submit(PAGES, held=True)
        if turn % 2:
            time.sleep(0.002)
        job.grant(LAYERS, 2**32 - 1, None)
        assert job.wait_released(20)
        assert ready[0] - begin_ns <= most_ns


def test_a_command_that_never_ends_does_not_stop_the_drive(make) -> None:  # type: ignore[no-untyped-def]
    """Not even the one that a load begins with, alone."""
    rig = make()
    rig.controller.set_faults(Faults(stall_from=1))
    stuck, _ = rig.submit(PAGES)
    wait_until(lambda: rig.controller.stats().unanswered)
    rig.controller.set_faults(Faults())
    other, _ = rig.submit(PAGES)
    assert other.wait_released(20)
    assert other.report().status == 0
    assert not stuck.report().released
    rig.controller.release()
    assert stuck.wait_released(20)
    assert stuck.report().status == 0


def test_a_short_load_is_issued_whole(make) -> None:  # type: ignore[no-untyped-def]
    nbytes = LAYERS * SLICE_NBYTES
    assert make().load(1)[-1] <= 1.1 * (LATENCY_NS + nbytes * 10**9 // RATE)


def test_stores_begin_with_few_bytes_in_flight(make) -> None:  # type: ignore[no-untyped-def]
    """A load that comes has to wait for these."""
    rig = make(parallelism=None)
    for opcode in (OPCODE_READ, OPCODE_WRITE):
        job, _ = rig.submit(1, opcode=opcode)
        assert job.wait_released(20)
    reads, writes = rig.engine.windows()[0].window_nbytes
    assert reads >= 32 * SLICE_NBYTES
    assert COMMAND_NBYTES < writes <= 4 * MiB


def test_a_store_that_stops_for_loads_begins_with_one_command(make) -> None:  # type: ignore[no-untyped-def]
    """The next ones are issued once it has ended, and then the drive is as busy as otherwise."""
    rig = make()
    took = {}
    for held in (True, False):
        job, ready = rig.submit(4, opcode=OPCODE_WRITE, priority=PRIORITY_STORE, held=held)
        if held:
            job.grant(LAYERS, 2**32 - 1, None)
        assert job.wait_released(20)
        took[held] = np.diff(ready)  # from one layer, a command, to the next
    assert took[True][0] >= took[False][0] + 0.9 * LATENCY_NS
    assert took[True].sum() <= took[False].sum() + 1.1 * LATENCY_NS


def test_a_load_does_not_wait_for_a_store_that_begins_slowly(make) -> None:  # type: ignore[no-untyped-def]
    rig = make()
    rig.controller.set_faults(Faults(stall_from=1))
    store, _ = rig.submit(PAGES, opcode=OPCODE_WRITE, priority=PRIORITY_STORE, held=True)
    store.grant(LAYERS, 2**32 - 1, None)

    def issued() -> int:
        return int(rig.engine.windows()[0].commands)

    wait_until(lambda: issued() == 1)
    load, _ = rig.submit(1)
    wait_until(lambda: issued() > LAYERS)
    rig.controller.recover()
    assert load.wait_released(20)
    assert store.wait_released(20)

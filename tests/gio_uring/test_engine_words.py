"""The words that a job shares with the mover of its staging: windows, failures, deadlines."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from memory_controller import Faults, MemoryController

from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.memory import HostBuffer, view_at
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_CANCELLED,
    STATUS_TIMED_OUT,
    STATUS_UNRECOVERED_READ,
)

LAYERS, PAGES, NBYTES = 6, 4, 4096


class Rig:
    """An engine over memory, and staging for all layers of four pages with words beside."""

    def __init__(self) -> None:
        self.controller = MemoryController([4 << 20])
        self.engine = Engine(self.controller, depth=16)
        self.buffer = HostBuffer(LAYERS * PAGES * NBYTES)
        self.region = self.controller.register(self.buffer)
        bases = self.buffer.address + np.arange(LAYERS, dtype=np.uint64) * np.uint64(PAGES * NBYTES)
        self.memory = PagedMemory(bases[:, None], (NBYTES,), (NBYTES,), PAGES)
        self.keep = HostBuffer(LayerWords.nbytes_of(LAYERS), hugepages=False)
        self.words = LayerWords(self.keep.address, LAYERS)

    def close(self) -> None:
        self.engine.close(5)
        self.region.close()
        self.controller.close()

    def submit(self, opcode: int, window: int, **options: object) -> Job:
        self.words.clear()
        pages = np.arange(PAGES, dtype=np.uint32)
        extents = Extents([0], [1], [PAGES], 1, PAGES)
        return self.engine.submit(
            opcode,
            extents,
            pages,
            self.memory,
            words=self.words,
            window=window,
            **options,  # type: ignore[arg-type]
        )

    def moved(self, layers: int) -> None:
        """What a mover's stream writes after its copies."""
        view_at(self.words.address, 4).view(np.uint32)[0] = layers

    def ready(self) -> list[bool]:
        return [self.words.is_ready(layer) for layer in range(LAYERS)]

    def statuses(self) -> list[int]:
        return [self.words.status(layer) for layer in range(LAYERS)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_a_read_never_runs_ahead_of_its_window(rig: Rig) -> None:
    job = rig.submit(OPCODE_READ, 2)
    for moved in range(LAYERS - 1):
        ready = min(moved + 2, LAYERS)
        assert job.wait_layers(ready, 5)
        time.sleep(0.01)  # room for a wrong engine to run ahead
        assert rig.ready() == [True] * ready + [False] * (LAYERS - ready)
        rig.moved(moved + 1)
    assert job.wait_released(5)
    assert rig.statuses() == [0] * LAYERS


def test_a_write_waits_for_what_the_mover_has_filled(rig: Rig, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, rig.buffer.nbytes, dtype=np.uint8)
    job = rig.submit(OPCODE_WRITE, 0)
    for layer in range(LAYERS):
        time.sleep(0.005)
        assert rig.ready() == [True] * layer + [False] * (LAYERS - layer)
        part = slice(layer * PAGES * NBYTES, (layer + 1) * PAGES * NBYTES)
        rig.buffer.array[part] = content[part]
        rig.moved(layer + 1)
        assert job.wait_layers(layer + 1, 5)
    assert job.wait_released(5)
    assert (rig.controller.medium(1)[: content.size] == content).all()


def test_a_failed_job_releases_every_layer_with_its_status(rig: Rig) -> None:
    rig.controller.fault_range(1, 2 * PAGES, 1, OPCODE_READ, STATUS_UNRECOVERED_READ)
    job = rig.submit(OPCODE_READ, LAYERS)
    assert job.wait_released(5)
    assert rig.ready() == [True] * LAYERS
    assert rig.statuses()[2:] == [STATUS_UNRECOVERED_READ] * (LAYERS - 2)


def test_a_dead_controller_releases_every_layer(rig: Rig) -> None:
    rig.controller.set_faults(Faults(stall_from=3))
    job = rig.submit(OPCODE_READ, LAYERS, timeout_s=0.2)
    assert job.wait_layers(LAYERS, 5)
    assert rig.ready() == [True] * LAYERS
    assert rig.statuses()[2:] == [STATUS_TIMED_OUT] * (LAYERS - 2)
    assert not job.report().released  # the device may still write there
    rig.controller.recover()
    assert job.wait_released(5)


def test_a_mover_that_stops_ends_its_job(rig: Rig) -> None:
    job = rig.submit(OPCODE_READ, 1, timeout_s=1.0)
    assert job.wait_released(5)
    assert job.report().status == STATUS_TIMED_OUT
    assert rig.statuses() == [0] + [STATUS_TIMED_OUT] * (LAYERS - 1)


def test_cancelling_a_blocked_job_releases_it(rig: Rig) -> None:
    job = rig.submit(OPCODE_WRITE, 0)
    job.cancel()
    assert job.wait_released(5)
    assert rig.ready() == [True] * LAYERS
    assert rig.statuses() == [STATUS_CANCELLED] * LAYERS


def test_a_blocked_job_holds_nobody_back(rig: Rig) -> None:
    rig.submit(OPCODE_WRITE, 0)
    other = rig.engine.submit(
        OPCODE_WRITE,
        Extents([512], [1], [PAGES], 1, PAGES),
        np.arange(PAGES, dtype=np.uint32),
        rig.memory,
    )
    assert other.wait_released(5)


def test_closing_with_a_blocked_job() -> None:
    made = Rig()
    job = made.submit(OPCODE_READ, 1)
    made.close()
    assert job.report().released
    assert made.ready() == [True] * LAYERS

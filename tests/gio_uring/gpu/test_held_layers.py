"""Held reads of the engines `launch` and `resident`: kernels are launched when layers are granted.

On a stand-in for the CUDA driver and its kernels: no GPU is involved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gio_uring.gpu.test_device_engine import LAYERS, PAGES, Rig, device_rig
from waiting import wait_until

from tutti.errors import DeviceTimeout, PoolClosed
from tutti.gio_uring.gpu.device_job import DeviceJob
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE, STATUS_CANCELLED

HOLDING = ("launch", "resident")
SENT, TARGETS = list(range(8)), list(range(8, 16))
RigOf = Callable[..., Rig]


@pytest.fixture(params=HOLDING)
def rig_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RigOf]:
    """Makes the rig of one engine; its pages have random bytes, and `SENT` are on the medium."""
    made = []

    def make(staging: int = 1 << 20) -> Rig:
        made.append(device_rig(request.param, tmp_path, monkeypatch, staging))
        rig = made[-1].__enter__()
        rng = np.random.default_rng(1)
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
        assert rig.submit(OPCODE_WRITE, SENT).wait_released(10)
        return rig

    yield make
    for one in made:
        one.__exit__(None, None, None)


def held(rig: Rig, timeout_s: float = 30.0) -> DeviceJob:
    return rig.submit(OPCODE_READ, TARGETS, held=True, timeout_s=timeout_s)


def layers_done(rig: Rig, job: DeviceJob, layers: int) -> None:
    """All that was granted has arrived, and nothing more."""
    assert not layers or job.wait_layers(layers, 10)
    wait_until(lambda: rig.driver.is_stream_done(rig.engine.stream_queue.stream))
    assert job.layers_ready == job.launched == layers


def test_others_go_between_the_layers_of_a_held_read(rig_of: RigOf) -> None:
    """A write that follows it on the stream ends, although the next grant waits for that."""
    rig = rig_of()
    want, told = rig.contents(SENT), list[int]()
    job = held(rig)
    layers_done(rig, job, 0)
    for layers in range(1, LAYERS + 1):
        job.grant(layers, layers, lambda n=layers: told.append(n))  # type: ignore[misc]
        layers_done(rig, job, layers)
        wait_until(lambda n=layers: len(told) == n)  # type: ignore[misc]
        assert rig.submit(OPCODE_WRITE, SENT).wait_released(10)
    assert job.wait_released(10)
    assert not job.page_status.any()
    assert rig.contents(TARGETS) == want
    assert told == list(range(1, LAYERS + 1))
    assert rig.engine.stream_queue.staging.arena.in_use == 0


def test_a_window_leaves_no_command_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job would take its completions, and it would take the other's."""
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        sent: list[int] = []
        submit = rig.kernels.submit

        def noted(batch: int, layer: int) -> None:
            sent.append(layer)
            submit(batch, layer)

        rig.driver.kernels["gio_submit_word"] = noted
        job = held(rig)
        job.grant(3, 3, None)
        layers_done(rig, job, 3)
        assert sent == [0, 1, 2]
        job.grant(LAYERS, LAYERS, None)
        assert job.wait_released(10)
        assert sent == list(range(LAYERS))


def test_a_stream_is_ordered_once_the_layer_is_launched(rig_of: RigOf) -> None:
    rig = rig_of()
    job, stream = held(rig), rig.driver.create_stream()
    job.grant(2, 2, None)
    job.order_stream(stream, 2)
    ordered = threading.Event()

    def order() -> None:
        job.order_stream(stream, LAYERS)
        ordered.set()

    thread = threading.Thread(target=order)
    thread.start()
    assert not ordered.wait(0.05)
    job.grant(LAYERS, LAYERS, None)
    assert ordered.wait(10)
    thread.join(10)
    wait_until(lambda: rig.driver.is_stream_done(stream))
    assert job.layers_ready == LAYERS


def test_a_read_has_not_ended_before_its_launch_is_known(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may be faster than the thread that launches; who orders a stream waits for that."""
    rig, was_launched = rig_of(), DeviceJob.was_launched

    def late(job: DeviceJob, layers: int) -> None:
        wait_until(lambda: job.work.staged.words.moved)
        assert not job._finished.wait(0.05)
        was_launched(job, layers)

    monkeypatch.setattr(DeviceJob, "was_launched", late)
    job, stream = held(rig), rig.driver.create_stream()
    job.grant(LAYERS, LAYERS, None)
    job.order_stream(stream, LAYERS)
    assert job.wait_released(10)


@pytest.mark.parametrize("granted", [0, 2])
def test_a_read_is_held_no_longer_than_its_time_out(rig_of: RigOf, granted: int) -> None:
    rig = rig_of()
    want, job = rig.contents(SENT), held(rig, timeout_s=0.2)
    job.grant(granted, 0, None)
    assert job.wait_released(10)
    assert rig.contents(TARGETS) == want


def test_a_lost_command_of_another_job_does_not_end_a_held_read(rig_of: RigOf) -> None:
    rig = rig_of()
    want = rig.contents(SENT)
    jobs = [held(rig), held(rig)]
    jobs[0].grant(2, 2, None)  # one has begun, the other has not
    layers_done(rig, jobs[0], 2)
    rig.kernels.lost = {3}
    lost = rig.submit(OPCODE_WRITE, list(range(PAGES)))
    assert lost.wait_layers(LAYERS, 10)
    wait_until(lambda: lost.done)
    assert not lost.wait_released(0)
    with pytest.raises(DeviceTimeout, match="close the engine"):
        held(rig)
    rig.kernels.lost = set()
    for job in jobs:
        job.grant(LAYERS, LAYERS, None)
        assert job.wait_released(10)
        assert not job.page_status.any()
    assert rig.contents(TARGETS) == want


def test_a_reset_of_the_drive_ends_held_reads(rig_of: RigOf) -> None:
    rig = rig_of()
    jobs = [held(rig), held(rig)]
    jobs[0].grant(2, 2, None)
    layers_done(rig, jobs[0], 2)
    launched = rig.driver.calls["cuLaunchKernel"]
    rig.controller._queue_pairs[-1].is_dead = True  # as a drive's reset leaves them
    for job in jobs:
        job.grant(LAYERS, LAYERS, None)
        with pytest.raises(DeviceTimeout, match="a drive was reset"):
            job.wait_layers(LAYERS, 10)
    assert rig.driver.calls["cuLaunchKernel"] == launched
    assert not jobs[0].wait_released(0)  # its kernels may have left something
    assert jobs[1].wait_released(0)
    rig.engine.close()
    assert jobs[0].wait_released(0)


def test_held_reads_go_on_if_others_need_their_memory(rig_of: RigOf) -> None:
    """A write whose end the next grant waits for must get staging."""
    rig = rig_of(staging=160 << 10)
    want, jobs = rig.contents(SENT), [held(rig)]
    while rig.engine.stream_queue.staging.arena.in_use == len(jobs) < 8:
        jobs[-1].grant(1, 1, None)
        assert jobs[-1].wait_layers(1, 10)
        assert rig.submit(OPCODE_WRITE, SENT).wait_released(10)
        if jobs[0].granted == LAYERS:
            break
        jobs.append(held(rig))
    assert jobs[0].granted == LAYERS
    assert len(jobs) < 8
    for job in jobs:
        job.release_hold()
        assert job.wait_released(10)
    assert rig.contents(TARGETS) == want


def test_a_cancelled_read_ends_at_once_if_nothing_was_launched(rig_of: RigOf) -> None:
    rig = rig_of()
    launched = rig.driver.calls["cuLaunchKernel"]
    job = held(rig)
    job.cancel()
    assert job.wait_released(0)
    assert (job.page_status == STATUS_CANCELLED).all()
    job.grant(LAYERS, LAYERS, None)
    wait_until(lambda: rig.engine.wait_idle(0.0))
    assert rig.driver.calls["cuLaunchKernel"] == launched
    job = held(rig)
    job.grant(1, 1, None)
    layers_done(rig, job, 1)
    job.cancel()
    assert job.wait_released(10)
    assert not job.page_status.any()


def test_a_cuda_error_in_a_later_window_keeps_the_memory(rig_of: RigOf) -> None:
    rig = rig_of()
    job = held(rig)
    job.grant(2, 2, None)
    layers_done(rig, job, 2)
    rig.driver.fail["cuLaunchKernel"] = 1
    job.grant(LAYERS, LAYERS, None)
    wait_until(lambda: job.done)
    assert not job.wait_released(0)
    wait_until(lambda: rig.engine.wait_idle(0.0))
    assert rig.engine.stream_queue.staging.arena.in_use == 1
    rig.engine.close()
    assert job.wait_released(0)


@pytest.mark.parametrize("granted", [0, 2])
def test_a_close_lets_held_reads_go_on(rig_of: RigOf, granted: int) -> None:
    rig = rig_of()
    want, job = rig.contents(SENT), held(rig)
    job.grant(granted, LAYERS, None)
    rig.engine.close()
    assert job.wait_released(0)
    assert rig.contents(TARGETS) == want
    with pytest.raises(PoolClosed):
        held(rig)


def test_a_gated_read_is_held_after_its_gate_has_opened(rig_of: RigOf) -> None:
    rig = rig_of()
    digests = np.zeros((len(SENT), LAYERS), np.uint64)
    assert rig.submit(OPCODE_WRITE, SENT, digests=digests).wait_released(10)
    unknown = np.zeros_like(digests)
    job = rig.submit(OPCODE_READ, TARGETS, digests=unknown, compare=True, gated=True, held=True)
    job.grant(1, 1, None)
    assert not job.wait_layers(1, 0.05)
    unknown[:] = digests
    job.open_gate()
    layers_done(rig, job, 1)
    job.grant(LAYERS, LAYERS, None)
    assert job.wait_released(10)
    assert not job.page_status.any()


def test_the_persistent_kernel_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_rig("persistent", tmp_path, monkeypatch) as rig:
        assert not rig.engine.holds
        assert held(rig).wait_released(10)


def test_a_gate_that_opens_after_the_cancellation_touches_nothing(rig_of: RigOf) -> None:
    """Also if the engine refuses jobs by then: the words may be another job's."""
    rig = rig_of()
    job = rig.submit(OPCODE_READ, TARGETS, gated=True)
    job.cancel()
    assert job.wait_released(0)
    rig.controller._queue_pairs[-1].is_dead = True
    job.open_gate()
    assert not any(job.work.staged.words.is_ready(layer) for layer in range(LAYERS))

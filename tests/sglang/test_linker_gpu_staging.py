"""Staging of pages in GPU memory: its size by the longest context, and long loads through less.

On a stand-in for the CUDA driver; no GPU runs.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import linker_engine as engine
import pytest
from gio_uring.cuda_stand_in import StandInDriver
from linker_engine import PAGE, names, wait_for
from linker_gpu import GpuRig, RigOf
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from tutti.base import memory_pressure
from tutti.errors import CapacityError
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.moved_job import MovedJob
from tutti.gio_uring.job import Job
from tutti.integration.sglang.direct import staging_size
from tutti.integration.sglang.direct.layer_marks import LayerMarks
from tutti.integration.sglang.direct.staging_copy import StagingCopier

SLICE = 2 * 4 * 32 * 2 * PAGE  # bytes of a page in one layer: K and V of four heads
ALL = list(range(48))


def staging_of(rig: GpuRig) -> tuple[int, str]:
    """Bytes of one direction, and the reason."""
    stats = rig.stored_pool.store.stats()
    return int(stats["gpu_staging_nbytes"]) // 2, str(stats["gpu_staging_reason"])


@pytest.mark.parametrize("gpu_engine", ["host", KINDS[0]])
@pytest.mark.parametrize("pages", [4, 32])
def test_staging_holds_two_loads_of_the_longest_context(
    rig_of: RigOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pages: int,
    gpu_engine: str,
) -> None:
    monkeypatch.setattr(staging_size, "_FLOOR_NBYTES", 1 << 12)

    def pool(**options: Any) -> ReqToTokenPool:
        return ReqToTokenPool(**{**options, "max_context_len": pages * PAGE})

    monkeypatch.setattr(engine, "ReqToTokenPool", pool)
    caplog.set_level(logging.INFO, "tutti.integration.sglang.direct.gpu_copies")
    with rig_of(gpu_engine=gpu_engine, profile="off") as rig:
        nbytes, reason = staging_of(rig)
        layers = engine.LAYERS * pages * SLICE  # fewer than four
        assert 2 * layers < nbytes <= 2 * (layers + (16 << 10))
        assert f"enough for 4 layers of two transfers of {pages * PAGE} tokens" in reason
        if gpu_engine == "host":
            rig.round_trip(ALL, ALL)  # any number of pages
    lines = [r.getMessage() for r in caplog.records if "; staging: " in r.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


@pytest.mark.parametrize(
    ("nbytes_of_node", "floor", "expected"),
    [(16 << 20, 4096, 1 << 20), (0, 512 << 10, 512 << 10), (1 << 40, 8 << 20, 8 << 20)],
    ids=["the node's memory", "the least", "more than needed"],
)
def test_staging_is_bounded_by_the_nodes_memory_and_by_the_least(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch, nbytes_of_node: int, floor: int, expected: int
) -> None:
    monkeypatch.setattr(staging_size, "_FLOOR_NBYTES", floor)
    monkeypatch.setattr(staging_size, "total_nbytes", lambda: nbytes_of_node)
    with rig_of(profile="off") as rig:
        nbytes, reason = staging_of(rig)
        assert nbytes == expected
        assert ("not enough" in reason) == (expected < 8 << 20)
        rig.round_trip(ALL, ALL)


def test_ranks_load_as_much_whatever_is_free_when_they_start(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes a rank's answer to a load as that of all of them."""
    monkeypatch.setattr(staging_size, "_FLOOR_NBYTES", 4096)
    most = []
    for free_kib in (1 << 15, 1 << 30):
        facts = {"MemTotal:": 1 << 16, "MemAvailable:": free_kib}
        monkeypatch.setattr(memory_pressure, "_numbers", lambda path, facts=facts: facts)
        with rig_of(gpu_engine=KINDS[0], profile="off") as rig:
            most.append(rig.stored_pool.batch_pages_max)
    assert most[0] == most[1] and most[0] is not None


def test_a_layer_is_there_before_a_later_chunk_was_read_to_its_end(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's copies are followed by a look at which chunks have their last layer by then."""
    read: dict[int, list[bool]] = {}
    put = MovedJob._put_layer

    def noted(job: MovedJob, layer: int) -> None:
        put(job, layer)
        chunks, last = job._route.cells.chunks, job.layers - 1
        if job._route.is_read:
            rig.driver.call(
                job._stream_queue.stream_of(layer),
                lambda: read.update({layer: [c.words.is_ready(last) for c in chunks]}),
            )

    options = {"gpu_staging": "144KiB", "profile": "off", "backlog_share": 1.0}
    with rig_of(**options) as rig:
        monkeypatch.setattr(MovedJob, "_put_layer", noted)
        rig.round_trip(ALL, ALL)
    assert sorted(read) == list(range(engine.LAYERS))
    assert len(read[0]) >= 8, "chunks"
    assert not any(read[0]), "layer 0 is in its pages, and no chunk has its last layer"
    assert read[engine.LAYERS - 1] == [True] * len(read[0])


@pytest.mark.parametrize("kind", ["host", *KINDS])
def test_staging_without_room_for_a_page_is_refused_at_the_start(rig_of: RigOf, kind: str) -> None:
    options = {"gpu_staging": "4KiB", "gpu_engine": kind}
    with (
        pytest.raises(CapacityError, match="page of one layer"),
        rig_of(**options),
    ):
        pass


def test_the_schedulers_thread_waits_for_no_command(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call but the one that ends a batch returns while the SSD stands still."""
    held: list[Job] = []
    submit = Engine.submit

    def frozen(native: Engine, *arguments: Any, **options: Any) -> Job:
        job = submit(native, *arguments, **{**options, "held": True})
        held.append(job)
        return job

    with rig_of(read_ahead_share=0.0, profile="off") as rig:
        want = rig.stored(8)
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "submit", frozen)
            assert rig.lookup(names(8)) == 8
            assert rig.load(names(8), range(16, 24))
            assert rig.load(names(2), range(30, 32), "other")
            assert rig.linker.cancel_queued_load("other")
            index = rig.linker.start_layer_wise_loading()
            rig.linker.layer_done_counter.set_consumer(index)
            for layer in range(engine.LAYERS):
                rig.linker.layer_done_counter.wait_until(layer)  # the forward's stream waits
            assert rig.offload(names(4, "new"), range(4))
            assert rig.linker.num_completed_offloads() == 0
            assert rig.lookup(names(8), "later") == 8
            wait_for(lambda: len(held) == 1)  # the load; the offload comes behind it
            assert not any(job.done for job in held), "a call waited for the SSD"
        for job in held:
            job.grant(engine.LAYERS, 0, None)
        assert rig.linker.finish_layer_wise_loading(index)
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert rig.linker.pop_completed_offload()
        assert rig.content(range(16, 24)) == want


def test_words_that_a_forward_still_writes_stay_pinned() -> None:
    """The streams of copies have ended then, but not that of the model."""
    driver = StandInDriver()
    marks, forward, word = LayerMarks(driver), driver.create_stream(), driver.allocate(256)
    batch = marks.take(2)
    assert batch is not None
    driver.wait_value(forward, word, 1)  # a kernel that is still at work
    batch.around(0, forward, lambda: None)
    marks.close(0.05)
    assert marks._pinned.address in driver._registered
    driver.array(word)[0] = 1
    marks.close(10.0)
    assert batch.is_written and marks._pinned.address not in driver._registered


def test_a_wait_counts_from_where_the_stream_reaches_it(rig_of: RigOf) -> None:
    """Also while its caller still waits for the layer to be enqueued: the stream may run dry."""
    with rig_of() as rig:
        gpu = rig.linker._gpu
        copier = StagingCopier(gpu, 2, "batch")
        marks, deadline_s, found = copier._marks, time.monotonic() + 20, list[bool]()
        thread = threading.Thread(target=lambda: found.append(copier.order(0, deadline_s)))
        thread.start()
        wait_for(lambda: marks._words[0, 0])
        assert not marks.look()
        copier.copy_layer([], deadline_s)
        copier.end()
        thread.join(20)
        wait_for(lambda: marks.is_written)
        [(layer, waited_s)] = marks.look()
        assert layer == 0 and waited_s > 0
        assert found == [True]
        assert copier.order(0, deadline_s)
        assert copier.wait_over(deadline_s)


@pytest.mark.parametrize("is_over", [True, False])
def test_marks_have_an_end_if_the_layer_is_never_enqueued(rig_of: RigOf, is_over: bool) -> None:
    with rig_of() as rig:
        copier = StagingCopier(rig.linker._gpu, 2, "batch")
        if is_over:
            copier.end()
        assert copier.order(0, time.monotonic() + 0.02) == is_over
        wait_for(lambda: copier._marks.is_written)
        copier.end()
        assert copier.wait_over(time.monotonic() + 20)


def test_a_wait_with_its_marks_is_one_call() -> None:
    """After each call the forward's thread may wait for the GIL."""
    driver = StandInDriver()
    marks, forward, event = LayerMarks(driver), driver.create_stream(), driver.create_event()
    batch = marks.take(1)
    assert batch is not None
    before = driver.entered
    batch.around(0, forward, partial(driver.stream_wait_event, forward, event))
    assert driver.entered == before + 1
    wait_for(lambda: batch.is_written)
    marks.close(10.0)
    driver.close()

"""Long transfers of the GPU engine `host`: chunks of a layer, and what is on its streams.

On a stand-in for the CUDA driver: no GPU is involved.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from gio_uring.gpu.test_host_engine import memory_of, rig_over_memory
from memory_controller import Faults
from waiting import wait_until

from store.pools import LAYOUT, some_keys
from tutti.errors import ConfigError, CudaError, DeviceTimeout, Unsupported
from tutti.gio_uring.gpu import moved_job, overlap, stream_queue
from tutti.gio_uring.gpu.host_engine import part_of
from tutti.gio_uring.gpu.stream_queue import StreamQueue
from tutti.gio_uring.gpu.verifier import Verification
from tutti.gio_uring.iocb import Extents
from tutti.placement.load_plan import PartRows
from tutti.transfers import loader

#: Staging in which a read of 24 pages goes in more than eight chunks.
SHORT = 80 << 10


def test_the_next_transfer_is_read_while_the_one_before_is_copied(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 8)
        word = rig.driver.allocate(256)
        rig.driver.wait_value(rig.gpu._loads.stream, word, 1)  # no copy begins before
        tickets = [
            rig.store.load(keys[n : n + 4], list(range(8 + n, 12 + n)))
            for n in (0, 4)  # each takes less than half of the staging
        ]
        reads = [job for t in tickets for part in t._progress.parts for job in part.job._jobs]  # type: ignore[attr-defined]
        assert len(reads) == 2
        assert all(job.wait_layers(LAYOUT.layers, 10.0) for job in reads), "both were read"
        assert not any(ticket.done for ticket in tickets), "none was copied"
        rig.driver.array(word)[0] = 1
        for ticket in tickets:
            ticket.wait(10)
        assert [rig.pool.read(8 + n) for n in range(8)] == contents


def test_a_layer_is_copied_while_the_one_before_is_and_tells_of_both(
    rng: np.random.Generator,
) -> None:
    """Two streams take layers by turns: the first one stands still, and layer 1 is copied."""
    with rig_over_memory(verify="off") as rig:
        pages = list(range(8))
        keys, contents = rig.stored(rng, 8)
        assert rig.store.stats()["gpu_streams"] == 4
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = 0
        word, compute = rig.driver.allocate(256), rig.driver.create_stream()
        width = sum(LAYOUT.segments)
        rig.driver.wait_value(rig.gpu._loads.streams[0], word, 1)
        ticket = rig.store.load(keys, pages)
        ticket.order_stream(compute, 1)
        wait_until(
            lambda: [rig.layer_bytes(p, 1) for p in pages] == [c[width:][:width] for c in contents],
            "layer 1 waits for the copies of layer 0",
        )
        assert not any(rig.layer_bytes(p, 0).strip(b"\0") for p in pages)
        assert not rig.driver.is_stream_done(compute), "layer 1 tells of layer 0, too"
        rig.driver.array(word)[0] = 1
        ticket.wait(10)
        assert [rig.pool.read(page) for page in pages] == contents


def test_a_layer_is_there_before_the_last_layer_of_any_chunk_was_read(
    rng: np.random.Generator,
) -> None:
    """Chunks are cut by layer first: eight or more of them, and the medium stops behind layer 1."""
    with rig_over_memory(staging_nbytes=SHORT, verify="off") as rig:
        pages = list(range(24))
        keys, contents = rig.stored(rng, 24)
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = 0
        commands = rig.store.engine.stats().commands
        ticket = rig.store.load(keys, pages)
        (part,) = ticket._progress.parts
        chunks = len(part.job._jobs)  # type: ignore[attr-defined]
        assert chunks >= 8
        ticket.wait(10)
        per_layer = (rig.store.engine.stats().commands - commands) // LAYOUT.layers
        assert [rig.pool.read(page) for page in pages] == contents

        memory_of(rig).set_faults(Faults(stall_from=2 * per_layer))
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = 0
        ticket = rig.store.load(keys, pages)
        ticket.wait_layer(0, 10)
        width = sum(LAYOUT.segments)
        assert [rig.layer_bytes(p, 0) for p in pages] == [c[:width] for c in contents]
        assert not any(rig.layer_bytes(p, LAYOUT.layers - 1).strip(b"\0") for p in pages), (
            "the last layer of some chunk was read"
        )
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        assert ticket.wait_settled(10)


@pytest.mark.parametrize(
    "staging_nbytes", [24 << 10, 48 << 10, 64 << 10, SHORT, 200 << 10, 1 << 20]
)
@pytest.mark.parametrize("pages", [1, 2, 7, 23])
def test_any_number_of_pages_goes_through_any_staging(
    seed: int, staging_nbytes: int, pages: int
) -> None:
    rng = np.random.default_rng(seed)
    with rig_over_memory(seed=seed, staging_nbytes=staging_nbytes) as rig:
        keys, contents = rig.stored(rng, pages)
        for _ in range(2):
            target = rng.permutation(24)[:pages].tolist()
            rig.store.load(keys, target).wait(10)
            assert [rig.pool.read(page) for page in target] == contents


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_a_held_load_of_several_kinds_of_objects_gets_its_staging(
    kinds: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs take all of the staging, and are granted once all jobs are submitted."""
    none = np.zeros(0, np.int64)
    parts = [
        PartRows(rows, none, verify=False, whole=False)
        for rows in np.array_split(np.arange(24), kinds)
    ]
    monkeypatch.setattr(loader, "partition", lambda *_: (None, parts))
    with rig_over_memory(staging_nbytes=320 << 10, verify="off", timeout_s=3.0) as rig:
        keys, contents = rig.stored(rng, 24)
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = 0
        pages = np.arange(24, dtype=np.uint32)
        progress = rig.store._loader.load(keys, pages, rig.pool.memory, held=True)
        if kinds < 3:
            time.sleep(0.02)
            assert progress.layers_ready == 0, "nothing was granted"
        progress.grant(LAYOUT.layers, 2**32 - 1, None)
        assert progress.wait_settled(10) and not progress.status(1).any()
        assert [rig.pool.read(page) for page in range(24)] == contents


def test_a_put_frees_its_stream_while_the_medium_stands_still(rng: np.random.Generator) -> None:
    """Nothing on the stream of stores waits for the SSD, so it may share a channel."""
    with rig_over_memory(timeout_s=30.0) as rig:
        keys, pages = some_keys(rng, 12), list(range(12))
        rig.fill(pages, rng)
        memory_of(rig).set_faults(Faults(stall_from=1))
        waits = rig.driver.calls.get("cuStreamWaitValue32", 0)
        ticket = rig.store.put(keys, pages)
        wait_until(rig.gpu._stores.is_idle, "the copies wait for the medium")
        assert not ticket.done
        assert rig.driver.calls.get("cuStreamWaitValue32", 0) == waits
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        assert ticket.wait(10).stored == 12


def test_a_page_larger_than_the_staging_is_put_without_a_wait_on_the_stream(
    rng: np.random.Generator,
) -> None:
    with rig_over_memory(staging_nbytes=24 << 10) as rig:
        (content,) = rig.fill([3], rng)
        assert len(content) > 24 << 10
        waits = rig.driver.calls.get("cuStreamWaitValue32", 0)
        keys = some_keys(rng, 1)
        assert rig.store.put(keys, [3]).wait(10).stored == 1
        assert rig.driver.calls.get("cuStreamWaitValue32", 0) == waits
        rig.store.load(keys, [5]).wait(10)
        assert rig.pool.read(5) == content


def test_a_submitter_enqueues_the_first_layers_alone(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    run = StreamQueue._run

    def late(queue: StreamQueue) -> None:
        assert go_on.wait(10)
        run(queue)

    with rig_over_memory(verify="off") as rig:
        keys, contents = rig.stored(rng, 8)
        monkeypatch.setattr(StreamQueue, "_run", late)
        copies = rig.driver.calls["cuMemcpyBatchAsync"]
        ticket = rig.store.load(keys, list(range(8, 16)))
        assert rig.driver.calls["cuMemcpyBatchAsync"] - copies == stream_queue.FIRST_LAYERS
        ticket.wait_layer(stream_queue.FIRST_LAYERS - 1, 10)
        assert not ticket.done
        other = rig.store.load(keys, list(range(16, 24)))  # behind the one before
        assert rig.driver.calls["cuMemcpyBatchAsync"] - copies == stream_queue.FIRST_LAYERS
        go_on.set()
        ticket.wait(10)
        other.wait(10)
        for first in (8, 16):
            assert [rig.pool.read(page) for page in range(first, first + 8)] == contents


@pytest.mark.parametrize("verify", ["off", "always"])
def test_all_layers_of_a_transfer_go_on_the_stream_in_a_few_calls(
    rng: np.random.Generator, verify: str
) -> None:
    """In each the thread releases the GIL, and another may hold it for 5 ms."""
    with rig_over_memory(verify=verify) as rig:
        keys, pages = some_keys(rng, 8), list(range(8))
        contents = rig.fill(pages, rng)
        for move in (lambda: rig.store.put(keys, pages), lambda: rig.store.load(keys, pages)):
            before, calls = rig.driver.entered, sum(rig.driver.calls.values())
            move().wait(10)
            assert rig.driver.entered - before <= 2  # the first layers, and all others
            assert sum(rig.driver.calls.values()) - calls >= 3 * LAYOUT.layers
        assert [rig.pool.read(page) for page in pages] == contents


def test_what_waits_behind_the_medium_is_bounded(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_queue, "CALLS_MAX", 40)
    monkeypatch.setattr("tutti.gio_uring.gpu.moved_job.CALLS_MAX", 40)
    with rig_over_memory(has_copy_batch=False, plain=True, verify="off", timeout_s=30.0) as rig:
        keys, contents = rig.stored(rng, 8)
        memory_of(rig).set_faults(Faults(stall_from=1))
        target = [8, 10, 12, 14, 16, 18, 20, 22]  # sixteen copies a layer
        ticket = rig.store.load(keys, target)
        time.sleep(0.05)
        queues = [rig.driver._streams[stream][0] for stream in rig.gpu._loads.streams]
        one_layer = 2 * len(target) + 4
        assert sum(len(queue.work) for queue in queues) <= 40 + one_layer
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        ticket.wait(10)
        assert [rig.pool.read(page) for page in target] == contents


def test_a_queue_that_cannot_follow_a_stream_moves_nothing_more(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_over_memory(verify="off", timeout_s=5.0) as rig:
        keys, _ = rig.stored(rng, 8)
        compute = rig.driver.create_stream()
        memory_of(rig).set_faults(Faults(stall_from=1))
        monkeypatch.setattr("tutti.gio_uring.gpu.moved_job.CALLS_MAX", 1)  # layers wait to be put
        first = rig.store.load(keys, list(range(8, 16)))

        def refused(*_: object) -> bool:
            raise CudaError("cuStreamWaitEvent failed; a test said so", call="cuStreamWaitEvent")

        monkeypatch.setattr(stream_queue._Follow, "put_next", refused)
        rig.gpu._loads.follow(compute)
        second = rig.store.load(keys, list(range(16, 24)))
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        first.wait(10)
        with pytest.raises((CudaError, DeviceTimeout)):
            second.wait(10)
        assert second.wait_settled(10)


@pytest.mark.parametrize("lost", ["together", "is_event_done"])
def test_loads_end_when_the_context_is_lost(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """While layers wait to be put on the stream, or once all are there."""
    with rig_over_memory(timeout_s=60.0) as rig:
        keys, _ = rig.stored(rng, 8)
        call, begun = getattr(rig.driver, lost), threading.Event()

        def fail(*arguments: Any) -> Any:
            is_feeder = threading.current_thread().name == "tutti-feed"
            if not (is_feeder if lost == "together" else begun.is_set()):
                return call(*arguments)
            raise CudaError(f"{lost}: a test said so", call=lost, code=719)

        rig.gpu.first_layers(1)
        with monkeypatch.context() as patch:
            patch.setattr(Verification, "put_outcome", lambda *_: None)  # it does not come
            patch.setattr(rig.driver, lost, fail)
            tickets = [rig.store.load(keys, list(range(n, n + 8))) for n in (8, 16)]
            begun.set()
            for ticket in tickets:
                with pytest.raises(CudaError, match="a test said so"):
                    ticket.wait(10)
            assert rig.store._core.wait_quiet(10)
            wait_until(lambda: rig.gpu._loads._feeder is None)
        assert all(ticket.wait_settled(10) for ticket in tickets)


def test_memory_of_a_gpu_is_registered_once() -> None:
    with rig_over_memory() as rig:
        with pytest.raises(ConfigError, match="do not register it again"):
            rig.store.register(rig.pool)
        rig.store.unregister(rig.pool)
        assert not rig.store._resources.memories
        rig.store.register(rig.pool)


def test_a_call_that_the_driver_lacks_ends_the_load(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 8)

        def lacks(*_: object) -> None:
            raise Unsupported("cuMemcpyBatchAsync: not found; install a newer driver")

        with monkeypatch.context() as patch:
            patch.setattr(rig.driver, "copy_batch", lacks)
            ticket = rig.store.load(keys, list(range(8, 16)))
        with pytest.raises(Unsupported, match="newer driver"):
            ticket.wait(10)
        assert ticket.wait_settled(10)
        rig.store.load(keys, list(range(8, 16))).wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents


def test_a_part_of_extents_is_the_same_slices(rng: np.random.Generator) -> None:
    for _ in range(50):
        runs = int(rng.integers(1, 6))
        count = rng.integers(1, 5, runs)
        slba = np.cumsum(rng.integers(100, 200, runs)).astype(np.uint64)
        whole = Extents(slba, np.arange(1, runs + 1), count, 3, 1000)
        cuts = np.sort(rng.integers(0, int(count.sum()) + 1, 2)).tolist()
        slices = [
            (int(first) + 3 * i, int(namespace))
            for first, namespace, n in zip(slba, whole.nsid, count, strict=True)  # type: ignore[arg-type]
            for i in range(n)
        ]
        part = part_of(whole, *cuts)
        found = [
            (int(first) + 3 * i, int(namespace))
            for first, namespace, n in zip(part.slba, part.nsid, part.count, strict=True)  # type: ignore[arg-type]
            for i in range(n)
        ]
        assert found == slices[slice(*cuts)]
        assert (part.slice_nlb, part.layer_stride_nlb) == (3, 1000)


@pytest.mark.parametrize("pages", [8, 24])
def test_calls_and_waits_for_a_layer_do_not_depend_on_the_pages(
    rng: np.random.Generator, pages: int
) -> None:
    with rig_over_memory(verify="off") as rig:
        keys, _ = rig.stored(rng, pages)
        rig.store.load(keys, list(range(pages))).wait(10)
        names = ("cuStreamWaitValue32", "cuMemcpyBatchAsync", "cuEventRecord")
        before = {name: rig.driver.calls.get(name, 0) for name in names}
        rig.store.load(keys, rng.permutation(24)[:pages].tolist()).wait(10)
        found = {name: rig.driver.calls[name] - before[name] for name in names}
        assert found == dict.fromkeys(names, LAYOUT.layers)


def test_a_cuda_error_of_a_thread_that_looks_ends_the_load(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that puts a layer does: no waiter is left with a timeout."""
    for module in (moved_job, overlap):
        monkeypatch.setattr(module, "CALLS_MAX", 1)  # one layer at a time
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 8)
        word = rig.hold_copies()
        ticket = rig.store.load(keys, list(range(8, 16)))
        rig.driver.fail["cuEventQuery"] = 1
        with pytest.raises(CudaError, match="cuEventQuery"):
            ticket.wait_layer(LAYOUT.layers - 1, 4)
        word[0] = 1
        assert ticket.wait_settled(10)
        rig.store.load(keys, list(range(8, 16))).wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents

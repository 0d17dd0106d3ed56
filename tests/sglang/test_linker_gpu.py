"""TuttiLinker over pools that a stand-in for the CUDA driver takes for GPU memory; no GPU runs."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linker_engine as engine
import numpy as np
import pytest
import torch
from linker_engine import FlatProfile, ahead_pages, names, wait_for
from linker_gpu import GpuRig, RigOf, gpu_rig, stand_in_gpu
from linker_states import KINDS, StatesRig
from node.agents import LOOKUP_S, running, start_process
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from test_linker_profile import Batch

from tutti.errors import DeviceTimeout, PoolInUse, Unsupported
from tutti.integration.sglang import identity
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct.gpu_copies import Gpu, open_gpu
from tutti.integration.sglang.direct.model_steps import STEPS
from tutti.scheduler.loads_and_writes import Phase

SLOT = 3 * 2 * 4096
ONE_QUEUE: dict[str, object] = {"has_copy_batch": False, "queues": 1}


@pytest.mark.parametrize(
    ("kind", "ahead", "driver_options"),
    [("mha", 0.0, {}), ("mla", 0.5, {}), ("mha", 0.5, ONE_QUEUE), ("mla", 0.0, ONE_QUEUE)],
    ids=["mha-streams", "mla-ahead-streams", "mha-ahead-one queue", "mla-one queue"],
)
def test_pages_come_back_byte_for_byte(
    rig_of: RigOf, kind: str, ahead: float, driver_options: dict[str, object]
) -> None:
    with rig_of(kind, driver_options=driver_options, read_ahead_share=ahead) as rig:
        rig.round_trip(range(3, 13), [40, 20, 21, 22, 60, 1, 2, 30, 31, 5], ahead)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_go_through_an_agent_and_come_back_after_it_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Staging is registered with the controller of each session in turn."""
    # A look-up that takes longer than the default would end the session, and another one begin.
    patient = partial(identity.connect, lookup_timeout_s=LOOKUP_S)
    monkeypatch.setattr(identity, "connect", patient)
    path, folder = tmp_path / "s", tmp_path / "pools"
    folder.mkdir()
    agent = start_process(path, folder)
    try:
        with gpu_rig(Path(f"unix:{path}"), monkeypatch, kind, read_ahead_share=0.0) as rig:
            store = rig.stored_pool.store
            rig.fill(1)
            want = rig.content(range(3, 13))
            assert rig.store(names(10), range(3, 13))
            for lives, target in ((0, range(20, 30)), (1, range(40, 50))):
                if lives:
                    agent.kill()
                    agent.communicate(timeout=engine.WAIT_S)
                    agent = start_process(path, folder)
                    wait_for(lambda: store.connected and store.recovered)
                    assert store.stats()["reconnects"] == lives
                rig.wipe()
                # The agent proves what a kill left in the background, after its recovery.
                wait_for(lambda: rig.lookup(names(12)) == 10)
                rig.check_restored(names(10), target, want)
            # All layers of the offload, in one put or several, and of two loads.
            moved = int(str(store.stats()["gpu_layers"]))
            assert moved >= 3 * engine.LAYERS and moved % engine.LAYERS == 0
    finally:
        agent.kill()
        agent.communicate(timeout=engine.WAIT_S)


def test_an_agents_pages_are_moved_by_the_engine_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running(tmp_path) as agent,
        pytest.raises(Unsupported, match="gpu_engine launch"),
        gpu_rig(Path(f"unix:{agent.path}"), monkeypatch, gpu_engine="launch"),
    ):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_states_windows_and_packed_pools_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with stand_in_gpu(monkeypatch), StatesRig(tmp_path, kind) as rig:
        rig.round_trip()


def test_the_gpu_compares_the_digests_of_windows_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several pages, although the staging of windows has the size for one."""
    options = {"read_ahead_share": 0.0, "profile": "off"}
    with stand_in_gpu(monkeypatch), StatesRig(tmp_path, "windows", **options) as rig:
        rig.round_trip()
        for name, pool in rig.linker.stored_pools.items():
            compared = pool.store.stats()["gpu_verified_layers"]
            assert compared >= len(pool.kv_pool.spans), name


def test_the_forwards_stream_waits_and_not_its_thread(rig_of: RigOf) -> None:
    with rig_of(read_ahead_share=0.0) as rig:
        rig.fill(2)
        want = [rig.content(range(8), [layer]) for layer in range(engine.LAYERS)]
        assert rig.store(names(8), range(8))
        rig.wipe()
        busy = rig.hold(rig.streams.forward)  # the batch before still runs, on these very pages
        assert rig.load(names(8), range(8, 16))
        index = rig.linker.start_layer_wise_loading()
        counter = rig.linker.layer_done_counter
        counter.set_consumer(index)
        seen = []
        for layer in range(engine.LAYERS):
            counter.wait_until(layer)  # returns although nothing can have moved
            counter.wait_until(layer)
            seen.append(rig.seen_by_forward(range(8, 16), layer))
        time.sleep(0.05)
        assert rig.content(range(8, 16)) == [bytes(len(c)) for c in rig.content(range(8, 16))]
        busy[0] = 1
        assert rig.linker.finish_layer_wise_loading(index)
        rig.drain()
        for layer in range(engine.LAYERS):
            assert b"".join(part.tobytes() for part in seen[layer]) == b"".join(want[layer])


@pytest.mark.parametrize("held", ["copies", "batch before"])
def test_the_time_of_a_load_has_the_copies_in_it_and_the_batch_before_not(
    rig_of: RigOf, held: str
) -> None:
    with rig_of(read_ahead_share=0.0) as rig:
        rig.stored(8)
        stream = rig.linker._gpu.copy_stream if held == "copies" else rig.streams.forward
        busy = rig.hold(stream)
        assert rig.load(names(8), range(8, 16))
        index = rig.linker.start_layer_wise_loading()
        batch = rig.linker.layer_done_counter._batches[index]
        copier = batch._copier
        wait_for(lambda: bool(batch._plans and batch._plans[0].fresh))
        (read,) = batch._plans[0].fresh
        wait_for(lambda: read.ended_s > read.began_s)  # the medium is through
        if held == "copies":
            wait_for(lambda: copier.free_s > 0)
        released_s = time.monotonic()
        assert not copier.ended_s
        busy[0] = 1
        assert rig.linker.finish_layer_wise_loading(index)
        assert copier.ended_s >= released_s
        if held == "copies":
            assert batch.took_s >= released_s - max(read.began_s, copier.free_s)
        else:
            wait_for(lambda: copier.free_s > 0)
            alone_s = max(read.ended_s - read.began_s, copier.ended_s - released_s)
            assert copier.free_s >= released_s and batch.took_s <= alone_s


def test_pools_that_cannot_be_opened_give_the_gpu_back(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], Gpu.close

    def counted(gpu: Gpu, timeout_s: float) -> None:
        closed.append(gpu)
        close(gpu, timeout_s)

    with rig_of() as rig:
        monkeypatch.setattr(Gpu, "close", counted)
        with pytest.raises(PoolInUse), rig_of():
            pass
        assert len(closed) == 1 and closed[0] is not rig.linker._gpu


def test_the_end_waits_for_all_copies(rig_of: RigOf) -> None:
    with rig_of() as rig:
        want = rig.stored(4)
        rig.wipe()
        assert rig.lookup(names(4)) == 4
        wait_for(lambda: ahead_pages(rig.linker) == 4)
        busy = rig.hold(rig.linker._gpu.copy_stream)  # nothing is left to do but copies
        assert rig.load(names(4), range(8, 12))
        index = rig.linker.start_layer_wise_loading()
        ends: list[bool] = []
        thread = threading.Thread(
            target=lambda: ends.append(rig.linker.finish_layer_wise_loading(index))
        )
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        busy[0] = 1
        thread.join(30)
        assert ends == [True]
        assert rig.content(range(8, 12)) == want


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_a_key_is_read_once_however_many_slots_want_it(rig_of: RigOf, ahead: float) -> None:
    with rig_of(load_staging="200KiB", read_ahead_share=ahead) as rig:
        want = rig.stored(8)
        rig.wipe()
        before = rig.stored_pool.store.stats()["loaded"]
        if ahead:
            assert rig.lookup(names(2)) == 2
            wait_for(lambda: ahead_pages(rig.linker) == 2)
        assert rig.load(names(8), range(8, 16), "a")
        assert rig.load(names(5), range(16, 21), "b")
        assert rig.load(names(8)[:2], range(30, 32), "c")
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        wait_for(lambda: rig.stored_pool.store.stats()["loaded"] - before == 8)
        assert rig.content(range(8, 16)) == want
        assert rig.content(range(16, 21)) == want[:5]
        assert rig.content(range(30, 32)) == want[:2]
        assert rig.driver.local_batches, "from a slot that was read to others"
        assert rig.content([0, 7, 21, 32]) == [bytes(len(want[0]))] * 4, "no other page was touched"


def test_offloads_read_pages_after_the_forward_wrote_them(rig_of: RigOf) -> None:
    with rig_of() as rig:
        busy = rig.hold(rig.streams.forward)
        assert rig.offload(names(6), range(6))
        time.sleep(0.05)
        assert not rig.linker.num_completed_offloads()
        rig.fill(5)  # what the forward computes
        want = rig.content(range(6))
        busy[0] = 1
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert rig.linker.pop_completed_offload()
        rig.wipe()
        rig.check_restored(names(6), range(20, 26), want)


def test_a_backlog_beyond_its_bound_is_copied_out_then_dropped(rig_of: RigOf) -> None:
    with rig_of(backlog_share=0.0, store_staging=8 * SLOT) as rig:
        rig.fill(6)
        want = rig.content(range(6))
        assert rig.offload(names(6), range(6))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        rig.wipe()  # the pages are free, and may change
        assert rig.linker.pop_completed_offload()
        assert rig.offload(names(9, "more"), range(9))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert not rig.linker.pop_completed_offload(), "more than staging holds"
        wait_for(lambda: rig.lookup(names(6)) == 6)
        rig.check_restored(names(6), range(20, 26), want)


def test_what_the_gpu_does_not_copy_out_stays_locked(rig_of: RigOf) -> None:
    with rig_of(backlog_share=0.0, load_timeout_s=0.2) as rig:
        busy = rig.hold(rig.linker._gpu.leaving)
        assert rig.offload(names(4), range(4))
        wait_for(lambda: bool(rig.linker.error_log.counts))
        assert rig.linker.num_completed_offloads() == 0
        with pytest.raises(DeviceTimeout, match="restart the server"):
            rig.linker.reset()
        busy[0] = 1
        rig.linker.reset()


def test_pages_that_the_gpu_copied_out_too_late_are_sglangs_again(rig_of: RigOf) -> None:
    with rig_of(backlog_share=0.0, load_timeout_s=0.2) as rig:
        free = rig.stored_pool.stores.free
        busy = rig.hold(rig.linker._gpu.leaving)
        assert rig.offload(names(4), range(4))
        wait_for(lambda: bool(rig.linker.error_log.counts))
        assert rig.linker.num_completed_offloads() == 0, "the GPU may still read them"
        busy[0] = 1
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert not rig.linker.pop_completed_offload(), "they are not stored"
        assert rig.linker.backlog.locked == 0
        assert rig.stored_pool.stores.free == free
        assert rig.store(names(4), range(4)), "and what comes later is served"


def test_sglang_unmaps_its_kv_when_nothing_reads_it(rig_of: RigOf, real_manager: Any) -> None:
    """Through SGLang's own request, with the plugin."""
    with rig_of(backlog_share=0.0, load_timeout_s=0.2) as rig:
        paused: list[int] = []
        saver = SimpleNamespace(pause=lambda tag: paused.append(rig.linker.backlog.locked))
        real_manager.memory_saver_adapter = saver
        real_manager.is_fully_idle = lambda **_: True
        real_manager.flush_cache = lambda: True
        busy = rig.hold(rig.linker._gpu.leaving)
        assert rig.offload(names(4), range(4))
        with pytest.raises(DeviceTimeout, match="restart the server"):
            real_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        assert not paused
        threading.Timer(0.05, lambda: busy.fill(1)).start()
        kept = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
        real_manager.release_memory_occupation(kept)
        assert paused == [0]


def test_a_wrong_copy_fails_the_batch(rig_of: RigOf) -> None:
    """The GPU digests pages, and compares them after their copies; the CPU does neither."""
    with rig_of(read_ahead_share=0.0, profile="off") as rig:
        want = rig.stored(10)
        rig.check_restored(names(10), range(20, 30), want)
        assert rig.kernels.verified == 2 * engine.LAYERS
        verify = rig.kernels.verify

        def damaged(batch: int, layer: int, publish: int) -> None:
            rig.buffers(layer)[0][25 * engine.PAGE] += 1
            verify(batch, layer, publish)

        rig.driver.kernels["gio_verify"] = damaged
        assert not rig.restore(names(10), range(20, 30))
        stats = rig.stored_pool.store.stats()
        assert stats["gpu_digested_layers"] == engine.LAYERS
        assert stats["gpu_verified_layers"] == 2 * engine.LAYERS
        assert stats["mismatches"] == 1
        wait_for(lambda: rig.lookup(names(10)) == 5)


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuMemcpyBatchAsync", "cuEventRecord"])
def test_a_failing_call_fails_the_batch(rig_of: RigOf, call: str) -> None:
    with rig_of(read_ahead_share=0.0) as rig:
        want = rig.stored(6)
        assert rig.load(names(6), range(20, 26))
        fail_soon(rig, call)
        assert not rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        rig.check_restored(names(6), range(30, 36), want)


def fail_soon(rig: GpuRig, call: str) -> None:
    """The call fails once the batch is on its way: recording starts before, on SGLang's side."""
    rig.driver.fail[call] = {"cuEventRecord": 6, "cuStreamWaitEvent": 5}.get(call, 1)


def test_slots_that_are_no_pages_move_nothing(rig_of: RigOf) -> None:
    with rig_of() as rig:
        rig.stored(2)
        rig.wipe()
        wrong = engine.transfer(names(2), range(2))
        wrong.device_indices = wrong.device_indices + 1
        assert rig.linker.load("r", [wrong])
        assert not rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert not any(np.frombuffer(page, np.uint8).any() for page in rig.content(range(3)))


def test_host_memory_needs_no_gpu() -> None:
    assert open_gpu(torch.device("cpu"), "auto", None, "auto") is None


def test_waits_of_the_stream_are_bubbles_and_tell_the_layer(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward's thread is far ahead; the stream that computes marks where it is."""
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    with rig_of() as rig:
        scheduler = rig.stored_pool.store.scheduler
        assert scheduler is not None
        rig.stored(10)
        for _ in range(2):  # words are used again
            before = scheduler.counters()["bubble_ns"]
            held = rig.hold(rig.linker._gpu.copy_stream)
            assert rig.load(names(10), range(20, 30))
            index = rig.linker.start_layer_wise_loading()
            STEPS.launched(Batch(Phase.PREFILL, index))
            rig.linker.layer_done_counter.set_consumer(index)
            for layer in range(engine.LAYERS):
                rig.linker.layer_done_counter.wait_until(layer)
            STEPS.returned()
            scheduler.run_due()  # takes what was posted
            assert scheduler.state.step.layer == 0, "no layer has begun"
            time.sleep(0.05)  # the stream waits for its first layer
            held[0] = 1
            rig.drain()
            wait_for(lambda: scheduler.state.step.layer == engine.LAYERS - 1)
            assert rig.linker.finish_layer_wise_loading(index)
            assert scheduler.counters()["bubble_ns"] > before
            STEPS.processed()
        assert rig.linker.metrics.snapshot()["bubble_seconds"] > 0

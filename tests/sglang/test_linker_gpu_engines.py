"""TuttiLinker with each engine for GPU memory, on a stand-in for the CUDA driver; no GPU runs.

Kernels are Python that rings the linker's own queue pairs; the pool's files are real.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import linker_engine as engine
import pytest
from linker_engine import damage, names, wait_for
from linker_gpu import GpuRig, RigOf, gpu_rig, stand_in_gpu
from linker_states import KINDS as POOLS
from linker_states import StatesRig

from tutti.errors import CudaError, DeviceTimeout, Unsupported
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.integration.sglang.direct.kernel_share import KernelShare
from tutti.integration.sglang.direct.staging_size import StagingSize
from tutti.machine import machine_facts
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import GPUS, ModelShape

ENGINES = ("host", *KINDS)
#: Of 48 pages no two touch.
SCATTERED = [*range(0, 48, 2), *range(1, 48, 2)]
#: Options with which 48 pages are stored and loaded as one transfer each.
WIDE = {
    "read_ahead_share": 0.0,
    "backlog_share": 1.0,
    "capacity": "16MiB",
    "load_staging": "16MiB",
    "store_staging": "16MiB",
}


def stats_of(rig: GpuRig) -> dict[str, object]:
    stats: dict[str, object] = rig.stored_pool.store.stats()
    return stats


@pytest.mark.parametrize("gpu_engine", KINDS)
@pytest.mark.parametrize(("kind", "ahead"), [("mha", 0.0), ("mla", 0.5)])
def test_pages_come_back_byte_for_byte(
    rig_of: RigOf, gpu_engine: str, kind: str, ahead: float
) -> None:
    """With the engine `host`: test_linker_gpu.py."""
    with rig_of(kind, gpu_engine=gpu_engine, read_ahead_share=ahead) as rig:
        rig.round_trip(range(3, 13), [40, 20, 21, 22, 60, 1, 2, 30, 31, 5], ahead)
        assert stats_of(rig)["gpu_engine"] == gpu_engine
        assert int(str(stats_of(rig)["gpu_layers"])) >= engine.LAYERS
        assert rig.kernels.commands


@pytest.mark.parametrize("gpu_engine", KINDS)
def test_states_and_windows_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_engine: str
) -> None:
    kind = next(iter(POOLS))
    with stand_in_gpu(monkeypatch), StatesRig(tmp_path, kind, gpu_engine=gpu_engine) as rig:
        rig.round_trip()


@pytest.mark.parametrize(
    ("gpu_engine", "ahead"), [*((name, 0.0) for name in ENGINES), ("host", 0.5)]
)
def test_a_damaged_medium_fails_the_batch_and_lets_the_stream_go(
    rig_of: RigOf, tmp_path: Path, gpu_engine: str, ahead: float
) -> None:
    with rig_of(gpu_engine=gpu_engine, read_ahead_share=ahead) as rig:
        rig.stored(10)
        damage(rig.file(tmp_path))
        assert rig.load(names(10), range(20, 30))
        index = rig.linker.start_layer_wise_loading()
        rig.linker.layer_done_counter.set_consumer(index)
        for layer in range(engine.LAYERS):
            rig.linker.layer_done_counter.wait_until(layer)
        rig.drain()
        assert not rig.linker.finish_layer_wise_loading(index)
        wait_for(lambda: rig.stored_pool.store.stats()["quarantined"] > 0)
        assert rig.lookup(names(10)) < 10


@pytest.mark.parametrize("gpu_engine", KINDS)
def test_a_deadline_fails_the_batch_and_the_linker_closes(rig_of: RigOf, gpu_engine: str) -> None:
    """Commands of the middle layer are never answered: the pages stay SGLang's to keep, the close
    resets the controller, and the pool serves again.
    """
    # The close must not wait timeout_s for the commands that never end.
    limits = {"load_timeout_s": 0.5, "timeout_s": 600.0, "read_ahead_share": 0.0}
    with rig_of(gpu_engine=gpu_engine, **limits) as rig:
        want = rig.stored(6)
        rig.kernels.lost = {1}
        assert rig.load(names(6), range(20, 26))
        index = rig.linker.start_layer_wise_loading()
        rig.linker.layer_done_counter.set_consumer(index)
        for layer in range(engine.LAYERS):
            rig.linker.layer_done_counter.wait_until(layer)
        rig.drain()
        with pytest.raises(DeviceTimeout, match="restart the server"):
            rig.linker.finish_layer_wise_loading(index)
    with rig_of(gpu_engine=gpu_engine) as rig:
        wait_for(lambda: rig.lookup(names(6)) == 6)  # what the reset ended is proven again
        rig.check_restored(names(6), range(30, 36), want)


@pytest.mark.parametrize("gpu_engine", ENGINES)
def test_after_a_crash_pages_are_proven_before_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_engine: str
) -> None:
    crashed = tmp_path / "crashed"
    with gpu_rig(tmp_path / "first", monkeypatch, gpu_engine=gpu_engine) as rig:
        want = rig.stored(8)
        shutil.copytree(tmp_path / "first", crashed)  # as a kill leaves it
    with gpu_rig(crashed, monkeypatch, gpu_engine=gpu_engine) as rig:
        wait_for(lambda: rig.lookup(names(8)) == 8)
        rig.check_restored(names(8), range(40, 48), want)


@pytest.mark.parametrize("gpu_engine", ENGINES)
def test_a_reset_of_the_linker_waits_for_what_moves(rig_of: RigOf, gpu_engine: str) -> None:
    with rig_of(gpu_engine=gpu_engine) as rig:
        rig.stored(6)
        assert rig.load(names(6), range(20, 26))
        index = rig.linker.start_layer_wise_loading()
        assert rig.linker.finish_layer_wise_loading(index)
        rig.linker.reset()
        want = rig.content(range(4))
        assert rig.store(names(4, "new"), range(4))
        rig.check_restored(names(4, "new"), range(10, 14), want)


def write_profile(folder: Path, times: dict[str, float]) -> Path:
    """A profile of this machine with times of engines on tier T0."""
    kv = 2 * 4 * 32 * 2  # bytes of a token in a layer of the rig's pool
    model = ModelShape(
        name="rig", layers=engine.LAYERS, parameters=1e6, attention_width=128,
        kv_nbytes_per_token=kv * engine.LAYERS, weight_nbytes=1e6,
    )  # fmt: skip
    document = estimated_document(model, GPUS["H100"], machine=machine_facts(folder))
    path = folder / "profile.json"
    path.write_text(json.dumps({**document, "engines": {"T0": times}}))
    return path


@pytest.mark.parametrize(
    ("times", "chosen", "why"),
    [
        ({}, "host", "no times of engines"),
        ({"host": 5421.0, "launch": 3145.0}, "host", "the drive takes"),
        ({"host": 1e6, "launch": 0.95e6}, "host", "no engine is a tenth faster"),
        ({"host": 1e6, "launch": 0.95e6, "resident": 0.6e6}, "resident", "the fastest"),
    ],
)
def test_auto_chooses_by_tier_and_profile_and_gives_the_reason_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: dict[str, float],
    chosen: str,
    why: str,
) -> None:
    profile = write_profile(tmp_path, times)
    with (
        caplog.at_level(logging.INFO, "tutti.integration.sglang.direct.gpu_copies"),
        gpu_rig(tmp_path / "pool", monkeypatch, profile=str(profile)) as rig,
    ):
        stats = stats_of(rig)
        assert stats["gpu_engine"] == chosen
        assert why in str(stats["gpu_engine_reason"])
        assert "tier T0" in str(stats["gpu_engine_reason"])
        rig.round_trip(range(4), range(8, 12))
    lines = [r.getMessage() for r in caplog.records if "GPU engine" in r.getMessage()]
    assert len(lines) == 1 and chosen in lines[0] and why in lines[0]


def test_many_short_fragments_go_by_a_kernel_and_few_by_copy_engines(rig_of: RigOf) -> None:
    # Without a profile a put is one issue, however slow the machine is now.
    with rig_of(**WIDE, profile="off") as rig:
        rig.fill(1)
        want = rig.content(range(48))
        assert rig.store(names(8), range(8))
        assert stats_of(rig)["gpu_kernel_jobs"] == 0
        assert rig.store(names(48, "many"), SCATTERED)
        stored = int(str(stats_of(rig)["gpu_kernel_jobs"]))
        assert stored >= 1
        rig.wipe()
        assert rig.restore(names(48, "many"), SCATTERED)
        assert stats_of(rig)["gpu_kernel_jobs"] == stored + 1
        assert rig.content(range(48)) == want
        assert "auto" in str(stats_of(rig)["gpu_mover"])


@pytest.mark.parametrize(("connections", "streams"), [("4", 2), ("8", 2), ("32", 4)])
@pytest.mark.parametrize("mover", ["auto", "kernel"])
def test_layers_take_two_streams_by_turns_as_far_as_hardware_queues_go(
    rig_of: RigOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    connections: str,
    streams: int,
    mover: str,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with rig_of(**WIDE, gpu_mover=mover, profile="off") as rig:
        # Four of SGLang's streams, two of the linker's, and the engine's.
        assert ("4 CUDA streams have no hardware queue" in caplog.text) == (connections == "4")
        assert ("no hardware queue" in caplog.text) == (connections == "4")
        assert stats_of(rig)["gpu_streams"] == streams
        rig.round_trip(SCATTERED, SCATTERED)


def test_without_device_code_short_fragments_go_by_copy_engines(
    rig_of: RigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> bytes:
        raise Unsupported("no NVRTC")

    monkeypatch.setattr(KernelShare, "__init__", refused)
    with rig_of(**WIDE) as rig:
        rig.round_trip(SCATTERED, SCATTERED)
        assert stats_of(rig)["gpu_mover"] == "copy-batch"


def test_an_engine_that_cannot_be_made_leaves_nothing_pinned(rig_of: RigOf) -> None:
    with rig_of() as rig:
        pool, pinned = rig.stored_pool, dict(rig.driver._registered)
        assert pool.gpu is not None
        rig.driver.fail["cuEventCreate"] = 1  # the verifier's tables are pinned by then
        with pytest.raises(CudaError) as caught:  # whose frames keep what was begun
            pool.gpu.attach(pool.store, StagingSize(1 << 20, 16, "a test"))
        assert caught.value.call == "cuEventCreate"
        assert rig.driver._registered == pinned

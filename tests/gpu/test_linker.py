"""SGLang's real pools in the memory of a real GPU: the linker stores and restores their pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))

import linker_engine as engine
import linker_states
from linker_engine import Rig, ahead_pages, names, wait_for
from linker_states import StatesRig

from tutti.gio_uring.gpu.device_engine import KINDS as KERNELS

ENGINES = ("host", *KERNELS)
PAGES = 70  # more than one piece of a read-ahead, and enough short pieces for a kernel


@pytest.fixture(autouse=True)
def pools_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEVICE", "cuda")


def facts(rig: Rig) -> dict[str, Any]:
    found: dict[str, Any] = rig.stored_pool.store.stats()
    return found


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("gpu_engine", ENGINES)
@pytest.mark.parametrize("ahead", [0.0, 0.5])
def test_pages_come_back_byte_for_byte(
    tmp_path: Path, kind: str, gpu_engine: str, ahead: float
) -> None:
    with Rig(tmp_path, kind, gpu_engine=gpu_engine, read_ahead_share=ahead) as rig:
        rig.fill(1)
        want = rig.content(range(3, 13))
        assert rig.store(names(10), range(3, 13))
        rig.wipe()
        assert rig.lookup(names(12)) == 10
        wait_for(lambda: bool(ahead_pages(rig.linker)) == bool(ahead))
        target = [40, 20, 21, 22, 60, 1, 2, 30, 31, 5]
        assert rig.restore(names(10), target)
        assert rig.content(target) == want
        assert facts(rig)["gpu_engine"] == gpu_engine
        assert facts(rig)["gpu_layers"] >= engine.LAYERS


@pytest.mark.parametrize("gpu_engine", ENGINES)
@pytest.mark.parametrize("kind", linker_states.KINDS)
def test_states_windows_and_packed_pools_come_back(
    tmp_path: Path, kind: str, gpu_engine: str
) -> None:
    with StatesRig(tmp_path, kind, gpu_engine=gpu_engine) as rig:
        rig.round_trip()


@pytest.mark.parametrize("mover", ["auto", "copy-batch"])
def test_short_pieces_are_copied_by_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    """Latents with an indexer: their pages are packed, in pieces of a few KiB."""
    _, components, page = linker_states.KINDS["sparse"]
    many = (lambda: linker_states.sparse(2 * PAGES + 4), components, page)
    monkeypatch.setitem(linker_states.KINDS, "sparse", many)  # type: ignore[arg-type]
    sizes = ("capacity", "sidecar_capacity", "load_staging", "store_staging")
    options = {**dict.fromkeys(sizes, "128MiB"), "backlog_share": 1.0, "read_ahead_share": 0.0}
    with StatesRig(tmp_path, "sparse", gpu_mover=mover, **options) as rig:
        rig.fill(1)
        pools = rig.linker.stored_pools
        at = {s.kv_pool.source: list(range(1, 1 + PAGES)) for s in pools.values()}
        to = {source: [2 * PAGES + 2 - p for p in pages] for source, pages in at.items()}
        want = {name: rig.content(name, at[s.kv_pool.source]) for name, s in pools.items()}
        assert rig.store(rig.transfers(names(PAGES), at))
        rig.wipe()
        assert rig.linker.lookup("r", rig.transfers(names(PAGES)))[-1:] == [PAGES]
        assert rig.restore(rig.transfers(names(PAGES), to))
        for name, pool in pools.items():
            assert rig.content(name, to[pool.kv_pool.source]) == want[name], name
            copied = pool.metrics.snapshot().get("kernel_copied_pages", 0)
            assert bool(copied) == (mover == "auto" and pool.kv_pool.packed), name


@pytest.mark.parametrize("gpu_engine", ENGINES)
def test_the_forwards_stream_waits_and_not_its_thread(tmp_path: Path, gpu_engine: str) -> None:
    """Each layer is read on the GPU as soon as the stream may; nothing waits on the CPU."""
    pages = range(8, 16)
    with Rig(tmp_path, gpu_engine=gpu_engine, read_ahead_share=0.0) as rig:
        rig.fill(2)
        want = [rig.content(range(8), [layer]) for layer in range(engine.LAYERS)]
        assert rig.store(names(8), range(8))
        for turn in range(20):
            rig.wipe()
            seen = [
                [torch.empty_like(b[: 8 * engine.PAGE]) for b in rig.buffers(layer)]
                for layer in range(engine.LAYERS)
            ]
            torch.cuda.current_stream().synchronize()
            assert rig.load(names(8), pages)
            index = rig.linker.start_layer_wise_loading()
            counter = rig.linker.layer_done_counter
            counter.set_consumer(index)
            for layer, copies in enumerate(seen):
                counter.wait_until(layer)
                for copy, buffer in zip(copies, rig.buffers(layer), strict=True):
                    copy.copy_(buffer[8 * engine.PAGE : 16 * engine.PAGE])
            torch.cuda.current_stream().synchronize()
            assert rig.linker.finish_layer_wise_loading(index)
            for layer, copies in enumerate(seen):
                found = [
                    b"".join(
                        copy[page * engine.PAGE : (page + 1) * engine.PAGE]
                        .view(torch.uint8)
                        .cpu()
                        .numpy()
                        .tobytes()
                        for copy in copies
                    )
                    for page in range(8)
                ]
                assert found == want[layer], f"layer {layer} in turn {turn}"

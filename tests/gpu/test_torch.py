"""The page on the GPU path, with PyTorch's tensors and streams: layers are used as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tutti
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.verifier import Verifier
from tutti.memory.device_memory import DeviceMemory

LAYERS, HEADS, DIM, PAGE, PAGES = 6, 8, 128, 64, 32
LAYOUT = tutti.KVLayout.mha(LAYERS, HEADS, DIM, PAGE, "bfloat16", model="torch")


def engine_of(kind: str, driver: CudaDriver, modules: Modules, store: Any) -> Any:
    if kind == "host":
        return HostEngine(driver, store.engine, verifier=Verifier(driver, modules))
    return DeviceEngine(driver, modules, store.engine.controller, kind=kind)


@pytest.mark.parametrize("kind", ["host", *KINDS])
def test_layers_are_used_as_they_come(
    kind: str, tmp_path: Path, driver: CudaDriver, modules: Modules, rng: np.random.Generator
) -> None:
    shape = (2, PAGES, PAGE, HEADS, DIM)
    cache = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    work = torch.empty_like(other)
    want = [layer.float().sum(dim=(2, 3, 4)) for layer in cache]  # of K and V of each page
    seen = [torch.empty_like(sums) for sums in want]
    keys = rng.integers(0, 256, (PAGES, 16), np.uint8)
    torch.cuda.synchronize()
    with tutti.open(str(tmp_path / "pool.tutti"), layout=LAYOUT, capacity="256MiB") as store:
        gpu = engine_of(kind, driver, modules, store)
        store.attach(gpu)
        tensors = [list(layer) for layer in cache]
        memory = store.register(DeviceMemory.from_layers(LAYOUT, tensors, PAGES, gpu=gpu))
        stream = torch.cuda.Stream()
        memory.follow(stream.cuda_stream)
        store.put(keys, range(PAGES), memory=memory).wait(30)
        to = rng.permutation(PAGES)
        for _ in range(10):
            with torch.cuda.stream(stream):
                for layer in cache:
                    layer.zero_()
            memory.follow(stream.cuda_stream)
            ticket = store.load(keys, to, memory=memory)
            with torch.cuda.stream(stream):
                for number, layer in enumerate(cache):
                    torch.matmul(other, other, out=work)  # of the layer before
                    ticket.order_stream(stream.cuda_stream, number)
                    torch.sum(layer.float(), dim=(2, 3, 4), out=seen[number])
            ticket.wait(30)
            stream.synchronize()
            assert not ticket.failed().size
            for sums, found in zip(want, seen, strict=True):
                assert torch.equal(sums, found[:, torch.as_tensor(to, device="cuda")])
        assert store.stats()["gpu_engine"] == kind

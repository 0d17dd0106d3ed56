"""The compute half of a profile, measured on a CUDA device with torch.

Times a stand-in layer with random weights and the model's numbers of parameters, attention pairs
and KV bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from tutti.bench.gpu.cases import Way, copy_engines, open_engine
from tutti.bench.gpu.rig import DevicePages, GpuUnderTest, LayerLoad, transfers
from tutti.bench.statistics import median
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.scheduler.roofline import ModelShape, mover_gb_per_s

NEW_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384)
PREFIXES = (0, 4096, 16384, 65536)
BATCHES = (1, 8, 32, 128)
CONTEXTS = (0, 65536, 262144)
_HEAD = 128
_REPEATS = 5
_COPY_NBYTES = 256 << 20
#: The load by which engines are compared: 256 pages of 64 KiB per layer.
_LOAD = LayerLoad(64 << 10, 256, layers=8)


def measure(model: ModelShape) -> dict[str, Any] | None:
    """`compute` and `movers` of a profile; None without torch or a CUDA device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    layer = _StandIn(torch, model)
    prefill = [[n, p, layer.time_us(n, p)] for p in PREFIXES for n in NEW_TOKENS]
    decode = [
        [b, c, model.layers * layer.time_us(b, c // b, batch=b)] for c in CONTEXTS for b in BATCHES
    ]
    sms = int(torch.cuda.get_device_properties(0).multi_processor_count)
    return {
        "compute": {
            "estimated": False,
            "prefill": prefill,
            "decode": decode,
            "device": torch.cuda.get_device_name(0),
        },
        # The copy engine is measured; the scaling of SM movers is an estimate.
        "movers": {
            "estimated": True,
            "copy_engine_gb_per_s": _copy_gb_per_s(torch),
            "points": [[n, mover_gb_per_s(n)] for n in range(1, sms + 1)],
        },
        "engines": _measure_engines(),
    }


def _measure_engines() -> dict[str, dict[str, float]]:
    driver = CudaDriver()
    try:
        machine = GpuUnderTest(driver, Modules(driver))
        return {"T0": engine_times(machine)}
    finally:
        driver.close()


def engine_times(machine: GpuUnderTest, load: LayerLoad = _LOAD) -> dict[str, float]:
    """Microseconds of one load by each engine, over a medium that moves nothing at tier T0."""
    with ExitStack() as stack:
        pages = stack.enter_context(closing(DevicePages(machine.driver, load)))
        ways = [copy_engines(machine), *(Way(kind) for kind in KINDS if _may(machine, kind))]
        times = {}
        for way in ways:
            with open_engine(machine, way) as engine:
                transfers(engine, pages, "load", 2)
                began_s = time.perf_counter()
                transfers(engine, pages, "load", _REPEATS)
                times[way.engine] = (time.perf_counter() - began_s) / _REPEATS * 1e6
        return times


def _may(machine: GpuUnderTest, kind: str) -> bool:
    return kind != "persistent" or not machine.driver.limits_kernels


class _StandIn:
    """Two matrix products with all weights of a layer, and attention over a prefix."""

    def __init__(self, torch: Any, model: ModelShape) -> None:
        self._torch = torch
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self._options = options
        width = model.attention_width
        inner = max(1, int(model.parameters / model.layers / (2 * width)))
        self._up = torch.randn(width, inner, **options) * 0.02
        self._down = torch.randn(inner, width, **options) * 0.02
        self._heads = width // _HEAD
        self._kv_heads = max(1, model.slice_nbytes_per_token // (2 * 2 * _HEAD))

    def time_us(self, tokens: int, prefix: int, *, batch: int = 1) -> float:
        """Median time of some runs; with a batch, each sequence has one new token."""
        torch, options = self._torch, self._options
        new = tokens // batch
        x = torch.randn(tokens, self._up.shape[0], **options)
        q = torch.randn(batch, self._heads, new, _HEAD, **options)
        shape = (batch, self._kv_heads, prefix + new, _HEAD)
        k, v = torch.randn(*shape, **options), torch.randn(*shape, **options)

        def step() -> None:
            torch.relu(x @ self._up) @ self._down
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return _time_us(torch, step)


def _copy_gb_per_s(torch: Any) -> float:
    host = torch.empty(_COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPY_NBYTES, dtype=torch.uint8, device="cuda")
    return _COPY_NBYTES / _time_us(torch, lambda: device.copy_(host, non_blocking=True)) / 1e3


def _time_us(torch: Any, step: Callable[[], object]) -> float:
    step()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times)

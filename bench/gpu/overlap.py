"""GPU benchmarks with concurrent compute: the slowdown by movers, and a pipeline.

The compute is emulated with PyTorch: a bf16 GEMM, a memory-bound kernel like decoding, and a layer
with Llama-3-8B's shapes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tutti.base.units import KiB
from tutti.bench.gpu import interference as gpu_beside
from tutti.bench.gpu import rig
from tutti.bench.gpu.cases import RoundPlan, Row, copy_engines
from tutti.bench.gpu.interference import Gate, Stopwatch, loads_beside
from tutti.bench.gpu_memory import DevicePool
from tutti.bench.statistics import bootstrap_median, median, ratios
from tutti.errors import Unsupported
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.medium.layout import KVLayout
from tutti.store import open as open_pool

_SMS = 16
#: Llama-3-8B: size of the hidden state, of the MLP, of K and V together.
_HIDDEN, _MLP, _KV = 4096, 14336, 2048
_PREFIX_TOKENS = 8192
_PAGE_TOKENS = 64
_LAYERS = 32
_TIMEOUT_S, _LOOK_S = 20.0, 0.0001


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unsupported(
            "PyTorch is not installed; in a clone of this project: pip install -e '.[cuda]'"
        ) from error
    if not torch.cuda.is_available():
        raise Unsupported("PyTorch sees no CUDA device")
    return torch


def _gemm(torch: Any) -> Callable[[], object]:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.matmul(a, b, out=out)


def _decode(torch: Any) -> Callable[[], object]:
    weights = torch.randn(8, _MLP, _HIDDEN, device="cuda", dtype=torch.bfloat16)
    token = torch.randn(8, _HIDDEN, 1, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(8, _MLP, 1, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.bmm(weights, token, out=out)


KERNELS: dict[str, Callable[[Any], Callable[[], object]]] = {"gemm": _gemm, "decode": _decode}


def interference(machine: rig.GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """A GEMM and a decode-like kernel with each mover, with and without green contexts."""
    torch = _torch()
    movers = [copy_engines(machine).mover] + (["kernel"] if machine.modules is not None else [])
    return [
        Row(
            f"{name} beside {mover}{', green contexts' if green else ''}",
            partial(_interfere, torch, machine, plan, name, mover, green),
        )
        for green in (False, True)
        for mover in movers
        for name in KERNELS
    ]


def _interfere(
    torch: Any, machine: rig.GpuUnderTest, plan: RoundPlan, name: str, mover: str, green: bool
) -> dict[str, Any]:
    driver = machine.driver
    with ExitStack() as stack:
        whole = torch.cuda.Stream()
        mover_stream, compute, sms, mover_sms = None, torch.cuda.Stream(), 0, 0
        if green:
            (small, mover_sms), (rest, sms) = driver.create_green_pair(_SMS)
            for context in (small, rest):
                stack.callback(driver.destroy_green_context, context)
            mover_stream = driver.create_green_stream(small)
            handle = driver.create_green_stream(rest)
            for one in (mover_stream, handle):
                stack.callback(driver.destroy_stream, one)
            compute = torch.cuda.ExternalStream(handle, device=torch.device("cuda", driver.device))
        gate = Gate(driver)
        stack.callback(gate.close)
        watch = Stopwatch(torch, gate, KERNELS[name](torch))
        watch.warm_up([whole, compute])
        load = plan.load(256 * KiB)
        pages = stack.enter_context(closing(rig.DevicePages(driver, load)))
        gpu = stack.enter_context(
            machine.host_engine(
                mover,
                streams=[mover_stream] if mover_stream else 1,
                blocks=_SMS,
                staging_nbytes=plan.staging_nbytes,
            )
        )
        rig.transfers(gpu, pages, "load", 4)
        found = _beside(watch, compute, whole, lambda: loads_beside(gpu, pages))
    slowdown = ratios(found["beside_ms"], found["alone_ms"])
    partition = ratios(found["alone_ms"], found["whole_ms"])
    return {
        "kernel": name,
        "mover": mover,
        "green": green,
        "mover_sms": mover_sms,
        "compute_sms": sms,
        "calls_in_a_round": watch.calls,
        "slowdown": bootstrap_median(slowdown).to_dict(),
        "noise": bootstrap_median(ratios(found["again_ms"], found["alone_ms"])).to_dict(),
        "partition_ratio": bootstrap_median(partition).to_dict(),
        "gb_per_s": median(found["beside_gb_per_s"]),
        "gb_per_s_alone": median(found["loads_alone_gb_per_s"]),
        "torch": str(torch.__version__),
        "raw": found,
    }


def _beside(
    watch: Stopwatch, compute: Any, whole: Any, loads: Callable[[], Any]
) -> dict[str, list[float]]:
    """Rounds of compute on a partition, on the whole device, twice alone and with concurrent loads;
    and loads alone.  Every other round is in reverse order.
    """
    found: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    def beside() -> None:
        with loads() as running:
            add("beside_ms", watch.ms(compute))
        add("beside_gb_per_s", running.gb_per_s())

    def loads_alone() -> None:
        with loads() as running:
            time.sleep(gpu_beside.ROUND_S)
        add("loads_alone_gb_per_s", running.gb_per_s())

    steps = [
        lambda: add("whole_ms", watch.ms(whole)),
        lambda: add("alone_ms", watch.ms(compute)),
        beside,
        lambda: add("again_ms", watch.ms(compute)),
        loads_alone,
    ]
    for number in range(gpu_beside.ROUNDS):
        for step in steps if number % 2 == 0 else reversed(steps):
            step()
    return found


class _Layer:
    """A layer with Llama-3-8B's shapes over a prefix: its products, and attention over K and V."""

    def __init__(self, torch: Any, new_tokens: int) -> None:
        def random(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        self._torch = torch
        self.hidden = random(new_tokens, _HIDDEN)
        self._qkv, self._out = random(_HIDDEN, _HIDDEN + _KV), random(_HIDDEN, _HIDDEN)
        self._up, self._down = random(_HIDDEN, 2 * _MLP), random(_MLP, _HIDDEN)
        context = _PREFIX_TOKENS + new_tokens
        self._q = random(1, 32, new_tokens, 128)
        self._k, self._v = (random(1, 32, context, 128) for _ in range(2))

    def run(self) -> None:
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        torch.matmul(self.hidden, self._qkv)
        attend(self._q, self._k, self._v)
        torch.matmul(self.hidden, self._out)
        up = torch.matmul(self.hidden, self._up)
        torch.matmul(up[:, :_MLP], self._down)


def pipeline(machine: rig.GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """32 layers that wait for their loads on the GPU, against max(loads alone, compute alone).

    Through a store: from a pool in a file.  Else with only the engine, over a medium that moves
    nothing: in one part (all layers are submitted before any compute, as the store does), or in
    several, each before the compute of its layers.
    """
    torch = _torch()
    ways = {"through a store, from a file": partial(_store_loads, machine, plan)}
    for parts in (1, 8, 32):
        name = f"loads in {parts} part{'s'[: parts > 1]}"
        ways[name] = partial(_engine_loads, machine, parts)
    return [
        Row(
            f"{new} new tokens over {_PREFIX_TOKENS}, {name}",
            partial(_pipeline, torch, new, name, way),
        )
        for new in (2048, 4096)
        for name, way in ways.items()
    ]


class _Loading(NamedTuple):
    """A load in flight.  order: makes a stream wait for a layer, counted from 0."""

    order: Callable[[int, int], object]
    is_done: Callable[[], bool]
    finish: Callable[[], object]


#: (number of layers, function that begins their load) of each part.
_Loads = list[tuple[int, Callable[[], _Loading]]]


def _prefix() -> rig.LayerLoad:
    return rig.LayerLoad(_PAGE_TOKENS * _KV * 2, _PREFIX_TOKENS // _PAGE_TOKENS, layers=_LAYERS)


@contextmanager
def _engine_loads(machine: rig.GpuUnderTest, parts: int) -> Iterator[_Loads]:
    load = _prefix()
    staging_nbytes = 2 * load.nbytes
    with ExitStack() as stack:
        pages = stack.enter_context(closing(rig.DevicePages(machine.driver, load)))
        mover = copy_engines(machine).mover
        gpu = stack.enter_context(
            machine.host_engine(
                mover, staging_nbytes=staging_nbytes, store_staging_nbytes=staging_nbytes // 8
            )
        )

        def begin(extents: Extents, memory: PagedMemory) -> _Loading:
            transfer = gpu.submit(
                rig.OPCODES["load"], extents, pages.pages, memory, timeout_s=_TIMEOUT_S
            )
            return _Loading(
                lambda stream, layer: transfer.order_stream(stream, layer + 1),
                lambda: transfer.done,
                lambda: rig.finish(transfer),
            )

        yield [
            (len(memory.bases), partial(begin, extents, memory))
            for extents, memory in _parts(pages, parts)
        ]


@contextmanager
def _store_loads(machine: rig.GpuUnderTest, plan: RoundPlan) -> Iterator[_Loads]:
    layout = KVLayout.mha(
        layers=_LAYERS,
        kv_heads=8,
        head_dim=128,
        page_size=_PAGE_TOKENS,
        dtype="bfloat16",
        model="pipeline",
    )
    count = _prefix().pages
    keys = np.random.default_rng(1).integers(0, 256, (count, 16), np.uint8)
    if machine.modules is None:
        raise Unsupported("a store's engine needs device code, for its digests")
    with ExitStack() as stack:
        path = plan.folder / f"gpu-bench-{os.getpid()}.tutti"
        stack.callback(path.unlink, missing_ok=True)
        pool = DevicePool(machine.driver, machine.modules, "host", layout, count)
        stack.callback(pool.close)
        capacity = 2 * count * layout.object_nbytes
        store = stack.enter_context(open_pool(str(path), layout, capacity, profile=None))
        memory = pool.attach(store)
        store.put(keys, range(count), memory=memory).wait(_TIMEOUT_S)

        def begin() -> _Loading:
            ticket = store.load(keys, range(count), memory=memory)
            return _Loading(
                ticket.order_stream, lambda: ticket.done, partial(ticket.wait, _TIMEOUT_S)
            )

        yield [(_LAYERS, begin)]


def _pipeline(
    torch: Any, new_tokens: int, name: str, way: Callable[[], AbstractContextManager[_Loads]]
) -> dict[str, Any]:
    with way() as begins:
        layer, stream = _Layer(torch, new_tokens), torch.cuda.Stream()

        def run(loads: bool, computes: bool) -> float:
            began_s = time.perf_counter()
            running: list[_Loading] = []
            for layers, begin in begins:
                if loads:
                    running.append(begin())
                with torch.cuda.stream(stream):
                    for number in range(layers if computes else 0):
                        if loads:
                            running[-1].order(stream.cuda_stream, number)
                        layer.run()
            # Polling without a pause would block the thread that enqueues layers.
            rig.poll_until(lambda: all(loading.is_done() for loading in running), "a load", _LOOK_S)
            rig.poll_until(stream.query, "the pipeline", _LOOK_S)
            elapsed_s = time.perf_counter() - began_s
            for loading in running:
                loading.finish()
            return elapsed_s * 1e3

        for _ in range(3):
            run(True, True)
        hows = {"both_ms": (True, True), "io_ms": (True, False), "compute_ms": (False, True)}
        found: dict[str, list[float]] = {how: [] for how in hows}
        for number in range(gpu_beside.ROUNDS):
            for how in hows if number % 2 == 0 else reversed(hows):
                found[how].append(run(*hows[how]))
    bars = [max(pair) for pair in zip(found["io_ms"], found["compute_ms"], strict=True)]
    return {
        "new_tokens": new_tokens,
        "way": name,
        "load_nbytes": _prefix().nbytes,
        **{how: median(values) for how, values in found.items()},
        "ratio": bootstrap_median(ratios(found["both_ms"], bars)).to_dict(),
        "torch": str(torch.__version__),
        "raw": found,
    }


def _parts(pages: rig.DevicePages, count: int) -> Iterator[tuple[Extents, PagedMemory]]:
    """The layers of pages in `count` consecutive parts."""
    load, memory = pages.load, pages.memory
    each = load.layers // count
    for start in range(0, load.layers, each):
        extents = replace(load.extents, slba=[start * load.extents.layer_stride_nlb])
        yield extents, replace(memory, bases=memory.bases[start : start + each])

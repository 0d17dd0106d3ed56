"""GPU benchmarks with something beside: what a mover costs compute, a pipeline, digests.

The compute is a stand-in through PyTorch: a bf16 GEMM, a kernel bound by memory as decoding is, and
a layer of Llama-3-8B's shapes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tutti.bench.gpu_cases import Plan
from tutti.bench.gpu_rig import DevicePages, Load, Machine, spin_until, transfers
from tutti.bench.statistics import bootstrap_median, median
from tutti.errors import TuttiError, Unsupported
from tutti.gio_uring.gpu_batch import DeviceBatch, launch_layer
from tutti.gio_uring.gpu_green import torch_stream
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.units import KiB

_ROUNDS = 12
_CALLS = 20
#: Loads beside a kernel between two looks at the clock: the link rests only after so many.
_BESIDE = 8
_SMS = 16
#: Llama-3-8B: hidden size, of the MLP, of K and V together.
_HIDDEN, _MLP, _KV = 4096, 14336, 2048
_PREFIX_TOKENS = 8192
_PAGE_TOKENS = 64


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise Unsupported("PyTorch is not installed; install the extra tutti[cuda]") from error
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


def _time_ms(torch: Any, stream: Any, kernel: Callable[[], object]) -> float:
    """GPU time of _CALLS calls on a stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(_CALLS):
            kernel()
        end.record()
    spin_until(end.query, "a kernel")
    return float(begin.elapsed_time(end))


@contextmanager
def _loads_beside(submitter: Any, pages: DevicePages) -> Iterator[dict[str, float]]:
    """Loads again and again on a thread of its own; afterwards tells their speed."""
    stop = threading.Event()
    moved = {"gb_per_s": 0.0}
    began_s = time.perf_counter()

    errors: list[BaseException] = []

    def work() -> None:
        count = 0
        try:
            while not stop.is_set():
                transfers(submitter, pages, "load", _BESIDE)
                count += _BESIDE
        except BaseException as error:
            errors.append(error)
        moved["gb_per_s"] = count * pages.load.nbytes / (time.perf_counter() - began_s) / 1e9

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    try:
        yield moved
    finally:
        stop.set()
        thread.join(120)
    if errors:
        raise errors[0]


def interference(machine: Machine, plan: Plan) -> dict[str, Any]:
    """A GEMM and a decode-like kernel with each mover, with and without green contexts."""
    torch = _torch()
    rows: list[dict[str, Any]] = []
    for green in (False, True):
        for kernel in KERNELS:
            try:
                rows += _interfere(torch, machine, plan, kernel, green)
            except (TuttiError, RuntimeError) as error:  # PyTorch's are RuntimeErrors
                why = f"{type(error).__name__}: {error}"
                rows.append({"kernel": kernel, "green": green, "not_run": why})
    return {"rows": rows}


def _interfere(
    torch: Any, machine: Machine, plan: Plan, name: str, green: bool
) -> list[dict[str, Any]]:
    driver = machine.driver
    rows = []
    with ExitStack() as stack:
        mover_stream, compute, sms = None, torch.cuda.Stream(), 0
        if green:
            small, rest = driver.create_green_pair(_SMS)
            for context, _ in (small, rest):
                stack.callback(driver.destroy_green_context, context)
            mover_stream = driver.create_green_stream(small[0])
            handle = driver.create_green_stream(rest[0])
            for one in (mover_stream, handle):
                stack.callback(driver.destroy_stream, one)
            compute, sms = torch_stream(handle, driver.device), rest[1]
        kernel = KERNELS[name](torch)
        whole = torch.cuda.Stream()
        for _ in range(3):
            _time_ms(torch, compute, kernel)
            _time_ms(torch, whole, kernel)
        partition = [
            _time_ms(torch, compute, kernel) / _time_ms(torch, whole, kernel)
            for _ in range(_ROUNDS)
        ]
        for mover in ("copy-batch", "kernel"):
            row: dict[str, Any] = {"kernel": name, "green": green, "mover": mover, "sms": sms}
            row["partition_ratio"] = bootstrap_median(partition).to_dict()
            ratios, speeds = [], []
            load = Load.of_nbytes(256 * KiB, plan.batch_nbytes)
            pages = DevicePages(driver, load)
            with machine.host_engine(
                mover, stream=mover_stream, blocks=_SMS, staging_nbytes=plan.staging_nbytes
            ) as (gpu, _):
                for _ in range(_ROUNDS):
                    alone = _time_ms(torch, compute, kernel)
                    with _loads_beside(gpu, pages) as moved:
                        ratios.append(_time_ms(torch, compute, kernel) / alone)
                    speeds.append(moved["gb_per_s"])
            pages.close()
            row |= {"slowdown": bootstrap_median(ratios).to_dict(), "gb_per_s": median(speeds)}
            rows.append(row)
    return rows


class _Layer:
    """One layer of Llama-3-8B's shapes over a prefix: its products, and attention over K and V."""

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


def pipeline(machine: Machine, plan: Plan) -> dict[str, Any]:
    """32 layers that wait for their loads on the GPU, against max(loads alone, compute alone)."""
    torch = _torch()
    layer_nbytes = _PAGE_TOKENS * _KV * 2
    load = Load(layer_nbytes, _PREFIX_TOKENS // _PAGE_TOKENS, layers=32)
    pages = DevicePages(machine.driver, load)
    rows = []
    with machine.host_engine("copy-batch", staging_nbytes=2 * load.nbytes) as (gpu, _):
        for new_tokens in (2048, 4096):
            layer = _Layer(torch, new_tokens)
            stream = torch.cuda.Stream()

            def run(
                loads: bool, computes: bool, layer: _Layer = layer, stream: Any = stream
            ) -> float:
                began_s = time.perf_counter()
                transfer = (
                    gpu.submit(OPCODE_READ, load.extents, pages.pages, pages.memory, timeout_s=60.0)
                    if loads
                    else None
                )
                with torch.cuda.stream(stream):
                    for number in range(load.layers if computes else 0):
                        if transfer is not None:
                            transfer.order_stream(stream.cuda_stream, number + 1)
                        layer.run()
                if transfer is not None:
                    spin_until(lambda: transfer.done, "a load")
                spin_until(stream.query, "the pipeline")
                return (time.perf_counter() - began_s) * 1e3

            for _ in range(3):
                run(True, True)
            times = [(run(True, True), run(True, False), run(False, True)) for _ in range(_ROUNDS)]
            ratios = [both / max(io, compute) for both, io, compute in times]
            rows.append(
                {
                    "new_tokens": new_tokens,
                    "load_nbytes": load.nbytes,
                    "both_ms": median([t[0] for t in times]),
                    "io_ms": median([t[1] for t in times]),
                    "compute_ms": median([t[2] for t in times]),
                    "ratio": bootstrap_median(ratios).to_dict(),
                }
            )
    pages.close()
    return {"rows": rows}


def digests(machine: Machine, plan: Plan) -> dict[str, Any]:
    """XXH3 of slices in GPU memory on at most 8 blocks, alone and beside the copy engine."""
    if machine.modules is None:
        raise Unsupported("no device code is loaded")
    rows = []
    load = Load.of_nbytes(256 * KiB, plan.batch_nbytes)
    hashed, moved_pages = DevicePages(machine.driver, load), DevicePages(machine.driver, load, 2)
    with machine.host_engine("copy-batch", staging_nbytes=plan.staging_nbytes) as (gpu, _):
        for blocks in (2, 4, 8):
            alone = [_digest_gb_per_s(machine, hashed, blocks) for _ in range(_ROUNDS)]
            beside, link = [], []
            for _ in range(_ROUNDS):
                with _loads_beside(gpu, moved_pages) as moved:
                    beside.append(_digest_gb_per_s(machine, hashed, blocks))
                link.append(moved["gb_per_s"])
            rows.append(
                {
                    "blocks": blocks,
                    "alone_gb_per_s": bootstrap_median(alone).to_dict(),
                    "beside_gb_per_s": bootstrap_median(beside).to_dict(),
                    "mover_gb_per_s": bootstrap_median(link).to_dict(),
                }
            )
    hashed.close()
    moved_pages.close()
    return {"rows": rows}


def _digest_gb_per_s(machine: Machine, pages: DevicePages, blocks: int) -> float:
    """Speed of one pass over all layers."""
    assert machine.modules is not None
    driver, load = machine.driver, pages.load
    stream = driver.create_stream()
    batch = DeviceBatch(
        machine.tables,
        pages.memory,
        pages.pages,
        opcode=OPCODE_WRITE,
        slice_nlb=load.slice_nbytes >> 9,
        lba_shift=9,
        digests=np.zeros((load.pages, load.layers), np.uint64),
    )
    batch.upload(stream)
    spin_until(lambda: driver.is_stream_done(stream), "an upload")
    began_s = time.perf_counter()
    for layer in range(load.layers):
        launch_layer(driver, machine.modules["gio_verify"], batch, layer, stream, blocks)
    spin_until(lambda: driver.is_stream_done(stream), "the digests")
    elapsed_s = time.perf_counter() - began_s
    batch.tables.hold(lambda: True)
    driver.destroy_stream(stream)
    return load.nbytes / elapsed_s / 1e9

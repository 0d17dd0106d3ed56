"""Measures the CPU cost of submitting a GPU transfer: time, driver calls and argument bytes.

Every engine and mover submits loads of a growing number of pages through a driver that only counts
and over a controller that moves nothing, so neither a GPU nor a drive is needed.  The same load
with more layers gives the cost of a layer; the remaining cost is that of the batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tutti.base.terminal import ProgressFactory
from tutti.base.units import MiB
from tutti.bench.controller_memory import MemoryController
from tutti.bench.counting_driver import CountingDriver, NamedKernels
from tutti.bench.environment import describe
from tutti.bench.writable import options
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_batch import KernelMover
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.mover import BatchCopyMover, CopyMover, Mover
from tutti.gio_uring.gpu.persistent import PersistentKernel
from tutti.gio_uring.gpu.pinned_memory import TableMemory
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.nvme_spec import OPCODE_READ

#: Names of engines; the engine host has one for each mover.
WAYS = ("host, copy-batch", "host, copy", "host, kernel", *KINDS)
_SEGMENT_NBYTES = 2048  # K, and V, of a page of one token: short, so that staging stays small
_LAYERS = (8, 64)
_PARTS = 5  # groups of measurements; the differences between them are noise
_TABLES_NBYTES = 64 * MiB
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Cost:
    """Cost of one submission with all its layers."""

    submit_us: float
    calls: int
    argument_nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--pages", [128, 512, 2048, 8192, 16384], "pages per load")
    option("--repeats", 101, "measurements per number")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures every way with every number of pages.  Raises ConfigError for numbers below 1."""
    if min(args.repeats, *args.pages) < 1:
        raise ConfigError("--pages and --repeats count from 1")
    rows = []
    with progress("submit", len(WAYS) * len(args.pages)) as bar:
        for way in WAYS:
            for pages in args.pages:
                rows.append(measure(way, pages, args.repeats))
                bar.advance(1)
    return {
        "benchmark": "submit",
        "source": "stand-in: a driver that does nothing; no GPU is involved",
        "controller": "memory, zero-copy",
        "segments": 2,
        "layers_compared": list(_LAYERS),
        "rows": rows,
        "machine": describe(),
    }


HEAD = (
    *("engine", "pages", "us a batch", "us a layer", "us until it returns", "calls a layer"),
    "argument bytes a layer",
)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    names = ("way", "pages", "batch_us", "layer_us", "return_us", "calls", "argument_nbytes")
    rows = []
    for row in result["rows"]:
        cells = {name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()}
        noise_us = row["layer_noise_us"]
        if row["layer_us"] <= noise_us:
            cells["layer_us"] = f"below noise ({noise_us:.1f})"
        rows.append([cells[name] for name in names])
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    return [str(result["source"])]


def measure(way: str, pages: int, repeats: int) -> dict[str, Any]:
    """One row: the costs of a batch apart from its layers, and of a layer.

    Times are the shortest of several, since other processes use the processor, too.  The noise of a
    layer's time is half the range between groups of measurements; a time that does not exceed it
    is only an upper bound.
    """
    few, many = costs_of(way, pages, _LAYERS, repeats)
    (whole,) = costs_of(way, pages, _LAYERS[1:], repeats, is_whole=False)
    parts = [_layer_us(few[i::_PARTS], many[i::_PARTS]) for i in range(min(_PARTS, repeats))]
    layer_us, step = _layer_us(few, many), _LAYERS[1] - _LAYERS[0]
    noise_us = (max(parts) - min(parts)) / 2
    of_layers_us = _LAYERS[0] * layer_us if layer_us > noise_us else 0.0
    return {
        "way": way,
        "pages": pages,
        "batch_us": _shortest_us(few) - of_layers_us,
        "layer_us": layer_us,
        "layer_noise_us": noise_us,
        "return_us": _shortest_us(whole),
        "calls": (many[-1].calls - few[-1].calls) / step,
        "argument_nbytes": (many[-1].argument_nbytes - few[-1].argument_nbytes) / step,
    }


def _shortest_us(costs: Sequence[Cost]) -> float:
    return min(cost.submit_us for cost in costs)


def _layer_us(few: Sequence[Cost], many: Sequence[Cost]) -> float:
    return (_shortest_us(many) - _shortest_us(few)) / (_LAYERS[1] - _LAYERS[0])


def costs_of(
    way: str, pages: int, layers: Sequence[int], repeats: int = 1, *, is_whole: bool = True
) -> list[list[Cost]]:
    """The costs of loads with each of these numbers of layers, measured in turns.

    is_whole: the submitting thread puts all layers on the stream, not only the first.
    """
    costs: list[list[Cost]] = [[] for _ in layers]
    with ExitStack() as stack:
        loads = [stack.enter_context(_load(way, pages, n, is_whole=is_whole)) for n in layers]
        for number in range(repeats + 1):  # the first makes events
            for load, found in zip(loads, costs, strict=True):
                cost = load()
                if number:
                    found.append(cost)
    return costs


@contextmanager
def _load(way: str, pages: int, layers: int, *, is_whole: bool) -> Iterator[Callable[[], Cost]]:
    """Submits a load and waits for its end."""
    extents = Extents([0], [1], [pages], 1, pages)
    numbers = np.random.default_rng(1).permutation(pages).astype(np.uint32)
    starts = np.arange(layers * 2, dtype=np.uint64).reshape(layers, 2)
    bases = np.uint64(1 << 40) + starts * np.uint64(pages * _SEGMENT_NBYTES)
    memory = PagedMemory(bases, (_SEGMENT_NBYTES,) * 2, (_SEGMENT_NBYTES,) * 2, pages)
    driver = CountingDriver()
    with engine_of(way, driver, pages * 4096) as engine:
        if is_whole and isinstance(engine, HostEngine):
            engine.first_layers(layers)

        def submit() -> Cost:
            if isinstance(engine, DeviceEngine) and isinstance(engine._launcher, PersistentKernel):
                engine._launcher._consumed[:] = engine._launcher._posted  # no kernel does it
            driver.calls = driver.argument_nbytes = 0
            began_ns = time.thread_time_ns()
            transfer = engine.submit(OPCODE_READ, extents, numbers, memory, timeout_s=_TIMEOUT_S)
            taken_us = (time.thread_time_ns() - began_ns) / 1e3
            if not transfer.wait_released(_TIMEOUT_S):
                raise DeviceTimeout("a load of a driver that does nothing did not end")
            return Cost(taken_us, driver.calls, driver.argument_nbytes)

        yield submit


@contextmanager
def engine_of(
    way: str, counting: CountingDriver, nbytes: int
) -> Iterator[HostEngine | DeviceEngine]:
    """An engine with staging for layers of nbytes each, and the mover that `way` names."""
    staging = 8 * nbytes + 16 * MiB
    driver, modules = cast(Driver, counting), cast(Modules, NamedKernels())
    kind, _, mover = way.partition(", ")
    with ExitStack() as stack:
        size = max(1024 * MiB, staging)
        controller = stack.enter_context(MemoryController([size], mode="zero_copy"))
        if kind != "host":
            device = DeviceEngine(driver, modules, controller, kind=kind, staging_nbytes=staging)
            stack.callback(device.close, _TIMEOUT_S)
            yield device
            return
        movers: dict[str, Mover] = {"copy-batch": BatchCopyMover(driver), "copy": CopyMover(driver)}
        if mover == "kernel":
            tables = TableMemory(driver, _TABLES_NBYTES)
            stack.callback(tables.close)
            movers[mover] = KernelMover(driver, modules["gio_move"], tables)
        native = Engine(controller, depth=256)
        host = HostEngine(
            driver,
            native,
            mover=movers[mover],
            load_staging_nbytes=staging,
            store_staging_nbytes=MiB,
        )
        stack.callback(host.close, _TIMEOUT_S)
        stack.callback(native.close, _TIMEOUT_S)
        yield host

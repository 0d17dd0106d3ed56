"""The GPU benchmarks without concurrent compute: ceilings, movers, scatter, SMs, CPU time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.terminal import ProgressFactory
from tutti.base.units import KiB, MiB, format_nbytes
from tutti.bench.compare.paired import ComparedSystem, Round, compare
from tutti.bench.controller_memory import MemoryController
from tutti.bench.gpu.rig import (
    MOVERS,
    DevicePages,
    GpuUnderTest,
    LayerLoad,
    PlainCopies,
    count_for,
    spin_until,
    transfers,
    tutti_system,
)
from tutti.errors import Unsupported
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.host_engine import STAGING_NBYTES
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.memory import HostBuffer

DIRECTIONS = ("load", "store")
#: The most important size first, because a run may be cut short.
SLICES = (256 * KiB, 64 * KiB, MiB)
BLOCKS = (16, 8, 4, 2, 1, 12, 24, 32)
#: Limit for the end of the thread that computes in Python; it ends within 5 ms.
_PYTHON_S = 10.0
#: Bytes of K (and of V) per token and layer of Llama-3-8B.
_TOKEN_NBYTES = 2048


@dataclass(frozen=True)
class RoundPlan:
    """The amount of measurements.

    pairs: number of pairs of rounds.  round_s: duration of a round, which determines its transfers.
    batch_nbytes, layers: of one transfer; by default a layer has 8K tokens of Llama-3-8B.
    staging_nbytes: by default the engine's.  tokens: of the layers that are scattered.
    file_nbytes: of the file in folder.  until_s: time.monotonic() after which no row begins.
    """

    progress: ProgressFactory
    folder: Path
    pairs: int = 7
    round_s: float = 0.15
    batch_nbytes: int = 256 * MiB
    layers: int = 8
    staging_nbytes: int = STAGING_NBYTES
    tokens: int = 65536
    file_nbytes: int = 4096 * MiB
    until_s: float = math.inf

    def load(self, slice_nbytes: int) -> LayerLoad:
        """A transfer of slices of this size, with K and V in separate segments."""
        return LayerLoad.of_nbytes(slice_nbytes, self.batch_nbytes, self.layers)


@dataclass(frozen=True)
class Row:
    """One measurement: its name, unique in its case, and the function that makes it."""

    name: str
    work: Callable[[], dict[str, Any]]


Case = Callable[[GpuUnderTest, RoundPlan], list[Row]]


@dataclass(frozen=True)
class Way:
    """A way to move bytes: an engine, a mover, and the number of blocks of its kernel."""

    engine: str = "host"
    mover: str = "kernel"
    blocks: int = 16

    @property
    def name(self) -> str:
        """Name in rows; leaves out the default of 16 blocks."""
        blocks = f", {self.blocks} blocks" if self.mover == "kernel" and self.blocks != 16 else ""
        return f"{self.engine}, {self.mover}{blocks}"


def round_trips(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """Checks with every engine and mover that stored bytes are loaded correctly."""
    ways = [Way("host", mover) for mover in _movers(machine)]
    if machine.modules is not None:
        ways += [Way(kind) for kind in KINDS]
    return [Row(f"round trip, {way.name}", partial(_trip, machine, way)) for way in ways]


def _trip(machine: GpuUnderTest, way: Way) -> dict[str, Any]:
    load = LayerLoad(64 * KiB, 16, layers=4)
    with MemoryController([64 * MiB]) as medium, ExitStack() as stack:
        pages = stack.enter_context(closing(DevicePages(machine.driver, load)))
        how: dict[str, Any] = {"controller": medium, "staging_nbytes": 8 * MiB}
        check = stack.enter_context(_checker(machine, pages))
        verdict = check(stack.enter_context(open_engine(machine, way, **how)))
    return {"verdict": verdict, "right": verdict == "right"}


def open_engine(machine: GpuUnderTest, way: Way, **how: Any) -> Any:
    """A context manager that opens the engine of a way."""
    if way.engine == "host":
        return machine.host_engine(way.mover, blocks=way.blocks, **how)
    return machine.device_engine(way.engine, blocks=way.blocks, **how)


@contextmanager
def _checker(machine: GpuUnderTest, pages: DevicePages) -> Iterator[Callable[[Any], str]]:
    """A function that stores random pages with an engine, wipes them and loads them; returns
    "right", or the number of wrong bytes.  Pins its memory before the engine is made.
    """
    driver, load = machine.driver, pages.load
    host = HostBuffer(load.nbytes)
    pinned = PinnedMemory(driver, host)
    content = np.random.default_rng(7).integers(0, 256, load.nbytes, dtype=np.uint8)
    stream = driver.create_stream()

    def move(target: int, source: int) -> None:
        driver.copy(target, source, load.nbytes, stream)
        spin_until(lambda: driver.is_stream_done(stream), "a copy")

    def check(submitter: Any) -> str:
        host.array[:] = content
        move(pages.address, pinned.device_address)
        transfers(submitter, pages, "store", 1)
        host.array[:] = 0
        move(pages.address, pinned.device_address)
        transfers(submitter, pages, "load", 1)
        move(pinned.device_address, pages.address)
        wrong = int(np.count_nonzero(host.array != content))
        return "right" if not wrong else f"{wrong} of {load.nbytes} bytes are wrong"

    try:
        yield check
    finally:
        driver.destroy_stream(stream)
        pinned.close()


def _movers(machine: GpuUnderTest) -> list[str]:
    has = {"copy-batch": machine.driver.has_copy_batch, "kernel": machine.modules is not None}
    return [name for name in MOVERS if has.get(name, True)]


def copy_engines(machine: GpuUnderTest) -> Way:
    """The engine host with the driver's best copy call."""
    return Way("host", _movers(machine)[0])


def first(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """The most important results: correctness, and the speed of both movers."""
    best = copy_engines(machine)
    loads = [plan.load(n) for n in SLICES]
    # Separate K and V turn slices of 64 KiB into fragments of 32; in one segment there is one.
    loads.append(replace(loads[SLICES.index(64 * KiB)], segments=1))
    rows = [_row(machine, plan, best, load, d) for load in loads for d in DIRECTIONS]
    if machine.modules is not None:
        rows += [_row(machine, plan, Way(), loads[0], direction) for direction in DIRECTIONS]
    return [*round_trips(machine, plan), *rows]


def engine(name: str, machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """One engine, with each of its movers, over a medium that moves nothing, against one memcpy."""
    if name in KINDS and machine.modules is None:
        raise Unsupported("no device code is loaded")
    ways = [Way("host", m) for m in _movers(machine)] if name == "host" else [Way(name)]
    loads = [plan.load(n) for n in SLICES]
    rows = [_row(machine, plan, w, load, d) for w in ways for load in loads for d in DIRECTIONS]
    # Blocks of the other engines also drive queues; measures how many are needed.
    few = (8, 4) if name in ("resident", "persistent") else ()
    return rows + [
        _row(machine, plan, Way(name, blocks=blocks), loads[0], direction)
        for blocks in few
        for direction in DIRECTIONS
    ]


def _row(
    machine: GpuUnderTest,
    plan: RoundPlan,
    way: Way,
    load: LayerLoad,
    direction: str,
    bar: str = "one",
) -> Row:
    pieces = f"{format_nbytes(load.slice_nbytes)} in {load.segments}"
    name = f"{way.name}, {direction}, slices of {pieces}, against {bar}"
    return Row(name, partial(against_copies, machine, plan, way, load, direction, bar))


def against_copies(
    machine: GpuUnderTest, plan: RoundPlan, way: Way, load: LayerLoad, direction: str, bar: str
) -> dict[str, Any]:
    """Alternates an engine over a medium that moves nothing with plain copies of as many bytes."""
    # Staging for all layers of two transfers, or the engine's default if that is smaller.
    # A store splits its puts into parts of which two fit.
    staging_nbytes = plan.staging_nbytes
    if direction == "store" or 2 * load.slice_nbytes * load.pages > staging_nbytes // 2:
        staging_nbytes = 2 * load.nbytes + 64 * MiB
    with ExitStack() as stack:
        # Before the engine is made, because an allocation may wait for its kernels.
        pages = stack.enter_context(closing(DevicePages(machine.driver, load)))
        copies = stack.enter_context(closing(PlainCopies(machine.driver, pages)))
        submitter = stack.enter_context(open_engine(machine, way, staging_nbytes=staging_nbytes))
        count = count_for(submitter, pages, direction, plan.round_s)
        ours = tutti_system(way.name, submitter, pages, direction, count)
        theirs = copies.system(bar, direction, count)
        result = compare(ours, theirs, pairs=plan.pairs, progress=plan.progress)
    return {
        "engine": way.engine,
        "mover": way.mover,
        "blocks": way.blocks if way.mover == "kernel" else 0,
        "direction": direction,
        "bar": bar,
        "slice_nbytes": load.slice_nbytes,
        "fragment_nbytes": load.slice_nbytes // load.segments,
        "layer_nbytes": load.slice_nbytes * load.pages,
        "transfer_nbytes": load.nbytes,
        "transfers_in_a_round": count,
        "staging_nbytes": staging_nbytes,
        "bar_backing": copies.backing,
        **result,
    }


def scatter(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """Layers of 64K tokens in pages of 16 and 64, fragments of 32 and 128 KiB, K and V, against the
    batch call alone and against a loop.
    """
    bars = ("batch", "loop") if machine.driver.has_copy_batch else ("loop",)
    rows = []
    for bar in bars:
        for page_tokens in (16, 64):
            slice_nbytes = 2 * page_tokens * _TOKEN_NBYTES
            load = LayerLoad(slice_nbytes, plan.tokens // page_tokens, layers=2)
            for direction in DIRECTIONS:
                rows.append(_row(machine, plan, copy_engines(machine), load, direction, bar))
    return rows


def multiprocessors(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """The number of blocks (one per multiprocessor) that the SM copy needs for the link's rate."""
    if machine.modules is None:
        raise Unsupported("no device code is loaded")
    return [
        _row(machine, plan, Way(blocks=blocks), plan.load(slice_nbytes), direction)
        for slice_nbytes in (256 * KiB, 64 * KiB)
        for blocks in BLOCKS
        for direction in DIRECTIONS
    ]


def interpreter(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """Transfers while a thread computes in Python, like SGLang's idle scheduler, against the same
    transfers alone.
    """
    return [
        Row(f"{direction}, beside Python", partial(_beside_python, machine, plan, direction))
        for direction in DIRECTIONS
    ]


def _beside_python(machine: GpuUnderTest, plan: RoundPlan, direction: str) -> dict[str, Any]:
    way, load = copy_engines(machine), plan.load(256 * KiB)
    with ExitStack() as stack:
        pages = stack.enter_context(closing(DevicePages(machine.driver, load)))
        staging_nbytes = 2 * load.nbytes + 64 * MiB
        submitter = stack.enter_context(open_engine(machine, way, staging_nbytes=staging_nbytes))
        count = count_for(submitter, pages, direction, plan.round_s)
        alone = tutti_system("alone", submitter, pages, direction, count)

        def beside() -> Round:
            with _computing():
                return alone.round()

        busy = ComparedSystem("beside Python", beside)
        return compare(busy, alone, pairs=plan.pairs, progress=plan.progress)


@contextmanager
def _computing() -> Iterator[None]:
    """Runs a thread that computes in Python, and releases the GIL only after its interval."""
    is_over = False

    def compute() -> None:
        number = 0
        while not is_over:  # bounded by the context
            number += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        is_over = True
        thread.join(_PYTHON_S)


def cpu_time(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """CPU time of the process per 10^9 bytes, for the engines in order and in reverse order."""
    ways = [copy_engines(machine)]
    if machine.modules is not None:
        ways += [Way("launch"), Way("resident")]
    load = plan.load(256 * KiB)
    rows = []
    for turn in (1, 2):
        for way in ways if turn == 1 else reversed(ways):
            for direction in DIRECTIONS:
                row = _row(machine, plan, way, load, direction)
                rows.append(replace(row, name=f"{row.name}, turn {turn}"))
    return rows

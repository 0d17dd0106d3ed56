"""The cases of bench/compare/run.py: the systems, shapes and sizes that are compared."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti import native
from tutti.base.terminal import ProgressFactory
from tutti.base.units import KiB, MiB
from tutti.bench.compare import index_cost
from tutti.bench.compare.churn import churn
from tutti.bench.compare.paired import ComparedSystem, Round, compare
from tutti.bench.compare.systems import (
    BATCH_NBYTES,
    INFLIGHT,
    PoolPlan,
    file_systems,
    filled_pool,
    fio_file,
    fio_system,
    in_place_of,
    pool_system,
)
from tutti.bench.fio import IODEPTH, FioJob, FioUnavailable, held_hugepages, run_fio
from tutti.bench.meter import Meter
from tutti.bench.peers.same_memory import unverified
from tutti.bench.pool_workload import Limit, PoolWorkload
from tutti.bench.shape import KvPageShape, parse_shape
from tutti.bench.statistics import interval_text
from tutti.errors import Unsupported
from tutti.gio_uring.controller_file import RequestLimits
from tutti.gio_uring.memory import HostBuffer

PHASES = ("store", "retrieve")
_FILE_BARS = {"store": 2.0, "retrieve": 1.5}  # times a file per object
_DIRECTION = {"store": "write", "retrieve": "read", "layerwise": "read"}
_PREFIX_SHAPE = "16x128KiB"  # of the pages of a long prefix
_CHURN = 10  # bytes stored over capacity
# A store's other memory on hugepages: staging of records, and its engine's descriptor lists.
_STORE_NBYTES = 256 * MiB

Cells = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """Parameters of all cases; see the arguments of tutti/bench/compare/run.py."""

    directories: tuple[Path, ...]
    pairs: int
    size_nbytes: int
    round_s: float
    prefix_pages: int
    records: int
    memory: tuple[str, ...]
    only: str
    allow_sysctl: bool
    seed: int
    progress: ProgressFactory

    @property
    def directory(self) -> Path:
        """The first folder, for the systems compared with; Tutti's pools have a member in each."""
        return self.directories[0]

    def pool(self, name: str, plan: PoolPlan) -> AbstractContextManager[PoolWorkload]:
        """A filled pool with a member in each directory."""
        return filled_pool(self.directories, name, plan, self.progress)

    def wanted(self, cell: str) -> bool:
        """Whether a cell is to be measured."""
        return self.only in cell

    def compare(self, a: ComparedSystem, b: ComparedSystem, **more: Any) -> dict[str, Any]:
        """Runs pairs of rounds of two systems.  more: see bench/compare/paired.py."""
        return compare(a, b, pairs=self.pairs, progress=self.progress, seed=self.seed, **more)

    def plan(self, shape: str, **more: Any) -> PoolPlan:
        """A pool of this size."""
        return PoolPlan(parse_shape(shape), self.size_nbytes, seed=self.seed, **more)


def bandwidth_fio(setup: Setup) -> Cells:
    """store and retrieve of 8 MiB objects, slices of 256 and 128 KiB, against fio"""
    return _against_fio(setup, ("32x256KiB", "64x128KiB"), verify="off", bounded=True)


def bandwidth_memory(setup: Setup) -> Cells:
    """as bandwidth-fio, verified and in registered memory of 256 MiB where fio reuses 8 MiB"""
    return _against_fio(setup, ("32x256KiB",), verify="always", bounded=False)


def fio_memory(setup: Setup) -> Cells:
    """fio with 256 MiB of buffers (queue depth 1024) against fio with 8 MiB (queue depth 32)"""
    phases = filter(setup.wanted, PHASES)
    return {f"{phase} 256KiB": _fio_memory_cell(setup, phase) for phase in phases}


def _fio_memory_cell(setup: Setup, phase: str) -> dict[str, Any]:
    path, nbytes = str(setup.directory / "fio.data"), setup.size_nbytes
    few = FioJob(path, _DIRECTION[phase], 256 * KiB, nbytes, nbytes)
    many = replace(few, iodepth=1024)
    try:
        with (
            held_hugepages([many], allow_sysctl=setup.allow_sysctl) as memory,
            fio_file(setup.directory, few.size_nbytes),
        ):
            few, many = (replace(job, hugepages=memory) for job in (few, many))
            nbytes = _round_nbytes(setup, run_fio(few).gb_per_s)
            few, many = (replace(job, io_nbytes=nbytes) for job in (few, many))
            return setup.compare(fio_system(many), fio_system(few))
    except FioUnavailable as error:
        return _not_measured(error)


def layerwise_fio(setup: Setup) -> Cells:
    """retrieve of a long prefix, waiting for layer after layer, against fio's reads"""
    cells: Cells = {}
    for memory, bounded in itertools.product(setup.memory, (True, False)):
        buffers = "fio's 8 MiB of buffers" if bounded else "a page of memory for every page"
        cell = f"{setup.prefix_pages} pages of {_PREFIX_SHAPE}, {memory} pages, {buffers}"
        if setup.wanted(cell):
            plan = _prefix_plan(setup, hugepages=memory == "huge")
            plan = _with_fio_memory(plan) if bounded else plan
            cells[cell] = _fio_cell(setup, plan, "layerwise")
    return cells


def churned(setup: Setup) -> Cells:
    """retrieve of a long prefix from a pool that was churned through, against a fresh pool"""
    plan = _prefix_plan(setup, hugepages=True)
    nbytes, pages = _CHURN * plan.capacity_nbytes, setup.prefix_pages
    round_nbytes = _prefix_round(setup, plan)
    with setup.pool("one", plan) as one, setup.pool("other", plan) as other:
        fresh, aged = [one], [other]

        def age() -> None:
            """Churns through the fresh pool, and empties the other one."""
            fresh[0], aged[0] = aged[0], fresh[0]
            fresh[0].store.clear(deallocate=False)
            churn(aged[0], nbytes, seed=setup.seed, progress=setup.progress)
            for workload in (*fresh, *aged):
                workload.fill(pages)

        age()
        cell = setup.compare(
            pool_system("churned pool", aged, "layerwise", round_nbytes, pages),
            pool_system("fresh pool", fresh, "layerwise", round_nbytes, pages),
            move=age,
        )
    return {"churned": cell}


def files(setup: Setup) -> Cells:
    """as `tutti.open` gives it, scheduled and verified, against a file per object"""
    cells: Cells = {}
    kinds = itertools.product((8, 32), (True, False), (False, True))
    for batch_mib, direct, hugepages in kinds:
        kind = f"{'direct' if direct else 'buffered'}, batches of {batch_mib} MiB"
        kind += ", all on hugepages" if hugepages else ""
        wanted = {p: f"{p}, {kind}" for p in PHASES if setup.wanted(f"{p}, {kind}")}
        if wanted:
            plan = setup.plan("32x256KiB", batch_nbytes=batch_mib * MiB, scheduled=True)
            try:
                cells |= _file_cells(setup, plan, wanted, direct=direct, hugepages=hugepages)
            except Unsupported as error:
                cells |= {cell: _not_measured(error) for cell in wanted.values()}
    return cells


def _not_measured(error: Unsupported) -> dict[str, str]:
    """A cell without numbers, with the reason; of: the missing system, if it is not the store."""
    cell = {"not_measured": str(error)}
    return {**cell, "of": "fio"} if isinstance(error, FioUnavailable) else cell


def _file_cells(
    setup: Setup, plan: PoolPlan, wanted: dict[str, str], *, direct: bool, hugepages: bool
) -> Cells:
    """A cell per phase, of a pool on hugepages, which is made again after half of the pairs.

    hugepages: the files and fio use them, too; then fio's blocks are as long as Tutti's longest
    requests.  In a phase every system uses as much memory as the batches in flight have.
    """
    cells: Cells = {}
    path = str(setup.directory / "fio.data")
    block_nbytes = RequestLimits().nbytes_max if hugepages else plan.shape.slice_nbytes
    jobs = {p: _same_memory(path, p, plan, setup.size_nbytes, block_nbytes) for p in wanted}
    nbytes = _STORE_NBYTES + plan.engine_nbytes + _inflight_nbytes(plan)
    needed = held_hugepages(
        list(jobs.values()), allow_sysctl=setup.allow_sysctl, others_nbytes=nbytes
    )
    can_fio = shutil.which("fio") is not None
    with (
        needed if hugepages else nullcontext("") as memory,
        fio_file(setup.directory, setup.size_nbytes) if can_fio else nullcontext(),
        ExitStack() as stack,
    ):
        pool: list[PoolWorkload] = []

        def make() -> None:
            pool.clear()
            stack.close()
            gc.collect()  # frees the memory of the pool before
            pool.append(stack.enter_context(setup.pool("compare", plan)))

        make()
        round_nbytes = _calibrated(setup, pool[0])
        with file_systems(
            setup.directory, plan, direct=direct, hugepages=hugepages, nbytes=round_nbytes
        ) as systems:
            for phase, cell in wanted.items():
                job = replace(jobs[phase], io_nbytes=round_nbytes, hugepages=memory)
                tutti = pool_system("tutti", pool, phase, round_nbytes)
                bound = fio_system(job) if can_fio else None
                found = setup.compare(tutti, systems[phase], bound=bound, move=make)
                cells[cell] = found | _file_bar(found, None if hugepages else _FILE_BARS[phase])
    return cells


def _inflight_nbytes(plan: PoolPlan) -> int:
    return plan.inflight * plan.batch_pages * plan.shape.object_nbytes


def _same_memory(path: str, phase: str, plan: PoolPlan, nbytes: int, block_nbytes: int) -> FioJob:
    """fio with as many bytes of buffers as the batches in flight have."""
    depth = _inflight_nbytes(plan) // block_nbytes
    return FioJob(path, _DIRECTION[phase], block_nbytes, nbytes, nbytes, iodepth=depth)


def _file_bar(found: dict[str, Any], bar: float | None) -> dict[str, str]:
    """Whether the bar was reached, and fio's speed with as much memory."""
    words = []
    if bar is not None:
        ratio = found["speed_ratio"]["median"]
        verdict = "reached" if ratio >= bar else "NOT REACHED"
        words.append(f"{ratio:.2f} times the files (bar {bar:g}): {verdict}")
    bound = found.get("bound", {})
    if "not_measured" in bound:
        words.append(f"{bound['name']} with as much memory: not measured: {bound['not_measured']}")
    elif bound:
        words.append(
            f"{bound['name']} with as much memory, on the files' kind of pages:"
            f" {bound['median_gb_per_s']:.2f} GB/s, {interval_text(bound['speed_ratio'])} times"
        )
    return {"bar": "; ".join(words)} if words else {}


def cpu_fio(setup: Setup) -> Cells:
    """CPU time without verification, objects of 8 MiB and 256 KiB, against fio"""
    return _against_fio(setup, ("32x256KiB", "1x256KiB", "8x32KiB"), verify="off", bounded=True)


def cpu_verify(setup: Setup) -> Cells:
    """CPU time that verification adds, slices from 64 KiB"""
    cells: Cells = {}
    for slice_kib, phase in itertools.product((64, 128, 256), PHASES):
        shape = KvPageShape(8 * MiB // (slice_kib * KiB), slice_kib * KiB)
        cell = f"{phase} {shape}"
        if not setup.wanted(cell):
            continue
        # One batch of 64 MiB at a time, so that much of the memory stays in a cache.
        plan = setup.plan(str(shape), batch_nbytes=64 * MiB, inflight=1)
        with setup.pool("compare", plan) as workload:
            nbytes = _calibrated(setup, workload)
            verified = pool_system("verify always", [workload], phase, nbytes)
            bare = unverified(workload.store)(verified.round)
            cells[cell] = setup.compare(verified, ComparedSystem("verify off", bare))
    return cells


def digest(setup: Setup) -> Cells:
    """XXH3 of memory that is in no cache, slices of 256 KiB, against one word of each line"""
    buffer = HostBuffer(1024 * MiB)
    buffer.array[:] = 1
    sizes = np.full(buffer.nbytes // (256 * KiB), 256 * KiB, np.uint64)
    where, library = np.uint64(buffer.address) + np.cumsum(sizes) - sizes, native.lib()
    given = native.address(where), native.address(sizes), sizes.size

    def timed(read: Callable[[], object]) -> Round:
        meter = Meter()
        with meter.timed():
            read()
        meter.nbytes = buffer.nbytes
        return Round(meter.gb_per_s, meter.cpu_s_per_gb)

    # One call for all slices, because calls from Python would be measured, too.
    xxh3 = partial(library.tutti_xxh3_64_isa, library.tutti_isa_best(), *given)
    lines = partial(library.tutti_read_lines, *given)
    plain = ComparedSystem("one word of each line", partial(timed, lines))
    return {"1 GiB": setup.compare(ComparedSystem("XXH3-64", partial(timed, xxh3)), plain)}


def index(setup: Setup) -> Cells:
    """memory of the index for an object, and recovery of many records after a crash"""
    return {"index": index_cost.measure(str(setup.directory), setup.records)}


def index_latency(setup: Setup) -> Cells:
    """CPU time to hash, insert and look up prompts of 128K to 1M tokens in a large index"""
    return index_cost.latency(setup.records, setup.pairs, setup.seed)


CASES: dict[str, Callable[[Setup], Cells]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        *(bandwidth_fio, bandwidth_memory, fio_memory, layerwise_fio, churned, files, cpu_fio),
        *(cpu_verify, digest, index, index_latency),
    )
}


def _against_fio(setup: Setup, shapes: tuple[str, ...], verify: str, *, bounded: bool) -> Cells:
    """bounded: register as much memory as fio has buffers, because its size affects bandwidth."""
    cells: Cells = {}
    for shape, memory, phase in itertools.product(shapes, setup.memory, PHASES):
        cell = f"{phase} {shape}, {memory} pages"
        if setup.wanted(cell):
            plan = setup.plan(shape, verify=verify, hugepages=memory == "huge")
            cells[cell] = _fio_cell(setup, _with_fio_memory(plan) if bounded else plan, phase)
    return cells


def _fio_cell(setup: Setup, plan: PoolPlan, phase: str) -> dict[str, Any]:
    """A pool against fio in the same file, with blocks of one slice, on the same kind of pages.

    What fio writes there is not read again.
    """
    path, block_nbytes = str(setup.directory / "compare.tutti"), plan.shape.slice_nbytes
    job = FioJob(path, _DIRECTION[phase], block_nbytes, setup.size_nbytes, setup.size_nbytes)
    nbytes = _STORE_NBYTES + plan.engine_nbytes
    needed = held_hugepages([job], allow_sysctl=setup.allow_sysctl, others_nbytes=nbytes)
    try:
        with (
            needed if plan.hugepages else nullcontext("") as memory,
            setup.pool("compare", plan) as workload,
        ):
            is_prefix, pages = phase == "layerwise", setup.prefix_pages
            batches = workload.prefix(pages) if is_prefix else workload.resident()
            job = in_place_of(workload, batches, replace(job, hugepages=memory))
            speed = run_fio(job).gb_per_s
            nbytes = _prefix_round(setup, plan, speed) if is_prefix else _round_nbytes(setup, speed)
            return setup.compare(
                pool_system("tutti", [workload], phase, nbytes, pages),
                fio_system(replace(job, io_nbytes=nbytes)),
            )
    except Unsupported as error:
        return _not_measured(error)


def _with_fio_memory(plan: PoolPlan) -> PoolPlan:
    """The plan with as much registered memory as fio has buffers, which excludes verification.

    Its batches are of 256 MiB, as for the pages of a long prefix.
    """
    memory_nbytes = IODEPTH * plan.shape.slice_nbytes
    return replace(
        plan, verify="off", memory_nbytes=memory_nbytes, batch_nbytes=256 * MiB, inflight=2
    )


def _calibrated(setup: Setup, workload: PoolWorkload) -> int:
    """Bytes per round, from a short round of retrieves."""
    measured = workload.retrieve_phase(Limit(setup.round_s / 4))
    return _round_nbytes(setup, measured["gb_per_s"])


def _round_nbytes(setup: Setup, gb_per_s: float) -> int:
    """Whole batches for about `round_s` at this speed."""
    batches = max(INFLIGHT, round(gb_per_s * 1e9 * setup.round_s / BATCH_NBYTES))
    return batches * BATCH_NBYTES


def _prefix_plan(setup: Setup, *, hugepages: bool) -> PoolPlan:
    """A pool with room for 1.5 times the prefix, in addition to the reserve."""
    shape = parse_shape(_PREFIX_SHAPE)
    capacity_nbytes = max(setup.size_nbytes, setup.prefix_pages * shape.object_nbytes * 3 // 2)
    return PoolPlan(
        shape, capacity_nbytes, hugepages=hugepages, load_pages=setup.prefix_pages, seed=setup.seed
    )


def _prefix_round(setup: Setup, plan: PoolPlan, gb_per_s: float = 0.0) -> int:
    """Bytes of whole prefixes for about `round_s`; at least one prefix."""
    prefix_nbytes = setup.prefix_pages * plan.shape.object_nbytes
    return max(1, round(gb_per_s * 1e9 * setup.round_s / prefix_nbytes)) * prefix_nbytes

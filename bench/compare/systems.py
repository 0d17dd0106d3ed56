"""The systems that cases compare; each runs rounds of a given number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.terminal import ProgressFactory
from tutti.base.units import MiB
from tutti.bench.compare.paired import ComparedSystem, Round
from tutti.bench.file_per_object import FilePerObject
from tutti.bench.fio import FioJob, prepare_file, run_fio
from tutti.bench.pool_file import medium_facts, temporary_pool
from tutti.bench.pool_workload import Limit, PoolWorkload
from tutti.bench.shape import KvPageShape
from tutti.errors import ChecksumMismatch
from tutti.memory.host_memory import HostMemory
from tutti.profiles.at_open import AUTO
from tutti.transfers.store_config import StoreConfig

INFLIGHT = 4
BATCH_NBYTES = 32 * MiB


@dataclass(frozen=True)
class PoolPlan:
    """A pool and its use, except its location."""

    shape: KvPageShape
    capacity_nbytes: int
    verify: str = "always"
    hugepages: bool = True
    load_pages: int = 1
    batch_nbytes: int = BATCH_NBYTES
    inflight: int = INFLIGHT
    memory_nbytes: int | None = None  # see Workload: only so much for puts, and for loads
    seed: int = 1
    scheduled: bool = False  # as `tutti.open` does by default

    @property
    def batch_pages(self) -> int:
        """Objects of a batch, fewer in a pool that is not much larger."""
        nbytes = min(self.batch_nbytes, self.capacity_nbytes // (8 * self.inflight))
        return max(1, nbytes // self.shape.object_nbytes)

    @property
    def memory_pages(self) -> int | None:
        """Pages of memory_nbytes, one at least."""
        nbytes = self.memory_nbytes
        return None if nbytes is None else max(1, nbytes // self.shape.object_nbytes)

    @property
    def engine_nbytes(self) -> int:
        """Registered memory of a workload."""
        source = self.memory_pages or self.inflight * self.batch_pages
        load = self.memory_pages or max(source, self.load_pages)
        return (source + load) * self.shape.object_nbytes


@contextmanager
def filled_pool(
    directories: Sequence[Path], name: str, plan: PoolPlan, progress: ProgressFactory
) -> Iterator[PoolWorkload]:
    """A pool that was filled completely once by puts."""
    with temporary_pool(
        [str(directory / f"{name}.tutti") for directory in directories],
        plan.shape.layout(),
        plan.capacity_nbytes,
        config=StoreConfig(verify=plan.verify),
        engine={"profile": AUTO if plan.scheduled else None},
        prewrite=True,
        progress=progress,
    ) as store:
        workload = PoolWorkload(
            store,
            batch_pages=plan.batch_pages,
            inflight=plan.inflight,
            load_pages=plan.load_pages,
            hugepages=plan.hugepages,
            memory_pages=plan.memory_pages,
            seed=plan.seed,
        )
        workload.fill(store.stats()["capacity_objects"])
        yield workload
        check(workload.wrong)


def pool_system(
    name: str, pool: list[PoolWorkload], phase: str, nbytes: int, prefix_pages: int = 0
) -> ComparedSystem:
    """Rounds of puts ("store"), of random batches ("retrieve") or of a prefix ("layerwise").

    pool: the only element is the pool; another one may replace it between rounds.
    """

    def run() -> Round:
        (workload,) = pool
        prefix = workload.prefix(prefix_pages) if phase == "layerwise" else None
        result = workload.phases(Limit(None, nbytes), prefix=prefix)[phase]()
        names = ("mean_run_length", "commands", "evicted", "p50_ms", "p99_ms", "nbytes")
        facts = {
            "backing": workload.backing,
            "engine_memory_nbytes": workload.memory.nbytes,
            "verify": workload.store._core.config.verify,  # of this round
            "scheduled": workload.store.scheduler is not None,
            **medium_facts(workload.store),
            **{key: result[key] for key in names},
        }
        return Round(result["gb_per_s"], result["cpu_s_per_gb"], facts)

    return ComparedSystem(name, run)


@contextmanager
def fio_file(directory: Path, nbytes: int) -> Iterator[str]:
    """A file for fio, written once."""
    path = directory / "fio.data"
    try:
        prepare_file(str(path), nbytes)
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def in_place_of(workload: PoolWorkload, batches: Sequence[int], job: FioJob) -> FioJob:
    """The job, whose path is that of the pool's first file, on the part with these batches.

    Where they begin at the end of the file and continue at its beginning, the longer part counts.
    """
    geometry = workload.store.geometry
    keys = np.concatenate([workload.keys(batch) for batch in batches])
    groups = [group for group in workload.store.residency.groups_of(keys) if group.nsid == 1]
    first, nlb = np.array([group.slba for group in groups]), groups[0].nlb
    far = np.flatnonzero(np.diff(first) > geometry.groups * nlb // 4)
    part = max(np.split(first, far + 1), key=len)
    offset_nbytes = int(part[0]) * geometry.lba_nbytes
    blocks = (int(part[-1] + nlb) * geometry.lba_nbytes - offset_nbytes) // job.block_nbytes
    nbytes = blocks * job.block_nbytes
    return replace(job, offset_nbytes=offset_nbytes, size_nbytes=nbytes, io_nbytes=nbytes)


def fio_system(job: FioJob) -> ComparedSystem:
    def run() -> Round:
        result = run_fio(job)
        backing = "hugetlb" if job.hugepages else "pages"
        facts = {"backing": backing, "version": result.version, "nbytes": result.nbytes}
        facts |= {"iodepth": job.iodepth, "engine_memory_nbytes": job.iodepth * job.block_nbytes}
        return Round(result.gb_per_s, result.cpu_s_per_gb, facts)

    return ComparedSystem(f"fio {job.direction}", run)


@contextmanager
def file_systems(
    directory: Path, plan: PoolPlan, *, direct: bool, hugepages: bool, nbytes: int
) -> Iterator[dict[str, ComparedSystem]]:
    """A file per object, filled: rounds of "store" and of "retrieve"."""
    pages = plan.inflight * plan.batch_pages
    memory = HostMemory.allocate(plan.shape.layout(), pages, hugepages=hugepages)
    objects = plan.capacity_nbytes // plan.shape.object_nbytes
    name = "files, direct" if direct else "files, buffered"
    with ExitStack() as stack:
        files = FilePerObject(directory / "objects", memory, direct=direct, objects_max=objects)
        stack.callback(files.close)
        files.store_phase(Limit(None, objects * plan.shape.object_nbytes))

        def round_of(phase: Callable[[Limit], dict[str, Any]]) -> Round:
            result = phase(Limit(None, nbytes))
            facts = {"backing": memory.owner.backing, "nbytes": result["nbytes"]}
            facts["engine_memory_nbytes"] = memory.nbytes
            return Round(result["gb_per_s"], result["cpu_s_per_gb"], facts)

        phases = {"store": files.store_phase, "retrieve": files.retrieve_phase}
        yield {phase: ComparedSystem(name, partial(round_of, of)) for phase, of in phases.items()}
        check(files.wrong)


def check(wrong: int) -> None:
    """Raises ChecksumMismatch for pages with wrong bytes, which make a speed meaningless."""
    if wrong:
        raise ChecksumMismatch(f"{wrong} pages held wrong bytes; the measurement is void")

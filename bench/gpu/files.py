"""Measures the GPU path over a file, against fio, or against threads if fio is missing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tutti.base.units import KiB, MiB, format_nbytes
from tutti.bench.compare.paired import ComparedSystem, Round, compare
from tutti.bench.fio import FioJob, held_hugepages, prepare_file, run_fio
from tutti.bench.gpu import rig
from tutti.bench.gpu.cases import DIRECTIONS, RoundPlan, Row, copy_engines
from tutti.errors import MediumError, Unsupported
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.memory import HostBuffer

#: Commands in flight, as many as the engine has.
_IODEPTH = 64
_SLICES = (256 * KiB, MiB)
#: A disk is slower than a link: rounds are longer, so that they contain several transfers.
_ROUND_FACTOR = 3
_BATCH_NBYTES = 128 * MiB


def files(machine: rig.GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """Loads from and stores to a file by direct I/O; fio has as many commands in flight."""
    bar = "fio" if shutil.which("fio") else "threads"
    return [
        Row(
            f"{direction}, slices of {format_nbytes(slice_nbytes)}, against {bar}",
            partial(_against_bar, machine, plan, slice_nbytes, direction, bar),
        )
        for slice_nbytes in _SLICES
        for direction in DIRECTIONS
    ]


@contextmanager
def _file(plan: RoundPlan, bar: str) -> Iterator[str]:
    """A file that was written once; it is removed after the last row that uses it."""
    path = str(plan.folder / f"gpu-bench-{os.getpid()}.dat")
    try:
        if bar == "fio":
            prepare_file(path, plan.file_nbytes)
        else:
            allocate_file(path, plan.file_nbytes)
            with closing(_Threads(path, MiB, plan.file_nbytes)) as threads:
                threads.move("write", plan.file_nbytes)
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def _against_bar(
    machine: rig.GpuUnderTest, plan: RoundPlan, slice_nbytes: int, direction: str, bar: str
) -> dict[str, Any]:
    load = rig.LayerLoad.of_nbytes(
        slice_nbytes, min(_BATCH_NBYTES, plan.batch_nbytes, plan.file_nbytes)
    )
    with ExitStack() as stack:
        path = stack.enter_context(_file(plan, bar))
        controller = stack.enter_context(FileController([path]))
        assert controller.info.lba_nbytes == rig.LBA_NBYTES, "files have blocks of 4096 bytes"
        # Closed after the engine, even if a transfer fails.
        pages = stack.enter_context(closing(rig.DevicePages(machine.driver, load)))
        mover = copy_engines(machine).mover
        gpu = stack.enter_context(
            machine.host_engine(mover, controller=controller, staging_nbytes=plan.staging_nbytes)
        )
        count = rig.count_for(gpu, pages, direction, _ROUND_FACTOR * plan.round_s)
        nbytes = count * load.nbytes
        verb = "read" if direction == "load" else "write"
        job = FioJob(path, verb, slice_nbytes, plan.file_nbytes, nbytes, iodepth=_IODEPTH)
        if bar == "fio":
            theirs, memory = _fio(stack, job)
        else:
            theirs, memory = _thread_bar(stack, job)
        ours = rig.tutti_system("host file", gpu, pages, direction, count)
        result = compare(ours, theirs, pairs=plan.pairs, progress=plan.progress)
    return {
        "direction": direction,
        "slice_nbytes": slice_nbytes,
        "transfer_nbytes": load.nbytes,
        "transfers_in_a_round": count,
        "executor": controller.executor_name,
        "bar_memory": memory,
        **result,
    }


def _fio(stack: ExitStack, job: FioJob) -> tuple[ComparedSystem, str]:
    """fio on hugepages, like the engine's staging, if possible; and the page kind that it has."""
    memory = "hugepages"
    try:
        huge = replace(job, hugepages=stack.enter_context(held_hugepages([job], allow_sysctl=True)))
        run_fio(replace(huge, io_nbytes=job.block_nbytes * job.iodepth))
    except Unsupported as error:
        huge, memory = job, f"ordinary pages: {error}"

    def run() -> Round:
        result = run_fio(huge)
        return Round(result.gb_per_s, result.cpu_s_per_gb, {"fio": result.version})

    return ComparedSystem("fio", run), memory


def _thread_bar(stack: ExitStack, job: FioJob) -> tuple[ComparedSystem, str]:
    threads = stack.enter_context(closing(_Threads(job.path, job.block_nbytes, job.size_nbytes)))
    move = partial(threads.move, job.direction, job.io_nbytes)
    return ComparedSystem("threads", lambda: rig.timed(job.io_nbytes, move)), threads.memory


class _Threads:
    """Sequential blocks by blocking calls, with as many threads as commands in flight.

    Replaces fio, which results note: the cost of reading or writing a file without a store.
    """

    def __init__(self, path: str, block_nbytes: int, size_nbytes: int) -> None:
        self._block_nbytes, self._blocks = block_nbytes, size_nbytes // block_nbytes
        flags = os.O_RDWR
        try:
            self._file = os.open(path, flags | os.O_DIRECT)
            how = "direct"
        except OSError:  # a file system without O_DIRECT
            self._file = os.open(path, flags)
            how = "through the page cache"
        self._buffer = HostBuffer(_IODEPTH * block_nbytes)
        self.memory = f"{self._buffer.backing}, {how}"
        self._pool = ThreadPoolExecutor(_IODEPTH)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)

    def move(self, direction: str, nbytes: int) -> None:
        """Moves `nbytes`, wrapping at the end of the file."""
        blocks = nbytes // self._block_nbytes
        began_s = time.monotonic()
        list(self._pool.map(partial(self._work, direction, blocks, began_s), range(_IODEPTH)))

    def _work(self, direction: str, blocks: int, began_s: float, thread: int) -> None:
        size = self._block_nbytes
        view = memoryview(self._buffer.array.data)[thread * size : (thread + 1) * size]
        call = os.preadv if direction == "read" else os.pwritev
        for number in range(thread, blocks, _IODEPTH):
            moved = call(self._file, [view], number % self._blocks * size)
            if moved != size:
                raise MediumError(f"a {direction} of {size} bytes moved {moved}; is the disk full?")
            if time.monotonic() - began_s > 60:
                raise MediumError(f"{direction}s take more than a minute; use a smaller file")

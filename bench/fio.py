"""fio, to compare with the store: same file system, file size, block size and bytes, direct I/O.

fio is the flexible I/O tester (github.com/axboe/fio); its JSON is described in fio(1).
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.base.units import MiB, format_nbytes
from tutti.errors import MediumError, Unsupported
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.memory import HUGEPAGE_NBYTES

IODEPTH = 32
_TIMEOUT_S = 600
_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")
_SPARE_HUGEPAGES = 128  # other programs take some as well


@dataclass(frozen=True)
class FioJob:
    """One run: `io_nbytes` from or to a file of `size_nbytes`, front to back, around at its end.

    direction: "read", "write" or "randread".  hugepages: buffers on reserved ones.  batches: of
    `iodepth` blocks, in memory that may be transparent hugepages; else all is on ordinary pages.
    """

    path: str
    direction: str
    block_nbytes: int
    size_nbytes: int
    io_nbytes: int
    hugepages: bool = False
    iodepth: int = IODEPTH
    batches: bool = False

    def command(self) -> list[str]:
        """The arguments of fio."""
        return [
            "fio",
            "--name=bench",
            f"--filename={self.path}",
            f"--rw={self.direction}",
            f"--bs={self.block_nbytes}",
            f"--size={self.size_nbytes}",
            f"--io_size={self.io_nbytes}",
            f"--iodepth={self.iodepth}",
            f"--iomem={'malloc' if self.batches else 'mmaphuge' if self.hugepages else 'mmap'}",
            *([f"--iodepth_batch={self.iodepth}"] if self.batches else []),
            *([f"--iodepth_batch_complete_min={self.iodepth}"] if self.batches else []),
            "--ioengine=io_uring",
            "--direct=1",
            "--overwrite=1",
            "--randrepeat=0",
            "--output-format=json",
        ]


@dataclass(frozen=True)
class FioResult:
    """What fio measured; CPU time is user and system time of its job."""

    nbytes: int
    wall_s: float
    cpu_s: float
    version: str

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.nbytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for 10^9 bytes."""
        return self.cpu_s / (self.nbytes / 1e9)


def run_fio(job: FioJob) -> FioResult:
    """Runs one job.  Raises Unsupported without fio, MediumError when the job fails."""
    if shutil.which("fio") is None:
        raise Unsupported("fio is not installed; install it, e.g. with `apt-get install fio`")
    tunables = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if job.batches else None
    command, timeout_s = job.command(), _TIMEOUT_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=tunables)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise MediumError(
            f"fio failed: {lines[-1] if lines else 'no message'}; with hugepages, reserve more "
            "of them (vm.nr_hugepages)"
        )
    return parse_fio(done.stdout, job.direction.removeprefix("rand"))


def parse_fio(text: str, direction: str) -> FioResult:
    """Reads fio's JSON; lines before it, such as notes, are skipped.

    Raises MediumError for a job that failed or output that is not fio's.
    """
    try:
        content: dict[str, Any] = json.loads(text[text.index("{") :])
        job = content["jobs"][0]
        error, measured = int(job["error"]), job[direction]
        nbytes, wall_s = int(measured["io_bytes"]), measured["runtime"] / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        version = str(content["fio version"])
    except (ValueError, LookupError, TypeError) as problem:
        raise MediumError(f"fio's output is not as expected ({problem!r}); run it by hand") from (
            problem
        )
    if error:
        raise MediumError(f"fio's job failed: {os.strerror(error)}; run it by hand")
    if nbytes <= 0 or wall_s <= 0:
        raise MediumError("fio moved nothing; give it more bytes")
    return FioResult(nbytes, wall_s, cpu_s, version)


def prepare_file(path: str, nbytes: int) -> None:
    """A file of this size, preallocated and written once with fio's random bytes."""
    allocate_file(path, nbytes)
    run_fio(FioJob(path, "write", MiB, nbytes, nbytes))


def hugepages_of(job: FioJob) -> int:
    """How many reserved hugepages a job needs."""
    return -(-job.iodepth * job.block_nbytes // HUGEPAGE_NBYTES) + _SPARE_HUGEPAGES


@contextmanager
def reserved_hugepages(count: int, *, allow_sysctl: bool) -> Iterator[None]:
    """Reserves `count` more hugepages, and releases them afterwards.

    Raises Unsupported when they are not there and may not, or cannot, be reserved.
    """
    gc.collect()  # what an earlier case used may hang in cycles
    before = int(_NR_HUGEPAGES.read_text())
    free, total = _hugepages()
    missing = count - free
    if missing <= 0:
        yield
        return
    what = f"{missing} more hugepages ({format_nbytes(missing * HUGEPAGE_NBYTES)}) are needed"
    wanted = total + missing  # pages in use count as well, also those above nr_hugepages
    remedy = f"set vm.nr_hugepages to {wanted}"
    if not allow_sysctl:
        raise Unsupported(f"{what}; {remedy}, or let this do it with --allow-sysctl")
    try:
        _NR_HUGEPAGES.write_text(str(wanted))
        if _hugepages()[0] < count:  # the page cache may be what lies in the way
            _DROP_CACHES.write_text("1")
            _COMPACT_MEMORY.write_text("1")
            _NR_HUGEPAGES.write_text(str(wanted))
        if _hugepages()[0] < count:
            raise Unsupported(f"{what}, but memory is too fragmented; {remedy} after a restart")
        yield
    except PermissionError as error:
        raise Unsupported(f"{what}, which needs root; {remedy}") from error
    finally:
        if int(_NR_HUGEPAGES.read_text()) != before:
            _NR_HUGEPAGES.write_text(str(before))


def _hugepages() -> tuple[int, int]:
    """(free, total); a page that was promised (HugePages_Rsvd) is not free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    free = counts.get("HugePages_Free:", 0) - counts.get("HugePages_Rsvd:", 0)
    return free, counts.get("HugePages_Total:", 0)

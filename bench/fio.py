"""Runs fio for comparison: same file system, file size, block size and bytes, with direct I/O.

fio is the flexible I/O tester (github.com/axboe/fio); its JSON is described in fio(1).
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.base.units import MiB, format_nbytes
from tutti.errors import Unsupported
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.memory import HUGEPAGE_NBYTES

IODEPTH = 32
_TIMEOUT_S = 600
_LOCK_S = 60.0
_NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_COMPACT_MEMORY = Path("/proc/sys/vm/compact_memory")
_ALIGNMENT_NBYTES = 4096  # fio's padding for direct I/O, in addition to its blocks


class FioUnavailable(Unsupported):
    """fio cannot be run: it is missing, has no hugepages, or failed."""


@dataclass(frozen=True)
class FioJob:
    """One run: `io_nbytes` from or to `size_nbytes` of a file, sequentially, wrapping at their end.

    direction: "read", "write" or "randread".  hugepages: the memory of `held_hugepages` for the
    buffers.  batches: of `iodepth` blocks, in memory that may be transparent hugepages.  Without
    both, buffers are on 4 KiB pages.  offset_nbytes: first byte in the file.
    """

    path: str
    direction: str
    block_nbytes: int
    size_nbytes: int
    io_nbytes: int
    hugepages: str = ""
    iodepth: int = IODEPTH
    batches: bool = False
    offset_nbytes: int = 0

    def command(self) -> list[str]:
        """The arguments of fio."""
        mapped = f"mmaphuge:{self.hugepages}" if self.hugepages else "mmap"
        return [
            "fio",
            "--name=bench",
            f"--filename={self.path}",
            f"--rw={self.direction}",
            f"--bs={self.block_nbytes}",
            f"--offset={self.offset_nbytes}",
            f"--size={self.size_nbytes}",
            f"--io_size={self.io_nbytes}",
            f"--iodepth={self.iodepth}",
            f"--iomem={'malloc' if self.batches else mapped}",
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
        """Speed in 10^9 bytes per second."""
        return self.nbytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_s / (self.nbytes / 1e9)


def run_fio(job: FioJob) -> FioResult:
    """Runs one job.  Raises FioUnavailable without fio, and when the job fails or does not end."""
    if shutil.which("fio") is None:
        raise FioUnavailable("fio is not installed; install it, e.g. with `apt-get install fio`")
    tunables = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if job.batches else None
    pipe = subprocess.PIPE
    # A process group of its own: fio does its I/O in a child, which would survive it.
    with subprocess.Popen(
        job.command(), stdout=pipe, stderr=pipe, text=True, env=tunables, process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                what = f"fio did not end in {_TIMEOUT_S} s; look for errors of the drive"
                raise FioUnavailable(what) from error
            raise
    if code := process.returncode:
        ending = f"signal {-code}, no message" if code < 0 else f"exit code {code}, no message"
        raise FioUnavailable(f"fio failed: {((err or out).strip().splitlines() or [ending])[-1]}")
    return parse_fio(out, job.direction.removeprefix("rand"))


def parse_fio(text: str, direction: str) -> FioResult:
    """Reads fio's JSON; lines before it, such as notes, are skipped.

    Raises FioUnavailable for a job that failed or output that is not fio's.
    """
    try:
        content: dict[str, Any] = json.loads(text[text.index("{") :])
        job = content["jobs"][0]
        error, measured = int(job["error"]), job[direction]
        nbytes, wall_s = int(measured["io_bytes"]), measured["runtime"] / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        version = str(content["fio version"])
    except (ValueError, LookupError, TypeError) as problem:
        what = f"fio's output is not as expected ({problem!r}); run it by hand"
        raise FioUnavailable(what) from problem
    if error:
        raise FioUnavailable(f"fio's job failed: {os.strerror(error)}; run it by hand")
    if nbytes <= 0 or wall_s <= 0:
        raise FioUnavailable("fio moved nothing; give it more bytes")
    return FioResult(nbytes, wall_s, cpu_s, version)


def prepare_file(path: str, nbytes: int) -> None:
    """Makes a file of this size, preallocated and written once with fio's random bytes."""
    allocate_file(path, nbytes)
    run_fio(FioJob(path, "write", MiB, nbytes, nbytes))


def hugepages_of(job: FioJob) -> int:
    """Hugepages that fio 3.33 maps: buffers for a power of two of blocks, and one page more."""
    depth = 1 << (job.iodepth - 1).bit_length()
    nbytes = depth * job.block_nbytes + _ALIGNMENT_NBYTES
    return -(-nbytes // HUGEPAGE_NBYTES) + 1


@contextmanager
def held_hugepages(
    jobs: Sequence[FioJob], *, allow_sysctl: bool, others_nbytes: int = 0
) -> Iterator[str]:
    """Reserves hugepages for the buffers of these jobs, which run one at a time.

    Any program may take free hugepages before fio does (a store's buffers do), and fio 3.33 then
    crashes, because it does not check its mapping.  So they are reserved here, in a memory file
    that fio maps.  `others_nbytes` are left free for others.  Missing hugepages are added to the
    system, and removed afterwards.
    Raises FioUnavailable if there are too few and they may not, or cannot, be added.
    """
    gc.collect()  # frees memory of earlier cases in reference cycles
    count = max(map(hugepages_of, jobs))
    added, file = 0, -1
    try:
        with _alone():  # also for pages that were found free
            missing = count + -(-others_nbytes // HUGEPAGE_NBYTES) - _hugepages()[0]
            added = _add(missing, allow_sysctl=allow_sysctl) if missing > 0 else 0
            try:
                file = os.memfd_create("fio", os.MFD_CLOEXEC | os.MFD_HUGETLB)
                os.posix_fallocate(file, 0, count * HUGEPAGE_NBYTES)
            except OSError as error:
                what = f"the kernel refuses {count} hugepages for fio ({error.strerror})"
                raise FioUnavailable(f"{what}; stop other programs that use some") from error
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        if file >= 0:
            os.close(file)
        if added:
            with _alone():
                now = int(_NR_HUGEPAGES.read_text())
                _NR_HUGEPAGES.write_text(str(max(0, now - added)))


@contextmanager
def _alone() -> Iterator[None]:
    """Excludes other comparisons with fio from reading or changing the number of hugepages."""
    end_s = time.monotonic() + _LOCK_S
    with open(_NR_HUGEPAGES) as lock:  # the lock ends with the file
        while not _locked(lock.fileno()):
            if time.monotonic() > end_s:
                what = f"another process has locked {_NR_HUGEPAGES} for {_LOCK_S:g} s"
                raise FioUnavailable(f"{what}; end it, then repeat this")
            time.sleep(0.02)
        yield


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _add(missing: int, *, allow_sysctl: bool) -> int:
    """Adds hugepages to the system; returns how many must be removed afterwards."""
    before, (free, total) = int(_NR_HUGEPAGES.read_text()), _hugepages()
    what = f"{missing} more hugepages ({format_nbytes(missing * HUGEPAGE_NBYTES)}) are needed"
    wanted = total + missing  # includes pages in use, also those above nr_hugepages
    remedy = f"set vm.nr_hugepages to {wanted}"
    if not allow_sysctl:
        raise FioUnavailable(f"{what}; {remedy}, or let this do it with --allow-sysctl")
    try:
        _NR_HUGEPAGES.write_text(str(wanted))
        if _hugepages()[0] < free + missing:  # the page cache may be in the way
            _DROP_CACHES.write_text("1")
            _COMPACT_MEMORY.write_text("1")
            _NR_HUGEPAGES.write_text(str(wanted))
    except OSError as error:
        raise FioUnavailable(f"{what}, which needs root; {remedy}") from error
    added = int(_NR_HUGEPAGES.read_text()) - before
    if _hugepages()[0] < free + missing:
        _NR_HUGEPAGES.write_text(str(before))
        why = "but memory is too fragmented"
        raise FioUnavailable(f"{what}, {why}; {remedy} after a restart")
    return added


def _hugepages() -> tuple[int, int]:
    """(free, total); reserved pages (HugePages_Rsvd) are not free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    free = counts.get("HugePages_Free:", 0) - counts.get("HugePages_Rsvd:", 0)
    return free, counts.get("HugePages_Total:", 0)

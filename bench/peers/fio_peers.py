"""fio as a peer: the drive's speed in the same rounds.

On hugepages it bounds the speed of peers on large pages: with many blocks in flight, and with four
blocks of a page each, like four threads.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutti.base.units import MiB
from tutti.bench.fio import IODEPTH, FioJob, held_hugepages, prepare_file, run_fio
from tutti.bench.peers.peer import PeerPlan
from tutti.errors import Unsupported


@dataclass(frozen=True)
class _Kind:
    """block_nbytes: None for blocks as large as a page."""

    block_nbytes: int | None
    iodepth: int
    hugepages: bool

    def job(self, path: str, plan: PeerPlan, direction: str) -> FioJob:
        """A batch of bytes from or to a file as large as all batches."""
        block_nbytes, nbytes = self.block_nbytes or plan.page_nbytes, plan.batch_nbytes
        return FioJob(
            *(path, direction, block_nbytes, plan.batches * nbytes, nbytes), iodepth=self.iodepth
        )


FIO = {
    "fio": _Kind(MiB, IODEPTH, hugepages=False),
    "fio-hugepages": _Kind(MiB, IODEPTH, hugepages=True),
    "fio-hugepages-4-pages": _Kind(None, 4, hugepages=True),
}


def missing(name: str, plan: PeerPlan, *, allow_sysctl: bool) -> str:
    """The reason why it cannot run here; empty if it can."""
    if shutil.which("fio") is None:
        return "fio is not installed"
    try:
        with ExitStack() as stack:
            _hold(name, plan, stack, allow_sysctl=allow_sysctl)
    except Unsupported as error:
        return str(error)
    return ""


class FioPeer:
    """Has the interface of a peer's process; its hugepages are released with the stack."""

    def __init__(self, name: str, plan: PeerPlan, stack: ExitStack, *, allow_sysctl: bool) -> None:
        self._kind, self._plan = FIO[name], plan
        self._path = str(Path(plan.directory) / "fio.data")
        self._memory = _hold(name, plan, stack, allow_sysctl=allow_sysctl)
        prepare_file(self._path, plan.batches * plan.batch_nbytes)

    def ask(self, command: str, *_: int) -> dict[str, Any]:
        """A batch of bytes, written or read."""
        direction = "write" if command == "store" else "read"
        job = self._kind.job(self._path, self._plan, direction)
        done = run_fio(replace(job, hugepages=self._memory))
        return {
            "wall_s": done.wall_s,
            "cpu_s": done.cpu_s,
            "nbytes": done.nbytes,
            "extra_memory_nbytes": 0,
        }

    def end(self) -> None:
        Path(self._path).unlink(missing_ok=True)


def _hold(name: str, plan: PeerPlan, stack: ExitStack, *, allow_sysctl: bool) -> str:
    """The memory of its job on hugepages; empty for one on ordinary pages."""
    if not FIO[name].hugepages:
        return ""
    job = FIO[name].job("", plan, "read")
    return stack.enter_context(held_hugepages([job], allow_sysctl=allow_sysctl))

"""One measurement of `tutti bench residency`, in a process of its own.

    python -m tutti.bench.residency.cell < cell.json

The process allocates its memory before it joins the control group, so that the group's limit
applies only to the page cache: earlier charges stay where they were.  It also allocates and frees
as much memory as the page cache may use: a virtual machine may have returned free memory to its
host (free page reporting of virtio-balloon), and the first pass through the page cache would then
measure how fast the host supplies it.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tutti import store as object_store
from tutti.base.interrupts import uninterrupted
from tutti.base.memory_pressure import read_memory
from tutti.bench.meter import Meter
from tutti.bench.pool_workload import WAIT_S, PendingLoad, PoolWorkload
from tutti.bench.residency import moving
from tutti.bench.shape import parse_shape
from tutti.bench.stamps import numbered_keys
from tutti.errors import ConfigError
from tutti.gio_uring.controller_file import BlockRange, FileController
from tutti.gio_uring.memory import HostBuffer
from tutti.scheduler.residency_policy import plan_groups
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

CONFIGURATIONS = ("page cache only", "cache policy only", "direct only", "dual path")


class Cell:
    """An open pool that is written completely once, and then read in rounds.

    plan_share: Dual-Blade's parameter X, as a share of the budget.
    """

    def __init__(self, store: ObjectStore, configuration: str, batch_pages: int) -> None:
        if configuration not in {*CONFIGURATIONS, *moving.CONFIGURATIONS}:
            raise ConfigError(f"no configuration {configuration!r}")
        assert isinstance(store.controller, FileController)
        self.store, self.controller = store, store.controller
        self.configuration = configuration
        self.workload = PoolWorkload(
            store, batch_pages=batch_pages, inflight=1, load_pages=batch_pages
        )
        self._kept_end = 0  # first block after those that the cache policy keeps

    def plan(self, share: float, budget_nbytes: int | None = None) -> int:
        """Chooses paths; returns the bytes that should stay in the page cache."""
        geometry, residency = self.store.geometry, self.store.residency
        if self.configuration in ("direct only", moving.AGAIN):
            return 0
        if self.configuration in ("dual path", "static", "dynamic"):
            return residency.replan(share=share, budget_nbytes=budget_nbytes).planned_nbytes
        whole = residency.replan(budget_nbytes=geometry.groups * geometry.group_nbytes)
        if self.configuration == "page cache only":
            return whole.planned_nbytes
        sizes = np.full(geometry.groups, geometry.group_nbytes)
        kept = plan_groups(sizes, read_memory().free_nbytes, share=share)
        count = int(np.count_nonzero(kept))
        first = geometry.groups_offset + count * geometry.group_nbytes
        self._kept_end = first // geometry.lba_nbytes
        return count * geometry.group_nbytes

    def write(self, batches: int) -> Meter:
        """Writes everything once, in order, like a prefill."""
        meter = Meter()
        for batch in range(batches):
            with meter.operation():
                stored = self.workload.put().wait(WAIT_S).stored
                self._after(batch)
            meter.nbytes += stored * self.workload.object_nbytes
        return meter

    def read(self, batches: int) -> tuple[Meter, float]:
        """Reads everything, in order, like decoding; also the share of bytes in the page cache."""
        meter, held, whole = Meter(), 0, 0
        for batch in range(batches):
            for blocks in self._blocks(batch):
                held += self.controller.resident_nbytes(blocks)
                whole += blocks.nlb * self.store.geometry.lba_nbytes
            with meter.operation():
                loaded = self.load(batch)
            meter.nbytes += loaded.pages.size * self.workload.object_nbytes
            self._check(loaded)
        return meter, held / whole

    def load(self, batch: int) -> PendingLoad:
        """Reads a batch."""
        loaded = self.workload.load([batch], 0)
        loaded.ticket.wait(WAIT_S)
        self._after(batch)
        return loaded

    def _check(self, loaded: PendingLoad) -> None:
        stamps = self.workload.stamps.wrong(loaded.pages, numbered_keys(loaded.contents))
        self.workload.wrong += int(np.count_nonzero(stamps))

    def follow(self, limit: moving.MovingLimit, cell: dict[str, Any]) -> dict[str, Any]:
        """Reads while the limit moves, and once more at the end, to check the bytes."""
        if self.configuration == "dynamic":
            self.store.residency.follow(cell["share"], root=limit.root)
        nbytes = self.workload.batch_pages * self.workload.object_nbytes

        def read(batch: int) -> int:
            self.load(batch)
            return nbytes

        limit.start()
        try:
            points = moving.read_on(read, cell["batches"], cell["seconds"])
        finally:
            limit.stop()
        self.read(cell["batches"])
        switches = self.store.residency.stats()["residency_switches"]
        return {"points": points, "switches": switches, "groups": self.store.geometry.groups}

    def _blocks(self, batch: int) -> list[BlockRange]:
        return self.store.residency.groups_of(self.workload.keys(batch))

    def _after(self, batch: int) -> None:
        """Advises the kernel which pages the cache policy does not keep."""
        if self.configuration == "cache policy only":
            for blocks in self._blocks(batch):
                if blocks.slba >= self._kept_end:
                    self.controller.drop(blocks)


def _touch(limit_nbytes: int) -> float:
    """Makes the host supply the memory that the page cache may use; returns the GB/s.

    Uses large pages, like the page cache, and a quarter more, because others take some.
    """
    nbytes = min(limit_nbytes * 5 // 4, read_memory().free_nbytes // 2)
    begin_s = time.perf_counter()
    HostBuffer(max(nbytes, mmap.PAGESIZE)).array[:: mmap.PAGESIZE] = 1
    return nbytes / (time.perf_counter() - begin_s) / 1e9


@uninterrupted()  # on a thread, as in a server
def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Runs one cell; see `tutti.bench.residency.run` for its fields."""
    shape = parse_shape(cell["shape"])
    config = StoreConfig(verify="off", timeout_s=WAIT_S)
    with object_store.open([cell["path"]], shape.layout(), config=config, profile=None) as store:
        controller = store.controller
        assert isinstance(controller, FileController)
        geometry = store.geometry
        first = geometry.groups_offset // geometry.lba_nbytes
        groups = BlockRange(1, first, geometry.groups * geometry.group_nbytes // 4096)
        controller.drop(groups)
        measured = Cell(store, cell["configuration"], cell["batch_pages"])
        fresh_gb_per_s = _touch(cell["limit_nbytes"])
        Path(cell["members_file"]).write_text("0")  # this process joins the group
        limit = None
        if "course" in cell:
            file, whole_nbytes = Path(cell["limit_file"]), cell["working_set_nbytes"]
            limit = moving.MovingLimit(file, cell["course"], whole_nbytes, cell["seconds"])
        planned_nbytes = measured.plan(cell["share"], None if limit is None else limit.set(0.0))
        written = measured.write(cell["batches"])
        rounds: list[dict[str, Any]] = []
        if limit is not None:
            return {**measured.follow(limit, cell), "wrong": measured.workload.wrong}
        for _ in range(cell["rounds"]):
            begin_s = time.perf_counter()
            meter, hit_ratio = measured.read(cell["batches"])
            facts = {"hit_ratio": hit_ratio, "round_s": time.perf_counter() - begin_s}
            rounds.append({**meter.to_dict(), **facts})
        return {
            "fresh_gb_per_s": fresh_gb_per_s,
            "planned_nbytes": planned_nbytes,
            "write": written.to_dict(),
            "rounds": rounds,
            "wrong": measured.workload.wrong,
            "executor": controller.executor_name,
        }


def main() -> int:
    """Reads a cell from stdin and writes what it measured to stdout, both as JSON."""
    print(json.dumps(measure(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

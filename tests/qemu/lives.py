"""In the guest: `python -m qemu.lives SEED`, stores that live on drives whose writes QEMU logs.

Place 0 holds a pool for durability "flush", 1 one for "process": each lives from open to close, and
says in marks, blocks behind its pool, what it served when the log was so long. Place 2 holds a pool
that is put to until the guest is killed.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path
from typing import TextIO

import numpy as np
from crash.objects import as_rows, content_of

from qemu.vfio_binding import bind
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.nvme_spec import FUA, OPCODE_WRITE, Sqe
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.memory.host_memory import HostMemory
from tutti.placement.index import SlotState
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

OUT = Path("/out")
MARK = b"TUTTI-MARK"
DURABILITIES = ("flush", "process")
STEPS = ("put", "put", "clear", "put", "put", "put", "clear", "put", "put")
PAGES = 24
KILLED_OBJECTS_MAX = 220  # below the capacity of the pool that is killed: nothing is evicted


class Life:
    """One store over one drive, and what it said."""

    def __init__(self, bdf: str, durability: str, rng: np.random.Generator) -> None:
        controller = VfioController(bdf)
        config = StoreConfig(durability=durability, timeout_s=30.0)
        self.store = ObjectStore(controller, [bdf], config=config)
        self.store.wait_recovered(30)
        self.pool: HostMemory = self.store.allocate_memory(PAGES, hugepages=False)
        self.puts: list[str] = []
        self.marks: list[dict[str, object]] = []
        self.fua: set[int] = set()  # first blocks of writes with FUA, and of those without
        self.plain: set[int] = set()
        self._rng = rng
        self._end = -(-self.store.geometry.member_nbytes // (1 << 20)) << 20

    def run(self) -> None:
        self.mark("open")
        for step in STEPS:
            if step == "put":
                self.put(int(self._rng.integers(1, 9)))
            else:
                self.store.clear(deallocate=bool(self._rng.random() < 0.5))
            self.look()
            self.mark(step)
        held = self._held()
        kind = "leave" if self.store.stats()["slots"]["unproven"] else "close"
        self.store.close()
        self.marks.append({"kind": kind, "held": held, "begun": len(self.puts)})

    def put(self, n: int) -> list[bytes]:
        keys = [self._rng.bytes(16) for _ in range(n)]
        self.puts += [key.hex() for key in keys]
        for page, key in enumerate(keys):
            self.pool.write(page, content_of(key))
        cut = int(self._rng.integers(0, n))
        tickets = [
            self.store.put(as_rows(keys[first:last]), np.arange(first, last))
            for first, last in ((0, cut), (cut, n))
            if first < last
        ]
        assert sum(ticket.wait(30).stored for ticket in tickets) == n
        return keys

    def look(self) -> None:
        """What the last commands in the submission queue were."""
        pair = self.store.engine.queue_pairs[0].struct
        for i in range(pair.depth):
            sqe = Sqe.from_address(pair.sq + ctypes.sizeof(Sqe) * i)
            if sqe.cdw0 & 0xFF == OPCODE_WRITE:
                places = self.fua if sqe.cdw12 & FUA else self.plain
                places.add(sqe.cdw10 | sqe.cdw11 << 32)

    def mark(self, kind: str) -> None:
        """A block in the log first, a look at what is held after it: that was stored before."""
        block = MARK + struct.pack("<I", len(self.marks))
        self.store._io.write(1, self._end, block.ljust(BLOCK_NBYTES, b"\0"))
        self.marks.append({"kind": kind, "held": self._held(), "begun": len(self.puts)})

    def _held(self) -> list[str]:
        core = self.store._core
        with core.lock:
            served = (core.index.state == SlotState.READY) | (
                core.index.state == SlotState.UNPROVEN
            )
            return [row.tobytes().hex() for row in core.index.key[served]]


def put_until_killed(bdf: str, rng: np.random.Generator, acks: TextIO) -> None:
    life = Life(bdf, "process", rng)
    print("begins", file=acks, flush=True)
    while len(life.puts) < KILLED_OBJECTS_MAX:
        keys = life.put(int(rng.integers(1, 9)))
        print(*(key.hex() for key in keys), file=acks, flush=True)
    print("ends", file=acks, flush=True)


def main(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bdfs = bind()
    for bdf, durability in zip(bdfs, DURABILITIES, strict=False):
        life = Life(bdf, durability, rng)
        life.run()
        said: dict[str, object] = {"puts": life.puts, "marks": life.marks}
        said |= {"fua": sorted(life.fua), "plain": sorted(life.plain)}
        (OUT / f"{durability}.json").write_text(json.dumps(said))
    with (OUT / "acks").open("w") as acks:
        put_until_killed(bdfs[2], rng, acks)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A host for tests: one controller, one ring, registered memory, commands that run to the end."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from gio_uring.command_ring import Ring, simple_command, transfer_command
from gio_uring.data_pointer import (
    Extent,
    ListMemory,
    set_deallocate,
    set_descriptor,
    set_prp,
    set_sgl,
)

from tutti.base.units import KiB, MiB
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.memory import Bytes, HostBuffer

LBA = 4096
NAMESPACES = (8 * MiB, 4 * MiB)
TIMEOUT_US = 20_000_000
SGL, PRP = nvme.PSDT_SGL, nvme.PSDT_PRP
READ, WRITE = nvme.OPCODE_READ, nvme.OPCODE_WRITE

Fill = Callable[[nvme.Sqe], None]


class NvmeHost:
    """Submits to `controller` and checks that every command is answered."""

    def __init__(self, controller: NativeController, depth: int = 16) -> None:
        self.controller = controller
        self.queue_pair = controller.create_queue_pair(depth)
        self.ring = Ring(self.queue_pair)
        self.buffer = HostBuffer(4 * MiB)
        self.lists = HostBuffer(64 * KiB, hugepages=False)
        self.regions = [controller.register(self.buffer), controller.register(self.lists)]

    def close(self) -> None:
        for region in self.regions:
            region.close()

    @property
    def data(self) -> Bytes:
        return self.buffer.array

    def list_memory(self, offset: int = 0, nbytes: int = 4096) -> ListMemory:
        address = self.lists.address + offset
        return ListMemory(address, address, nbytes)

    def run(self, fill: Fill) -> int:
        """One command to its end: its status."""
        return self.run_all([fill])[0]

    def run_all(self, fills: Sequence[Fill]) -> list[int]:
        """Commands under way together: their statuses in order of submission."""
        return self.wait(self.submit(fills))

    def submit(self, fills: Sequence[Fill]) -> list[int]:
        cids = []
        for fill in fills:
            sqe = self.ring.get_sqe()
            assert sqe is not None, "the queue is full"
            fill(sqe)
            cids.append(sqe.cdw0 >> 16)
        assert self.ring.submit() == len(fills)
        return cids

    def wait(self, cids: Sequence[int]) -> list[int]:
        statuses: dict[int, int] = {}
        while len(statuses) < len(cids):
            completion = self.ring.wait_cqe(TIMEOUT_US)
            assert completion is not None, f"{len(cids) - len(statuses)} commands got no answer"
            assert completion.cid in cids
            assert completion.cid not in statuses
            statuses[completion.cid] = completion.status
            self.ring.cq_advance(1)
        return [statuses[cid] for cid in cids]

    def extent(self, offset: int, nbytes: int) -> Extent:
        return self.buffer.address + offset, nbytes

    def transfer(
        self,
        opcode: int,
        slba: int,
        nlb: int,
        extents: Sequence[Extent],
        *,
        psdt: int = SGL,
        nsid: int = 1,
        flags: int = 0,
        lists: ListMemory | None = None,
    ) -> Fill:
        def fill(sqe: nvme.Sqe) -> None:
            transfer_command(sqe, opcode, nsid, slba, nlb, flags)
            memory = lists or self.list_memory()
            set_sgl(sqe, extents, memory) if psdt == SGL else set_prp(sqe, extents, memory)

        return fill

    def write(self, slba: int, content: bytes | Bytes, *, nsid: int = 1, flags: int = 0) -> int:
        """Write whole blocks from the start of the buffer."""
        content = np.frombuffer(content, np.uint8)
        self.data[: content.size] = content
        extents = [self.extent(0, content.size)]
        return self.run(
            self.transfer(WRITE, slba, content.size // LBA, extents, nsid=nsid, flags=flags)
        )

    def read(self, slba: int, nlb: int, *, nsid: int = 1) -> Bytes:
        """Read whole blocks through the start of the buffer; the read must succeed."""
        self.data[: nlb * LBA] = 0xEE
        extents = [self.extent(0, nlb * LBA)]
        assert self.run(self.transfer(READ, slba, nlb, extents, nsid=nsid)) == nvme.STATUS_OK
        return self.data[: nlb * LBA].copy()

    def flush(self, nsid: int = 1) -> int:
        return self.run(lambda sqe: simple_command(sqe, nvme.OPCODE_FLUSH, nsid))

    def deallocate(self, ranges: Sequence[tuple[int, int]], nsid: int = 1) -> int:
        def fill(sqe: nvme.Sqe) -> None:
            simple_command(sqe, nvme.OPCODE_DATASET_MANAGEMENT, nsid)
            set_deallocate(sqe, ranges, self.list_memory())

        return self.run(fill)


def chain(host: NvmeHost, extents: Sequence[Extent], per_segment: int) -> Fill:
    """Fills a data pointer: a chain of SGL segments of at most per_segment + 1 descriptors."""

    def fill(sqe: nvme.Sqe) -> None:
        groups = [extents[i : i + per_segment] for i in range(0, len(extents), per_segment)]
        address = host.lists.address
        places = []
        for i, group in enumerate(groups):
            count = len(group) + (i + 1 < len(groups))
            places.append((address, 16 * count))
            address += 16 * count + 48  # segments need not follow one another
        for i, group in enumerate(groups):
            descriptors = [nvme.SglDescriptor(a, n, type=nvme.SGL_DATA_BLOCK) for a, n in group]
            if i + 1 < len(groups):
                descriptors.append(segment(places[i + 1], is_last=i + 2 == len(groups)))
            put_descriptors(places[i][0], descriptors)
        set_descriptor(sqe, segment(places[0], is_last=len(groups) == 1))

    return fill


def segment(place: tuple[int, int], *, is_last: bool = True) -> nvme.SglDescriptor:
    kind = nvme.SGL_LAST_SEGMENT if is_last else nvme.SGL_SEGMENT
    return nvme.SglDescriptor(place[0], place[1], type=kind)


def put_descriptors(address: int, descriptors: Sequence[nvme.SglDescriptor]) -> None:
    for i, descriptor in enumerate(descriptors):
        ctypes.memmove(address + 16 * i, ctypes.byref(descriptor), 16)

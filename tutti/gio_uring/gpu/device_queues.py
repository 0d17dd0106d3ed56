"""Queue pairs for kernels: rings in pinned memory, the submitter's words in device memory.

Kernels update their own words with atomics, which need device memory; each word that they share
with the controller has one writer.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import numpy as np

from tutti.base.process import Owned
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import LIST_NBYTES
from tutti.gio_uring.gpu.device_batch import TableImage
from tutti.gio_uring.gpu.doorbells import GpuDoorbells
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.parameters import QueueShareStruct
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, PinnedMemory, TableMemory
from tutti.gio_uring.iocb import Runs
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.queue_pair import QueuePair, QueuePairStruct

_TIMEOUT_S = 10.0


class DeviceQueues(Owned):
    """Queue pairs of one controller, which may serve other producers already: `shares` for each of
    its native controllers (drives) that has namespaces.

    scratch, zeros: DMA addresses of one LBA each, for the padding of reads and writes.
    """

    def __init__(
        self,
        driver: Driver,
        controller: NativeController,
        tables: TableMemory,
        stream: int,
        shares: int,
        depth: int,
    ) -> None:
        self._routes = np.array(controller.device_routes, np.int64)
        self._shares = shares
        handles = np.repeat(np.arange(handles_rung(controller)), shares).tolist()
        self.count = len(handles)
        with ExitStack() as undo:
            lba_nbytes = controller.info.lba_nbytes
            lists_nbytes = self.count * depth * LIST_NBYTES
            buffer = HostBuffer(lists_nbytes + 2 * lba_nbytes)
            doorbells: list[GpuDoorbells] = []
            for registers in controller.doorbell_registers:
                doorbells.append(GpuDoorbells(driver, *registers))
                undo.callback(doorbells[-1].close)
            #: How kernels ring doorbells: the suffix of their names.
            self.ring = "mmio" if doorbells else "word"
            undo.callback(controller.register(buffer).close)
            lists = PinnedMemory(driver, buffer)
            undo.callback(lists.close)
            self.scratch = buffer.address + lists_nbytes
            self.zeros = self.scratch + lba_nbytes
            self._pairs: list[QueuePair] = []
            images = []
            for handle in handles:
                pair = controller.create_queue_pair(depth, is_device=True, service_thread=handle)
                undo.callback(pair.close)
                self._pairs.append(pair)
                pinned = PinnedMemory(driver, pair.memory)
                undo.callback(pinned.close)
                images.append(_image(pair, pinned, doorbells[handle] if doorbells else pinned))
            nbytes = sum(image.nbytes for image, _ in images)
            lease = tables.lease(nbytes, _TIMEOUT_S, LeaseOwner())
            #: By queue pair: its addresses, and no runs.
            self.queues: list[QueueShareStruct] = []
            offset = 0
            for number, (image, struct) in enumerate(images):
                place = lease.device.address + offset
                struct.marks += place
                struct.cid_free += place
                struct.completions += place
                image.write(lease.host.address + offset)
                start = number * depth * LIST_NBYTES
                addresses = place, lists.device_address + start, buffer.address + start
                self.queues.append(QueueShareStruct(*addresses, LIST_NBYTES))
                offset += image.nbytes
            tables.upload(lease, offset, stream)
            self._undo = undo.pop_all()

    @property
    def are_dead(self) -> bool:
        """Whether a drive's reset has ended one of them: commands put there never end."""
        return any(pair.is_dead for pair in self._pairs)

    def split(self, runs: Runs) -> tuple[Runs, list[QueueShareStruct]]:
        """Sorts runs by native controller, with its NSIDs.  Also returns each queue pair's share of
        them: equal shares within a controller, and no slice in two queue pairs.
        """
        handle, nsid = self._routes[runs["nsid"].astype(np.int64) - 1].T
        order = np.argsort(handle, kind="stable")
        runs, handle = runs[order], handle[order]
        runs["nsid"] = nsid[order]
        ends = np.searchsorted(handle, np.arange(self.count // self._shares + 1))
        parts = [
            (first + int(start), number)
            for start, end in itertools.pairwise(ends)
            for first, number in split_shares(runs[start:end], self._shares)
        ]
        shares = [QueueShareStruct.from_buffer_copy(queue) for queue in self.queues]
        for share, (first, number) in zip(shares, parts, strict=True):
            share.first_run, share.n_runs = first, number
        return runs, shares

    def close(self) -> None:
        """Frees the memory, after the controller was reset.  A second call does nothing."""
        self._undo.close()


def handles_rung(controller: NativeController) -> int:
    """Number of the controller's handles that kernels need to reach every namespace."""
    return 1 + max(handle for handle, _ in controller.device_routes)


def split_shares(runs: Runs, count: int) -> list[tuple[int, int]]:
    """(first, number) of `count` equal shares of runs, with no slice in two of them."""
    whole = np.append(np.flatnonzero(runs["skip"] == 0), runs.size)
    wanted = np.arange(count + 1) * runs.size // count
    cuts = whole[np.searchsorted(whole, wanted)].tolist()
    return [(first, last - first) for first, last in itertools.pairwise(cuts)]


def _image(
    pair: QueuePair, pinned: PinnedMemory, doorbells: PinnedMemory | GpuDoorbells
) -> tuple[TableImage, QueuePairStruct]:
    """The struct and the submitter's words, with offsets instead of addresses."""
    struct = QueuePairStruct.from_buffer_copy(pair.struct)
    for name in ("sq", "cq"):
        setattr(struct, name, pinned.to_device(getattr(pair.struct, name)))
    for name in ("sq_doorbell", "cq_doorbell"):
        setattr(struct, name, doorbells.to_device(getattr(pair.struct, name)))
    image = TableImage()
    image.add(struct)
    struct.marks = image.add(np.zeros(pair.depth, np.uint32))
    struct.cid_free = image.add(np.array(pair.layout.free_cids(), np.uint32))
    struct.completions = image.add(np.zeros(pair.depth, np.uint32))
    return image, struct

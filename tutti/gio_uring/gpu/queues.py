"""Queue pairs that kernels drive: rings in pinned memory, the submitter's words on the device.

Kernels read, modify and write their own words, which pinned memory does not offer; what they share
with the controller has one writer each.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import LIST_NBYTES
from tutti.gio_uring.gpu.batch import TableImage
from tutti.gio_uring.gpu.doorbells import GpuDoorbells
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.memory import LeaseOwner, PinnedMemory, TableMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.queue_pair import QueuePair, QueuePairStruct
from tutti.process import Owned

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DeviceQueue:
    """One queue pair: its struct and lists as kernels address them, the lists as the controller."""

    struct_address: int
    lists: int
    lists_dma: int


class DeviceQueues(Owned):
    """Queue pairs of one controller, which may serve other producers already.

    scratch, zeros: one LBA each that commands may name, as the controller addresses them.
    """

    def __init__(
        self,
        driver: Driver,
        controller: NativeController,
        tables: TableMemory,
        stream: int,
        count: int,
        depth: int,
    ) -> None:
        self.count = count
        with ExitStack() as undo:
            lba_nbytes = controller.info.lba_nbytes
            lists_nbytes = self.count * depth * LIST_NBYTES
            buffer = HostBuffer(lists_nbytes + 2 * lba_nbytes)
            registers = controller.doorbell_registers
            doorbells = GpuDoorbells(driver, *registers) if registers else None
            if doorbells is not None:
                undo.callback(doorbells.close)
            #: How kernels ring: the end of their names.
            self.ring = "mmio" if registers else "word"
            undo.callback(controller.register(buffer).close)
            lists = PinnedMemory(driver, buffer)
            undo.callback(lists.close)
            self.scratch = buffer.address + lists_nbytes
            self.zeros = self.scratch + lba_nbytes
            images = []
            for _ in range(self.count):
                pair = controller.create_queue_pair(depth, is_device=True)
                undo.callback(pair.close)
                pinned = PinnedMemory(driver, pair.memory)
                undo.callback(pinned.close)
                images.append(_image(pair, pinned, doorbells or pinned))
            nbytes = sum(image.nbytes for image, _ in images)
            lease = tables.lease(nbytes, _TIMEOUT_S, LeaseOwner())
            self.queues: list[DeviceQueue] = []
            offset = 0
            for number, (image, struct) in enumerate(images):
                place = lease.device.address + offset
                struct.marks += place
                struct.cid_free += place
                struct.completions += place
                image.write(lease.host.address + offset)
                start = number * depth * LIST_NBYTES
                self.queues.append(
                    DeviceQueue(place, lists.device_address + start, buffer.address + start)
                )
                offset += image.nbytes
            tables.upload(lease, offset, stream)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Releases the memory; the controller has been reset.  A second call does nothing."""
        self._undo.close()


def _image(
    pair: QueuePair, pinned: PinnedMemory, doorbells: PinnedMemory | GpuDoorbells
) -> tuple[TableImage, QueuePairStruct]:
    """The struct and the submitter's words; offsets stand where addresses will."""
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

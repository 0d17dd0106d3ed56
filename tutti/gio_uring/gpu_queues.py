"""Queue pairs that kernels drive: rings in pinned memory, the submitter's words on the device.

Kernels read, modify and write their own words, which pinned memory does not offer; what they share
with the controller has one writer each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import LIST_NBYTES
from tutti.gio_uring.gpu_batch import TableImage
from tutti.gio_uring.gpu_doorbells import GpuDoorbells
from tutti.gio_uring.gpu_driver import Driver
from tutti.gio_uring.gpu_memory import PinnedMemory, TableMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.queue_pair import QueuePair, QueuePairStruct

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class DeviceQueue:
    """One queue pair: its struct and lists as kernels address them, the lists as the controller."""

    struct_address: int
    lists: int
    lists_dma: int


class DeviceQueues:
    """Queue pairs of one controller, which must not be started yet.

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
        lba_nbytes = controller.info.lba_nbytes
        lists_nbytes = count * depth * LIST_NBYTES
        self._lists = HostBuffer(lists_nbytes + 2 * lba_nbytes)
        self._region = controller.register(self._lists)
        self._pinned = [PinnedMemory(driver, self._lists)]
        self.scratch = self._lists.address + lists_nbytes
        self.zeros = self.scratch + lba_nbytes
        registers = controller.doorbell_registers
        self._doorbells = GpuDoorbells(driver, *registers) if registers else None
        #: How kernels ring: the end of their names.
        self.ring = "mmio" if registers else "word"
        self._pairs = [controller.create_queue_pair(depth) for _ in range(count)]
        images = [self._image(driver, pair) for pair in self._pairs]
        whole = TableImage()
        for image, _ in images:
            whole.nbytes += image.nbytes
        lease = tables.lease(whole.nbytes, _TIMEOUT_S)
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
                DeviceQueue(
                    place, self._pinned[0].device_address + start, self._lists.address + start
                )
            )
            offset += image.nbytes
        tables.upload(lease, offset, stream)

    def _image(self, driver: Driver, pair: QueuePair) -> tuple[TableImage, QueuePairStruct]:
        """The struct and the submitter's words; offsets stand where addresses will."""
        pinned = PinnedMemory(driver, pair.memory)
        self._pinned.append(pinned)
        struct = QueuePairStruct.from_buffer_copy(pair.struct)
        for name in ("sq", "cq"):
            setattr(struct, name, pinned.to_device(getattr(pair.struct, name)))
        place = self._doorbells or pinned
        for name in ("sq_doorbell", "cq_doorbell"):
            setattr(struct, name, place.to_device(getattr(pair.struct, name)))
        image = TableImage()
        image.add(struct)
        layout = pair.layout
        struct.marks = image.add(np.zeros(pair.depth, np.uint32))
        struct.cid_free = image.add(np.array(layout.free_cids(), np.uint32))
        struct.completions = image.add(np.zeros(pair.depth, np.uint32))
        return image, struct

    def close(self) -> None:
        """Gives the memory back; the controller has been reset."""
        for pair in self._pairs:
            pair.close()
        for pinned in self._pinned:
            pinned.close()
        if self._doorbells:
            self._doorbells.close()
        self._region.close()

"""A drive made of software behind the vfio controller: its rings are real, its IOMMU is not there.

A memory controller with a thread of its own executes what is rung. It knows the same rings as the
vfio controller, and its doorbells are the page that the vfio controller maps.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from memory_controller import MemoryController

from tutti.gio_uring import _native
from tutti.gio_uring.controller import HAS_FUA, HAS_PRP, NativeController
from tutti.gio_uring.controller_vfio import _RESTART, VfioConfigStruct
from tutti.gio_uring.controller_vfio import _lib as vfio_lib
from tutti.gio_uring.drives.rescue import Ask, NativeDrive
from tutti.gio_uring.memory import DmaRegion, address_of
from tutti.gio_uring.nvme_spec import STATUS_ABORTED_SQ_DELETION
from tutti.gio_uring.queue_pair import QueuePair

_PAGE_NBYTES = 4096
_CSTS = 2 * _PAGE_NBYTES
_DEPTH_MAX = 64


class SoftwareDrive(NativeController):
    """The vfio controller over a medium (bytes of one namespace), with a thread as its drive."""

    def __init__(self, image: Any) -> None:
        self._mediums: list[MemoryController] = []
        self._places: dict[int, int] = {}  # of registered memory
        self._add_medium(image)
        self._registers = os.memfd_create("registers")
        os.ftruncate(self._registers, _CSTS + 8)
        self._events = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self._callback = _RESTART(self._restart)
        super().__init__(self._create())

    @property
    def medium(self) -> MemoryController:
        return self._mediums[-1]

    def _create(self) -> int:
        info = self.medium.info
        sizes = (ctypes.c_uint64 * 1)(info.namespace_nlb[0])
        config = VfioConfigStruct(
            namespace_nlb=ctypes.addressof(sizes),
            doorbells_nbytes=_PAGE_NBYTES,
            restart=ctypes.cast(self._callback, ctypes.c_void_p).value or 0,
            csts=_CSTS,
            doorbell_nbytes=4,
            namespaces=1,
            lba_shift=info.lba_shift,
            mdts_nbytes=info.mdts_nbytes,
            sgl_descriptors=info.sgl_descriptors,
            flags=HAS_FUA | HAS_PRP,
            depth_max=_DEPTH_MAX,
            device_fd=self._registers,
            container_fd=self._registers,
            irq_fd=-1,
            request_fd=self._events[0],
            wake_fd=self._events[1],
        )
        handle = ctypes.c_void_p()
        result = vfio_lib().gio_vfio_controller_create(ctypes.byref(config), ctypes.byref(handle))
        _native.check(result, "cannot make a vfio controller", "look at its config")
        return int(handle.value or 0)

    def _add_medium(self, image: Any) -> None:
        medium = MemoryController([len(image)], depth_max=_DEPTH_MAX)
        medium.medium(1)[:] = image
        for address, nbytes in self._places.items():
            _native.lib().gio_controller_register(medium.handle, address, nbytes)
        self._mediums.append(medium)

    def _restart(self, timeout_ns: int) -> int:
        """Ends the process: the native controller asks for it in a reset that cannot succeed."""
        self.medium.stop()
        vfio_lib().gio_vfio_controller_end_all(self.handle, STATUS_ABORTED_SQ_DELETION)
        return 0

    def reset_beside(self) -> None:
        """Resets the drive while its queues are served, as `DriveRescue` does.

        Commands end with an error; what the medium holds stays.
        """
        native = NativeDrive(self.handle, "the drive")
        self.medium.stop()  # it would take the page that parking puts there for its doorbells
        native.park()
        self._add_medium(self.medium.medium(1).copy())
        os.pwrite(self._registers, bytes(_PAGE_NBYTES), 0)
        native.ask(Ask.END_ALL)
        for pair in self._queue_pairs:
            assert _native.lib().gio_controller_attach(self.medium.handle, pair.struct_address) == 0
        native.ask(Ask.GO_ON)
        self.medium.start()

    def register(self, buffer: Any) -> DmaRegion:
        region = super().register(buffer)
        address, nbytes = address_of(buffer)
        _native.lib().gio_controller_register(self.medium.handle, address, nbytes)
        self._places[address] = nbytes
        return region

    def _unregister(self, region: DmaRegion) -> None:
        _native.lib().gio_controller_unregister(self.medium.handle, region.address)
        self._places.pop(region.address, None)
        super()._unregister(region)

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        pair = QueuePair(depth, 1, owner=self)
        base = int(vfio_lib().gio_vfio_controller_doorbells(self.handle))
        pair.struct.sq_doorbell, pair.struct.cq_doorbell = base + 8, base + 12
        assert _native.lib().gio_controller_attach(self.medium.handle, pair.struct_address) == 0
        assert vfio_lib().gio_vfio_controller_attach(self.handle, pair.struct_address) == 0
        self._queue_pairs.append(pair)
        self._rings.append(pair.memory)
        self.medium.start()
        return pair

    def close(self) -> None:
        if self.is_closed:
            return
        for medium in self._mediums:  # they look at the doorbells, which end with the controller
            medium.stop()
            medium.keep_after_failure()
            _native.lib().gio_controller_destroy(medium.handle)
        super().close()
        for fd in (self._registers, *self._events):
            os.close(fd)

"""A real NVMe drive, driven from this process: NVMe commands go from the rings to the hardware.

The drive is bound to vfio-pci. Submitters fill its queue pairs directly: CPU threads, and GPU
kernels where these can write the drive's doorbells. The drive addresses memory by this process's
virtual addresses, through the IOMMU.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from typing import Any

from tutti.base.process import finalize
from tutti.errors import (
    ConfigError,
    DeviceGone,
    DeviceTimeout,
    MediumError,
    TuttiError,
    Unsupported,
)
from tutti.gio_uring import _native
from tutti.gio_uring.controller import (
    HAS_DEALLOCATE,
    HAS_FUA,
    HAS_PRP,
    HAS_VOLATILE_CACHE,
    NativeController,
)
from tutti.gio_uring.drives.admin import CSTS, DOORBELLS, QUEUES_MAX, NvmeAdmin
from tutti.gio_uring.drives.identify import NAMESPACES_MAX, NamespaceIdentity
from tutti.gio_uring.drives.rescue import DriveRescue, NativeDrive
from tutti.gio_uring.drives.vfio import PageMap, VfioDevice
from tutti.gio_uring.memory import DmaRegion, HostBuffer
from tutti.gio_uring.nvme_spec import PAGE_NBYTES, STATUS_ABORTED_SQ_DELETION
from tutti.gio_uring.queue_pair import QueuePair
from tutti.native import members

DESCRIPTORS_MAX = 256

_P = ctypes.c_void_p
_I = ctypes.c_int
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_RESTART = ctypes.CFUNCTYPE(_I, _U64)
_EIO, _EBUSY = 5, 16
_RESCUE_STOP_S = 60.0

_log = logging.getLogger(__name__)

_lib = _native.part(
    {
        "gio_vfio_controller_create": (_I, (_P, _P)),
        "gio_vfio_controller_doorbells": (_U64, (_P,)),
        "gio_vfio_controller_attach": (_I, (_P, _P)),
        "gio_vfio_controller_end_all": (None, (_P, _U32)),
        "gio_vfio_controller_lose": (_I, (_P,)),
        "gio_vfio_controller_is_gone": (_I, (_P,)),
    }
)


class VfioConfigStruct(ctypes.LittleEndianStructure):
    """`gio::VfioConfig`."""

    _fields_ = (
        *members(_U64, "namespace_nlb doorbells doorbells_nbytes shadow event_index restart csts"),
        *members(_U32, "doorbell_nbytes namespaces lba_shift mdts_nbytes sgl_descriptors flags"),
        ("depth_max", _U32),
        *members(_I, "device_fd container_fd irq_fd request_fd wake_fd"),
    )


class _Restart:
    """The native controller's callback for a reset; references the drive, not the controller."""

    def __init__(self, admin: NvmeAdmin) -> None:
        self._admin = admin
        self.handle = 0
        self.callback = _RESTART(self._run)

    def _run(self, timeout_ns: int) -> int:
        if not self._admin.lock.acquire(blocking=False):
            return -_EBUSY  # DriveRescue resets it now, and waits for the caller
        try:
            self._admin.restart(timeout_ns * 1e-9, self._end_all)
        except TuttiError:
            _log.exception("the drive could not be reset")
            return -_EIO
        except Exception:  # no exception may reach the native caller
            _log.exception("a reset failed")
            return -_EIO
        finally:
            self._admin.lock.release()
        return 0

    def _end_all(self) -> None:
        _lib().gio_vfio_controller_end_all(self.handle, STATUS_ABORTED_SQ_DELETION)


class VfioController(NativeController):
    """One drive bound to vfio-pci, from its reset to its shutdown.

    bdf: the PCI function, "0000:03:00.0". queues: most I/O queue pairs to request. use_sgl: None
    uses SGLs if the drive supports them, False uses PRPs only. shadow_doorbells: None uses them if
    the drive supports them. Namespace n is the drive's namespace n; unusable ones, and those whose
    block size is not that of the first, have 0 blocks, see `refusals`. rescues: commands beyond
    their deadline are aborted, and then the drive is reset, see `DriveRescue`.

    identity, namespace_identities: the drive's Identify data. queues_granted: I/O queue pairs.

    Raises what VfioDevice raises, Unsupported for a drive that lacks a required feature,
    MediumError for one that violates the specification, DeviceTimeout and DeviceGone.
    """

    def __init__(
        self,
        bdf: str,
        *,
        queues: int = 8,
        use_sgl: bool | None = None,
        shadow_doorbells: bool | None = None,
        rescues: bool = True,
    ) -> None:
        if not 1 <= queues <= QUEUES_MAX:
            raise ConfigError(f"queues={queues} is not acceptable; use 1 to {QUEUES_MAX}")
        self.device = VfioDevice(bdf)
        try:
            self._bring_up(queues, use_sgl, shadow_doorbells)
        except BaseException:
            self.device.close()
            raise
        self.rescue = DriveRescue(self.admin, NativeDrive(self.handle, bdf))
        if rescues:
            self.rescue.start()
            # Runs before the finalizer of the native object, which was made earlier.
            finalize(self, self.rescue.stop, _RESCUE_STOP_S)

    def _bring_up(self, queues: int, use_sgl: bool | None, shadow: bool | None) -> None:
        self.admin = NvmeAdmin(self.device)
        self.admin.disable()
        self.admin.enable()
        self.identity = self.admin.identify()
        self.namespace_identities = self.admin.identify_namespaces(self.identity.namespaces)
        self.queues_granted = self.admin.request_queues(queues)
        self._pages = PageMap(self.device)
        self._reachable: set[int] = set()  # addresses of regions that are mapped
        self._shadow = self._new_shadow(shadow)
        self._restart = _Restart(self.admin)
        sizes, shift = self._usable_sizes()
        handle = self._create(sizes, shift, use_sgl)
        self._restart.handle = handle
        super().__init__(handle)
        # Kept as long as the native object, which uses these.
        self._rings += [self.device, self.admin, self._restart, self._shadow]

    def _new_shadow(self, wanted: bool | None) -> HostBuffer | None:
        stride = self.admin.capabilities.doorbell_nbytes
        fits = (2 * (QUEUES_MAX + 1)) * stride <= PAGE_NBYTES
        if wanted:
            self.admin.check_features(self.identity, shadow=True)
        if wanted is False or not (self.identity.has_shadow_doorbells and fits):
            return None
        shadow = HostBuffer(2 * PAGE_NBYTES, hugepages=False)
        self.device.map((shadow.address, shadow.nbytes))
        self.admin.set_shadow_doorbells(shadow.address)
        return shadow

    def _usable_sizes(self) -> tuple[list[int], int]:
        """(blocks of namespaces 1 to the highest, 0 if unusable; log2 of the block size)."""
        self.refusals: dict[int, str] = {}
        usable: dict[int, NamespaceIdentity] = {}
        for nsid, identity in self.namespace_identities.items():
            if identity.refusal is None and nsid > NAMESPACES_MAX:
                self.refusals[nsid] = f"only namespaces up to {NAMESPACES_MAX} are used"
            elif identity.refusal is not None:
                self.refusals[nsid] = identity.refusal
            elif usable and identity.lba_shift != next(iter(usable.values())).lba_shift:
                self.refusals[nsid] = "its blocks have another size than those of the first one"
            else:
                usable[nsid] = identity
        if not usable:
            reasons = "; ".join(f"namespace {n}: {why}" for n, why in self.refusals.items())
            raise MediumError(
                f"{self.device.bdf} has no namespace that can be used"
                f" ({reasons or 'there are none'}); create or format one with nvme-cli"
            )
        sizes = [0] * max(usable)
        for nsid, identity in usable.items():
            sizes[nsid - 1] = identity.nlb
        return sizes, next(iter(usable.values())).lba_shift

    def _create(self, sizes: list[int], lba_shift: int, use_sgl: bool | None) -> int:
        identity, capabilities = self.identity, self.admin.capabilities
        stride = capabilities.doorbell_nbytes
        nbytes = -(-2 * (self.queues_granted + 1) * stride // PAGE_NBYTES) * PAGE_NBYTES
        self.device.check_mappable(DOORBELLS, nbytes)
        if use_sgl and not identity.sgl:
            raise ConfigError(f"{self.device.bdf} has no SGLs; leave use_sgl out")
        flags = HAS_FUA | HAS_PRP
        flags |= HAS_DEALLOCATE if identity.has_deallocate else 0
        flags |= HAS_VOLATILE_CACHE if identity.has_volatile_cache else 0
        descriptors = min(identity.sgl_advised or DESCRIPTORS_MAX, DESCRIPTORS_MAX)
        words = (_U64 * len(sizes))(*sizes)
        config = VfioConfigStruct(
            namespace_nlb=ctypes.addressof(words),
            doorbells=self.device.registers + DOORBELLS,
            doorbells_nbytes=nbytes,
            shadow=self._shadow.address if self._shadow else 0,
            event_index=self._shadow.address + PAGE_NBYTES if self._shadow else 0,
            restart=ctypes.cast(self._restart.callback, _P).value or 0,
            csts=self.device.registers + CSTS,
            doorbell_nbytes=stride,
            namespaces=len(sizes),
            lba_shift=lba_shift,
            mdts_nbytes=identity.mdts_nbytes,
            sgl_descriptors=descriptors if identity.sgl and use_sgl is not False else 0,
            flags=flags,
            depth_max=capabilities.depth_max,
            device_fd=self.device.fd,
            container_fd=self.device.container_fd,
            irq_fd=self.device.irq_fd,
            request_fd=self.device.request_fd,
            wake_fd=self.device.wake_fd,
        )
        handle = _P()
        result = _lib().gio_vfio_controller_create(ctypes.byref(config), ctypes.byref(handle))
        _native.check(result, f"cannot drive {self.device.bdf}", "see the kernel's log")
        return int(handle.value or 0)

    @property
    def is_gone(self) -> bool:
        """Whether the drive was removed, returned to the kernel, or failed permanently."""
        return self.is_closed or bool(_lib().gio_vfio_controller_is_gone(self.handle))

    def register(self, buffer: Any) -> DmaRegion:
        """See NativeController.register; pins the pages and maps them for the drive."""
        region = super().register(buffer)
        try:
            if not self.is_gone:
                self._pages.map(region.address, region.nbytes)
                self._reachable.add(region.address)
        except BaseException:
            super()._unregister(region)
            raise
        return region

    def _unregister(self, region: DmaRegion) -> None:
        if not self.is_closed and region.address in self._reachable:
            self._pages.unmap(region.address, region.nbytes)
            self._reachable.discard(region.address)
        super()._unregister(region)

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        """See NativeController.create_queue_pair; the drive has `queues_granted` of them.

        is_device: GPU kernels write the doorbells and reap. The drive raises no interrupts for it,
        and the service thread ignores it. A reset ends it: `is_dead` is true then, none of its
        commands touches memory any more, and its owner closes it and creates another.
        A queue pair for CPU threads must be created while no thread serves the controller.

        Raises DeviceGone when the drive is gone, Unsupported for a device's queue pair on a drive
        whose shadow doorbells are in use.
        """
        self._check_open()
        if not is_device and (idle := self._reopened(depth)) is not None:
            return idle
        if self.is_gone:
            raise DeviceGone(f"{self.device.bdf} was removed; reconnect it and open it again")
        if is_device and self._shadow:
            raise Unsupported(
                f"{self.device.bdf} is rung through shadow doorbells, which a GPU cannot forward;"
                " open it with shadow_doorbells=False"
            )
        qid = self._free_qid()
        limits = f"depth: a power of two from 2 to {self.info.depth_max}"
        is_late = self.is_served and not is_device
        if depth > self.info.depth_max or qid > self.queues_granted or is_late:
            raise ConfigError(
                f"cannot create queue pair {qid} of depth {depth}; use a {limits}, at most"
                f" {self.queues_granted} queue pairs, and create those of CPU threads before"
                " start() or an engine"
            )
        queue_pair = QueuePair(depth, qid, owner=self, is_device=is_device, on_close=self._release)
        self._aim_doorbells(queue_pair)
        where = (queue_pair.memory.address, queue_pair.layout.nbytes)
        self.device.map(where)
        try:
            self.admin.create_queues(queue_pair)
        except MediumError:  # the drive refused, and does not use the rings
            self.device.unmap(where)
            raise
        except BaseException:
            self._rings.append(queue_pair.memory)  # the drive may write to it
            raise
        if not is_device:
            result = _lib().gio_vfio_controller_attach(self.handle, queue_pair.struct_address)
            what = f"cannot create a queue pair of depth {depth}"
            _native.check(result, what, limits, ConfigError)
        self.admin.queue_pairs.append(queue_pair)
        self._keep(queue_pair)
        return queue_pair

    def _reopened(self, depth: int) -> QueuePair | None:
        """Reopens a closed queue pair of CPU threads with nothing in flight, if there is one."""
        for queue_pair in self._queue_pairs:
            idle = queue_pair.is_closed and queue_pair.inflight == 0
            if idle and not queue_pair.is_device and queue_pair.depth == depth:
                queue_pair.is_closed = False
                return queue_pair
        return None

    def _release(self, queue_pair: QueuePair) -> None:
        """Deletes a device's queue pair on the drive; others are kept for `_reopened`."""
        if self.is_closed or not queue_pair.is_device:
            return
        with self.admin.lock:
            if not (self.is_gone or queue_pair.is_dead):
                self.admin.delete_queues(queue_pair)
            if queue_pair in self.admin.queue_pairs:
                self.admin.queue_pairs.remove(queue_pair)
        if not self.is_gone:
            self.device.unmap((queue_pair.memory.address, queue_pair.layout.nbytes))
        self._queue_pairs.remove(queue_pair)
        self._rings.remove(queue_pair.memory)

    @property
    def doorbell_registers(self) -> list[tuple[int, int]]:
        """(address, bytes) of the doorbells; empty while shadow doorbells are in use."""
        if self._shadow:
            return []
        stride = self.admin.capabilities.doorbell_nbytes
        base = int(_lib().gio_vfio_controller_doorbells(self.handle))
        return [(base, 2 * (self.queues_granted + 1) * stride)]

    def _aim_doorbells(self, queue_pair: QueuePair) -> None:
        """Sets a queue pair's doorbells: the drive's registers, or its shadow doorbells."""
        base = self._shadow.address if self._shadow else 0
        base = base or int(_lib().gio_vfio_controller_doorbells(self.handle))
        stride = self.admin.capabilities.doorbell_nbytes
        queue_pair.struct.sq_doorbell = base + 2 * queue_pair.qid * stride
        queue_pair.struct.cq_doorbell = base + (2 * queue_pair.qid + 1) * stride

    def abort(self, queue_pair: QueuePair, cid: int) -> bool:
        """Asks the drive to abort one command; returns whether it did.

        The command's completion still comes, and until then the drive may use its memory.
        """
        self._check_open()
        return self.admin.abort(queue_pair.qid, cid)

    def close(self) -> None:
        """Deletes the queues, shuts the drive down cleanly and releases it.

        A drive that does not respond is reset by the kernel, which also removes its mappings.
        Raises ConfigError while regions are registered or an engine serves it.
        """
        if self.is_closed:
            return
        self._check_idle()
        if not self.rescue.stop(_RESCUE_STOP_S):
            self.keep_after_failure()
            raise DeviceTimeout(
                f"{self.device.bdf} is still being reset; its memory stays reserved until the"
                " process ends"
            )
        with contextlib.suppress(TuttiError):
            if not self.is_gone:
                self._shut_down()
        _lib().gio_vfio_controller_lose(self.handle)
        if self._finalizer.detach() is not None:
            self._lib.gio_controller_destroy(self.handle)
        self.device.close()

    def _shut_down(self) -> None:
        if all(pair.inflight == 0 for pair in self._queue_pairs):
            for queue_pair in self._queue_pairs:
                self.admin.delete_queues(queue_pair)
        self.admin.shut_down()

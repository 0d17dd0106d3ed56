"""A drive's registers and its admin queue: bring-up from reset, admin commands, shutdown.

Registers and admin commands: NVM Express Base Specification 2.0, sections 3.1.3, 3.5 and 5. Every
wait has a deadline, the drive's own (CAP.TO, CRTO, RTD3E) where it has one. `NvmeAdmin` remembers
the I/O queues, so that it can make them again after a reset.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tutti.base.process import Owned
from tutti.errors import ConfigError, DeviceTimeout, MediumError, Unsupported
from tutti.gio_uring import _native
from tutti.gio_uring.drives.identify import (
    IDENTIFY_NBYTES,
    Capabilities,
    IdentifyController,
    NamespaceIdentity,
    parse_namespace_list,
)
from tutti.gio_uring.drives.vfio import Range, VfioDevice
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import Cqe, Sqe, make_cdw0
from tutti.gio_uring.queue_pair import COMPLETED, NO_CID, QueuePair

_CAP, _CC, CSTS, _AQA, _ASQ, _ACQ, _CRTO = 0x00, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x68
DOORBELLS = 0x1000

_CC_ENABLE = 1
_CC_SHUTDOWN_NORMAL = 1 << 14
_CC_ENTRY_SIZES = 6 << 16 | 4 << 20  # SQ entries of 2^6 bytes, CQ entries of 2^4
_CSTS_READY, _CSTS_FATAL, _CSTS_SHUTDOWN, _CSTS_SHUTDOWN_DONE = 1, 2, 3 << 2, 2 << 2

_DELETE_SQ, _CREATE_SQ, _DELETE_CQ, _CREATE_CQ = 0x00, 0x01, 0x04, 0x05
_IDENTIFY, _ABORT, _SET_FEATURES, _DOORBELL_BUFFER = 0x06, 0x08, 0x09, 0x7C
_CNS_NAMESPACE, _CNS_CONTROLLER, _CNS_ACTIVE_LIST = 0, 1, 2
_FEATURE_NUMBER_OF_QUEUES = 7
_QUEUE_CONTIGUOUS, _CQ_INTERRUPTS = 1, 2

_ADMIN_DEPTH = 32
_COMMAND_TIMEOUT_S = 5.0
_SHUTDOWN_TIMEOUT_S = 10.0
_NAP_S = 0.0002
QUEUES_MAX = 64


@dataclass(frozen=True)
class AdminResult:
    """Result of an admin command: status, and dword 0 of its completion."""

    status: int
    dword: int


@dataclass(eq=False)
class NvmeAdmin(Owned):
    """Registers and admin queue of one drive. Thread-safe: commands and restarts are serialized.

    queue_pairs: I/O queue pairs; a restart creates them again, except those of a GPU. shadow:
    address of a page of shadow doorbells and a page of event indices, 0 if unused.
    """

    device: VfioDevice
    queue_pairs: list[QueuePair] = field(default_factory=list)
    shadow: int = 0
    queues_granted: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()  # held to reset, or to run a command
        self.device.enable_dma()
        read = self.device.read_register
        self.capabilities = Capabilities.parse(read(_CAP, 8), lambda: read(_CRTO, 4))
        self._shutdown_timeout_s = _SHUTDOWN_TIMEOUT_S
        self._data = HostBuffer(IDENTIFY_NBYTES, hugepages=False)
        self._mapped: list[Range] = [(self._data.address, IDENTIFY_NBYTES)]
        self.device.map(self._mapped[0])
        self._new_queue()

    def _new_queue(self) -> None:
        """Makes empty rings, as a drive expects them when it is enabled."""
        self._queue = QueuePair(_ADMIN_DEPTH, 0, owner=self)
        where = (self._queue.memory.address, self._queue.layout.nbytes)
        self.device.map(where)
        self._mapped.append(where)
        self._struct = self._queue.struct

    # Registers

    def disable(self, timeout_s: float | None = None) -> None:
        """Clears CC.EN and waits for CSTS.RDY: queues are gone, and no memory is touched any more.

        Raises DeviceTimeout, or DeviceGone.
        """
        cc = self.device.read_register(_CC, 4)
        self.device.write_register(_CC, 4, cc & ~_CC_ENABLE & ~(3 << 14))
        limit_s = self.capabilities.timeout_s
        limit_s = limit_s if timeout_s is None else min(limit_s, timeout_s)
        self._wait_status(_CSTS_READY, 0, limit_s, "disable itself")

    def enable(self) -> None:
        """Enables a disabled drive, with a new admin queue. Raises DeviceTimeout or DeviceGone."""
        old = self._mapped.pop()
        self.device.unmap(old)
        self._new_queue()
        device = self.device
        device.write_register(_AQA, 4, (_ADMIN_DEPTH - 1) << 16 | (_ADMIN_DEPTH - 1))
        device.write_register(_ASQ, 8, self._struct.sq)
        device.write_register(_ACQ, 8, self._struct.cq)
        device.write_register(_CC, 4, _CC_ENTRY_SIZES)
        device.write_register(_CC, 4, _CC_ENTRY_SIZES | _CC_ENABLE)
        self._wait_status(_CSTS_READY, _CSTS_READY, self.capabilities.timeout_s, "become ready")

    def shut_down(self) -> None:
        """Shuts the drive down (CC.SHN), so that power may be cut, and then disables it."""
        cc = self.device.read_register(_CC, 4)
        self.device.write_register(_CC, 4, cc & ~(3 << 14) | _CC_SHUTDOWN_NORMAL)
        limit_s = self._shutdown_timeout_s
        self._wait_status(_CSTS_SHUTDOWN, _CSTS_SHUTDOWN_DONE, limit_s, "shut down")
        self.disable()

    def _wait_status(self, mask: int, wanted: int, timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        csts = self.device.read_register(CSTS, 4)
        while csts & mask != wanted:
            if csts & _CSTS_FATAL and wanted & _CSTS_READY:
                raise MediumError(f"{self.device.bdf} reports a fatal error; power-cycle the drive")
            if time.monotonic() > deadline_s:
                raise DeviceTimeout(
                    f"{self.device.bdf} did not {what} within {timeout_s:g} s; power-cycle it"
                )
            time.sleep(_NAP_S)
            csts = self.device.read_register(CSTS, 4)

    # Admin commands

    def run(self, sqe: Sqe, timeout_s: float = _COMMAND_TIMEOUT_S) -> AdminResult:
        """Runs one admin command. Raises DeviceTimeout; the drive must be reset then."""
        with self.lock:
            return self._run(sqe, timeout_s)

    def _run(self, sqe: Sqe, timeout_s: float) -> AdminResult:
        lib, address = _native.lib(), self._queue.struct_address
        cid = lib.gio_qp_cid_acquire(address)
        if cid == NO_CID:
            raise DeviceTimeout(f"{self.device.bdf} answers no admin commands; reset it")
        sqe.cdw0 = make_cdw0(sqe.cdw0 & 0xFF, 0, cid)
        lib.gio_qp_sq_enqueue(address, ctypes.byref(sqe))
        lib.gio_qp_sq_ring(address)
        self._forward(0, self._struct.sq_doorbell)
        deadline_s = time.monotonic() + timeout_s
        result = self._reap(cid)
        while result is None:
            if time.monotonic() > deadline_s:
                self.device.read_register(CSTS, 4)  # raises if the drive is gone
                raise DeviceTimeout(
                    f"{self.device.bdf} did not answer an admin command within {timeout_s:g} s;"
                    " reset the controller"
                )
            time.sleep(_NAP_S)
            result = self._reap(cid)
        return result

    def _reap(self, cid: int) -> AdminResult | None:
        """Consumes one completion, if there is one; returns it if it is that of `cid`."""
        lib, address = _native.lib(), self._queue.struct_address
        slot = self._struct.cq_head % _ADMIN_DEPTH
        cqe = Cqe.from_address(self._struct.cq + ctypes.sizeof(Cqe) * slot)
        if not lib.gio_qp_cq_reap(address, 1):
            return None
        self._forward(1, self._struct.cq_doorbell)
        word = int(lib.gio_qp_completion(address, cid))
        if not word & COMPLETED:
            return None
        lib.gio_qp_cid_release(address, cid)
        return AdminResult(word & ~COMPLETED, int(cqe.result))

    def _forward(self, which: int, word_address: int) -> None:
        """Copies a doorbell of the admin queue from its word in memory to its register."""
        word = ctypes.c_uint32.from_address(word_address).value
        offset = DOORBELLS + which * self.capabilities.doorbell_nbytes
        self.device.write_register(offset, 4, word)

    def _must(
        self, what: str, opcode: int, *, timeout_s: float = _COMMAND_TIMEOUT_S, **dwords: int
    ) -> AdminResult:
        sqe = Sqe(cdw0=opcode)
        dptr = dwords.pop("prp1", 0), dwords.pop("prp2", 0)
        sqe.dptr[0], sqe.dptr[1] = dptr
        for name, content in dwords.items():
            setattr(sqe, name, content)
        result = self.run(sqe, timeout_s)
        if result.status:
            raise MediumError(
                f"{self.device.bdf} refused to {what}: status {result.status:#05x}; reset the"
                " drive, and update its firmware when that does not help",
                status=result.status,
            )
        return result

    def _identify(self, cns: int, nsid: int = 0) -> bytes:
        self._data.array[:] = 0
        self._must("identify itself", _IDENTIFY, nsid=nsid, cdw10=cns, prp1=self._data.address)
        return self._data.array.tobytes()

    def identify(self) -> IdentifyController:
        """Identify Controller. Raises MediumError for data that violates the specification."""
        page_nbytes = self.capabilities.page_nbytes_min
        found = IdentifyController.parse(self._identify(_CNS_CONTROLLER), page_nbytes)
        self._shutdown_timeout_s = max(_SHUTDOWN_TIMEOUT_S, found.shutdown_s)
        return found

    def identify_namespaces(self, highest: int) -> dict[int, NamespaceIdentity]:
        """Every active namespace by nsid."""
        nsids = parse_namespace_list(self._identify(_CNS_ACTIVE_LIST), highest)
        return {n: NamespaceIdentity.parse(self._identify(_CNS_NAMESPACE, n)) for n in nsids}

    def request_queues(self, count: int) -> int:
        """Requests I/O queue pairs, before any is created; returns how many are granted."""
        wanted = (count - 1) << 16 | (count - 1)
        cdw10 = _FEATURE_NUMBER_OF_QUEUES
        dword = self._must("grant queues", _SET_FEATURES, cdw10=cdw10, cdw11=wanted).dword
        self.queues_granted = min(count, (dword & 0xFFFF) + 1, (dword >> 16) + 1)
        return self.queues_granted

    def create_queues(self, queue_pair: QueuePair) -> None:
        """Creates the completion queue and then the submission queue of a pair in mapped memory."""
        if queue_pair.qid > self.queues_granted:
            raise ConfigError(
                f"{self.device.bdf} grants {self.queues_granted} I/O queue pairs; close one first"
            )
        shape = (queue_pair.depth - 1) << 16 | queue_pair.qid
        interrupts = self.device.irq_fd >= 0 and not queue_pair.is_device
        flags = _QUEUE_CONTIGUOUS | (_CQ_INTERRUPTS if interrupts else 0)
        what = f"create queue pair {queue_pair.qid}"
        struct = queue_pair.struct
        self._must(what, _CREATE_CQ, cdw10=shape, cdw11=flags, prp1=struct.cq)
        cdw11 = queue_pair.qid << 16 | _QUEUE_CONTIGUOUS
        try:
            self._must(what, _CREATE_SQ, cdw10=shape, cdw11=cdw11, prp1=struct.sq)
        except MediumError:  # refused: otherwise its qid would stay taken
            self._must(what, _DELETE_CQ, cdw10=queue_pair.qid)
            raise

    def delete_queues(self, queue_pair: QueuePair) -> None:
        """Deletes the submission queue and then the completion queue of an idle pair."""
        what = f"delete queue pair {queue_pair.qid}"
        self._must(what, _DELETE_SQ, cdw10=queue_pair.qid)
        self._must(what, _DELETE_CQ, cdw10=queue_pair.qid)

    def abort(self, qid: int, cid: int, timeout_s: float = _COMMAND_TIMEOUT_S) -> bool:
        """Asks the drive to abort one command; returns whether it was aborted.

        The command's completion still comes, and until then the drive may use its memory.
        """
        cdw10 = cid << 16 | qid
        result = self._must("abort a command", _ABORT, timeout_s=timeout_s, cdw10=cdw10)
        return result.dword & 1 == 0

    def set_shadow_doorbells(self, address: int) -> None:
        """Doorbell Buffer Config: shadow doorbells at `address`, event indices one page later."""
        prp2 = address + self.capabilities.page_nbytes_min
        self._must("use shadow doorbells", _DOORBELL_BUFFER, prp1=address, prp2=prp2)
        self.shadow = address

    def restart(self, timeout_s: float, when_disabled: Callable[[], None]) -> None:
        """Resets the controller: disables the drive, then enables it with all its queues.

        If disabling fails, the PCI function is reset. when_disabled: ends all commands and clears
        the rings. Raises DeviceTimeout, DeviceGone or MediumError.
        """
        with self.lock:
            self._restart(timeout_s, when_disabled)

    def _restart(self, timeout_s: float, when_disabled: Callable[[], None]) -> None:
        try:
            self.disable(timeout_s)
        except DeviceTimeout:
            if not self.device.reset():
                raise
            self.device.enable_dma()
            self.disable(timeout_s)
        when_disabled()
        self.enable()
        self.request_queues(max(1, self.queues_granted))
        if self.shadow:
            self.set_shadow_doorbells(self.shadow)
        for queue_pair in self.queue_pairs:
            # The submitter's words in GPU memory cannot be cleared: kernels could ring old tails.
            queue_pair.is_dead = queue_pair.is_device
            if not queue_pair.is_dead:
                self.create_queues(queue_pair)

    def check_features(self, identity: IdentifyController, *, shadow: bool) -> None:
        """Raises Unsupported if a requested feature is missing."""
        if shadow and not identity.has_shadow_doorbells:
            raise Unsupported(
                f"{self.device.bdf} has no shadow doorbells; only emulated drives have them"
            )

"""Python's interface to controllers, which execute NVMe commands: the lowest layer.

`NativeController` is the base of all controllers; they live in the native library. Memory that a
controller may still write is never freed: after a failed reset it stays reserved until the process
exits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy.typing as npt

from tutti.base.interrupts import uninterrupted
from tutti.base.process import Owned, finalize
from tutti.base.units import format_nbytes
from tutti.errors import ConfigError, DeviceTimeout, NativeError
from tutti.gio_uring import _native
from tutti.gio_uring.memory import DmaRegion, address_of
from tutti.gio_uring.queue_pair import QueuePair

HAS_FUA = 1
HAS_DEALLOCATE = 2
HAS_VOLATILE_CACHE = 4
HAS_PRP = 8

_CLOSE_TIMEOUT_S = 5.0
#: Longest sleep of `service` in one handle, so that the others are served meanwhile.
_TURN_NS = 100_000

#: (handle, memory) of controllers that could not be reset: they may still write there.
_STUCK: list[object] = []


class ControllerInfoStruct(ctypes.LittleEndianStructure):
    """`gio::ControllerInfo`."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            "lba_shift",
            "namespaces",
            "mdts_nbytes",
            "sgl_descriptors",
            "flags",
            "depth_max",
        )
    )


@dataclass(frozen=True)
class ControllerInfo:
    """What a controller can do.

    lba_shift: log2 of the block size. namespaces: nsid 1 to this exist, of namespace_nlb[nsid - 1]
    blocks. mdts_nbytes: largest transfer of one command. sgl_descriptors: most that one command
    may have, 0 for PRP only. flags: HAS_*. depth_max: deepest queue pair.
    """

    lba_shift: int
    namespaces: int
    mdts_nbytes: int
    sgl_descriptors: int
    flags: int
    depth_max: int
    namespace_nlb: tuple[int, ...]

    @property
    def lba_nbytes(self) -> int:
        return 1 << self.lba_shift


class ServingEngine(Protocol):
    """An engine whose thread serves a controller."""

    def reset(self, timeout_s: float) -> None:
        """Resets the controller. Raises DeviceTimeout."""


class NativeController(Owned):
    """A controller in the native library; a context manager.

    One thread at a time serves it: the caller of `service`, an engine's thread, or one that
    `start` makes. It serves the queue pairs of all producers, GPU kernels included; they may be
    created and closed meanwhile.

    handles: the native objects, one per service thread: each is a drive, or some of a controller's
    files. handle: the first of them. routes: (service thread, its nsid) by nsid - 1.
    """

    def __init__(self, handle: int, *others: int) -> None:
        self.handle = handle
        self.handles = [handle, *others]
        self._lib = _native.lib()
        self._buffers: dict[int, Any] = {}  # registered, by address
        self._queue_pairs: list[QueuePair] = []
        self._rings: list[object] = []
        self._is_started = False
        self._server: weakref.ref[ServingEngine] | None = None
        self._finalizer = self._finalize()
        self.info = self._read_info()

    def _finalize(self) -> weakref.finalize[..., Any]:
        """Keeps what the native side may touch until the native objects are destroyed."""
        return finalize(self, _abandon, self.handles, self._buffers, self._rings)

    def _read_info(self) -> ControllerInfo:
        raw = ControllerInfoStruct()
        self._lib.gio_controller_info(self.handle, ctypes.byref(raw))
        fields = {field[0]: int(getattr(raw, field[0])) for field in ControllerInfoStruct._fields_}
        sizes = tuple(
            int(self._lib.gio_controller_namespace_nlb(self.handle, nsid + 1))
            for nsid in range(raw.namespaces)
        )
        return ControllerInfo(namespace_nlb=sizes, **fields)

    @property
    def is_served(self) -> bool:
        """Whether a thread serves the queues: an engine's, or the controller's own."""
        claimed = self._lib.gio_controller_is_claimed
        return not self.is_closed and any(claimed(handle) for handle in self.handles)

    @property
    def routes(self) -> list[tuple[int, int]]:
        """(service thread, its nsid) of each namespace; namespaces are dealt to threads in turn."""
        threads = len(self.handles)
        return [(i % threads, i + 1) for i in range(self.info.namespaces)]

    @property
    def device_routes(self) -> list[tuple[int, int]]:
        """As `routes`, for a device's queue pairs: the first service thread has every namespace."""
        return [(0, nsid) for nsid in range(1, self.info.namespaces + 1)]

    @property
    def is_closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def doorbell_registers(self) -> list[tuple[int, int]]:
        """(address, bytes) of doorbells in a drive's registers, by service thread; empty if they
        are words in memory.
        """
        return []

    #: How often blocks changed from one path to another.
    path_changes = 0

    def path_of(self, nsid: npt.ArrayLike, slba: npt.ArrayLike) -> str:
        """The path of commands to these blocks (n,): "direct", "page cache" or "both"."""
        return "direct"

    def check_places(self, nsids: Iterable[int]) -> None:
        """Raises PoolMoved if the name of one of these files leads to another file now."""

    def register(self, buffer: Any) -> DmaRegion:
        """Registers a buffer, so that commands can name its memory; its DMA address is its address.

        Raises ConfigError for memory that is unsuitable or overlaps a registered region.
        """
        self._check_open()
        address, nbytes = address_of(buffer)
        region = DmaRegion(buffer, address, self._unregister)
        what = f"cannot register {format_nbytes(nbytes)} at {address:#x}"
        remedy = "register memory once, and close overlapping regions first"
        for i, handle in enumerate(self.handles):  # all of them have the same regions
            result = self._lib.gio_controller_register(handle, address, nbytes)
            if result < 0:
                for other in self.handles[:i]:
                    self._lib.gio_controller_unregister(other, address)
                _native.check(result, what, remedy, ConfigError)
        self._buffers[address] = buffer
        return region

    def register_all(self, buffers: Iterable[Any]) -> list[DmaRegion]:
        """Registers all of the buffers, or none.  Raises what `register` raises."""
        regions: list[DmaRegion] = []
        try:
            for buffer in buffers:
                regions.append(self.register(buffer))
        except BaseException:
            for region in regions:
                region.close()
            raise
        return regions

    def read_page_sizes(self) -> None:
        """Reads the page sizes of the registered memory, which limit the requests to the kernel.
        Call it after a registration, and after memory was moved to large pages.
        """

    @property
    def request_nbytes_max(self) -> int:
        """Most bytes of one request to the kernel; of one command if the kernel takes no part."""
        return self.info.mdts_nbytes

    def _unregister(self, region: DmaRegion) -> None:
        if not self.is_closed:
            for handle in self.handles:
                self._lib.gio_controller_unregister(handle, region.address)
            del self._buffers[region.address]

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        """Creates a queue pair of a service thread, at any time.

        is_device: GPU kernels submit and reap here, with a copy of the submitter's words in GPU
        memory. Call `expect_rings` around their work; `device_routes` has the service threads that
        they need.
        The rings are not registered memory: no transfer can name them.
        Raises ConfigError for an unacceptable depth or too many queue pairs.
        """
        self._check_open()
        queue_pair = QueuePair(
            depth,
            self._free_qid(),
            owner=self,
            is_device=is_device,
            service_thread=service_thread,
            on_close=self._release,
        )
        handle = self.handles[service_thread]
        self._keep(queue_pair)
        result = self._lib.gio_controller_attach(handle, queue_pair.struct_address)
        if result < 0:
            self._forget(queue_pair)
            what = f"cannot create a queue pair of depth {depth}"
            remedy = f"use a power of two up to {self.info.depth_max}, and at most 64 queue pairs"
            _native.check(result, what, remedy, ConfigError)
        return queue_pair

    def _free_qid(self) -> int:
        taken = {queue_pair.qid for queue_pair in self._queue_pairs}
        return next(qid for qid in range(1, len(taken) + 2) if qid not in taken)

    def _keep(self, queue_pair: QueuePair) -> None:
        """Keeps the rings of a queue pair, which the native side may read from now on."""
        self._queue_pairs.append(queue_pair)
        self._rings.append(queue_pair.memory)

    def _release(self, queue_pair: QueuePair) -> None:
        """Forgets a queue pair that was closed; one with commands in flight keeps its rings."""
        if self.is_closed or queue_pair.inflight:
            return
        timeout_ns = int(_CLOSE_TIMEOUT_S * 1e9)
        address = queue_pair.struct_address
        handle = self.handles[queue_pair.service_thread]
        if self._lib.gio_controller_detach(handle, address, timeout_ns) == 0:
            self._forget(queue_pair)

    def _forget(self, queue_pair: QueuePair) -> None:
        self._queue_pairs.remove(queue_pair)
        self._rings.remove(queue_pair.memory)

    def expect_rings(self, is_busy: bool) -> None:
        """Announces that a producer which cannot wake the service thread, such as a GPU kernel,
        begins its work (True) or has ended it (False). Calls nest; while any is busy, doorbells
        are polled every few microseconds.
        """
        if not self.is_closed:  # such producers have queue pairs of the first service thread
            self._lib.gio_controller_expect_rings(self.handle, 1 if is_busy else -1)

    def served_by(self, server: ServingEngine) -> None:
        """Names the engine whose thread serves the queues, and does resets, until it is closed."""
        self._server = weakref.ref(server)

    def service(self, timeout_s: float = 0.0) -> int:
        """Serves each handle once, in the caller's thread. An idle handle sleeps up to `timeout_s`,
        or 0.1 ms if there are several handles.

        Returns the number of completions posted. Does nothing while `is_served`.
        """
        self._check_open()
        if self.is_served:
            return 0
        timeout_ns = int(timeout_s * 1e9)
        if len(self.handles) > 1:
            timeout_ns = min(timeout_ns, _TURN_NS)
        return sum(int(self._lib.gio_controller_service(h, timeout_ns)) for h in self.handles)

    def start(self) -> None:
        """Starts a service thread per handle. Raises NativeError if a thread serves one already."""
        self._check_open()
        for i, handle in enumerate(self.handles):
            result = self._lib.gio_controller_start(handle)
            if result < 0:
                for other in self.handles[:i]:
                    self._lib.gio_controller_stop(other)
            _native.check(result, "cannot start the controller", "stop() it, or its engine, first")
        self._is_started = True

    def stop(self) -> None:
        """Ends the threads of `start`; commands stay outstanding. Does nothing without threads."""
        if self._is_started and not self.is_closed:
            for handle in self.handles:
                self._lib.gio_controller_stop(handle)
        self._is_started = False

    def reset(self, timeout_s: float) -> None:
        """Ends every outstanding command, each with its own status.

        If an engine serves the controller, the engine does it. Raises DeviceTimeout if commands are
        still outstanding after `timeout_s`: all memory stays owned then, and the reset may be tried
        again.
        """
        self._check_open()
        server = self._server() if self._server is not None else None
        if server is not None and not self._is_started and self.is_served:
            server.reset(timeout_s)
            return
        restarts = self._is_started
        self.stop()
        self._check_unserved()
        timeout_ns = int(timeout_s * 1e9)
        results = [self._lib.gio_controller_reset(handle, timeout_ns) for handle in self.handles]
        if restarts:
            self.start()
        if min(results) < 0:
            raise DeviceTimeout(
                f"the controller could not be reset within {timeout_s:g} s; its memory stays"
                " reserved, try again or restart the process"
            )

    @uninterrupted()
    def close(self) -> None:
        """Resets and frees the controller; a second call does nothing.

        Raises ConfigError while regions are registered or an engine serves it, DeviceTimeout when
        the reset fails.
        """
        if self.is_closed:
            return
        self._check_idle()
        self.reset(_CLOSE_TIMEOUT_S)
        if self._finalizer.detach() is not None:
            for handle in self.handles:
                self._lib.gio_controller_destroy(handle)

    def keep_after_failure(self) -> None:
        """Never frees the native object, because a device or thread may still use it."""
        self._finalizer.detach()

    def _check_idle(self) -> None:
        """Stops the controller's own threads. Raises ConfigError if it is still in use."""
        if self._buffers:
            raise ConfigError(
                f"{len(self._buffers)} memory regions are still registered;"
                " close them before the controller"
            )
        self.stop()
        self._check_unserved()

    def _check_unserved(self) -> None:
        if self.is_served:
            raise ConfigError("an engine serves this controller; close the engine first")

    def _check_open(self) -> None:
        if self.is_closed:
            raise NativeError("the controller is closed; create a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _abandon(handles: list[int], *memory: object) -> None:
    """Frees a controller that was not closed; keeps its memory if it cannot be reset."""
    lib = _native.lib()
    for handle in handles:
        lib.gio_controller_stop(handle)
        if lib.gio_controller_reset(handle, int(_CLOSE_TIMEOUT_S * 1e9)) < 0:
            _STUCK.append((handle, memory))
            continue
        lib.gio_controller_destroy(handle)

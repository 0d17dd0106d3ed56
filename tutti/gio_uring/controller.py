"""Interface of what executes NVMe commands, as Python sees it: the lowest seam.

`Controller` is the protocol that everything above relies on; `NativeController` implements it for
controllers that live in the native library. Memory that a controller may still write is never
freed: what could not be reset stays reserved until the process ends.
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
#: How long one handle may sleep in the caller's thread before the others are served.
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
    """What serves a controller and is not its own thread."""

    def reset(self, timeout_s: float) -> None:
        """Resets the controller. Raises DeviceTimeout."""


class NativeController(Owned):
    """A controller in the native library; a context manager.

    One thread at a time serves it: the caller of `service`, an engine's, or the one that `start`
    makes. It serves the queue pairs of all producers, those of GPU kernels included, which may
    come and go meanwhile.

    handles: the native objects, each with a service thread of its own: a drive, or a share of one.
    handle: the first of them. routes: (service thread, nsid there), by nsid - 1.
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
        """What the native side may touch lives at least until it has been destroyed."""
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
        """The service thread of each namespace, in turns, and its nsid there."""
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
        """(address, bytes) of doorbells that are a drive's registers, by service thread; none where
        they are words.
        """
        return []

    #: How often blocks changed from one path to another.
    path_changes = 0

    def path_of(self, nsid: npt.ArrayLike, slba: npt.ArrayLike) -> str:
        """The path of commands to these blocks (n,): "direct", "page cache" or "both"."""
        return "direct"

    def check_places(self) -> None:
        """Raises PoolMoved where a file is no longer what was opened under its name."""

    def register(self, buffer: Any) -> DmaRegion:
        """Let commands name a buffer's memory; its DMA address is its address.

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
        """Reads on what pages the registered memory lies now: how long requests to the kernel may
        be depends on it. For after a registration, and when memory was moved to large pages.
        """

    @property
    def request_nbytes_max(self) -> int:
        """The largest request below the commands: a whole one, where there is no kernel between."""
        return self.info.mdts_nbytes

    def _unregister(self, region: DmaRegion) -> None:
        if not self.is_closed:
            for handle in self.handles:
                self._lib.gio_controller_unregister(handle, region.address)
            del self._buffers[region.address]

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        """A new queue pair of a service thread, at any time; its `close` releases the place.

        is_device: kernels of a GPU submit and reap here, with a copy of the submitter's words in
        GPU memory. While they are at work, announce it with `expect_rings`; `device_routes` tells
        which service threads they need.
        Its rings are not registered memory: no transfer can name them.
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
        """The native side may look at its rings from now on."""
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
        """Reports that a producer that cannot wake the serving thread, as a GPU's kernel, begins
        its work (True) or has ended it (False). Calls nest; while one is busy, doorbells are looked
        at every few microseconds.
        """
        if not self.is_closed:  # such producers have queue pairs of the first service thread
            self._lib.gio_controller_expect_rings(self.handle, 1 if is_busy else -1)

    def served_by(self, server: ServingEngine) -> None:
        """Names the engine whose thread serves the queues until it is closed: it resets, too."""
        self._server = weakref.ref(server)

    def service(self, timeout_s: float = 0.0) -> int:
        """One turn of work in the caller's thread, each handle sleeping at most `timeout_s` when
        idle, and only shortly where others wait for their turn.

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
        """Serve each handle on a thread of the controller's own. Raises NativeError if one does."""
        self._check_open()
        for i, handle in enumerate(self.handles):
            result = self._lib.gio_controller_start(handle)
            if result < 0:
                for other in self.handles[:i]:
                    self._lib.gio_controller_stop(other)
            _native.check(result, "cannot start the controller", "stop() it, or its engine, first")
        self._is_started = True

    def stop(self) -> None:
        """End those threads; commands stay outstanding. Does nothing if there are none."""
        if self._is_started and not self.is_closed:
            for handle in self.handles:
                self._lib.gio_controller_stop(handle)
        self._is_started = False

    def reset(self, timeout_s: float) -> None:
        """Ends every outstanding command, each with its own status.

        An engine that serves it does it; its commands end, too. Raises DeviceTimeout when something
        is still outstanding after `timeout_s`; everything stays owned then, and the reset may be
        tried again.
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
        """Reset and free the controller; a second call does nothing.

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
        """Gives up on ever freeing the native object: something may still use it."""
        self._finalizer.detach()

    def _check_idle(self) -> None:
        """Stops the controller's own thread, which is not needed any more."""
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
    """Ends a controller that was not closed; memory that cannot be reset is kept."""
    lib = _native.lib()
    for handle in handles:
        lib.gio_controller_stop(handle)
        if lib.gio_controller_reset(handle, int(_CLOSE_TIMEOUT_S * 1e9)) < 0:
            _STUCK.append((handle, memory))
            continue
        lib.gio_controller_destroy(handle)

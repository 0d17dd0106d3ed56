"""One submitted I/O control block: its progress by layer, waiting, cancelling and its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from tutti.base.arrays import U32
from tutti.base.callbacks import Guard
from tutti.base.interrupts import in_pieces
from tutti.errors import CapacityError, Unsupported
from tutti.gio_uring import _native
from tutti.gio_uring.engine_structs import JobReport


class JobEngine(Protocol):
    """The engine of a job.  handle: the native engine.  guard: runs callbacks.  free_job: see
    gio_job_free.
    """

    guard: Guard
    free_job: Callable[..., None]

    @property
    def handle(self) -> int: ...


def nanoseconds(seconds: float) -> int:
    """Converts a time for native code."""
    return max(0, int(seconds * 1e9))


class Job:
    """One submitted I/O control block.  Thread-safe.  A forked child cannot use it.

    page_status: uint32 (pages,), 0 or the first error status of a page; final once the job is done.
    native: the native job; its submission sets this before a service thread gets the job.
    """

    _on_ready: Callable[[], None] | None = None
    _callback: Callable[[Job], None] | None = None
    _released = False

    def __init__(
        self,
        engine: JobEngine,
        tag: int,
        page_status: U32,
        keep: tuple[Any, ...],
        on_released: Callable[[Job], None] | None = None,
    ) -> None:
        self._engine = engine
        self.native = ctypes.c_void_p()
        self._keep: tuple[Any, ...] = keep
        self.tag = tag
        self.page_status = page_status
        self._callback = on_released
        self._free = engine.free_job

    def __del__(self) -> None:
        """Frees the native job; the native threads free one that was not released."""
        if self._released:
            self._free(self.native)

    def report(self) -> JobReport:
        """The progress of the job."""
        _ = self._engine.guard  # in a forked child this raises ForkedProcess
        out = JobReport()
        _native.quick().gio_job_report(self.native, ctypes.byref(out))
        return out

    @property
    def kept(self) -> tuple[Any, ...]:
        """Objects kept while a device may use them; empty once the job is released."""
        return self._keep

    @property
    def done(self) -> bool:
        """Whether every layer is ready or failed."""
        return bool(self.report().done)

    def order_stream(self, stream: int, layers: int) -> None:
        """Raises Unsupported: GPU streams cannot wait for jobs in host memory."""
        raise Unsupported(
            "a stream can wait only for loads into GPU memory; wait with wait_layer, or load into "
            "a DeviceMemory"
        )

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until ``layers`` layers are ready or the job failed.  False after the timeout."""
        wait = _native.lib().gio_job_wait_layers
        handles = (self._engine.handle, self.native)
        return in_pieces(lambda s: wait(*handles, layers, nanoseconds(s)) == 0, timeout_s)

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until no command of the job can touch memory any more.  False after the timeout."""
        if self._released:
            return True
        wait = _native.lib().gio_job_wait_released
        handles = (self._engine.handle, self.native)
        return in_pieces(lambda s: wait(*handles, nanoseconds(s)) == 0, timeout_s)

    def open_gate(self) -> None:
        """Lets a gated job compare its digests, which are filled now."""
        _native.quick().gio_job_open_gate(self._engine.handle, self.native)

    @property
    def layers_ready(self) -> int:
        """Number of layers that have arrived, from the first on."""
        return int(self.report().layers_ready)

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """Permits a held job to issue its first ``layers`` layers; fewer than before stop a write.

        on_ready: called on the engine's thread once ``report_at`` layers are ready; a later grant
        replaces it.  Raises CapacityError without memory for that.
        """
        self._on_ready = on_ready
        result = _native.quick().gio_job_grant(self._engine.handle, self.native, layers, report_at)
        _native.check(result, "cannot grant layers of a transfer", "free memory", CapacityError)

    def report_ready(self) -> None:
        """Calls ``on_ready`` of the last grant: its layers are ready."""
        if self._on_ready is not None:
            self._engine.guard.call("a completion callback", self._on_ready)

    def cancel(self) -> None:
        """Issues no more commands of this job; those in flight end by themselves."""
        _native.lib().gio_job_cancel(self._engine.handle, self.native)

    def on_released(self, callback: Callable[[Job], None] | None) -> None:
        """Calls back once no command is outstanding, or now if none is; replaces an earlier one."""
        self._callback = callback
        if self._released:  # and `release` may have missed it
            callback = vars(self).pop("_callback", None)
            if callback is not None:
                self._engine.guard.call("a completion callback", callback, self)

    def release(self) -> Callable[[Job], None] | None:
        """Marks the job as released, drops its arrays, and returns its callback."""
        self._released = True  # before the look at the callback: pairs with on_released
        self._keep, self._on_ready = (), None
        callback: Callable[[Job], None] | None = vars(self).pop("_callback", None)
        return callback

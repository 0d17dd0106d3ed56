"""Tickets, which `put` and `load` return, and the progress behind them, which transfers report."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base import process
from tutti.base.arrays import U32, UINT8, UINT32, Rows, Slots
from tutti.base.callbacks import Guard
from tutti.base.checks import function, seconds, takes, whole
from tutti.base.histogram import Histogram
from tutti.base.interrupts import Latch
from tutti.base.process import Uncopied
from tutti.errors import CapacityError, DeviceTimeout, PageRangeError, PagesInUse, TuttiError
from tutti.gio_uring.nvme_spec import STATUS_INTERNAL_ERROR
from tutti.gio_uring.status import error_status, status_error
from tutti.gio_uring.transfer import HeldTransfer, Transfer
from tutti.placement.load_plan import LoadPlan
from tutti.transfers.put_limits import Limit

_STREAM_MAX = 2**64 - 1  # an address
NO_STATUS: U32 = np.zeros(0, np.uint32)
_Progress = TypeVar("_Progress", bound=Latch)


@dataclass(frozen=True)
class PutResult:
    """What became of the objects of one put: their numbers add up to the number of keys.

    stored: written by this put.  present: in the pool already, or being written by another put,
    whose own ticket has the outcome, or unproven since an unclean close.
    dropped: not stored, because no slot could be freed, or a budget or quota is used up.
    """

    stored: int
    present: int
    dropped: int


class Outcome(IntEnum):
    """What became of one key of a put."""

    PENDING = 0
    STORED = 1
    PRESENT = 2
    DROPPED = 3
    FAILED = 4


class _Ticket(Uncopied, Generic[_Progress]):
    """Belongs to the process that made it, as an Owned object; to register it as one would take
    longer than all else about it, and every put and load makes one.
    """

    def __init__(self, progress: _Progress) -> None:
        self._own, self._made_in = progress, process.generation

    @property
    def _progress(self) -> _Progress:
        if self._made_in is not process.generation:
            raise process.refusal()
        return self._own


class PutTicket(_Ticket["PutProgress"]):
    """A put that was started.  Thread-safe.

    The pages must not change before the put is done.
    """

    def __repr__(self) -> str:
        if self._made_in is not process.generation:
            return object.__repr__(self)  # as of an Owned object: a log or a debugger may ask
        counts = Counter(Outcome(code).name.lower() for code in self.outcome.tolist())
        listed = ", ".join(f"{n} {name}" for name, n in counts.items())
        return f"<PutTicket: {listed or 'no keys'}>"

    @property
    def done(self) -> bool:
        """Whether the outcome of every key is known."""
        return self._progress.is_set()

    @property
    def outcome(self) -> npt.NDArray[np.uint8]:
        """An Outcome per key, uint8 (n,); do not change it."""
        return self._progress.outcome

    @takes(timeout_s=seconds)
    def wait(self, timeout_s: float = 60.0) -> PutResult:
        """Returns the outcome, once every object is acknowledged at the pool's durability level.

        Raises DeviceTimeout after the timeout (the put goes on), CapacityError for a full disk,
        PoolReadOnly for a write-protected one, MediumError for a failed write: its ``pages`` are
        the positions of keys that were not stored; the others were.  Raises the pool's own error
        if it refused the put when it was to start.
        """
        if not self._progress.wait(timeout_s):
            raise DeviceTimeout(
                f"the put is not done after {timeout_s:g} s; do not change its pages, wait again"
            )
        octets = self.outcome.tobytes()
        if octets.count(Outcome.FAILED):
            status, failed = self._progress.status, self.failed()
            refusal = self._progress.refusal
            if refusal is not None:  # a copy: a raised exception collects the frames that it passed
                raise copy.copy(refusal) from refusal
            raise _error(int(status[failed[0]]), failed, "put")
        counts = [octets.count(code) for code in range(len(Outcome))]
        return PutResult(counts[Outcome.STORED], counts[Outcome.PRESENT], counts[Outcome.DROPPED])

    @takes(timeout_s=seconds)
    def wait_ended(self, timeout_s: float = 60.0) -> bool:
        """Waits until the outcome is known, whatever it is.  False after the timeout."""
        return self._progress.wait(timeout_s)

    def failed(self) -> Rows:
        """Positions of the keys that have failed so far, int64 (n,), ascending."""
        return np.flatnonzero(self._progress.status).astype(np.int64)

    @takes(callback=function)
    def on_done(self, callback: Callable[[PutTicket], None]) -> None:
        """Calls ``callback`` when the outcome is known: on the engine's thread, or at once.

        It must not wait for the store.  An exception in it is logged.
        """
        self._progress.on_done(lambda _: callback(self))


class PutProgress(Latch):
    """The state of one put, set with the end of the writer's last batch.  Thread-safe.

    begun_s: monotonic time of the start (default: now).
    outcome: u8 (keys,), an Outcome each.
    refusal: what the pool raised when a part of the put was started or granted.
    slots: of pages of the put that were placed before others.  is_cut: the rest is not written, for
    lack of space or because of a limit (cut_by).  is_lost: an agent did not answer.
    """

    refusal: TuttiError | None = None
    is_cut = is_lost = False
    cut_by: Limit | None = None

    def __init__(
        self,
        keys: int,
        guard: Guard | None = None,
        latency: Histogram | None = None,
        begun_s: float = 0.0,
    ) -> None:
        self._guard = guard or Guard()
        self._latency = latency
        self._begun_s = begun_s or time.monotonic()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[PutProgress], None]] = []
        self.outcome: npt.NDArray[np.uint8] = np.zeros(keys, UINT8)  # PENDING
        self.slots: list[Slots] = []

    @property
    def status(self) -> U32:
        """NVMe status of each key that failed, else 0: u32 (keys,).  The first access makes it."""
        status: U32 = vars(self).setdefault("_status", np.zeros(self.outcome.size, UINT32))
        return status

    def on_done(self, callback: Callable[[PutProgress], None]) -> None:
        """See PutTicket."""
        with self._lock:
            if not self._is_set:
                self._callbacks.append(callback)
                return
        self._guard.call("a callback of a put", callback, self)

    def refuse(self, rows: Rows, error: BaseException) -> None:
        """The put of these keys could not be started or continued."""
        status = error_status(error)
        self.outcome[rows], self.status[rows] = Outcome.FAILED, status
        if isinstance(error, TuttiError) and status == STATUS_INTERNAL_ERROR:
            self.refusal = error

    def end_part(self) -> None:
        """All keys have their outcome."""
        with self._lock:
            if self._is_set:
                return
            callbacks, self._callbacks = self._callbacks, []
            self.set()
        if self._latency is not None:
            self._latency.observe_since(self._begun_s)
        for callback in callbacks:
            self._guard.call("a callback of a put", callback, self)


class LoadPart(NamedTuple):
    """Some pages of a load, moved by one job: ``rows`` are their positions, None for all."""

    job: Transfer
    rows: Rows | None
    whole: bool  # no layer is ready before all are: unproven objects are verified in full first


class LoadTicket(_Ticket["LoadProgress"]):
    """A load that was started; its layers become ready one after another.  Thread-safe.

    A layer must not be read before it is ready, and no page reused before the load has settled.
    """

    def __repr__(self) -> str:
        if self._made_in is not process.generation:
            return object.__repr__(self)
        state = "done" if self.done else "under way"
        return f"<LoadTicket: {self.keys} keys, {state}, {self.failed().size} failed>"

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self._progress.keys

    def _read_s(self) -> float:
        """Monotonic time when the medium had read what a GPU verifies later; 0.0 elsewhere."""
        jobs = [part.job for part in self._progress.parts]
        return max((job.read_s() for job in jobs if hasattr(job, "read_s")), default=0.0)

    @property
    def done(self) -> bool:
        """Whether every layer is ready or has failed."""
        return self._progress.is_done()

    @takes(timeout_s=seconds)
    def wait_layer(self, layer: int, timeout_s: float = 60.0) -> None:
        """Returns when ``layer`` (from 0) of all pages is in memory, and verified if that is on.

        May be called again.  Raises ChecksumMismatch or MediumError, whose ``pages`` are the
        positions in the batch with unusable bytes; DeviceTimeout after the timeout; PageRangeError.
        """
        self._check_layer(layer)
        progress = self._progress
        deadline_s = time.monotonic() + timeout_s
        progress.wanted()
        for part in progress.parts:
            needed = progress.layers if part.whole else layer + 1
            if not part.job.wait_layers(needed, _left_s(deadline_s)):
                raise DeviceTimeout(
                    f"layer {layer} is not ready after {timeout_s:g} s; its pages stay in use"
                )
        status = progress.status()
        if np.count_nonzero(status):
            if progress.refusal is not None:
                raise copy.copy(progress.refusal) from progress.refusal
            failed = self.failed()
            raise _error(int(progress.status()[failed[0]]), failed, "load")

    def _check_layer(self, layer: int) -> None:
        layers = self._progress.layers
        if not isinstance(layer, int | np.integer) or not 0 <= layer < layers:
            raise PageRangeError(f"layer {layer!r} does not exist; pass one from 0 to {layers - 1}")

    def order_stream(self, stream: int, layer: int) -> None:
        """Makes a GPU stream wait for ``layer`` instead of the caller.

        Blocks until the layer's work is enqueued: with the engines `launch` and `resident` until
        the scheduler has granted the layer.  stream: its CUDA handle.  The stream continues after a
        failed load, too: do not use what it computed unless ``failed()`` is empty after the last
        layer.  Raises Unsupported for pages in host memory, PageRangeError.
        """
        self._check_layer(layer)
        whole("stream", stream, 0, _STREAM_MAX)
        progress = self._progress
        for part in progress.parts:
            part.job.order_stream(stream, progress.layers if part.whole else layer + 1)

    @takes(timeout_s=seconds)
    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns when all layers are ready; see ``wait_layer``."""
        self.wait_layer(self._progress.layers - 1, timeout_s)

    @takes(timeout_s=seconds)
    def wait_settled(self, timeout_s: float = 60.0) -> bool:
        """Waits until the device can no longer touch the pages.  False after the timeout."""
        return self._progress.wait_settled(timeout_s)

    @takes(timeout_s=seconds)
    def cancel(self, timeout_s: float = 60.0) -> bool:
        """Issues no further commands, and waits as ``wait_settled`` does."""
        for part in self._progress.parts:
            part.job.cancel()
        return self._progress.wait_settled(timeout_s)

    def failed(self) -> Rows:
        """Positions in the batch that have failed so far, int64 (n,), ascending."""
        return np.flatnonzero(self._progress.status()).astype(np.int64)

    @takes(callback=function)
    def on_settled(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the device can no longer touch the pages: on its thread, or at
        once.  It must not wait for the store.  An exception in it is logged.
        """
        self._progress.on_settled(callback)


class LoadProgress(Latch):
    """The state of one load: its jobs; set when all of them were released.  Thread-safe.

    begun_s: monotonic time of the start (default: now).
    record_status: u32 (keys,), why the slot record of a key was refused, else 0; empty where no
    record may have to be read.
    refusal: why layers could not be granted.
    job, plan: of a load that is one job; the plan has the status of each page.
    on_wanted: called once, when something waits for a background load.
    """

    refusal: CapacityError | None = None
    record_status: U32 = NO_STATUS
    job: Transfer | None = None
    plan: LoadPlan | None = None
    on_wanted: Callable[[], None] | None = None

    def __init__(
        self,
        keys: int,
        layers: int,
        guard: Guard | None = None,
        latency: Histogram | None = None,
        begun_s: float = 0.0,
    ) -> None:
        self._guard = guard or Guard()
        self._latency = latency
        self._begun_s = begun_s or time.monotonic()
        self.keys = keys
        self.layers = layers
        self._is_set = False  # found sooner than that of the class
        self._parts: list[LoadPart] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def parts(self) -> list[LoadPart]:
        """The jobs so far."""
        return self._parts if self.job is None else [LoadPart(self.job, None, whole=False)]

    def wanted(self) -> None:
        """Calls ``on_wanted``, once: something waits for a layer now."""
        on_wanted, self.on_wanted = self.on_wanted, None
        if on_wanted is not None and not self.is_done():
            on_wanted()

    def is_done(self) -> bool:
        """Whether every layer is ready or has failed."""
        return all(part.job.done for part in self.parts)

    def status(self, otherwise: int = 0) -> U32:
        """Why a key failed so far, else 0: u32 (keys,); ``otherwise`` for one without a job."""
        if self.plan is not None:
            return self.plan.status
        status = np.full(self.keys, otherwise, np.uint32)
        for part in self.parts:
            status[part.rows] = part.job.page_status
        if np.count_nonzero(self.record_status) == 0:
            return status
        return np.where(self.record_status == 0, status, self.record_status)

    @property
    def layers_ready(self) -> int:
        """Number of layers, from the first on, that have arrived for all pages of a held load."""
        return min((_held(part).layers_ready for part in self.parts), default=self.layers)

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """Lets so many layers of a held load be read; see Job.grant.  An error cancels the load."""
        try:
            for part in self.parts:
                _held(part).grant(layers, report_at, on_ready)
        except CapacityError as error:
            self.refusal = error
            for part in self.parts:
                part.job.cancel()
            raise

    def wait_settled(self, timeout_s: float = 60.0) -> bool:
        """See LoadTicket."""
        deadline_s = time.monotonic() + timeout_s
        if not self.wait(timeout_s):
            return False
        return all(part.job.wait_released(_left_s(deadline_s)) for part in self.parts)

    def on_settled(self, callback: Callable[[], None]) -> None:
        """See LoadTicket.  Takes no lock, which an interrupt could leave taken."""
        self._callbacks.append(callback)
        if self._is_set:
            with suppress(ValueError):  # `settle` took it
                self._callbacks.remove(callback)
                self._guard.call("a callback of a load", callback)

    def settle(self) -> None:
        """Every job of this load was released."""
        self.set()  # before the look at the callbacks: pairs with on_settled
        if self._latency is not None:
            self._latency.observe_since(self._begun_s)
        while self._callbacks:  # bounded: callbacks that come from now on call themselves
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # it calls itself
                break
            self._guard.call("a callback of a load", callback)

    def cancel(self, timeout_s: float) -> None:
        """Stops the jobs of a load that could not be started in full.

        Raises PagesInUse when one of them may still write into the caller's pages.
        """
        for part in self.parts:
            part.job.cancel()
        for part in self.parts:
            if not part.job.wait_released(timeout_s):
                raise PagesInUse(
                    "a load was abandoned but the device still owns its pages; do not reuse them "
                    "before it is done or the pool is closed",
                    self.wait_settled,
                )


def _held(part: LoadPart) -> HeldTransfer:
    assert isinstance(part.job, HeldTransfer), "an engine that holds layers"
    return part.job


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _error(status: int, failed: Rows, what: str) -> TuttiError:
    count = f"{failed.size} object{'s' if failed.size != 1 else ''}"
    error = status_error(status, f"the {what} of {count}", failed.tolist())
    assert error is not None, "a failed page has a status"
    return error

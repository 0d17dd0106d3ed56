"""Request of a put: pages with their keys, and the part of them that is started at one time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, UINT8, UINT32, Keys, Rows, Slots
from tutti.base.checks import whole
from tutti.errors import CapacityError
from tutti.gio_uring.iocb import PagedMemory, as_pages
from tutti.gio_uring.job import Job
from tutti.medium.keys import KEY_NBYTES, as_keys, check_key
from tutti.medium.slot_record import expiry_of, tenant_of
from tutti.native import quick
from tutti.placement.allocator import PlacedChain
from tutti.placement.index import MISSING, Index
from tutti.transfers.put_limits import Limit
from tutti.transfers.tickets import Outcome, PutProgress

DEPTH_MAX = 2**32 - 1  # of a record
_ROW_NBYTES = 2 * KEY_NBYTES + 8  # a key, its predecessor, depth and page


class PutRequest:
    """Keys (n, 16) to store, their predecessors (n, 16), depths (n,) and pages (n,).

    Zeros stand for no predecessor.  packed: all of these, as native code takes them; bytes, because
    an array and its address take longer to make.  has_start: whether a key is the first of its
    chain.  tenant: number of the namespace, 0 for none.  expiry_64s: Unix time in units of 64 s
    from which the objects are removed, 0 for never.  digests: of the slices (n, layers), if they
    are known; then nothing is hashed.
    """

    __slots__ = ("digests", "expiry_64s", "has_start", "memory", "n", "packed", "tenant")

    def __init__(
        self,
        packed: bytes,
        has_start: bool,
        memory: PagedMemory,
        tenant: int = 0,
        expiry_64s: int = 0,
        digests: U64 | None = None,
    ) -> None:
        self.packed, self.n, self.has_start = packed, len(packed) // _ROW_NBYTES, has_start
        self.memory, self.tenant, self.expiry_64s = memory, tenant, expiry_64s
        self.digests = digests

    @property
    def keys(self) -> Keys:
        """See the class."""
        return np.frombuffer(self.packed, UINT8, *self._column(16, 16)).reshape(-1, KEY_NBYTES)

    @property
    def parents(self) -> Keys:
        """See the class."""
        return np.frombuffer(self.packed, UINT8, *self._column(16, 0)).reshape(-1, KEY_NBYTES)

    @property
    def depths(self) -> U32:
        """See the class."""
        return np.frombuffer(self.packed, UINT32, *self._column(1, 32))

    @property
    def pages(self) -> U32:
        """See the class."""
        return np.frombuffer(self.packed, UINT32, *self._column(1, 36))

    def _column(self, items: int, start: int) -> tuple[int, int]:
        return items * self.n, start * self.n

    @classmethod
    def of(
        cls,
        keys: Keys,
        parents: Keys,
        depths: U32,
        pages: U32,
        memory: PagedMemory,
        tenant: int = 0,
        expiry_64s: int = 0,
        digests: U64 | None = None,
    ) -> PutRequest:
        """Keys of any chains, by their columns."""
        columns = (parents, keys, depths, pages)
        packed = b"".join([column.tobytes() for column in columns])
        assert len(packed) == len(keys) * _ROW_NBYTES, "two keys and two 32-bit numbers per page"
        has_start = bool(np.count_nonzero(depths) < depths.size)
        return cls(packed, has_start, memory, tenant, expiry_64s, digests)

    @classmethod
    def chain(
        cls,
        keys: Keys,
        pages: npt.ArrayLike,
        memory: PagedMemory,
        parent: bytes | None,
        depth: int,
        tenant: int = 0,
        expiry_64s: int = 0,
    ) -> PutRequest:
        """Keys that follow one another, the first behind ``parent``; a page for each.

        Raises KeySizeError, PageRangeError and ConfigError for what ObjectStore.put does not take.
        """
        n = len(keys)
        numbers = as_pages(pages, n)
        if parent is not None:
            check_key("parent", parent)
        if type(depth) is not int or not 0 <= depth <= DEPTH_MAX - n:
            depth = whole("depth", depth, 0, DEPTH_MAX - max(0, n - 1))
        packed = bytes(n * _ROW_NBYTES)
        its = numbers.tobytes(), numbers.itemsize, memory.pages
        if quick().tutti_put_pack(keys.tobytes(), n, parent, depth, *its, packed) < 0:
            memory.check_pages(numbers)  # says which page
        return cls(packed, depth == 0 and n > 0, memory, tenant, expiry_64s)

    @classmethod
    def checked(
        cls,
        keys: npt.NDArray[np.uint8] | Sequence[bytes],
        pages: npt.ArrayLike,
        memory: PagedMemory,
        parent: bytes | None,
        depth: int,
        ttl_s: float | None = None,
        namespace: str = "",
    ) -> PutRequest:
        """As `chain`, for unchecked values.  Raises KeySizeError, PageRangeError, ConfigError."""
        expiry = 0 if ttl_s is None else expiry_of(ttl_s)
        tenant = tenant_of(namespace) if type(namespace) is not str or namespace else 0
        return cls.chain(as_keys(keys), pages, memory, parent, depth, tenant, expiry)

    def take(self, rows: Rows) -> PutRequest:
        """The same for some rows (m,), ascending."""
        if rows.size == self.n:
            return self
        own = self.keys[rows], self.parents[rows], self.depths[rows], self.pages[rows]
        digests = None if self.digests is None else self.digests[rows]
        return PutRequest.of(*own, self.memory, self.tenant, self.expiry_64s, digests)

    @staticmethod
    def merge(requests: Sequence[PutRequest]) -> PutRequest:
        """Requests of one kind (see PutPart.kind), one after another."""
        digests = [request.digests for request in requests if request.digests is not None]
        first = requests[0]
        return PutRequest.of(
            np.concatenate([request.keys for request in requests]),
            np.concatenate([request.parents for request in requests]),
            np.concatenate([request.depths for request in requests]),
            np.concatenate([request.pages for request in requests]),
            first.memory,
            first.tenant,
            first.expiry_64s,
            np.concatenate(digests) if digests else None,
        )


#: Open parts of all puts of a pool; they are few, because a stopped part keeps its staging.
OPEN_PARTS_MAX = 4
_NEVER = 2**32 - 1
NO_ROWS: Rows = np.zeros(0, np.int64)


class PutGrant:
    """How many layers of a part may be written by now, also by jobs that begin later.

    first: first row of the part, among the put's rows.  done: rows that are known to be written.
    layers: with which a job may be submitted; it needs no grant of its own unless that changes.
    error: why a job could not be granted; it was cancelled.
    """

    def __init__(self, first: int) -> None:
        self.first, self.done, self.layers = first, 0, 0
        self.error: CapacityError | None = None
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._grant: tuple[int, int, Callable[[], None] | None] = (0, 0, None)

    def begin(self, job: Job, layers: int = 0) -> None:
        """Adds a held job that writes some of the part.  layers: with which it was submitted."""
        with self._lock:
            self._jobs.append(job)
            if self._grant != (layers, _NEVER, None):
                self._tell(job)

    def set(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """See Job.grant."""
        with self._lock:
            if on_ready is None and self._grant == (layers, report_at, None):
                return
            self._grant = layers, report_at, on_ready
            self.layers = layers if on_ready is None else 0
            for job in self._jobs:
                self._tell(job)

    def _tell(self, job: Job) -> None:
        try:
            job.grant(*self._grant)
        except CapacityError as error:
            self.error = error
            job.cancel()

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is written; after a time-out it may not be released yet."""
        with self._lock:
            return bool(self._jobs) and all(job.done for job in self._jobs)

    @property
    def layers_ready(self) -> int:
        """Layers that are written, from the first on."""
        with self._lock:
            return min((job.layers_ready for job in self._jobs), default=0)


class PutPart(NamedTuple):
    """Rows (m,) of a put, ascending, that are started together.

    progress: of the whole put.  ended: called once, when all of these rows have their outcome, with
    the error of their start or grant, or None.  grant: None to write all at once.  is_dropped: they
    are not written, and only their outcome is to be found.
    """

    request: PutRequest
    rows: Rows
    progress: PutProgress
    ended: Callable[[PutPart, BaseException | None], object]
    grant: PutGrant | None = None
    is_dropped: bool = False

    @property
    def kind(self) -> tuple[int, ...]:
        """Parts of one kind can be written together."""
        request, is_hashed = self.request, self.request.digests is not None
        own = id(request.memory), request.tenant, request.expiry_64s
        return *own, is_hashed, self.progress.is_cut, id(self.progress.cut_by)


class OpenParts:
    """Parts of one put, each a job that is granted layer by layer.  The caller holds a lock.

    layers: of a page.  every: the open parts of all puts.
    """

    def __init__(self, layers: int, every: set[PutGrant]) -> None:
        self._layers, self._every = layers, every
        self._open: dict[PutGrant, int] = {}  # to rows of their parts, from the first on

    @property
    def has_room(self) -> bool:
        """Whether one more may be open."""
        every = self._every
        return len(every) < OPEN_PARTS_MAX or sum(not g.is_over for g in every) < OPEN_PARTS_MAX

    @property
    def done(self) -> int:
        """Rows of open parts that are known to be written."""
        return sum(grant.done for grant in self._open)

    def add(self, first: int, rows: int) -> PutGrant:
        """The grant of a part that begins at this row of the put."""
        grant = PutGrant(first)
        self._open[grant] = rows
        self._every.add(grant)
        return grant

    def remove(self, grant: PutGrant) -> None:
        """A part is over."""
        self._open.pop(grant, None)
        self._every.discard(grant)

    def grant(self, end: int, progressed: Callable[[int], None]) -> None:
        """Lets only rows before ``end`` be written.  A part that is granted whole reports only its
        end; for others ``progressed`` is called with ``end``, on the engine's thread.
        """
        for grant in self._open:
            layers = self._layers_of(grant, end)
            is_part = 0 < layers < self._layers
            on_ready = partial(progressed, end) if is_part else None
            grant.set(layers, layers if is_part else _NEVER, on_ready)

    def written(self, end: int) -> None:
        """Updates ``done`` of the parts that are written up to row ``end``.  The last row of a part
        counts only with its record.
        """
        for grant, rows in self._open.items():
            if grant.layers_ready >= self._layers_of(grant, end):
                grant.done = max(grant.done, min(end - grant.first, rows - 1))

    def stop(self, end: int) -> int:
        """Begins no more commands; returns the first row that is not written, at most ``end``."""
        for grant, rows in reversed(self._open.items()):
            grant.set(0, _NEVER, None)
            ready = grant.layers_ready
            grant.done = max(grant.done, min(rows - 1, ready * rows // self._layers))
            if ready < self._layers:
                end = min(end, grant.first + grant.done)
        return end

    def _layers_of(self, grant: PutGrant, end: int) -> int:
        """Layers of a part that correspond to its rows before ``end``."""
        layers = -((grant.first - end) * self._layers // self._open[grant])
        return 0 if layers < 0 else layers if layers < self._layers else self._layers


@dataclass(eq=False)
class QueuedPut:
    """A put that is not over.

    name: the scheduler's; empty if it was not asked.  rows: are to be written when it decides, in
    this order; the first ``granted`` may be written, ``launched`` went to the writer, ``ended`` are
    over, and ``written`` were reported.  open: its parts, if it can be stopped.  is_free: the
    scheduler no longer decides on it.
    left: rows of the request, those that need no write included, without an outcome.
    """

    request: PutRequest
    progress: PutProgress
    left: int
    rows: Rows
    open: OpenParts | None = None
    name, is_free = "", False
    granted = launched = ended = written = 0

    def lost_and_there(self, rows: Rows) -> tuple[int, int]:
        """Of rows that are over: how many were not stored, and how many were there before."""
        outcome = self.progress.outcome
        if rows.size < outcome.size:
            outcome = outcome[rows]
        count = outcome.tobytes().count
        if count(Outcome.STORED) == rows.size:
            return 0, 0
        return count(Outcome.DROPPED) + count(Outcome.FAILED), count(Outcome.PRESENT)


class PlannedPut(NamedTuple):
    """A chain that another process writes.  begun_s: monotonic.

    flushes_failed: how many flushes had failed when it was planned.
    """

    chain: PlacedChain
    flushes_failed: int
    begun_s: float


class PutTogether:
    """Parts of one or several puts that are written as one; each ticket gets its own rows' outcome.

    The parts are of the same memory, namespace and expiry.  request: all rows, one part after
    another.
    """

    def __init__(self, parts: Sequence[PutPart]) -> None:
        self._parts, self._lock = parts, threading.Lock()
        self._left = 1  # the submission itself, then batches
        self.placed = 0  # pages that got slots
        first = parts[0]
        self.grant, self.request = first.grant, first.request
        if len(parts) > 1:
            self.grant = None
            self.request = PutRequest.merge([part.request.take(part.rows) for part in parts])
        elif first.rows.size != first.request.n:
            self.request = first.request.take(first.rows)

    def tell(self, rows: Rows, outcome: Outcome, status: int | U32 = 0) -> None:
        """Rows (m,) of ``request`` have this outcome.  status: why, for one that failed."""
        if rows.size == 0:
            return
        if len(self._parts) == 1:
            part = self._parts[0]
            own = part.rows[rows]
            part.progress.outcome[own] = outcome
            if outcome == Outcome.FAILED:
                part.progress.status[own] = status
            return
        status = np.broadcast_to(np.asarray(status, np.uint32), rows.shape)
        starts = [0, *itertools.accumulate(part.rows.size for part in self._parts)]
        which = np.searchsorted(starts, rows, "right") - 1
        for number in np.unique(which).tolist():
            mine, part = which == number, self._parts[number]
            own = part.rows[rows[mine] - starts[number]]
            part.progress.outcome[own] = outcome
            part.progress.status[own] = status[mine]

    def cut(self, rows: Rows, limit: Limit | None) -> None:
        """Drops these rows, and later ones of their puts: there is no space, or a limit refuses
        them.  Other puts continue.
        """
        self.tell(rows, Outcome.DROPPED)
        first = 0
        for part in self._parts:
            end = first + part.rows.size
            if not part.progress.is_cut and ((rows >= first) & (rows < end)).any():
                part.progress.is_cut, part.progress.cut_by = True, limit
            first = end

    @property
    def slots(self) -> Slots:
        """Slots of these puts' earlier pages, which are not evicted for the end of the chain."""
        earlier = [slots for part in self._parts for slots in part.progress.slots]
        return np.concatenate(earlier) if earlier else NO_ROWS

    def found(self, index: Index) -> Slots:
        """Slots of all pages of these puts that are in the pool, whichever put stored them."""
        requests = {id(part.request): part.request for part in self._parts}
        slots = np.concatenate([index.find(request.keys) for request in requests.values()])
        found: Slots = slots[slots != MISSING]
        return found

    def add_slots(self, slots: Slots) -> None:
        """Adds slots in which pages were placed."""
        for part in self._parts:
            if slots.size < part.request.n:
                part.progress.slots.append(slots.copy())

    @property
    def is_cut(self) -> bool:
        """Whether there was no space for earlier pages of all of these puts."""
        return all(part.progress.is_cut for part in self._parts)

    @property
    def cut_by(self) -> Limit | None:
        """The limit that cut these puts, which are of one kind."""
        return self._parts[0].progress.cut_by

    def add_batch(self) -> None:
        """One more batch of these rows is under way."""
        with self._lock:
            self._left += 1

    def end_batch(self) -> None:
        """A batch, or the submission, ended."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        for part in self._parts:
            part.ended(part, None if part.grant is None else part.grant.error)

    def refuse(self, error: BaseException) -> None:
        """Nothing of it could be started."""
        for part in self._parts:
            part.progress.refuse(part.rows, error)
            part.ended(part, error)

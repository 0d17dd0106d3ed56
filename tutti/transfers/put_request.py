"""What a put asks for: pages with their keys, and the part of them that is started at one time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.arrays import U32, Keys, Rows
from tutti.checks import whole
from tutti.errors import ConfigError
from tutti.gio_uring.iocb import PagedMemory
from tutti.medium.keys import KEY_NBYTES, as_keys, check_key
from tutti.medium.slot_record import expiry_of, tenant_of
from tutti.transfers.tickets import Outcome, PutProgress

DEPTH_MAX = 2**32 - 1  # of a record


class PutRequest(NamedTuple):
    """Keys (n, 16) to store, their predecessors (n, 16), depths (n,) and pages (n,).

    A predecessor of zeros is none.  tenant: number of the namespace, 0 for none.  expiry_64s: Unix
    time in units of 64 s from which the objects are removed, 0 for never.
    """

    keys: Keys
    parents: Keys
    depths: U32
    pages: U32
    memory: PagedMemory
    tenant: int = 0
    expiry_64s: int = 0

    @classmethod
    def chain(
        cls, keys: Keys, pages: U32, memory: PagedMemory, parent: bytes | None, depth: int
    ) -> PutRequest:
        """Keys that follow one another, the first behind ``parent``.

        Raises KeySizeError and ConfigError for what ObjectStore.put does not take.
        """
        check_lengths(keys, pages)
        if parent is not None:
            check_key("parent", parent)
        n = len(keys)
        depth = whole("depth", depth, 0, DEPTH_MAX - max(0, n - 1))
        # A copy, as records are written later: each key lies behind its predecessor.
        chain = np.empty((n + 1, KEY_NBYTES), np.uint8)
        chain[0] = 0 if parent is None else np.frombuffer(parent, np.uint8)
        chain[1:] = keys
        depths = np.arange(depth, depth + n, dtype=np.uint32)
        return cls(chain[1:], chain[:-1], depths, pages, memory)

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
        """As `chain`, of what a caller gave.  Raises KeySizeError, PageRangeError, ConfigError."""
        expiry, tenant = expiry_of(ttl_s), tenant_of(namespace)
        request = cls.chain(as_keys(keys), memory.check_pages(pages), memory, parent, depth)
        return request._replace(tenant=tenant, expiry_64s=expiry) if expiry or tenant else request

    def take(self, rows: Rows) -> PutRequest:
        """The same for some rows (m,), ascending."""
        if rows.size == len(self.keys):
            return self
        return PutRequest(
            self.keys[rows],
            self.parents[rows],
            self.depths[rows],
            self.pages[rows],
            self.memory,
            self.tenant,
            self.expiry_64s,
        )

    @classmethod
    def merge(cls, requests: Sequence[PutRequest]) -> PutRequest:
        """Requests over the same memory, of one namespace and expiry, one after another."""
        if len(requests) == 1:
            return requests[0]
        return cls(
            np.concatenate([request.keys for request in requests]),
            np.concatenate([request.parents for request in requests]),
            np.concatenate([request.depths for request in requests]),
            np.concatenate([request.pages for request in requests]),
            requests[0].memory,
            requests[0].tenant,
            requests[0].expiry_64s,
        )


class PutPart(NamedTuple):
    """Rows (m,) of a put, ascending, that are started together.

    progress: of the whole put.  ended: called once, when all of these rows have their outcome, with
    the error for which they could not be started, or None.
    """

    request: PutRequest
    rows: Rows
    progress: PutProgress
    ended: Callable[[PutPart, BaseException | None], object]


class PutTogether:
    """Parts of one or several puts that are written as one; each ticket hears of its own rows.

    The parts are of the same memory, namespace and expiry.  request: all rows, one part after
    another.
    """

    def __init__(self, parts: Sequence[PutPart]) -> None:
        self._parts = parts
        self._left = 1  # the submission itself, then batches
        self._lock = threading.Lock()
        self._starts = [0, *itertools.accumulate(part.rows.size for part in parts)]
        self.request = PutRequest.merge([part.request.take(part.rows) for part in parts])

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
        which = np.searchsorted(self._starts, rows, "right") - 1
        for number in np.unique(which).tolist():
            mine, part = which == number, self._parts[number]
            own = part.rows[rows[mine] - self._starts[number]]
            part.progress.outcome[own] = outcome
            part.progress.status[own] = status[mine]

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
            part.ended(part, None)

    def refuse(self, error: BaseException) -> None:
        """Nothing of it could be started."""
        for part in self._parts:
            part.progress.refuse(part.rows, error)
            part.ended(part, error)


def check_lengths(keys: Keys, pages: U32) -> U32:
    """The pages, if there is one per key.  Raises ConfigError."""
    if len(keys) != pages.size:
        raise ConfigError(f"{len(keys)} keys and {pages.size} pages; give one page per key")
    return pages


def checked_pages(keys: Keys, pages: npt.ArrayLike, memory: PagedMemory, *, once: bool) -> U32:
    """Page numbers (n,) for a load of ``keys``; once: each may be given to one key only.

    Raises PageRangeError, ConfigError.
    """
    numbers = check_lengths(keys, memory.check_pages(pages))
    if once and len(set(numbers.tolist())) != numbers.size:
        raise ConfigError("a page is named twice; give every key a page of its own")
    return numbers

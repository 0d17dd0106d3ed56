"""Plans a load in one call on the index, the history of uses and the cache of digests.

Not thread-safe: the store holds a lock around it, as around the index.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, Keys, Mask, Slots
from tutti.medium.keys import KEY_NBYTES
from tutti.native import ANSWER_NBYTES, NativeLoadTables, quick
from tutti.placement.digest_cache import DigestCache
from tutti.placement.index import Index
from tutti.placement.reuse import ReuseHistory

_NOT_STARTED = -(1 << 32)  #: `kTuttiNotStarted`, to which an errno is added
BAD_PAGES = -(1 << 32)  #: `LoadPlan.refused` by `kTuttiBadPages`
_NOWHERE, _NO_JOB = np.zeros(0, np.uint32), (0,) * 6
_NO_ROWS = np.zeros(0, np.int64)
#: Bits of `LoadPlan.marks`: unproven; its record has digests; they are known.
MARK_UNPROVEN, MARK_HAS_DIGESTS, MARK_KNOWN = 1, 2, 4


class LoadPlan:
    """The slots of a load's keys, which are pinned, and what is known of them, in one block of
    memory that native code writes.  It is of bytes, as to make an array and to find its address
    would take longer than the plan; the arrays of it are read-only.

    runs: number of runs that the slots form.  refused: 0, or a negative errno if the job that was
    to move them could not be submitted, or BAD_PAGES if a page is not in the memory, or may be
    named twice; then nothing is pinned.
    more: additional 8-byte words for each key at the end of the block.  rest: further words there;
    1 of each are for the pages.
    """

    __slots__ = ("_keys", "_layers", "_status", "block", "refused", "runs")

    def __init__(self, keys: int, layers: int, more: int, rest: int = 0) -> None:
        self.block = bytes(8 * (keys * (2 + layers + more) + keys // 8 + 2 + rest))
        self._status: U32 | None = None  # made when it is asked for
        self._keys, self._layers, self.runs, self.refused = keys, layers, 0, 0

    @property
    def slots(self) -> Slots:
        """Slot of each key, (n,)."""
        return np.frombuffer(self.block, np.int64, self._keys)

    @property
    def sequences(self) -> U64:
        """Sequence numbers of the objects, (n,)."""
        return np.frombuffer(self.block, np.uint64, self._keys, 8 * self._keys)

    @property
    def digests(self) -> U64:
        """Digests of the slices, (n, layers); valid in rows with MARK_KNOWN."""
        n, layers = self._keys, self._layers
        return np.frombuffer(self.block, np.uint64, n * layers, 16 * n).reshape(n, layers)

    @property
    def marks(self) -> npt.NDArray[np.uint8]:
        """MARK bits, (n,)."""
        return np.frombuffer(self.block, np.uint8, self._keys, 8 * (2 + self._layers) * self._keys)

    @property
    def pages(self) -> U32:
        """Page of each, (n,), of a load that was to be started with the plan."""
        return np.frombuffer(
            self.block, np.uint32, self._keys, len(self.block) - 8 * self._keys - 8
        )

    @property
    def status(self) -> U32:
        """NVMe status of each, (n,), of a load that was started with the plan."""
        if self._status is None:
            n, words = self._keys, 2 + self._layers
            self._status = np.frombuffer(self.block, np.uint32, n, 8 * (words * n + n // 8 + 1))
        return self._status


class LoadAnswer(LoadPlan):
    """A plan for another process, with the message that it gets if one job moves all pages."""

    __slots__ = ()

    def __init__(self, keys: int, layers: int) -> None:
        super().__init__(keys, layers, layers + 1, ANSWER_NBYTES // 8 + 1)

    @property
    def answer(self) -> memoryview | None:
        """The message; None where several jobs are needed, or digests have to be read first."""
        size = 8 * ((2 + self._layers) * self._keys + self._keys // 8 + 1)
        first = size + 8
        nbytes = int.from_bytes(self.block[size:first], "little")
        return memoryview(self.block)[first : first + nbytes] if nbytes else None


class PartRows(NamedTuple):
    """Pages of a load that one job moves."""

    rows: Slots
    unknown: Slots  # of these rows, those whose digests are still to be read
    verify: bool
    whole: bool  # no layer is ready before all are: unproven objects are verified in full first


class LoadPlanner:
    """Begins loads from one pool.  group_slots: slots of a group; no run crosses groups."""

    def __init__(
        self, index: Index, history: ReuseHistory, digests: DigestCache, group_slots: int
    ) -> None:
        self._index = index
        self._layers = digests.layers
        self._parts = (index, history, digests)  # keeps their memory alive
        tables = (index.native, history.native, digests.native)
        self._tables = NativeLoadTables(*map(ctypes.addressof, tables), group_slots)
        self._handle = ctypes.byref(self._tables)
        self._start = quick().tutti_load_start  # to find it takes a microsecond
        self._load = (ctypes.c_uint64 * 10)()  # `struct tutti_load`

    def begin(
        self,
        keys: Keys,
        verify: bool,
        plan: LoadPlan | None = None,
        jobs: Any = None,
        pages: npt.NDArray[Any] = _NOWHERE,
        job: tuple[int, ...] = _NO_JOB,
    ) -> LoadPlan:
        """Pins the slot of every key for a transfer; counts a use, a hit and an access of each.

        verify: digests of proven objects are wanted too.  jobs: `common` of tutti_load_start, where
        one job is to move all, if it can, to pages (n,).  job: of `tutti_load`, from `once` on.
        Raises LookupError with the number of the first key that is neither READY nor UNPROVEN; then
        nothing was pinned.
        """
        index, n = self._index, len(keys)
        raw = keys.tobytes()
        assert len(raw) == n * KEY_NBYTES, "a key is 16 bytes"
        index.begin_use()
        if not index.counts_hits:
            index.own("hits")
        plan = plan or LoadPlan(n, self._layers, 0)
        self._load[:] = [n, index.uses, verify, *job, pages.itemsize]
        runs = self._start(self._handle, jobs, raw, pages.tobytes(), self._load, plan.block)
        if runs >= 0:
            plan.runs, plan.refused = runs, 0
        elif runs >= -n:
            raise LookupError(-1 - runs)
        else:
            plan.refused = runs - _NOT_STARTED
            if plan.refused == BAD_PAGES:
                index.uses -= 1  # nothing was accessed
        return plan

    def answer(self, keys: bytes, *, verify: bool, job: int) -> LoadAnswer:
        """As `begin`, for another process.  keys: 16 bytes each.  job: number of the only one."""
        index, n = self._index, len(keys) // KEY_NBYTES
        assert n * KEY_NBYTES == len(keys), "a key is 16 bytes"
        index.begin_use()
        if not index.counts_hits:
            index.own("hits")
        plan = LoadAnswer(n, self._layers)
        arguments = (self._handle, keys, n, index.uses, verify, job, plan.block)
        plan.runs = quick().tutti_load_answer(*arguments)
        if plan.runs < 0:
            raise LookupError(-1 - plan.runs)
        return plan


def partition(marks: npt.NDArray[np.uint8], every: bool) -> tuple[Mask | None, Sequence[PartRows]]:
    """Which objects are unproven, and the parts of a load that a job each moves.

    every: proven objects are verified, too.
    """
    octets = marks.tobytes()
    first = octets[0] if octets else 0
    verify = every and bool(first & MARK_HAS_DIGESTS)
    is_ready = not first & MARK_UNPROVEN and bool(first & MARK_KNOWN) == verify
    if is_ready and octets.count(first) == len(octets):
        rows = np.arange(len(octets), dtype=np.int64)
        return None, (PartRows(rows, _NO_ROWS, verify, whole=False),) if octets else ()
    unproven = (marks & MARK_UNPROVEN) != 0
    verified = unproven | ((marks & MARK_HAS_DIGESTS) != 0) if every else unproven
    kinds = ((verified & ~unproven, True, False), (~verified, False, False), (unproven, True, True))
    parts = []
    for mask, checked, whole in kinds:
        rows = np.flatnonzero(mask).astype(np.int64)
        unknown = np.flatnonzero((marks[rows] & MARK_KNOWN) == 0) if checked else _NO_ROWS
        if rows.size:
            parts.append(PartRows(rows, unknown, checked, whole))
    return unproven if unproven.any() else None, parts

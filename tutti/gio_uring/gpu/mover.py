"""Movers: from pinned staging to pages in GPU memory and back, one layer at a time.

Staging holds slices one after another; a slice's segments are consecutive there and scattered in
GPU memory.  Which bytes go where is worked out once per batch, and for each layer only the bases
are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64
from tutti.base.units import KiB
from tutti.errors import Unsupported
from tutti.gio_uring.gpu.calls import BATCH_MAX
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner
from tutti.gio_uring.iocb import PagedMemory

#: A copy engine pays for each fragment, so that a kernel moves shorter ones faster
#: (vllm-project/vllm#57555).
FRAGMENT_NBYTES_MIN = 28 * KiB
#: Fewer fragments in a layer than this are as fast by copy engines, and take no multiprocessor.
FRAGMENTS_MIN = 64


@dataclass(frozen=True)
class CopyDescriptor:
    """What a mover moves for one job.

    pages: uint32 (n,).  paged: where they are in GPU memory.  staged: uint64 (layers,), where the
    device finds the first slice of each layer in staging.  stride_nbytes: from slice to slice.
    to_pages: out of staging (a read), or into it (a write).  owner: keeps what the copies need.
    """

    pages: U32
    paged: PagedMemory
    staged: U64
    stride_nbytes: int
    to_pages: bool
    owner: LeaseOwner


class PreparedCopy(Protocol):
    """A descriptor made ready."""

    @property
    def calls(self) -> int:
        """Driver calls that move one layer."""

    @property
    def has_tables(self) -> bool:
        """Whether `upload` enqueues anything."""

    def upload(self, stream: int) -> None:
        """Enqueues the copy of its tables to the device, before the first layer."""

    def move(self, layers: range, stream: int) -> None:
        """Enqueues the copies of some layers."""


class Mover(Protocol):
    """Moves shipments."""

    @property
    def name(self) -> str:
        """For results and messages."""

    @property
    def kernel_jobs(self) -> int:
        """Jobs whose layers a kernel moves, since it was made."""

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        """Does for all layers what is the same for each."""


class Fragments:
    """The copies of a descriptor as contiguous stretches, (n,) of each column, for every layer."""

    def __init__(self, descriptor: CopyDescriptor) -> None:
        paged = descriptor.paged
        index = np.arange(descriptor.pages.size, dtype=np.uint64)
        starts = np.cumsum(paged.segment_nbytes) - paged.segment_nbytes
        columns: list[tuple[U64, U64, U64, npt.NDArray[np.intp]]] = []
        for k, nbytes in enumerate(paged.segment_nbytes):
            there = descriptor.pages.astype(np.uint64) * np.uint64(paged.stride_nbytes[k])
            here = index * np.uint64(descriptor.stride_nbytes) + np.uint64(starts[k])
            columns.append(_joined(there, here, nbytes, k))
        self._shipment = descriptor
        self._there: U64 = np.concatenate([column[0] for column in columns])
        self._here: U64 = np.concatenate([column[1] for column in columns])
        self.nbytes: U64 = np.concatenate([column[2] for column in columns])
        self._segment = np.concatenate([column[3] for column in columns])

    def at(self, layers: range) -> tuple[U64, U64, U64]:
        """(targets, sources, nbytes) of some layers."""
        descriptor, rows = self._shipment, slice(layers.start, layers.stop)
        there = (descriptor.paged.bases[rows][:, self._segment] + self._there).ravel()
        here = (descriptor.staged[rows, None] + self._here).ravel()
        nbytes = np.tile(self.nbytes, len(layers))
        return (there, here, nbytes) if descriptor.to_pages else (here, there, nbytes)


def _joined(
    there: U64, here: U64, nbytes: int, k: int
) -> tuple[U64, U64, U64, npt.NDArray[np.intp]]:
    """One segment of all pages, neighbours on both sides joined into one copy."""
    step = np.uint64(nbytes)
    follows = (np.diff(there) == step) & (np.diff(here) == step)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(np.concatenate((first, [there.size]))).astype(np.uint64)
    return there[first], here[first], counts * step, np.full(first.size, k)


class _Copies:
    """Copies that need no more than their fragments, which the driver has once it was called."""

    has_tables = False

    def __init__(self, driver: Driver, fragments: Fragments) -> None:
        self._driver, self._fragments = driver, fragments

    def upload(self, stream: int) -> None:
        pass


class _BatchCopies(_Copies):
    @property
    def calls(self) -> int:
        return -(-self._fragments.nbytes.size // BATCH_MAX)

    def move(self, layers: range, stream: int) -> None:
        self._driver.copy_batch(*self._fragments.at(layers), stream)


class _SingleCopies(_Copies):
    @property
    def calls(self) -> int:
        return int(self._fragments.nbytes.size)

    def move(self, layers: range, stream: int) -> None:
        columns = [column.tolist() for column in self._fragments.at(layers)]
        for target, source, nbytes in zip(*columns, strict=True):
            self._driver.copy(target, source, nbytes, stream)


class CopyMover:
    """Copy engines, one cuMemcpyAsync for each fragment."""

    name = "copy"
    kernel_jobs = 0
    _kind: type[_BatchCopies | _SingleCopies] = _SingleCopies

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        return self.copies_of(Fragments(descriptor))

    def copies_of(self, fragments: Fragments) -> PreparedCopy:
        """As `prepare`, for fragments that are known."""
        return self._kind(self._driver, fragments)


class BatchCopyMover(CopyMover):
    """Copy engines, all fragments of a layer in one call of cuMemcpyBatchAsync; no SM is used.

    Raises Unsupported where the driver lacks the call.
    """

    name = "copy-batch"
    _kind = _BatchCopies

    def __init__(self, driver: Driver) -> None:
        if not driver.has_copy_batch:
            raise Unsupported(
                "the driver has no cuMemcpyBatchAsync of CUDA 13.0; use the mover 'copy', or a "
                "newer driver"
            )
        super().__init__(driver)


class AutoMover:
    """Copy engines, or a kernel for jobs of many short fragments."""

    def __init__(self, copies: CopyMover, kernel: Mover) -> None:
        self._copies, self._kernel = copies, kernel
        self.name = f"auto: {copies.name} or {kernel.name}"

    @property
    def kernel_jobs(self) -> int:
        return self._kernel.kernel_jobs

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        fragments = Fragments(descriptor)
        count = fragments.nbytes.size
        is_short = int(fragments.nbytes.sum()) < count * FRAGMENT_NBYTES_MIN
        if is_short and count >= FRAGMENTS_MIN:
            return self._kernel.prepare(descriptor)
        return self._copies.copies_of(fragments)


def choose_mover(driver: Driver) -> CopyMover:
    """The copy engines, by the best call that the driver has."""
    return BatchCopyMover(driver) if driver.has_copy_batch else CopyMover(driver)

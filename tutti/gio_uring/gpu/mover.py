"""Movers copy between pinned staging and pages in GPU memory, one layer at a time.

Slices are contiguous in staging; in GPU memory their segments are scattered.  The offsets are
computed once per batch; for each layer only the bases are added.
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

#: A copy engine has a cost per fragment, so a kernel moves shorter fragments faster than it
#: (vllm-project/vllm#57555).
FRAGMENT_NBYTES_MIN = 28 * KiB
#: Fewer fragments per layer are as fast by copy engines, which use no multiprocessor.
FRAGMENTS_MIN = 64


@dataclass(frozen=True)
class CopyDescriptor:
    """What a mover moves for one job.

    pages: uint32 (n,).  paged: their addresses in GPU memory.  staged: uint64 (layers,), device
    address of the first slice of each layer in staging.  stride_nbytes: from slice to slice.
    to_pages: True from staging to pages (a read), else back.  owner: keeps what the copies need.
    """

    pages: U32
    paged: PagedMemory
    staged: U64
    stride_nbytes: int
    to_pages: bool
    owner: LeaseOwner


class PreparedCopy(Protocol):
    """The prepared copies of a descriptor."""

    @property
    def calls(self) -> int:
        """Number of driver calls that move one layer."""

    @property
    def has_tables(self) -> bool:
        """Whether `upload` enqueues anything."""

    def upload(self, stream: int) -> None:
        """Enqueues the copy of its tables to the device, before the first layer."""

    def move(self, layers: range, stream: int) -> None:
        """Enqueues the copies of some layers."""


class Mover(Protocol):
    """Moves layers between staging and GPU memory."""

    @property
    def name(self) -> str:
        """For results and messages."""

    @property
    def kernel_jobs(self) -> int:
        """Number of jobs whose layers a kernel moved, since the mover was made."""

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        """Computes what all layers have in common."""


class Fragments:
    """The copies of a descriptor as contiguous ranges: columns (n,) that hold for every layer."""

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
    """One segment of all pages; copies that are adjacent on both sides are joined."""
    step = np.uint64(nbytes)
    follows = (np.diff(there) == step) & (np.diff(here) == step)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(np.concatenate((first, [there.size]))).astype(np.uint64)
    return there[first], here[first], counts * step, np.full(first.size, k)


class _Copies:
    """Copies that need only their fragments; the driver's call copies the arguments."""

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
    """Uses copy engines, with one cuMemcpyAsync per fragment."""

    name = "copy"
    kernel_jobs = 0
    _kind: type[_BatchCopies | _SingleCopies] = _SingleCopies

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        return self.copies_of(Fragments(descriptor))

    def copies_of(self, fragments: Fragments) -> PreparedCopy:
        """As `prepare`, for given fragments."""
        return self._kind(self._driver, fragments)


class BatchCopyMover(CopyMover):
    """Uses copy engines, with one cuMemcpyBatchAsync for all fragments of a layer; uses no SM.

    Raises Unsupported if the driver lacks the call.
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
    """Uses copy engines, or a kernel for jobs with many short fragments."""

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
    """The mover for copy engines that uses the best call of the driver."""
    return BatchCopyMover(driver) if driver.has_copy_batch else CopyMover(driver)

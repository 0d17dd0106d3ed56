"""Sources of DMA addresses of GPU memory for drives, and the test that checks them.

Tiers T2 and T3 need the addresses by which a drive reaches GPU memory. No source that works without
a kernel module of its own is known, so none is built in: the caller passes a `DmaAddressSource`,
which is trusted only after `prove` has moved patterns both ways. docs/tiers.md describes the known
sources.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti.errors import MediumError, Unsupported

_GUARD_BLOCKS = 1  # before and after the extents; these must not change

#: Address and number of bytes, as the device addresses memory.
Extent = tuple[int, int]


class DmaAddressSource(Protocol):
    """Supplies the addresses by which a drive reaches GPU memory."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def missing(self) -> Sequence[str]:
        """What this machine lacks for it, each with the remedy; empty if it can be tried."""

    def map(self, address: int, nbytes: int) -> Sequence[Extent]:
        """(DMA address, bytes) extents of device memory, in order; valid until `unmap`."""

    def unmap(self, address: int) -> None:
        """Undoes `map`; no command to it may be under way."""


@dataclass(frozen=True)
class KnownSource:
    """A known source that is not built in: its description and requirements."""

    name: str
    what: str
    lacks: str


KNOWN_SOURCES = (
    KnownSource(
        "nvidia p2p",
        "nvidia_p2p_get_pages and nvidia_p2p_dma_map_pages of the NVIDIA kernel driver",
        "needs a kernel module that calls them, and a data-centre or workstation GPU: the driver"
        " refuses GeForce",
    ),
    KnownSource(
        "dma-buf",
        "cuMemGetHandleForAddressRange exports memory as a dma-buf, which vfio would map",
        "no mainline kernel does: iommufd takes only dma-bufs that vfio exported itself; it needs"
        " an out-of-tree importer",
    ),
    KnownSource(
        "GDRCopy",
        "maps GPU memory for the CPU by a module of its own",
        "it gives addresses to the CPU, not to a drive; behind vfio a drive cannot use them",
    ),
    KnownSource(
        "kernel P2PDMA",
        "the kernel's own NVMe driver moves data to GPU memory (GPUDirect Storage)",
        "then the kernel has the drive and a CPU submits: it serves T0, not T2 or T3",
    ),
)


def choose_source(sources: Sequence[DmaAddressSource]) -> DmaAddressSource:
    """The first of the given sources that lacks nothing.

    Raises Unsupported, which lists what each given and each known source lacks.
    """
    reasons = []
    for source in sources:
        missing = source.missing()
        if not missing:
            return source
        reasons.append(f"{source.name}: {'; '.join(missing)}")
    reasons += [f"{known.name}: {known.lacks}" for known in KNOWN_SOURCES]
    raise Unsupported(
        "no source of DMA addresses of GPU memory works here. "
        + ". ".join(reasons)
        + ". Use tier T1 or T0, or pass a source"
    )


class PatternPath(Protocol):
    """The path that `prove` tests: a drive, expendable blocks on it, and some GPU memory."""

    lba_nbytes: int

    def fill(self, content: bytes) -> None:
        """Fills the GPU memory with `content`, by the GPU."""

    def fetch(self) -> bytes:
        """Returns the content of the GPU memory, read by the GPU."""

    def write_direct(self, extents: Sequence[Extent], slba: int) -> None:
        """Writes these extents of GPU memory to the drive with one command."""

    def read_direct(self, extents: Sequence[Extent], slba: int) -> None:
        """Reads from the drive into these extents of GPU memory with one command."""

    def write_host(self, content: bytes, slba: int) -> None:
        """Writes the same blocks from host memory."""

    def read_host(self, slba: int, nlb: int) -> bytes:
        """Reads the same blocks into host memory."""


def prove(path: PatternPath, extents: Sequence[Extent], slba: int, seed: int) -> None:
    """Proves that a drive reads and writes GPU memory at the addresses of a source.

    extents: DMA addresses of all memory of `path`, in whole blocks; the first and last are guards.
    slba: first of as many blocks on the drive; their content is destroyed. Both directions are
    tested, because some machines drop reads from one PCIe device to another but not writes.
    Raises MediumError with the reason; the source must not be used then.
    """
    rng = random.Random(seed)
    lba_nbytes = path.lba_nbytes
    nbytes = sum(size for _, size in extents)
    guard = _GUARD_BLOCKS * lba_nbytes
    inner = _cut(extents, guard, nbytes - guard)
    nlb = (nbytes - 2 * guard) // lba_nbytes
    if nlb < 1 or nbytes % lba_nbytes:
        raise MediumError("the address check needs at least three whole blocks of memory")

    stored = rng.randbytes(nbytes)
    path.write_host(rng.randbytes(nlb * lba_nbytes), slba)
    path.fill(stored)
    path.write_direct(inner, slba)
    if path.read_host(slba, nlb) != stored[guard:-guard]:
        raise MediumError(
            "the drive did not read GPU memory where the source says it lies: wrong addresses, or"
            " the machine drops reads between PCIe devices; use tier T1"
        )
    loaded, before = rng.randbytes(nlb * lba_nbytes), rng.randbytes(nbytes)
    path.write_host(loaded, slba)
    path.fill(before)
    path.read_direct(inner, slba)
    after = path.fetch()
    if after[guard:-guard] != loaded:
        raise MediumError(
            "the drive did not write GPU memory where the source says it lies; use tier T1"
        )
    if after[:guard] != before[:guard] or after[-guard:] != before[-guard:]:
        raise MediumError(
            "the drive wrote outside the memory that was named; do not use the source"
        )


def _cut(extents: Sequence[Extent], start: int, end: int) -> list[Extent]:
    """The extents of bytes [start, end) of the memory that the extents describe."""
    pieces = []
    at = 0
    for address, nbytes in extents:
        first, last = max(start, at), min(end, at + nbytes)
        if first < last:
            pieces.append((address + first - at, last - first))
        at += nbytes
    return pieces

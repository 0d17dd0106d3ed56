"""Tables for device kernels: written in pinned memory, copied to the device once for all layers.

The structs are those of `device_batch`; kernels/device/parameters.cuh describes them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.mover import CopyDescriptor, PreparedCopy
from tutti.gio_uring.gpu.parameters import (
    BLOCK_THREADS_MAX,
    BatchStruct,
    LayerTallyStruct,
    QueueShareStruct,
    RunStateStruct,
    SliceTableStruct,
)
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory, Tables
from tutti.gio_uring.iocb import IocbStruct, PagedMemory
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.memory import Bytes, view_at
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE

ALIGNMENT = 64
READY = 1
_LBA_SHIFT = 9
_TABLE_TIMEOUT_S = 30.0
_TALLY = np.dtype(LayerTallyStruct)
_STATE_NBYTES = ctypes.sizeof(RunStateStruct)


class TableImage:
    """The bytes of one job's tables, part after part, before their address is known."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._parts: list[tuple[int, Bytes]] = []

    def add(self, content: npt.NDArray[np.generic] | ctypes.Structure) -> int:
        """Appends a part; returns its offset.  A struct is read when the image is written."""
        if isinstance(content, ctypes.Structure):
            raw = np.frombuffer(content, np.uint8)  # type: ignore[call-overload]
        else:
            raw = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        offset = self.nbytes
        self._parts.append((offset, raw))
        self.nbytes += -(-max(1, raw.size) // ALIGNMENT) * ALIGNMENT
        return offset

    def write(self, address: int) -> None:
        """Copies all parts to host memory."""
        into = view_at(address, self.nbytes)
        for offset, raw in self._parts:
            into[offset : offset + raw.size] = raw


def paged_iocb(
    memory: PagedMemory, pages: int, opcode: int, slice_nlb: int, shift: int
) -> IocbStruct:
    """An IOCB of pages without runs; the caller sets the addresses of `pages` and `bases`."""
    io = IocbStruct()
    io.n_pages = pages
    io.n_layers, io.n_segments = memory.bases.shape
    for k, nbytes in enumerate(memory.segment_nbytes):
        io.segment_nbytes[k], io.segment_stride[k] = nbytes, memory.stride_nbytes[k]
    io.opcode, io.slice_nlb, io.lba_shift = opcode, slice_nlb, shift
    return io


@dataclass(frozen=True)
class Staged:
    """Location of staged slices.  bases: uint64 (layers,), device addresses."""

    bases: U64
    stride_nbytes: int


@dataclass(frozen=True)
class Commands:
    """What the device submits: an IOCB whose arrays are still offsets, and shares of its runs."""

    iocb: IocbStruct
    runs: npt.NDArray[np.void]
    pages: U32
    bases: U64
    shares: list[QueueShareStruct]


@dataclass(frozen=True)
class BatchRequest:
    """What one job moves.

    memory, pages: in GPU memory.  staged: None if commands name the pages themselves.
    commands: None if the device submits none.  digests: uint64 (pages, layers) or None.
    flags: the device address of `LayerWord[layers]`, or 0.
    """

    memory: PagedMemory
    pages: U32
    opcode: int
    slice_nlb: int
    lba_shift: int
    staged: Staged | None = None
    commands: Commands | None = None
    digests: U64 | None = None
    flags: int = 0
    timeout_s: float = 30.0


class DeviceBatch:
    """One job's tables on the device, leased by `owner`.

    own_words: kernels publish layers to `words`, which follow the tables in pinned memory.
    """

    def __init__(
        self,
        tables: TableMemory,
        request: BatchRequest,
        owner: LeaseOwner,
        *,
        own_words: bool = False,
    ) -> None:
        memory, pages, digests = request.memory, request.pages, request.digests
        staged, commands = request.staged, request.commands
        self._tables = tables
        self.pages = pages.size
        self._image = image = TableImage()
        layers = memory.bases.shape[0]
        self.batch = BatchStruct(
            flags=request.flags, timeout_ns=int(request.timeout_s * 1e9), ready=READY
        )
        self._batch_offset = image.add(self.batch)
        slices = SliceTableStruct()
        slices_offset = image.add(slices)
        paged = paged_iocb(memory, pages.size, request.opcode, request.slice_nlb, request.lba_shift)
        paged_offset = image.add(paged)
        pages_offset = image.add(pages)
        bases_offset = image.add(memory.bases)
        self._tallies_nbytes = layers * _TALLY.itemsize
        self._tallies_offset = image.add(np.zeros(self._tallies_nbytes, np.uint8))
        self._status_offset = image.add(np.zeros(pages.size, np.uint32))
        staged_offset = None if staged is None else image.add(staged.bases)
        self._digests_shape = (0, 0) if digests is None else digests.shape
        self._digests_offset = 0 if digests is None else image.add(digests)
        if commands is not None:
            links = self._add_commands(commands, layers)
        words_nbytes = LayerWords.nbytes_of(layers) if own_words else 0
        words_offset = image.add(np.zeros(words_nbytes, np.uint8))
        self.tables: Tables = tables.lease(image.nbytes, _TABLE_TIMEOUT_S, owner)
        base = self.tables.device.address
        if own_words:  # in pinned memory, where the host polls them
            self.words = LayerWords(self.tables.host.address + words_offset, layers)
            self.device_words = self.words.address + self.tables.to_device
            self.batch.flags = self.device_words + self.words.ready_offset(0)
        paged.pages, paged.bases = base + pages_offset, base + bases_offset
        slices.paged, slices.page_status = base + paged_offset, base + self._status_offset
        if staged is not None and staged_offset is not None:
            slices.staged_bases, slices.staged_stride = base + staged_offset, staged.stride_nbytes
        if digests is not None:
            slices.digests = base + self._digests_offset
        self.batch.slices, self.batch.tallies = base + slices_offset, base + self._tallies_offset
        if commands is not None:
            iocb, runs, command_pages, bases, shares, states = links
            commands.iocb.runs, commands.iocb.pages = base + runs, base + command_pages
            commands.iocb.bases = base + bases
            self.batch.iocb, self.batch.shares = base + iocb, base + shares
            self.batch.states, self.batch.n_shares = base + states, len(commands.shares)
        self.address = base + self._batch_offset

    @staticmethod
    def nbytes_max(pages: int, layers: int, commands: int = 0) -> int:
        """Most bytes of a batch's tables, with digests.  commands: number for each slice."""
        page_nbytes = 8 + 8 * layers + commands * (28 + 8 * layers)
        return 4096 + 256 * layers + pages * page_nbytes

    def _add_commands(self, commands: Commands, layers: int) -> tuple[int, ...]:
        """Offsets of the IOCB, runs, pages, bases, shares and states."""
        image = self._image
        shares = np.concatenate([np.frombuffer(s, np.uint8) for s in commands.shares])  # type: ignore[call-overload]
        return (
            image.add(commands.iocb),
            image.add(commands.runs),
            image.add(commands.pages),
            image.add(commands.bases),
            image.add(shares),
            image.add(np.full(layers * commands.runs.size * _STATE_NBYTES, 0xFF, np.uint8)),
        )

    def write(self) -> None:
        """Writes the tables to pinned memory, for `copy_up`."""
        self._image.write(self.tables.host.address)

    def copy_up(self, stream: int) -> None:
        """Enqueues the copy of the tables to the device."""
        self._tables.upload(self.tables, self._image.nbytes, stream)

    def upload(self, stream: int) -> None:
        """Writes the tables and enqueues their copy to the device."""
        self.write()
        self.copy_up(stream)

    def download_outcome(self, driver: Driver, stream: int) -> None:
        """Enqueues the copy of what `outcome` reads: tallies and statuses, which are adjacent."""
        first, end = self._tallies_offset, self._status_offset + 4 * self.pages
        self.download(driver, first, end - first, stream)

    def outcome(self) -> tuple[U32, bool]:
        """(first error of each page, uint32 (pages,); whether the device still has commands).

        A late command need not be the first error of its pages.
        """
        tallies = self.result(self._tallies_offset, self._tallies_nbytes).view(_TALLY)
        status = self.result(self._status_offset, 4 * self.pages).view(np.uint32)
        return status.copy(), bool(tallies["owned"].any())

    def result(self, offset: int, nbytes: int) -> Bytes:
        """A part of the tables, after its `download`."""
        return view_at(self.tables.host.address + offset, nbytes)

    def digests(self) -> U64:
        """The digests in pinned memory, uint64 (pages, layers); of a write, valid once
        `download_digests` has ended.
        """
        nbytes = 8 * math.prod(self._digests_shape)
        raw = self.result(self._digests_offset, nbytes)
        return raw.view(np.uint64).reshape(self._digests_shape)

    def download_digests(self, driver: Driver, stream: int) -> None:
        """Enqueues the copy of computed digests to where `digests` reads them."""
        nbytes = 8 * math.prod(self._digests_shape)
        self.download(driver, self._digests_offset, nbytes, stream)

    def download(self, driver: Driver, offset: int, nbytes: int, stream: int) -> None:
        """Enqueues the copy of one part to where `result` reads it."""
        target = self.tables.host.address + self.tables.to_device + offset
        driver.copy(target, self.tables.device.address + offset, nbytes, stream)


class KernelMover:
    """Copies with SMs: a kernel in which every lane moves 16 bytes at a time.

    function: gio_move.  blocks: number of blocks, which limits the multiprocessors it uses.
    """

    name = "kernel"

    def __init__(
        self, driver: Driver, function: int, tables: TableMemory, *, blocks: int = 16
    ) -> None:
        self._driver = driver
        self._function = function
        self._tables = tables
        self.blocks = blocks
        self.kernel_jobs = 0

    def prepare(self, descriptor: CopyDescriptor) -> PreparedCopy:
        self.kernel_jobs += 1
        batch = DeviceBatch(
            self._tables,
            BatchRequest(
                descriptor.paged,
                descriptor.pages,
                opcode=OPCODE_READ if descriptor.to_pages else OPCODE_WRITE,
                slice_nlb=-(-descriptor.stride_nbytes >> _LBA_SHIFT),
                lba_shift=_LBA_SHIFT,
                staged=Staged(descriptor.staged, descriptor.stride_nbytes),
            ),
            descriptor.owner,
        )
        return _KernelCopies(self._driver, self._function, batch, self.blocks)


class _KernelCopies:
    calls = 1
    has_tables = True

    def __init__(self, driver: Driver, function: int, batch: DeviceBatch, blocks: int) -> None:
        self._driver, self._function = driver, function
        self._batch, self._blocks = batch, blocks

    def upload(self, stream: int) -> None:
        self._batch.upload(stream)

    def move(self, layers: range, stream: int) -> None:
        for layer in layers:
            launch_layer(self._driver, self._function, self._batch, layer, stream, self._blocks)


def launch_layer(
    driver: Driver,
    function: int,
    batch: DeviceBatch,
    layer: int,
    stream: int,
    blocks: int,
    *,
    threads: int = BLOCK_THREADS_MAX,
    publish: int | None = 0,
) -> None:
    """Launches one kernel of a layer.  publish: None for kernels without this parameter."""
    arguments = [(batch.address, ctypes.c_void_p), (layer, ctypes.c_uint32)]
    if publish is not None:
        arguments.append((publish, ctypes.c_uint32))
    driver.launch(function, blocks, threads, arguments, stream)

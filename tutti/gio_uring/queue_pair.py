"""The submitter's half of an NVMe queue pair: its memory, and an executable model of its verbs.

`QueuePair` lays out the memory that submitters and controller share and fills the struct that all
native code takes. `ModelQueuePair` and `ModelController` say in Python what
`kernels/include/gio_uring/queue_pair.h` and `controller_queue.h` do, on the same bytes: a test
replays traces through both.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti.errors import ConfigError
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import Cqe, Sqe
from tutti.process import Owned

COMPLETED = 1 << 31
NO_CID = 0xFFFFFFFF
DEPTH_MAX = 1 << 16  # a CID has 16 bits
_LINE_NBYTES = 64
_U32_MASK = 0xFFFFFFFF
_REAP_MAX = 32

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class QueuePairStruct(ctypes.LittleEndianStructure):
    """`gio::QueuePair`."""

    _fields_ = (
        ("sq", _U64),
        ("cq", _U64),
        ("sq_doorbell", _U64),
        ("cq_doorbell", _U64),
        ("marks", _U64),
        ("cid_free", _U64),
        ("completions", _U64),
        ("depth", _U32),
        ("qid", _U32),
        ("ticket", _U32),
        ("tail", _U32),
        ("tail_lock", _U32),
        ("padding", _U32 * 13),
        ("cq_head", _U32),
        ("cq_lock", _U32),
        ("cid_hint", _U32),
        ("reserved", _U32 * 13),
    )


class ControllerQueueStruct(ctypes.LittleEndianStructure):
    """`gio::ControllerQueue`."""

    _fields_ = (
        ("sq", _U64),
        ("cq", _U64),
        ("sq_doorbell", _U64),
        ("cq_doorbell", _U64),
        ("depth", _U32),
        ("qid", _U32),
        ("sq_head", _U32),
        ("sq_tail", _U32),
        ("cq_tail", _U32),
        ("cq_head", _U32),
    )


@dataclass(frozen=True)
class QueueLayout:
    """Byte offsets of one queue pair's parts in its memory; rings on pages, words on lines."""

    depth: int

    def __post_init__(self) -> None:
        depth = self.depth
        if not 2 <= depth <= DEPTH_MAX or depth & (depth - 1):
            raise ConfigError(f"queue depth {depth} is not a power of two from 2 to {DEPTH_MAX}")

    @property
    def sq(self) -> int:
        return 0

    @property
    def cq(self) -> int:
        return _round_up(self.depth * ctypes.sizeof(Sqe), 4096)

    @property
    def sq_doorbell(self) -> int:
        return self.cq + _round_up(self.depth * ctypes.sizeof(Cqe), 4096)

    @property
    def cq_doorbell(self) -> int:
        return self.sq_doorbell + _LINE_NBYTES

    @property
    def marks(self) -> int:
        return self.cq_doorbell + _LINE_NBYTES

    @property
    def cid_free(self) -> int:
        return self.marks + _round_up(4 * self.depth, _LINE_NBYTES)

    @property
    def completions(self) -> int:
        return self.cid_free + _round_up(4 * self.cid_words, _LINE_NBYTES)

    @property
    def queue_pair(self) -> int:
        """Where the struct itself lies."""
        return self.completions + _round_up(4 * self.depth, _LINE_NBYTES)

    @property
    def cid_words(self) -> int:
        """Words of the bitmap of free CIDs."""
        return -(-self.depth // 32)

    @property
    def nbytes(self) -> int:
        return _round_up(self.queue_pair + ctypes.sizeof(QueuePairStruct), 4096)

    def free_cids(self) -> list[int]:
        """The bitmap at the start: all CIDs are free but the last, so at most depth-1 are used."""
        bits = (1 << (self.depth - 1)) - 1
        return [bits >> (32 * i) & _U32_MASK for i in range(self.cid_words)]


class QueuePair(Owned):
    """The memory of one queue pair, with nothing in flight.

    Made by a controller, which polls this memory until the controller itself is closed; `close`
    only ends the use of it. Plain data at `struct_address` for native and device code.
    """

    def __init__(
        self,
        depth: int,
        qid: int,
        *,
        owner: object = None,
        is_device: bool = False,
        lane: int = 0,
        on_close: Callable[[QueuePair], None] | None = None,
    ) -> None:
        self.layout = QueueLayout(depth)
        self.depth = depth
        self.qid = qid
        self.owner = owner
        self.is_device = is_device
        self.lane = lane
        self._on_close = on_close
        self.memory = HostBuffer(self.layout.nbytes)
        self.is_closed = False
        self.is_dead = False  # a reset of its drive has ended it
        base = self.memory.address
        self.struct_address = base + self.layout.queue_pair
        self.struct = QueuePairStruct.from_address(self.struct_address)
        for name in ("sq", "cq", "sq_doorbell", "cq_doorbell", "marks", "cid_free", "completions"):
            setattr(self.struct, name, base + getattr(self.layout, name))
        self.struct.depth = depth
        self.struct.qid = qid
        bitmap = self.memory.array[self.layout.cid_free :][: 4 * self.layout.cid_words]
        bitmap.view(np.uint32)[:] = self.layout.free_cids()

    @property
    def inflight(self) -> int:
        """Commands whose CID was acquired and not given back."""
        bitmap = self.memory.array[self.layout.cid_free :][: 4 * self.layout.cid_words]
        free = sum(int(word).bit_count() for word in bitmap.view(np.uint32))
        return self.depth - 1 - free

    def close(self) -> None:
        """Nothing is submitted here any more; a second call does nothing."""
        if not self.is_closed:
            self.is_closed = True
            if self._on_close is not None:
                self._on_close(self)

    def __enter__(self) -> QueuePair:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


class _Words:
    """32-bit words of a queue pair's memory, by byte offset."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memoryview(memory)

    def load(self, offset: int) -> int:
        return int(struct.unpack_from("<I", self._memory, offset)[0])

    def store(self, offset: int, word: int) -> None:
        struct.pack_into("<I", self._memory, offset, word & _U32_MASK)

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._memory[offset : offset + nbytes])

    def write(self, offset: int, content: bytes) -> None:
        self._memory[offset : offset + len(content)] = content


class ModelQueuePair:
    """What the submitter's verbs do, one at a time. `memory` starts as `QueueLayout` says."""

    def __init__(self, depth: int) -> None:
        self.layout = QueueLayout(depth)
        self.depth = depth
        self.memory = bytearray(self.layout.nbytes)
        self.ticket = self.tail = self.cq_head = self.cid_hint = 0
        self._words = _Words(self.memory)
        for i, word in enumerate(self.layout.free_cids()):
            self._words.store(self.layout.cid_free + 4 * i, word)

    def cid_acquire(self) -> int:
        """The lowest free CID of the first word with one, from the hint on; NO_CID if all are."""
        words = self.layout.cid_words
        for i in range(words):
            w = (self.cid_hint + i) % words
            offset = self.layout.cid_free + 4 * w
            bits = self._words.load(offset)
            if bits:
                lowest = bits & -bits
                self._words.store(offset, bits & ~lowest)
                cid = 32 * w + lowest.bit_length() - 1
                self._words.store(self.layout.completions + 4 * cid, 0)
                self.cid_hint = w
                return cid
        return NO_CID

    def cid_release(self, cid: int) -> None:
        offset = self.layout.cid_free + 4 * (cid // 32)
        self._words.store(offset, self._words.load(offset) | 1 << cid % 32)

    def sq_enqueue(self, sqe: bytes) -> None:
        slot = self.ticket % self.depth
        self._words.write(self.layout.sq + len(sqe) * slot, sqe)
        self._words.store(self.layout.marks + 4 * slot, self.ticket // self.depth + 1)
        self.ticket = self.ticket + 1 & _U32_MASK

    def _is_marked(self, ticket: int) -> bool:
        mark = self._words.load(self.layout.marks + 4 * (ticket % self.depth))
        return mark == (ticket // self.depth + 1) & _U32_MASK

    def sq_ring(self) -> None:
        """Publish every finished SQE; the doorbell is written only when there is one."""
        before = self.tail
        for _ in range(self.depth):
            if not self._is_marked(self.tail):
                break
            self.tail = self.tail + 1 & _U32_MASK
        if self.tail != before:
            self._words.store(self.layout.sq_doorbell, self.tail % self.depth)

    def cq_reap(self, count: int) -> int:
        """Consume at most `count` CQEs (32 a call) and publish their statuses by CID."""
        found: list[int] = []
        for i in range(min(count, _REAP_MAX)):
            position = self.cq_head + i & _U32_MASK
            word = self._words.load(self.layout.cq + 16 * (position % self.depth) + 12)
            if word >> 16 & 1 == position // self.depth & 1:
                break  # the first lap expects P = 1
            found.append(word)
        if found:
            self.cq_head = self.cq_head + len(found) & _U32_MASK
            self._words.store(self.layout.cq_doorbell, self.cq_head % self.depth)
        for word in found:
            cid = word & 0xFFFF
            if cid < self.depth:
                status = COMPLETED | word >> 17 & 0x7FF
                self._words.store(self.layout.completions + 4 * cid, status)
        return len(found)

    def completion(self, cid: int) -> int:
        """0 = pending, else COMPLETED | status."""
        return self._words.load(self.layout.completions + 4 * cid)


class ModelController:
    """What a software controller's half of the queue does, on the model's memory."""

    def __init__(self, queue_pair: ModelQueuePair, qid: int) -> None:
        self.layout = queue_pair.layout
        self.depth = queue_pair.depth
        self.qid = qid
        self.sq_head = self.sq_tail = self.cq_tail = self.cq_head = 0
        self._words = _Words(queue_pair.memory)

    def sq_fetch(self) -> bytes | None:
        """The next SQE; None when there is none. A tail outside the queue is ignored."""
        slot = self.sq_head % self.depth
        if slot == self.sq_tail:
            tail = self._words.load(self.layout.sq_doorbell)
            if tail < self.depth:
                self.sq_tail = tail
            if slot == self.sq_tail:
                return None
        self.sq_head = self.sq_head + 1 & _U32_MASK
        nbytes = ctypes.sizeof(Sqe)
        return self._words.read(self.layout.sq + nbytes * slot, nbytes)

    def cq_post(self, cid: int, status: int) -> bool:
        """Post a CQE; False when the completion queue is full."""
        slot = self.cq_tail % self.depth
        following = (slot + 1) % self.depth
        if following == self.cq_head:
            head = self._words.load(self.layout.cq_doorbell)
            if head < self.depth:
                self.cq_head = head
            if following == self.cq_head:
                return False
        phase = self.cq_tail // self.depth & 1 ^ 1
        sq = self.sq_head % self.depth | self.qid << 16
        cqe = struct.pack("<IIII", 0, 0, sq, cid | phase << 16 | status << 17)
        self._words.write(self.layout.cq + len(cqe) * slot, cqe)
        self.cq_tail = self.cq_tail + 1 & _U32_MASK
        return True

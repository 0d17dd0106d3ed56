"""An executable model of the verbs of a queue pair, on the same bytes as the native code.

`kernels/include/gio_uring/queue_pair.h` and `controller_queue.h` do the same; a test replays traces
through both.
"""

from __future__ import annotations

import ctypes
import struct

from tutti.gio_uring.nvme_spec import Sqe
from tutti.gio_uring.queue_pair import COMPLETED, NO_CID, QueueLayout

_U32_MASK = 0xFFFFFFFF
_REAP_MAX = 32

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


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

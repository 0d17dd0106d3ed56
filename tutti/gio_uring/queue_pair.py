"""The memory of an NVMe queue pair, which submitters and controller share.

`QueuePair` lays it out and fills the struct that native and device code uses; the operations are
in `kernels/include/gio_uring/queue_pair.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti.base.process import Owned
from tutti.errors import ConfigError
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import Cqe, Sqe
from tutti.native import members

COMPLETED = 1 << 31
NO_CID = 0xFFFFFFFF
DEPTH_MAX = 1 << 16  # a CID has 16 bits
_LINE_NBYTES = 64
_U32_MASK = 0xFFFFFFFF

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class QueuePairStruct(ctypes.LittleEndianStructure):
    """`gio::QueuePair`."""

    _fields_ = (
        *members(_U64, "sq cq sq_doorbell cq_doorbell marks cid_free completions"),
        *members(_U32, "depth qid ticket tail tail_lock"),
        ("padding", _U32 * 13),
        *members(_U32, "cq_head cq_lock cid_hint"),
        ("reserved", _U32 * 13),
    )


@dataclass(frozen=True)
class QueueLayout:
    """Byte offsets of a queue pair's parts; rings start at pages, words at cache lines."""

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
        """Offset of the struct."""
        return self.completions + _round_up(4 * self.depth, _LINE_NBYTES)

    @property
    def cid_words(self) -> int:
        """Number of words of the bitmap of free CIDs."""
        return -(-self.depth // 32)

    @property
    def nbytes(self) -> int:
        return _round_up(self.queue_pair + ctypes.sizeof(QueuePairStruct), 4096)

    def free_cids(self) -> list[int]:
        """The initial bitmap: all CIDs but the last are free, as at most depth - 1 may be used."""
        bits = (1 << (self.depth - 1)) - 1
        return [bits >> (32 * i) & _U32_MASK for i in range(self.cid_words)]


class QueuePair(Owned):
    """The memory of one queue pair.

    A controller makes it, and may poll it until the controller is closed; `close` only ends its
    use. Native and device code use the plain struct at `struct_address`.
    """

    def __init__(
        self,
        depth: int,
        qid: int,
        *,
        owner: object = None,
        is_device: bool = False,
        service_thread: int = 0,
        on_close: Callable[[QueuePair], None] | None = None,
    ) -> None:
        self.layout = QueueLayout(depth)
        self.depth = depth
        self.qid = qid
        self.owner = owner
        self.is_device = is_device
        self.service_thread = service_thread
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
        """Number of acquired CIDs."""
        bitmap = self.memory.array[self.layout.cid_free :][: 4 * self.layout.cid_words]
        free = sum(int(word).bit_count() for word in bitmap.view(np.uint32))
        return self.depth - 1 - free

    def close(self) -> None:
        """Ends the use of the queue pair; a second call does nothing."""
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

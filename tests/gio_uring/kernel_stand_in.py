"""Short Python kernels that read the tables of the real ones, for the stand-in driver.

They show that the host side fills every table with the right addresses and launches in the right
order, not that device code works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import xxhash
from gio_uring.cuda_stand_in import DEVICE_MARK, PINNED_MARK, StandInDriver

from tutti.gio_uring.gpu.parameters import (
    RUN_PENDING,
    BatchStruct,
    LayerTallyStruct,
    MailboxStruct,
    PostStruct,
    QueueShareStruct,
    RunStateStruct,
    SliceTableStruct,
)
from tutti.gio_uring.iocb import RUN_DTYPE, IocbStruct
from tutti.gio_uring.memory import view_at
from tutti.gio_uring.nvme_spec import OPCODE_READ, STATUS_DIGEST_MISMATCH, STATUS_TIMED_OUT
from tutti.gio_uring.queue_pair import QueuePairStruct


class LayerWordStruct(ctypes.Structure):
    """`gio::LayerWord`, as `tutti.gio_uring.layer_words` reads it."""

    _fields_ = (("ready", ctypes.c_uint32), ("status", ctypes.c_uint32))


class Kernels:
    """What the kernels do with the tables, without queues: commands go straight to the medium."""

    def __init__(self, driver: StandInDriver, medium: np.ndarray | None, depth: int = 16) -> None:
        self.driver = driver
        self.medium = medium  # None: commands move nothing
        self.depth = depth
        self.lost: set[int] = set()  # layers whose commands are never answered
        self.verified = 0  # layers
        self.is_silent = False  # the kernel that stays neither works nor ends
        for name in ("submit", "drain", "resident"):
            driver.kernels[f"gio_{name}_word"] = getattr(self, name)
        for name in ("move", "verify"):
            driver.kernels[f"gio_{name}"] = getattr(self, name)
        driver.staying["gio_persistent_word"] = self.persistent

    def at(self, kind: type[ctypes.Structure], address: int, index: int = 0) -> ctypes.Structure:
        nbytes = ctypes.sizeof(kind)
        assert address & (DEVICE_MARK | PINNED_MARK), "kernels use device addresses"
        return kind.from_address(self.driver.host(address + index * nbytes, nbytes))

    def words(self, address: int, count: int, kind: str = "<u4") -> np.ndarray:
        nbytes = count * np.dtype(kind).itemsize
        return view_at(self.driver.host(address, nbytes), nbytes).view(kind)

    def submit(self, batch: int, layer: int) -> None:
        self._send(batch, layer)

    def drain(self, batch: int, layer: int, publish: int) -> None:
        self._send(batch, layer)
        if publish:
            self._publish(batch, layer)

    def resident(self, batch: int, layer: int, publish: int) -> None:
        table = self.at(SliceTableStruct, self.at(BatchStruct, batch).slices)
        reads = self.at(IocbStruct, table.paged).opcode == OPCODE_READ
        for step in (self._send, self._move) if reads else (self._move, self._send):
            step(batch, layer)
        if publish:
            self._publish(batch, layer)

    def move(self, batch: int, layer: int, publish: int) -> None:
        self._move(batch, layer)
        if publish:
            self._publish(batch, layer)

    def verify(self, batch: int, layer: int, publish: int) -> None:
        self._verify(self.at(BatchStruct, batch), layer)
        if publish:
            self._publish(batch, layer)

    def persistent(self, mailbox: int) -> Callable[[], bool]:
        """Returns what it does again and again, until that is True."""
        box = self.at(MailboxStruct, mailbox)
        posted, stop = self.words(box.posted, 1), self.words(box.stop, 1)
        next_post = int(self.words(box.consumed, 1)[0])

        def step() -> bool:
            nonlocal next_post
            if self.is_silent:
                return False
            if stop[0] or posted[0] == next_post:
                return bool(stop[0])
            post = self.at(PostStruct, box.posts, next_post % box.capacity)
            shares = self.at(BatchStruct, post.batch).n_shares
            self.resident(post.batch, post.layer, post.publish)
            next_post += 1
            self.words(box.consumed, shares)[:] = next_post
            return False

        return step

    def _send(self, batch_address: int, layer: int) -> None:
        """All runs of all shares that were not sent yet."""
        batch = self.at(BatchStruct, batch_address)
        io = self.at(IocbStruct, batch.iocb)
        runs = self.words(batch.iocb and io.runs, io.n_runs * RUN_DTYPE.itemsize, "u1")
        table = runs.view(RUN_DTYPE)
        pages = self.words(io.pages, io.n_pages)
        bases = self.words(io.bases, io.n_layers * io.n_segments, "<u8")
        for number in range(batch.n_shares):
            share = self.at(QueueShareStruct, batch.shares, number)
            queue = self.at(QueuePairStruct, share.qp)
            assert queue.depth == self.depth
            assert queue.cid_free & DEVICE_MARK
            assert queue.sq & PINNED_MARK
            assert self.words(queue.cid_free, 1)[0] == min(2**32, 2 ** (self.depth - 1)) - 1
            assert share.lists & PINNED_MARK
            for i in range(share.first_run, share.first_run + share.n_runs):
                state = self.at(RunStateStruct, batch.states, layer * io.n_runs + i)
                if state.status != RUN_PENDING:
                    continue
                state.status = 0
                if layer in self.lost:
                    self._fail(batch, layer, table[i], STATUS_TIMED_OUT)
                    continue
                self._transfer(io, table[i], pages, int(bases[layer]), layer)

    def _transfer(
        self, io: IocbStruct, run: np.void, pages: np.ndarray, base: int, layer: int
    ) -> None:
        if self.medium is None:
            return
        slice_nbytes = io.slice_nlb << io.lba_shift
        lba = int(run["slba"]) + layer * io.layer_stride_nlb
        for n in range(int(run["nlb"]) // io.slice_nlb):
            host = base + int(pages[int(run["first"]) + n]) * io.segment_stride[0]
            assert not host & (DEVICE_MARK | PINNED_MARK), (
                "commands name the controller's addresses"
            )
            place = (lba << io.lba_shift) + n * slice_nbytes
            there = self.medium[place : place + io.segment_nbytes[0]]
            here = view_at(host, io.segment_nbytes[0])
            if io.opcode == OPCODE_READ:
                here[:] = there
            else:
                there[:] = here

    def _fail(self, batch: BatchStruct, layer: int, run: np.void, status: int) -> None:
        """Names the pages of a run; what staging then holds is not theirs."""
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        staged = int(self.words(table.staged_bases, paged.n_layers, "<u8")[layer])
        first = int(run["first"])
        for index in range(first, first + int(run["nlb"]) // paged.slice_nlb):
            self._lose(table, paged, index, status)
            if paged.opcode == OPCODE_READ:
                place = staged + index * table.staged_stride
                self.words(place, table.staged_stride, "u1")[:] = 0xA5
        if status == STATUS_TIMED_OUT:
            self.at(LayerTallyStruct, batch.tallies, layer).owned += 1
        self.at(LayerWordStruct, batch.flags, layer).status = status

    def _lose(self, table: SliceTableStruct, paged: IocbStruct, index: int, status: int) -> None:
        """A page's first error stays."""
        statuses = self.words(table.page_status, paged.n_pages)
        statuses[index] = statuses[index] or status

    def _move(self, batch_address: int, layer: int) -> None:
        batch = self.at(BatchStruct, batch_address)
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        pages = self.words(paged.pages, paged.n_pages)
        bases = self.words(paged.bases, paged.n_layers * paged.n_segments, "<u8")
        staged = int(self.words(table.staged_bases, paged.n_layers, "<u8")[layer])
        lost = self.words(table.page_status, paged.n_pages) != 0
        for i, page in enumerate(pages.tolist()):
            if paged.opcode == OPCODE_READ and lost[i]:
                continue  # as the kernel: its bytes did not come
            start = staged + i * table.staged_stride
            parts = []
            for k in range(paged.n_segments):
                n = paged.segment_nbytes[k]
                there = int(bases[layer * paged.n_segments + k]) + page * paged.segment_stride[k]
                page_bytes = view_at(self.driver.host(there, n), n)
                stage_bytes = view_at(self.driver.host(start, n), n)
                if paged.opcode == OPCODE_READ:
                    page_bytes[:] = stage_bytes
                else:
                    stage_bytes[:] = page_bytes
                parts.append(stage_bytes.tobytes())
                start += n
            if table.digests:
                self._digest(batch, layer, i, b"".join(parts))

    def _verify(self, batch: BatchStruct, layer: int) -> None:
        """Digests of slices where they lie in their pages."""
        self.verified += 1
        paged = self.at(IocbStruct, self.at(SliceTableStruct, batch.slices).paged)
        bases = self.words(paged.bases, paged.n_layers * paged.n_segments, "<u8")
        for i, page in enumerate(self.words(paged.pages, paged.n_pages).tolist()):
            parts = []
            for k in range(paged.n_segments):
                n = paged.segment_nbytes[k]
                there = int(bases[layer * paged.n_segments + k]) + page * paged.segment_stride[k]
                parts.append(view_at(self.driver.host(there, n), n).tobytes())
            self._digest(batch, layer, i, b"".join(parts))

    def _digest(self, batch: BatchStruct, layer: int, i: int, content: bytes) -> None:
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        known = self.words(table.digests, paged.n_pages * paged.n_layers, "<u8")
        place = i * paged.n_layers + layer
        if paged.opcode != OPCODE_READ:
            known[place] = xxhash.xxh3_64_intdigest(content)
        elif known[place] != xxhash.xxh3_64_intdigest(content):
            self._lose(table, paged, i, STATUS_DIGEST_MISMATCH)
            self.at(LayerWordStruct, batch.flags, layer).status = STATUS_DIGEST_MISMATCH

    def _publish(self, batch_address: int, layer: int) -> None:
        batch = self.at(BatchStruct, batch_address)
        self.at(LayerWordStruct, batch.flags, layer).ready = batch.ready

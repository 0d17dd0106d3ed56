"""Kernels of the stand-in that submit through real queue pairs: the controller executes what they
ring.  One command at a time, in Python: for bytes, statuses and ownership, not for speed.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.data_pointer import Extent, ListMemory, set_prp, set_sgl
from gio_uring.kernel_stand_in import Kernels

from tutti.gio_uring.gpu.parameters import (
    RUN_PENDING,
    BatchStruct,
    QueueShareStruct,
    RunStateStruct,
)
from tutti.gio_uring.iocb import RUN_DTYPE, IocbStruct
from tutti.gio_uring.nvme_spec import PSDT_SGL, STATUS_OK, STATUS_TIMED_OUT, Cqe, Sqe
from tutti.gio_uring.queue_pair import QueuePairStruct

_NAP_S = 0.00005


class RingingKernels(Kernels):
    """commands: how many were rung.  A deadline that passed leaves the queue as a kernel would."""

    def __init__(self, driver: StandInDriver) -> None:
        super().__init__(driver, None, depth=0)
        self.commands = 0

    def _send(self, batch_address: int, layer: int) -> None:
        batch = self.at(BatchStruct, batch_address)
        io = self.at(IocbStruct, batch.iocb)
        table = self.words(io.runs, io.n_runs * RUN_DTYPE.itemsize, "u1").view(RUN_DTYPE)
        deadline_s = time.monotonic() + batch.timeout_ns / 1e9
        for number in range(batch.n_shares):
            share = self.at(QueueShareStruct, batch.shares, number)
            for i in range(share.first_run, share.first_run + share.n_runs):
                state = self.at(RunStateStruct, batch.states, layer * io.n_runs + i)
                if state.status != RUN_PENDING:
                    continue
                state.status = self._command(share, io, table[i], layer, deadline_s)
                if state.status != STATUS_OK:
                    self._fail(batch, layer, table[i], state.status)

    def _command(
        self, share: QueueShareStruct, io: IocbStruct, run: np.void, layer: int, deadline_s: float
    ) -> int:
        """Rings one command and waits for its status."""
        if layer in self.lost:
            return STATUS_TIMED_OUT
        pair = self.at(QueuePairStruct, share.qp)
        slot, self.commands = pair.tail % pair.depth, self.commands + 1
        sqe = self.at(Sqe, pair.sq, slot)
        ctypes.memset(ctypes.addressof(sqe), 0, ctypes.sizeof(Sqe))
        sqe.cdw0, sqe.nsid = io.opcode | slot << 16, int(run["nsid"])
        slba = int(run["slba"]) + layer * io.layer_stride_nlb
        sqe.cdw10, sqe.cdw11, sqe.cdw12 = slba & 0xFFFFFFFF, slba >> 32, int(run["nlb"]) - 1
        lists = ListMemory(
            self.driver.host(share.lists, share.list_nbytes), share.lists_dma, share.list_nbytes
        )
        place = set_sgl if io.psdt == PSDT_SGL else set_prp
        place(sqe, self._extents(io, run, layer), lists)
        pair.tail += 1
        self.words(pair.sq_doorbell, 1)[0] = pair.tail % pair.depth
        cqe = self.at(Cqe, pair.cq, pair.cq_head % pair.depth)
        phase = pair.cq_head // pair.depth & 1 ^ 1
        while cqe.status >> 16 & 1 != phase:
            if time.monotonic() > deadline_s:
                return STATUS_TIMED_OUT
            time.sleep(_NAP_S)
        pair.cq_head += 1
        self.words(pair.cq_doorbell, 1)[0] = pair.cq_head % pair.depth
        assert cqe.status & 0xFFFF == slot, "one command at a time"
        return int(cqe.status >> 17 & 0x7FF)

    def _extents(self, io: IocbStruct, run: np.void, layer: int) -> list[Extent]:
        """Where a run's bytes lie in staging, with the padding of its slices."""
        base = int(self.words(io.bases, io.n_layers, "<u8")[layer])
        pages = self.words(io.pages, io.n_pages)
        slice_nbytes, held = io.slice_nlb << io.lba_shift, io.segment_nbytes[0]
        skip, left = int(run["skip"]), int(run["nlb"]) << io.lba_shift
        extents: list[Extent] = []
        for index in range(int(run["first"]), io.n_pages):
            start = base + int(pages[index]) * io.segment_stride[0]
            for address, nbytes in ((start, held), (io.padding, slice_nbytes - held)):
                cut = min(skip, nbytes)
                taken = min(nbytes - cut, left)
                if taken > 0:
                    extents.append((address + cut, taken))
                skip, left = skip - cut, left - taken
            if not left:
                return extents
        raise AssertionError("a run ends within its pages")

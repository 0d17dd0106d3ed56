"""Jobs that move what slots hold, each by one native call that cuts its commands and submits it."""

from __future__ import annotations

import ctypes
from typing import Unpack

import numpy as np

from tutti import native
from tutti.base.arrays import U32, Slots
from tutti.gio_uring.engine import DIGEST_COMPUTE, PRIORITY_RECORDS, Engine
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.job import Job, nanoseconds
from tutti.gio_uring.nvme_spec import FUA, PSDT_PRP
from tutti.gio_uring.transfer import TIMEOUT_S, HostOptions
from tutti.native import NativePutTables, address, members
from tutti.pool.slot_extents import SlotPlaces


class SlotJobStruct(ctypes.Structure):
    """`struct tutti_slot_job`."""

    _fields_ = (
        *members(ctypes.c_uint64, "engine places scratch zeros"),
        *members(ctypes.c_uint32, "slice_nlb layer_stride_nlb lba_shift psdt command_nlb_max"),
        ("descriptors_max", ctypes.c_uint32),
        *members(ctypes.c_uint64, "slot_runs_max memory pages digests job tag timeout_ns"),
        *members(ctypes.c_uint32, "opcode flags priority digest held ahead"),
    )


class PutStruct(ctypes.Structure):
    """`struct tutti_put`."""

    _fields_ = (
        ("tables", NativePutTables),
        ("cache", ctypes.c_uint64),
        *members(SlotJobStruct, "data records"),
        *members(ctypes.c_uint64, "identity staging member_slots layers"),
    )


class SlotJobs:
    """Starts jobs of one engine on the slots of one pool.  Thread-safe.

    slice_nlb, layer_stride_nlb: see Extents.  words: 8-byte words of memory that a job needs for
    each slot; it needs one more word.  common, handle: fields of all jobs, and their address.
    has_prps: whether these depend on the memory; with SGLs all memory is alike.
    """

    def __init__(
        self,
        engine: Engine,
        places: SlotPlaces,
        slice_nlb: int,
        layer_stride_nlb: int = 0,
        *,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._places = places  # keeps the memory alive that the struct points to
        slot_runs = -(-slice_nlb // engine.command_nlb_max)
        self.words = 1 + 3 * slot_runs
        self.common = SlotJobStruct(
            engine=engine.handle,
            places=ctypes.addressof(places),
            scratch=engine.scratch,
            zeros=engine.zeros,
            slice_nlb=slice_nlb,
            layer_stride_nlb=layer_stride_nlb,
            lba_shift=engine.controller.info.lba_shift,
            psdt=engine.psdt,
            command_nlb_max=engine.command_nlb_max,
            descriptors_max=engine.descriptors_max,
            slot_runs_max=slot_runs,
            timeout_ns=nanoseconds(timeout_s),
        )
        self.has_prps = engine.psdt == PSDT_PRP
        self.handle = ctypes.byref(self.common)

    def start(
        self,
        opcode: int,
        slots: Slots,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[HostOptions],
    ) -> Job:
        """As Engine.submit for the places of ``slots`` in page order; compares no digests."""
        n, digests = slots.size, options.get("digests")
        words = np.empty(n * self.words + 1, np.uint64)
        keep = (words, pages, memory, digests)
        job = self._engine.open_job(words.view(np.uint32)[:n], keep, options.get("on_released"))
        struct = SlotJobStruct.from_buffer_copy(self.common)
        if self.has_prps:
            struct.descriptors_max = self._engine.descriptors_of(memory)
        struct.memory, struct.pages = ctypes.addressof(memory.iocb), address(pages)
        struct.job, struct.tag = ctypes.addressof(job.native), job.tag
        struct.held = options.get("held", 0)
        struct.opcode, struct.priority = opcode, options.get("priority", PRIORITY_RECORDS)
        struct.flags = FUA if options.get("fua") else 0
        struct.timeout_ns = nanoseconds(options.get("timeout_s", TIMEOUT_S))
        if digests is not None:
            struct.digests, struct.digest = address(digests), DIGEST_COMPUTE
        slots = np.ascontiguousarray(slots)
        call = native.quick().tutti_slot_job_start
        result = call(ctypes.byref(struct), address(slots), n, address(words))
        self._engine.check_started(job, result)
        return job

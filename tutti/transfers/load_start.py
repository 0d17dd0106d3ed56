"""Starts a load by one native call where one job can move all of it: plan, commands, submission."""

from __future__ import annotations

import ctypes

from tutti import native
from tutti.arrays import U32
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.job import Job, nanoseconds
from tutti.native import address
from tutti.transfers.core import Core

#: A result below it is this minus an errno of the submission.
NOT_STARTED = -(1 << 32)


class StartStruct(ctypes.Structure):
    """`struct tutti_start` of kernels/native/load_start.h."""

    _fields_ = (
        ("engine", ctypes.c_void_p),
        ("places", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("slice_nlb", ctypes.c_uint32),
        ("layer_stride_nlb", ctypes.c_uint32),
        ("lba_shift", ctypes.c_uint32),
        ("psdt", ctypes.c_uint32),
        ("command_nlb_max", ctypes.c_uint32),
        ("descriptors_max", ctypes.c_uint32),
        ("slot_runs_max", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("held", ctypes.c_uint64),
        ("job", ctypes.c_uint64),
    )


class LoadStart:
    """What `LoadPlanner.begin` calls to start a load, too.  Used under the core's lock.

    words: of each key, behind its plan: the status and the commands.
    """

    def __init__(self, core: Core) -> None:
        engine, geometry = core.engine, core.geometry
        slot_runs = -(-geometry.slice_nlb // engine.command_nlb_max)
        self.words = 1 + 3 * slot_runs
        self._start = StartStruct(
            engine=engine.handle,
            places=ctypes.addressof(core.places),
            padding=engine.scratch,
            timeout_ns=nanoseconds(core.config.timeout_s),
            slice_nlb=geometry.slice_nlb,
            layer_stride_nlb=geometry.layer_stride_nlb,
            lba_shift=engine.controller.info.lba_shift,
            psdt=engine.psdt,
            command_nlb_max=engine.command_nlb_max,
            descriptors_max=engine.descriptors_max,
            slot_runs_max=slot_runs,
        )
        self._handle = ctypes.byref(self._start)
        self._keep = core  # whose memory it names

    def of(self, job: Job, pages: U32, memory: PagedMemory | None, *, held: bool) -> LoadStart:
        """Of this load; memory: None where nothing is to be submitted."""
        start = self._start
        start.memory = 0 if memory is None else ctypes.addressof(memory.iocb)
        start.pages, start.tag, start.held = address(pages), job.tag, held
        start.job = ctypes.addressof(job.native)
        return self

    def __call__(self, *arguments: object) -> int:
        """See tutti_load_start."""
        return int(native.quick().tutti_load_start(*arguments, self._handle))

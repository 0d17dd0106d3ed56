"""Reads by an engine without a store: a prepared job that is submitted by one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np

from tutti.base.arrays import U32, U64
from tutti.gio_uring import _native
from tutti.gio_uring.engine import DIGEST_COMPARE, PRIORITY_LOAD, Engine
from tutti.gio_uring.engine_structs import JobConfig
from tutti.gio_uring.iocb import CutStruct, Extents, PagedMemory
from tutti.gio_uring.job import Job, nanoseconds
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.native import address


class PreparedRead:
    """A prepared job that reads extents into pages (n,) of registered memory; can be repeated.

    digests: (n, layers), to compare with the digests of the bytes read.
    """

    def __init__(
        self,
        engine: Engine,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        *,
        timeout_s: float,
        digests: U64 | None = None,
    ) -> None:
        self._engine = engine
        slices = max(1, (engine.descriptors_of(memory) - 1) // (len(memory.segment_nbytes) + 1))
        nlb_max = engine.command_nlb_max
        runs = extents.commands(CutStruct(extents.slice_nlb, engine.lba_nbytes, nlb_max, slices))
        self._status = np.zeros(pages.size, np.uint32)
        self._kept = pages, memory, runs, digests
        self._config = JobConfig(iocb=memory.iocb, page_status=address(self._status))
        self._config.priority, self._config.timeout_ns = PRIORITY_LOAD, nanoseconds(timeout_s)
        if digests is not None:
            self._config.digests, self._config.digest = address(digests), DIGEST_COMPARE
        io = self._config.iocb
        io.opcode, io.psdt = OPCODE_READ, engine.psdt
        io.lba_shift, io.padding = engine.controller.info.lba_shift, engine.scratch
        io.pages, io.n_pages = address(pages), pages.size
        io.runs, io.n_runs = address(runs), runs.size
        io.slice_nlb, io.layer_stride_nlb = extents.slice_nlb, extents.layer_stride_nlb

    def open(self) -> tuple[Job, Callable[[], int]]:
        """A job, and the call that submits it, whose result `Engine.check_started` takes."""
        job = self._engine.open_job(self._status, self._kept, None)
        self._config.tag = job.tag
        arguments = self._engine.handle, ctypes.byref(self._config), ctypes.byref(job.native)
        return job, partial(_native.quick().gio_engine_submit, *arguments)

"""Copies many short segments with one kernel per layer, which reads a table of addresses.

The kernel is written in Triton, which every SGLang on a GPU has.  It is compiled and loaded when a
pool is opened, because loading code later may wait for the streams.  A copy engine has a cost per
segment (see `mover`), and a page that the linker packs into one object has hundreds of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import numpy as np

from tutti.base.process import Owned
from tutti.base.units import MiB
from tutti.errors import CapacityError, DeviceTimeout, Unsupported
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.events import EventPool
from tutti.gio_uring.gpu.mover import FRAGMENT_NBYTES_MIN, FRAGMENTS_MIN
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, PinnedStaging
from tutti.gio_uring.memory import view_at
from tutti.integration.sglang.direct.kv_pools import Pages, Span

#: Memory for the tables of layers that wait for the SSD.
_TABLES_NBYTES = 8 * MiB
_UNITS_NBYTES = (16, 4, 1)
_BLOCK_NBYTES, _WARPS = 8192, 4
#: Blocks of the kernel, which limit the multiprocessors that it takes from the model.
_PROGRAMS = 16
#: Triton's additional arguments: addresses of scratch memory, which this kernel does not use.
_SCRATCH = [(0, ctypes.c_void_p)] * 2


class TableCopies(Owned):
    """The kernel, and pinned memory for its tables.  Thread-safe.

    Raises Unsupported if Triton cannot compile for the GPU, CudaError from the driver.
    """

    def __init__(self, driver: Driver, events: EventPool) -> None:
        self._driver, self._events = driver, events
        self._modules = []
        self._functions = {}
        self._tables = PinnedStaging(driver, None, _TABLES_NBYTES)
        try:
            for unit in _UNITS_NBYTES:
                self._modules.append(driver.load_module(compile_for(driver.architecture, unit)))
                self._functions[unit] = driver.find_function(self._modules[-1], "copy_pages")
        except BaseException:
            self.close()
            raise

    def copy(
        self, stream: int, targets: Sequence[Span], to: Pages, sources: Sequence[Span], of: Pages
    ) -> bool:
        """Enqueues the copies of pages ``of`` (n,) to ``to`` (n,) if they are many and short;
        returns whether it did.
        """
        count = len(to) * len(targets)
        if count < FRAGMENTS_MIN or not are_short(targets):
            return False
        table = _table_of(targets, to, sources, of)
        owner = LeaseOwner(self)
        try:
            lease = self._tables.arena.lease(table.nbytes, 0.0, owner)
        except (CapacityError, DeviceTimeout):  # tables of many layers that wait for the SSD
            return False
        view_at(lease.address, table.nbytes).view(np.int64)[:] = table
        address = lease.address + self._tables.pinned.device_address - self._tables.pinned.address
        spans = table[: 5 * len(targets)]
        function = self._functions[max(u for u in _UNITS_NBYTES if not (spans % u).any())]
        event: list[int] = []
        programs = min(count, _PROGRAMS)
        numbers = (len(targets), len(to), programs)
        arguments = [
            (address, ctypes.c_int64),
            *((number, ctypes.c_int32) for number in numbers),
            *_SCRATCH,
        ]
        try:
            self._events.acquire(1, event)
            self._driver.launch(function, programs, 32 * _WARPS, arguments, stream)
            self._driver.record_event(event[0], stream)
        except BaseException:  # without an event, the table may still be in use
            owner.is_free = partial(self._driver.is_stream_done, stream)
            self._events.release(event)
            raise

        def is_read() -> bool:
            if not self._driver.is_event_done(event[0]):
                return False
            self._events.release(event)
            return True

        owner.is_free = is_read
        return True

    def close(self) -> None:
        """Frees everything; the streams must be idle and not destroyed yet."""
        assert not self._tables.arena.in_use, "nothing is on the streams"
        for module in self._modules:
            self._driver.unload_module(module)
        self._modules.clear()
        self._tables.close()


def are_short(spans: Sequence[Span]) -> bool:
    """Whether a kernel copies such segments faster than a copy engine."""
    return sum(span.nbytes for span in spans) < len(spans) * FRAGMENT_NBYTES_MIN


def compile_for(architecture: str, unit_nbytes: int) -> bytes:
    """The kernel's code for a GPU such as "sm_90"; Triton caches it on disk."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.errors import TritonError

        from tutti.kernels.triton.copy_pages import copy_pages
    except ImportError as error:
        raise Unsupported(f"this Triton version lacks a required function: {error}") from error
    names = ("segments", "pages", "programs")
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    try:
        source = ASTSource(
            fn=copy_pages,
            signature={
                "table": "i64",
                **dict.fromkeys(names, "i32"),
                **dict.fromkeys(("UNIT", "BLOCK"), "constexpr"),
            },
            constexprs={"UNIT": unit_nbytes, "BLOCK": _BLOCK_NBYTES},
        )
        made = triton.compile(source, target=target, options={"num_warps": _WARPS})
        text: str = made.asm["ptx"]
        code: bytes = made.asm["cubin"]
    except (TritonError, RuntimeError, OSError, TypeError, AttributeError, KeyError) as error:
        raise Unsupported(f"Triton does not compile for {architecture}: {error!r}") from error
    entry = text.partition(".entry")[2].partition(")")[0]
    if entry.count(".param") != 1 + len(names) + len(_SCRATCH):
        raise Unsupported(
            "this Triton passes kernel arguments differently; use the version of SGLang"
        )
    return code


def _table_of(targets: Sequence[Span], to: Pages, sources: Sequence[Span], of: Pages) -> np.ndarray:
    spans = [
        (there.address, there.stride_nbytes, here.address, here.stride_nbytes, there.nbytes)
        for there, here in zip(targets, sources, strict=True)
    ]
    return np.concatenate([np.array(spans, np.int64).reshape(-1), to, of]).astype(np.int64)

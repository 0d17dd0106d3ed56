"""Calls of CUDA's driver that enqueue work on a stream, or query its progress.

A thread releases the GIL during a driver call, and waits for it afterwards: up to 5 ms if another
thread computes in Python, as SGLang's idle scheduler does.  A put of four pages needs about 200
such calls.  So they are collected in a table, and native code makes all of them in one call, see
`kernels/native/cuda_calls.h`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tutti.base.arrays import U64
from tutti.base.process import Owned
from tutti.errors import Unsupported
from tutti.native import address, declare, lib, members

#: Arguments of a kernel: values and their ctypes.
Arguments = Sequence[tuple[int, Any]]

#: In the order of `enum TuttiCudaKind`.
KINDS = (
    *("cuStreamWaitValue32", "cuStreamWriteValue32", "cuMemcpyAsync", "cuMemcpyBatchAsync"),
    *("cuMemsetD8Async", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"),
    *("cuEventQuery", "cuStreamQuery"),
)
_OF_CONTEXTS = (
    *("cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"),
    "cuThreadExchangeStreamCaptureMode",
)
#: Most copies of one call: a driver 580 crashed and hung with 51,828 (vllm-project/vllm#49276).
BATCH_MAX = 4096
_BATCH = "cuMemcpyBatchAsync"
#: `cuMemcpyBatchAsync` has the signature that is used here since CUDA 13.0.
_BATCH_VERSION = 13000
_SOURCE_IN_STREAM_ORDER, _PREFER_OVERLAP = 1, 1
_NOT_READY = 600
_NO_CONTEXT = 2**64 - 1

_POINTER, _U64 = ctypes.c_void_p, ctypes.c_uint64
#: `struct tutti_cuda_call`.
_CALL = np.dtype([("kind", "<u4"), ("count", "<u4"), ("stream", "<u8"), ("operands", "<u8", (4,))])


class CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`; the locations are hints for managed memory alone."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaFunctions(ctypes.Structure):
    """`struct tutti_cuda_driver`."""

    _fields_ = (
        *members(_POINTER, "get_current push pop capture_mode"),
        ("of_kinds", _POINTER * len(KINDS)),
    )


class _Pending(threading.local):
    """Calls that a thread collected in `together`, and the memory of their arguments."""

    rows: list[tuple[int, int, int, tuple[int, ...]]] | None = None
    kept: list[object]


class CudaCalls(Owned):
    """Makes the calls in the context of a device.

    find: returns the address of a driver function for a CUDA version; 0 if there is none.
    version: the driver's.  check: raises CudaError for a call's name and result.
    Raises Unsupported if a function is missing.
    """

    context: int

    def __init__(
        self, find: Callable[[str, int], int], version: int, check: Callable[[str, int], None]
    ) -> None:
        self._native = declare(
            lib(), {"tutti_cuda_calls": (ctypes.c_int32, (*(_POINTER, _U64) * 2, _POINTER))}
        )
        self._check = check
        asked = min(version, _BATCH_VERSION)
        found = {name: find(name, asked) for name in (*_OF_CONTEXTS, *KINDS) if name != _BATCH}
        if missing := [name for name, place in found.items() if not place]:
            raise Unsupported(
                f"the driver has no {missing[0]}; install an NVIDIA driver of CUDA 13.0 or newer"
            )
        found[_BATCH] = find(_BATCH, asked) if version >= _BATCH_VERSION else 0
        self.has_copy_batch = bool(found[_BATCH])
        of_kinds = (_POINTER * len(KINDS))(*(found[name] for name in KINDS))
        self._functions = CudaFunctions(*(found[name] for name in _OF_CONTEXTS), of_kinds)
        self._attributes = {
            is_local: CopyAttributes(
                _SOURCE_IN_STREAM_ORDER, flags=0 if is_local else _PREFER_OVERLAP
            )
            for is_local in (False, True)
        }
        self._pending = _Pending()

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Driver.together`."""
        pending = self._pending
        if pending.rows is not None:
            yield
            return
        pending.rows, pending.kept = [], []
        try:
            yield
            self._make(pending.rows)
        finally:
            pending.rows, pending.kept = None, []

    def _add(
        self, name: str, stream: int, *operands: int, count: int = 0, keep: object = None
    ) -> None:
        """keep: the object that the operands point to."""
        row = (KINDS.index(name), count, stream, (*operands, 0, 0, 0, 0)[:4])
        rows = self._pending.rows
        if rows is None:
            self._make([row])
            return
        rows.append(row)
        self._pending.kept.append(keep)

    def _make(self, rows: list[tuple[int, int, int, tuple[int, ...]]]) -> None:
        code, made = self._ask(rows)
        if code:
            failed = "cuCtxPushCurrent" if made == _NO_CONTEXT else KINDS[rows[made][0]]
            self._check(failed, code)

    def _ask(self, rows: list[tuple[int, int, int, tuple[int, ...]]]) -> tuple[int, int]:
        """Makes the calls; returns (result, number of calls that succeeded)."""
        table, made = np.array(rows, _CALL), ctypes.c_uint64()
        code = self._native.tutti_cuda_calls(
            ctypes.byref(self._functions),
            *(self.context, address(table), len(rows)),
            ctypes.byref(made),
        )
        return int(code), made.value

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """See `Driver`; so for the methods below."""
        self._add("cuStreamWaitValue32", stream, address, value)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._add("cuStreamWriteValue32", stream, address, value)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._add("cuMemcpyAsync", stream, target, source, nbytes)

    def copy_batch(
        self, targets: U64, sources: U64, nbytes: U64, stream: int, *, is_local: bool = False
    ) -> None:
        assert targets.size == sources.size == nbytes.size, "three columns of one table"
        columns = [np.ascontiguousarray(c, np.uint64) for c in (targets, sources, nbytes)]
        attributes = ctypes.addressof(self._attributes[is_local])
        for start in range(0, targets.size, BATCH_MAX):
            operands = (address(c) + start * c.itemsize for c in columns)
            count = min(BATCH_MAX, targets.size - start)
            self._add(_BATCH, stream, *operands, attributes, count=count, keep=columns)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self._add("cuMemsetD8Async", stream, target, value, nbytes)

    def record_event(self, event: int, stream: int) -> None:
        self._add("cuEventRecord", stream, event)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._add("cuStreamWaitEvent", stream, event)

    def launch(
        self, function: int, grid: int, block: int, arguments: Arguments, stream: int
    ) -> None:
        values = [kind(value) for value, kind in arguments]
        pointers = (_POINTER * len(values))(*map(ctypes.addressof, values))
        operands = (function, block, ctypes.addressof(pointers))
        self._add("cuLaunchKernel", stream, *operands, count=grid, keep=(values, pointers))

    def is_event_done(self, event: int) -> bool:
        return self._is_done("cuEventQuery", 0, event)

    def is_stream_done(self, stream: int) -> bool:
        return self._is_done("cuStreamQuery", stream, 0)

    def _is_done(self, name: str, stream: int, event: int) -> bool:
        code, made = self._ask([(KINDS.index(name), 0, stream, (event, 0, 0, 0))])
        if code == _NOT_READY and made == 0:
            return False
        if code:
            self._check("cuCtxPushCurrent" if made == _NO_CONTEXT else name, code)
        return True

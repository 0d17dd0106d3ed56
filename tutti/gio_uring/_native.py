"""Declares the functions of the native library whose names start with `gio_`, part by part."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

from tutti import native
from tutti.errors import NativeError, TuttiError

_P = ctypes.c_void_p
_I = ctypes.c_int
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I64 = ctypes.c_int64

_PROTOTYPES: native.Prototypes = {
    # controller.h
    "gio_controller_info": (_I, (_P, _P)),
    "gio_controller_namespace_nlb": (_U64, (_P, _U32)),
    "gio_controller_register": (_I, (_P, _U64, _U64)),
    "gio_controller_unregister": (_I, (_P, _U64)),
    "gio_controller_attach": (_I, (_P, _P)),
    "gio_controller_detach": (_I, (_P, _P, _U64)),
    "gio_controller_expect_rings": (None, (_P, _I)),
    "gio_controller_service": (_U32, (_P, _U64)),
    "gio_controller_start": (_I, (_P,)),
    "gio_controller_stop": (None, (_P,)),
    "gio_controller_is_claimed": (_I, (_P,)),
    "gio_controller_reset": (_I, (_P, _U64)),
    "gio_controller_destroy": (None, (_P,)),
    # controller_memory.h
    "gio_memory_controller_create": (_I, (_P, _P)),
    "gio_memory_controller_medium": (_P, (_P, _U32)),
    "gio_memory_controller_faults": (None, (_P, _P)),
    "gio_memory_controller_fault_range": (None, (_P, _P)),
    "gio_memory_controller_release": (None, (_P,)),
    "gio_memory_controller_power_cut": (None, (_P, _U64)),
    "gio_memory_controller_stats": (None, (_P, _P)),
    "gio_memory_controller_now_ns": (_U64, (_P,)),
    "gio_memory_controller_advance": (None, (_P, _U64)),
    "gio_memory_controller_limit": (None, (_P, _U64)),
    "gio_memory_controller_trace": (None, (_P, _P, _U64)),
    # queue_pair.cpp
    "gio_qp_cid_acquire": (_U32, (_P,)),
    "gio_qp_cid_release": (None, (_P, _U32)),
    "gio_qp_sq_enqueue": (None, (_P, _P)),
    "gio_qp_sq_ring": (None, (_P,)),
    "gio_qp_cq_reap": (_U32, (_P, _U32)),
    "gio_qp_completion": (_U32, (_P, _U32)),
    "gio_queue_sq_fetch": (_I, (_P, _P)),
    "gio_queue_cq_post": (_I, (_P, _U32, _U32)),
    # engine.h
    "gio_engine_create": (_I, (_P, _P)),
    "gio_engine_next": (_U64, (_P, _U64)),
    "gio_engine_reset": (_I, (_P, _U64)),
    "gio_engine_stop": (_I, (_P, _U64)),
    "gio_engine_stats": (None, (_P, _P)),
    "gio_engine_window": (_I, (_P, _U32, _P)),
    "gio_engine_destroy": (None, (_P,)),
    "gio_job_wait_layers": (_I, (_P, _P, _U32, _U64)),
    "gio_job_wait_released": (_I, (_P, _P, _U64)),
    "gio_job_cancel": (None, (_P, _P)),
    # ring_bench.cpp
    "gio_ring_bench": (_I, (_P, _P, _U64, _U32, _U64, _U64, _U32, _P)),
    "gio_path_bench": (_I, (_P, _P, _P, _P)),
}


#: See native.quick.
_QUICK: native.Prototypes = {
    "gio_engine_submit": (_I, (_P, _P, _P)),
    "gio_job_open_gate": (None, (_P, _P)),
    "gio_job_grant": (_I, (_P, _P, _U32, _U32)),
    "gio_job_report": (None, (_P, _P)),
    "gio_job_free": (None, (_P,)),
    "gio_split_runs": (_I64, (_P, _P, _P, _U64, _P, _P, _U64)),
    "gio_slot_runs": (_I64, (_P, _U64, _P, _P, _P, _U64)),
    "gio_copy_pages": (_I64, (_P, _U32, _U64, _U64, _P)),
}


def part(prototypes: native.Prototypes) -> Callable[[], ctypes.CDLL]:
    """Returns a function that loads the native library and declares these functions' types.

    Its first call raises NativeError where `native.declare` does.
    """
    return cache(lambda: native.declare(native.lib(), prototypes))


lib = part(_PROTOTYPES)


@cache
def quick() -> ctypes.CDLL:
    """See native.quick."""
    return native.declare(native.quick(), _QUICK)


def check(result: int, what: str, remedy: str, error: type[TuttiError] = NativeError) -> None:
    """Raises `error` when `result` is a negative errno; the message has `what` and `remedy`."""
    if result < 0:
        raise error(f"{what}: {os.strerror(-result)}; {remedy}")

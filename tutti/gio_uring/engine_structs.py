"""The structs that the native engine shares with Python; a test compares the layouts."""

from __future__ import annotations

import ctypes

from tutti.gio_uring.iocb import IocbStruct
from tutti.native import members


class JobConfig(ctypes.Structure):
    """``gio::JobConfig``."""

    _fields_ = (
        ("iocb", IocbStruct),
        *members(ctypes.c_uint64, "digests page_status tag timeout_ns"),
        *members(ctypes.c_uint32, "priority digest gated window"),
        *members(ctypes.c_uint64, "words layer_ns"),
        *members(ctypes.c_uint32, "held ahead"),
        *members(ctypes.c_uint64, "then before_then context"),
    )


class JobReport(ctypes.Structure):
    """``gio::JobReport``: times in CLOCK_MONOTONIC nanoseconds, 0 while not done."""

    _fields_ = (
        *members(ctypes.c_uint64, "submitted_ns done_ns"),
        *members(ctypes.c_uint32, "layers_ready done released status"),
    )


class EngineStats(ctypes.Structure):
    """``gio::EngineStats``: totals since the engine started."""

    _fields_ = (
        *members(ctypes.c_uint64, "commands bytes_read bytes_written jobs timeouts thread_cpu_ns"),
        *members(ctypes.c_uint64, "digest_ns digests_offloaded"),
    )


class ServiceThreadConfig(ctypes.Structure):
    """``gio::ServiceThreadConfig``."""

    _fields_ = (
        ("controller", ctypes.c_uint64),
        ("queue_pair", ctypes.c_uint64),
        ("lists", ctypes.c_uint64),
    )


class RouteStruct(ctypes.Structure):
    """``gio::Route``."""

    _fields_ = (("thread", ctypes.c_uint32), ("nsid", ctypes.c_uint32))


class EngineConfig(ctypes.Structure):
    """``gio::EngineConfig``."""

    _fields_ = (
        *members(ctypes.c_uint64, "threads routes"),
        *members(ctypes.c_uint32, "n_threads n_routes list_nbytes digest_workers"),
        ("window_nbytes", ctypes.c_uint64),
    )


class WindowStats(ctypes.Structure):
    """``gio::WindowStats``: a service thread's measurements of its drive; [0] reads, [1] writes.

    window_nbytes: the window while layers are waited for, if any were, else the window. rate: bytes
    per second of the last sample with a full window, 0 if none. latency_ns: of commands, smoothed.
    samples: number of samples of the window in use.
    """

    _fields_ = (
        *members(ctypes.c_uint64 * 2, "window_nbytes rate latency_ns samples"),
        *members(ctypes.c_uint64, "inflight_nbytes commands bytes_read bytes_written"),
    )

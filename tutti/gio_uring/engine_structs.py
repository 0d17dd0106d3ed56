"""The structs that the native engine shares with Python; a test compares the layouts."""

from __future__ import annotations

import ctypes

from tutti.gio_uring.iocb import IocbStruct


class JobConfig(ctypes.Structure):
    """``gio::JobConfig``."""

    _fields_ = (
        ("iocb", IocbStruct),
        ("digests", ctypes.c_uint64),
        ("page_status", ctypes.c_uint64),
        ("tag", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("priority", ctypes.c_uint32),
        ("digest", ctypes.c_uint32),
        ("gated", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("words", ctypes.c_uint64),
        ("layer_ns", ctypes.c_uint64),
        ("held", ctypes.c_uint32),
        ("ahead", ctypes.c_uint32),
        ("then", ctypes.c_uint64),
        ("before_then", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
    )


class JobReport(ctypes.Structure):
    """``gio::JobReport``: times in CLOCK_MONOTONIC nanoseconds, 0 while not done."""

    _fields_ = (
        ("submitted_ns", ctypes.c_uint64),
        ("done_ns", ctypes.c_uint64),
        ("layers_ready", ctypes.c_uint32),
        ("done", ctypes.c_uint32),
        ("released", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
    )


class EngineStats(ctypes.Structure):
    """``gio::EngineStats``: totals since the engine started."""

    _fields_ = (
        ("commands", ctypes.c_uint64),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
        ("jobs", ctypes.c_uint64),
        ("timeouts", ctypes.c_uint64),
        ("thread_cpu_ns", ctypes.c_uint64),
        ("digest_ns", ctypes.c_uint64),
        ("digests_offloaded", ctypes.c_uint64),
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
        ("threads", ctypes.c_uint64),
        ("routes", ctypes.c_uint64),
        ("n_threads", ctypes.c_uint32),
        ("n_routes", ctypes.c_uint32),
        ("list_nbytes", ctypes.c_uint32),
        ("digest_workers", ctypes.c_uint32),
        ("window_nbytes", ctypes.c_uint64),
    )


class WindowStats(ctypes.Structure):
    """``gio::WindowStats``: what a service thread has done, and found out about its drive;
    [0] reads, [1] writes.

    window_nbytes: in use, while layers are waited for if any were. rate: bytes per second of the
    last sample with a full window, 0 before it. latency_ns: of commands, smoothed. samples: of the
    window in use.
    """

    _fields_ = (
        ("window_nbytes", ctypes.c_uint64 * 2),
        ("rate", ctypes.c_uint64 * 2),
        ("latency_ns", ctypes.c_uint64 * 2),
        ("samples", ctypes.c_uint64 * 2),
        ("inflight_nbytes", ctypes.c_uint64),
        ("commands", ctypes.c_uint64),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    )

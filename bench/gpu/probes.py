"""Tests how the driver handles waits that the medium ends; the engines depend on this.

Needs no device code.  The runner sets CUDA_DEVICE_MAX_CONNECTIONS to 8 for it, as SGLang does.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from tutti.base.units import MiB, format_nbytes
from tutti.bench.gpu.cases import RoundPlan, Row
from tutti.bench.gpu.interference import Gate
from tutti.bench.gpu.rig import GpuUnderTest, poll_until, spin_until
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.memory import HostBuffer

#: More calls than a stream can hold, number of streams, and times after which a call is blocked.
_CALLS_MAX, _STREAMS, _BLOCKED_S, _ENDS_S = 8192, 32, 0.2, 10.0
_SIZES = (1 * MiB, 4 * MiB, 16 * MiB, 32 * MiB)
_REPEATS = 9


def probes(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """A full stream and other threads, a wait and other streams, a wait and the copy after it."""
    driver = machine.driver
    rows = [
        Row("a full stream behind a closed wait, another thread's call", partial(_full, driver)),
        Row(f"a closed wait, {_STREAMS} other streams", partial(_aliased, driver)),
    ]
    sizes = [size for size in _SIZES if size <= plan.batch_nbytes]
    return rows + [
        Row(f"from a word to the end of {format_nbytes(size)}", partial(_latency, driver, size))
        for size in sizes
    ]


@contextmanager
def _streams(driver: Driver, count: int) -> Iterator[tuple[Gate, list[int], int]]:
    """A gate, streams, and device memory; all made before anything waits."""
    gate, memory = Gate(driver), driver.allocate(4096)
    streams = [driver.create_stream() for _ in range(count)]
    try:
        yield gate, streams, memory
    finally:
        gate.close()
        for stream in streams:
            poll_until(lambda s=stream: driver.is_stream_done(s), "a stream")  # type: ignore[misc]
            driver.destroy_stream(stream)
        driver.free(memory)


def _full(driver: Driver) -> dict[str, Any]:
    """Number of calls that a stream takes after a wait; whether other threads' calls block."""
    with _streams(driver, 2) as (gate, (closed, other), memory):
        counts, seconds = [0], [0.0]

        def fill() -> None:
            while counts[0] < _CALLS_MAX and not ends.is_set():  # bounded by the gate's own end
                driver.fill(memory, 1, 64, closed)
                counts[0] += 1

        def call() -> None:
            began_s = time.perf_counter()
            driver.fill(memory, 2, 64, other)
            seconds[0] = time.perf_counter() - began_s

        ends = threading.Event()
        with gate.holds(closed):
            filler = threading.Thread(target=fill, daemon=True)
            filler.start()
            before = -1
            while filler.is_alive() and counts[0] != before:  # until no call returns any more
                before = counts[0]
                filler.join(_BLOCKED_S)
            held = filler.is_alive()
            caller = threading.Thread(target=call, daemon=True)
            caller.start()
            caller.join(_BLOCKED_S)
            blocked = caller.is_alive()
            taken = counts[0]
            ends.set()
        filler.join(_ENDS_S)
        caller.join(_ENDS_S)
    verdict = f"{taken} calls, then " + ("the next one waits" if held else "no end was seen")
    return {
        "verdict": f"{verdict}; another thread's call {'waits, too' if blocked else 'returns'}",
        "calls_taken": taken,
        "the_next_call_blocked": held,
        "another_threads_call_blocked": blocked,
        "another_threads_call_us": seconds[0] * 1e6,
    }


def _aliased(driver: Driver) -> dict[str, Any]:
    """Number of streams that wait only because they share a hardware queue."""
    with _streams(driver, _STREAMS + 1) as (gate, (closed, *others), memory):
        with gate.holds(closed):
            for stream in others:
                driver.fill(memory, 1, 64, stream)
            time.sleep(_BLOCKED_S)
            late = sum(not driver.is_stream_done(stream) for stream in others)
        for stream in others:
            poll_until(lambda s=stream: driver.is_stream_done(s), "a stream")  # type: ignore[misc]
    verdict = f"{late} of {_STREAMS} streams wait with it"
    return {"verdict": verdict, "streams": _STREAMS, "streams_that_waited": late}


def _latency(driver: Driver, nbytes: int) -> dict[str, Any]:
    """Time from the CPU's store of a word until the CPU sees the word written after the copy."""
    host = HostBuffer(nbytes + 4096)
    pinned = PinnedMemory(driver, host)
    words = host.array[nbytes : nbytes + 128].view(np.uint32)
    ready = pinned.device_address + nbytes
    memory, stream = driver.allocate(nbytes), driver.create_stream()
    found: dict[bool, list[float]] = {True: [], False: []}
    words[:] = 0
    for number in range(1, 2 * _REPEATS + 1):
        copies = number % 2 == 0
        driver.wait_value(stream, ready, number)
        if copies:
            driver.copy(memory, pinned.device_address, nbytes, stream)
        driver.write_value(stream, ready + 64, number)
        time.sleep(0.002)  # the stream is at the wait
        began_s = time.perf_counter()
        words[0] = number
        spin_until(lambda n=number: words[16] == n, "a copy")  # type: ignore[misc]
        found[copies].append((time.perf_counter() - began_s) * 1e6)
    driver.destroy_stream(stream)
    driver.free(memory)
    pinned.close()
    whole, empty = (statistics.median(found[copies]) for copies in (True, False))
    verdict = f"{whole:.0f} us, {empty:.0f} us without the copy"
    return {"verdict": verdict, "nbytes": nbytes, "us": whole, "us_without_the_copy": empty}

"""Holds short puts back while the device is busy, and writes them together.

Decoding appends one page at a time to many chains.  Alone, each is a put of its own, with a
command per layer and a record; together they are one batch, whose neighbours on the medium share
commands.  As in Nagle's algorithm nothing waits for a clock: a short put goes at once when no other
is under way, and with the first batch that ends otherwise.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from tutti.errors import TuttiError
from tutti.process import Owned
from tutti.threads import start_thread
from tutti.transfers.core import Core
from tutti.transfers.tickets import PutProgress
from tutti.transfers.writer import PutRequest, Writer

#: A run of one layer that is at least this long is worth a command of its own.
COMMAND_NBYTES = 256 << 10
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Held:
    request: PutRequest
    progress: PutProgress
    finished: int  # of the writer, when it was held


class Coalescer(Owned):
    """Puts for one pool: long ones at once, short ones together."""

    def __init__(self, core: Core, writer: Writer) -> None:
        self._core = core
        self._writer = writer
        self._held: list[_Held] = []
        self._stopping = False
        slice_nbytes = core.geometry.slice_padded_nbytes
        self._short = min(core.geometry.group_slots, -(-COMMAND_NBYTES // slice_nbytes))
        self._thread = threading.Thread(target=self._run, name="tutti-coalescer", daemon=True)
        start_thread(self._thread)

    def put(self, request: PutRequest) -> PutProgress:
        """Starts a put, or holds it back; see ObjectStore.put."""
        core = self._core
        progress = PutProgress(len(request.keys), core.guard, core.store_latency)
        with core.lock:
            core.check_open()
            if len(request.keys) < self._short and self._writer.active and not self._stopping:
                core.in_flight += 1
                self._held.append(_Held(request, progress, self._writer.finished))
                if self._due():
                    core.changed.notify_all()
                return progress
        self._writer.put(request, progress)
        return progress

    def stop(self, timeout_s: float) -> None:
        """Writes what is held back and ends the thread."""
        with self._core.lock:
            self._stopping = True
            self._core.changed.notify_all()
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Ends the thread if ``stop`` did not."""
        self.stop(1.0)

    def _run(self) -> None:
        core = self._core
        stopped = False
        while not stopped:  # bounded by stop()
            with core.lock:
                core.changed.wait_for(lambda: self._due() or self._stopping, _LOOK_S)
                held = []
                if self._due() or self._stopping:
                    held, self._held = self._held, []
                stopped = self._stopping and not self._held
            core.guard.call("a group of held puts", self._write, held)

    def _due(self) -> bool:
        if not self._held:
            return False
        pages = sum(len(held.request.keys) for held in self._held)
        first = self._held[0].finished
        return (
            not self._writer.active
            or self._writer.finished > first
            or pages >= self._writer.batch_pages
        )

    def _write(self, held: list[_Held]) -> None:
        by_memory: dict[tuple[int, ...], list[_Held]] = {}
        for one in held:
            request = one.request
            alike = (id(request.memory), request.tenant, request.expiry_64s)
            by_memory.setdefault(alike, []).append(one)
        for group in by_memory.values():
            together = PutProgress(sum(len(one.request.keys) for one in group))
            try:
                self._writer.put(PutRequest.merge([one.request for one in group]), together)
            except BaseException as error:  # whatever it is: others wait for the tickets
                if not isinstance(error, TuttiError):
                    self._core.guard.caught("a put that was held back", error)
                together.refuse(np.arange(together.outcome.size), error)
                self._share(together, group)
            else:
                together.on_done(lambda whole, group=group: self._share(whole, group))  # type: ignore[misc]

    def _share(self, together: PutProgress, group: list[_Held]) -> None:
        """Hands each put its part of the outcome."""
        start = 0
        for one in group:
            end = start + len(one.request.keys)
            one.progress.outcome[:] = together.outcome[start:end]
            one.progress.status[:] = together.status[start:end]
            one.progress.refusal = together.refusal
            one.progress.end_part()
            self._core.end()
            start = end

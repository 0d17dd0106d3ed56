"""The resources of an open pool, released when the store is closed or dropped."""

from __future__ import annotations

import logging
import threading
import warnings
from functools import partial
from typing import Protocol, runtime_checkable

from tutti.base.interrupts import start
from tutti.errors import DeviceTimeout, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.memory import DmaRegion
from tutti.memory.host_memory import HostMemory
from tutti.transfers.core import Closable, Core

_log = logging.getLogger(__name__)

#: Resources of devices that could not be stopped, which are kept until the process exits.
_STUCK: list[Resources] = []


@runtime_checkable
class JobKeeper(Protocol):
    """A part that keeps memory of jobs with lost commands, until its close resets the device."""

    @property
    def kept_jobs(self) -> int:
        """How many; a store that closes does not wait for them."""


class Resources:
    """Controller, engine, threads and memory of one store; it has no reference to the store.

    parts: closed in this order after the engine.  memories: what is registered.
    recovery: the thread that reads the pool after it was opened.
    """

    def __init__(self, controller: NativeController, engine: Engine) -> None:
        self.controller = controller
        self.engine = engine
        self.core: Core | None = None
        self.parts: list[Closable] = []
        self.memories: list[HostMemory] = []
        self.recovery: threading.Thread | None = None
        self._regions: dict[int, list[DmaRegion]] = {}
        self._lost: list[DmaRegion] = []

    def add(self, memory: HostMemory) -> None:
        """Registers memory with the controller."""
        self._regions[id(memory)] = self.controller.register_all(memory.buffers)
        self.memories.append(memory)
        self.controller.read_page_sizes()

    def remove(self, memory: HostMemory) -> None:
        """Undoes ``add``; no transfer of this memory may be under way."""
        for region in self._regions[id(memory)]:
            region.close()
        del self._regions[id(memory)]
        self.memories.remove(memory)

    def lost_jobs(self) -> int:
        """Jobs that no wait ends: only the close of their part resets the device."""
        return sum(part.kept_jobs for part in self.parts if isinstance(part, JobKeeper))

    def lose(self, regions: list[DmaRegion]) -> None:
        """Keeps memory registered until the engine has ended: a device may still write to it."""
        self._lost += regions

    def release(self, timeout_s: float) -> None:
        """Releases everything; a call after an error continues from there.

        Raises DeviceTimeout, and keeps all, when the device does not stop.
        """
        try:
            self.engine.close(timeout_s)
        except DeviceTimeout:
            _STUCK.append(self)
            raise
        if self.recovery is not None and self.recovery.ident is not None:
            self.recovery.join(timeout_s)
        for region in self._lost:
            region.close()
        while self.parts:  # bounded by their number
            self.parts[0].close()
            del self.parts[0]
        for memory in list(self.memories):
            self.remove(memory)
        self.controller.close()

    def undo_opening(self, reason: BaseException, timeout_s: float) -> None:
        """Ends what was begun before an opening failed; the controller stays the caller's."""
        try:
            self.engine.close(timeout_s)
        except TuttiError as stuck:
            _STUCK.append(self)
            reason.add_note(str(stuck))
            return
        if self.recovery is not None and self.recovery.ident is not None:
            self.recovery.join(timeout_s)
        for part in self.parts:
            try:
                part.close()
            except TuttiError as error:
                reason.add_note(str(error))

    def drop(self, timeout_s: float) -> None:
        """Releases everything of a store that was not closed, on a thread of its own: a finalizer
        runs in whatever thread frees the store.
        """
        start(partial(self._release_dropped, timeout_s))  # first: a warning may be an error
        warnings.warn("a pool was not closed; close the store", ResourceWarning, stacklevel=2)

    def _release_dropped(self, timeout_s: float) -> None:
        if self.core is not None:
            with self.core.lock:
                self.core.closing = True
                self.core.changed.notify_all()
        try:
            self.release(timeout_s)
        except TuttiError as error:
            _log.warning("a store that was not closed cannot be released: %s", error)

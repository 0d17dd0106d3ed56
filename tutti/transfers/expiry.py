"""Expiry: removes the objects whose time is over, in a thread."""

from __future__ import annotations

import threading

import numpy as np

from tutti.base.arrays import Slots
from tutti.base.process import Owned
from tutti.base.threads import start_thread
from tutti.placement.index import SlotState
from tutti.transfers.core import Core
from tutti.transfers.reclaim import Reclaimer, deallocate_empty

_INTERVAL_S = 16.0


class Expiry(Owned):
    """Removes what expires in one open pool, in a thread if anything does.  Thread-safe."""

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, something: bool) -> None:
        """Starts the thread if there is something that expires.  Raises CapacityError."""
        with self._core.lock:
            if something and self._thread is None:
                given = "the thread that removes what expired", self._run
                thread = threading.Thread(target=self._core.guard.call, args=given, daemon=True)
                start_thread(thread, "tutti-expiry")
                self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def sweep(self) -> Slots:
        """Removes what has expired and is not being transferred; the slots of these objects."""
        core = self._core
        with core.lock:
            if not core.ready or core.closing:
                return np.zeros(0, np.int64)
            index = core.index
            due = (index.expiry > 0) & (index.expiry <= core.now_64s())
            slots = np.flatnonzero(due & index.resident() & (index.pins == 0)).astype(np.int64)
            if slots.size:
                core.lookup_pins.forget(slots)
                core.counters.expired += slots.size
                self._reclaimer.discard(slots)
            return slots

    def _run(self) -> None:
        core, gone = self._core, np.zeros(0, np.int64)
        while not self._stopping.wait(_INTERVAL_S):
            # Slots of the sweep before; the records of most of them are void by now.
            with core.lock:
                late = gone[core.index.state[gone] == SlotState.VOIDING]
            deallocate_empty(core, self._reclaimer, gone)
            gone = np.concatenate([late, self.sweep()])

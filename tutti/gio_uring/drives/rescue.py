"""Ends commands that a drive does not complete: abort, then reset, then stop using the drive.

The job of a late command has failed already; this releases its memory. A thread of its own waits
for the drive, so that the service thread is not blocked; it asks the service thread only for work
on the rings.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import threading
import time
from enum import Enum
from typing import Protocol

from tutti.base.process import Owned
from tutti.errors import DeviceTimeout, TuttiError
from tutti.gio_uring import _native
from tutti.gio_uring.drives.admin import NvmeAdmin

LATE_MAX = 64  # commands considered in one round
ABORTS_MAX = 4  # NVM Express Base Specification 2.0, ACL: drives take at least one, often four
ABORT_TIMEOUT_S = 1.0
GRACE_S = 2.0  # for commands to end after their abort
RESET_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 5.0
RESETS_MAX = 5  # within RESETS_WINDOW_S; a drive that needs more is not used any more
RESETS_WINDOW_S = 600.0
_LOOK_S = 0.1
_NAP_S = 0.001

_log = logging.getLogger(__name__)

_P = ctypes.c_void_p
_U32 = ctypes.c_uint32

_lib = _native.part(
    {
        "gio_vfio_controller_park": (ctypes.c_int, (_P,)),
        "gio_vfio_controller_ask": (None, (_P, _U32)),
        "gio_vfio_controller_asked": (_U32, (_P,)),
        "gio_vfio_controller_late": (_U32, (_P, _P, _U32)),
    }
)


class Ask(Enum):
    """`gio::Ask`: a request to the service thread."""

    END_ALL = 1
    GO_ON = 2
    LOSE = 3


class RescueResult(Enum):
    """Result of one round."""

    NOTHING_LATE = 0
    ABORTED = 1
    RESET = 2
    LOST = 3


class LateCommandStruct(ctypes.LittleEndianStructure):
    """`gio::LateCommand`."""

    _fields_ = (
        ("qid", ctypes.c_uint32),
        ("cid", ctypes.c_uint32),
        ("deadline_ns", ctypes.c_uint64),
    )


#: (qid, cid, deadline in nanoseconds) of one command.
Late = tuple[int, int, int]


class RescuedDrive(Protocol):
    """What the rescue needs of a controller."""

    def late(self) -> list[Late]:
        """Commands beyond their deadline, at most LATE_MAX."""

    def park(self) -> None:
        """Redirects doorbells away from the drive, until GO_ON. Raises NativeError."""

    def ask(self, what: Ask) -> None:
        """Waits until the service thread did it. Raises DeviceTimeout if no thread serves."""


class NativeDrive:
    """A RescuedDrive: a native vfio controller, which must outlive this object."""

    def __init__(self, handle: int, name: str) -> None:
        self._handle = handle
        self._name = name

    def late(self) -> list[Late]:
        """See RescuedDrive."""
        found = (LateCommandStruct * LATE_MAX)()
        count = int(_lib().gio_vfio_controller_late(self._handle, found, LATE_MAX))
        return [(c.qid, c.cid, c.deadline_ns) for c in found[: min(count, LATE_MAX)]]

    def park(self) -> None:
        """See RescuedDrive."""
        result = _lib().gio_vfio_controller_park(self._handle)
        _native.check(result, f"cannot stop the doorbells of {self._name}", "close the controller")

    def ask(self, what: Ask) -> None:
        """See RescuedDrive."""
        _lib().gio_vfio_controller_ask(self._handle, what.value)
        deadline_s = time.monotonic() + ASK_TIMEOUT_S
        while _lib().gio_vfio_controller_asked(self._handle):
            if time.monotonic() > deadline_s:
                raise DeviceTimeout(
                    f"no thread serves the queues of {self._name}, so its reset cannot end; "
                    "close it"
                )
            time.sleep(_NAP_S)


class DriveRescue(Owned):
    """Polls one drive for late commands and ends them.

    A late command is aborted once. Commands that do not end within GRACE_S lead to a reset. If a
    reset fails, or RESETS_MAX resets were not enough within RESETS_WINDOW_S, the drive is lost:
    the IOMMU blocks its access to memory, and its commands end with STATUS_DEVICE_GONE.

    outcomes: number of rounds by their result.
    """

    def __init__(self, admin: NvmeAdmin, drive: RescuedDrive, *, grace_s: float = GRACE_S) -> None:
        self._admin = admin
        self._drive = drive
        self._grace_s = grace_s
        self._resets: collections.deque[float] = collections.deque(maxlen=RESETS_MAX)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gio-rescue", daemon=True)
        self._has_failed = False
        self.outcomes: collections.Counter[RescueResult] = collections.Counter()

    def start(self) -> None:
        """Starts a thread that calls `look` every 100 ms."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its current round; False if that takes longer than the timeout."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S) and not self._has_failed:
            try:
                self.outcomes[self.look()] += 1
            except TuttiError:
                self._has_failed = True
                _log.exception("a drive can neither be reset nor given up; close its pool")

    def look(self) -> RescueResult:
        """One round: at most ABORTS_MAX aborts, and one reset.

        Raises DeviceTimeout or NativeError if a lost drive cannot be isolated either; its memory
        stays owned then.
        """
        late = self._drive.late()
        if not late:
            return RescueResult.NOTHING_LATE
        _log.warning("%d commands of %s are late", len(late), self._admin.device.bdf)
        self._abort(late[:ABORTS_MAX])
        if self._all_end(late):
            return RescueResult.ABORTED
        return self._reset()

    def _abort(self, late: list[Late]) -> None:
        for command in late:
            qid, cid, _ = command
            try:
                with self._admin.lock:  # so that its CID cannot be reused meanwhile
                    if command in self._drive.late():
                        self._admin.abort(qid, cid, ABORT_TIMEOUT_S)
            except TuttiError:  # no answer or a refusal: a reset follows
                return

    def _all_end(self, late: list[Late]) -> bool:
        deadline_s = time.monotonic() + self._grace_s
        while set(late) & set(self._drive.late()):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S / 4)
        return True

    def _reset(self) -> RescueResult:
        with self._admin.lock:
            if not self._drive.late():  # the drive was reset elsewhere
                return RescueResult.ABORTED
            now_s = time.monotonic()
            often = len(self._resets) == RESETS_MAX and now_s - self._resets[0] < RESETS_WINDOW_S
            self._resets.append(now_s)
            self._drive.park()
            try:
                if often:
                    raise DeviceTimeout(f"{RESETS_MAX} resets have not helped; replace the drive")
                self._admin.restart(RESET_TIMEOUT_S, lambda: self._drive.ask(Ask.END_ALL))
                self._drive.ask(Ask.GO_ON)
            except TuttiError:
                _log.exception("%s is given up", self._admin.device.bdf)
                self._drive.ask(Ask.LOSE)
                return RescueResult.LOST
        _log.warning("%s was reset; its late commands have ended", self._admin.device.bdf)
        return RescueResult.RESET

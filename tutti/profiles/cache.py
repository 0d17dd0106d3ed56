"""Measured speeds of media, kept between processes: a JSON file for each machine and medium.

The folder is $XDG_CACHE_HOME/tutti, by default ~/.cache/tutti.  A file that cannot be read or
written costs a measurement, never a start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tutti.base.cache_folder import cache_folder
from tutti.base.checks import open_regular
from tutti.base.units import MiB

_FILE_NBYTES_MAX = 1 * MiB
_LOOK_S = 0.02

_log = logging.getLogger(__name__)


class CachedSpeeds:
    """The entry of one machine and medium.

    facts: what must be the same for the entry to hold; the file is named by their digest.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = dict(facts)
        self._name = xxhash.xxh3_64_hexdigest(json.dumps(self._facts, sort_keys=True).encode())

    @property
    def path(self) -> Path:
        """The file.  Raises FileNotFoundError as `cache_folder` does."""
        return cache_folder() / f"medium-{self._name}.json"

    def read(self) -> dict[str, Any] | None:
        """The speeds of the entry; None without a usable one."""
        try:
            with open_regular(self.path) as file:
                content = json.loads(file.read(_FILE_NBYTES_MAX))
            if content["facts"] != self._facts:
                raise ValueError("it was measured on another machine")
            io = content["io"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self.refused(error)
            return None
        return io if isinstance(io, dict) else None

    def refused(self, why: object) -> None:
        """Logs that the entry cannot be used."""
        _log.warning("the cached profile %s is not used: %s", self.path, why)

    def write(self, io: Mapping[str, Any]) -> None:
        """Writes the entry; logs a warning if the cache cannot be written."""
        beside = None
        try:
            path = self.path
            beside = path.with_suffix(f".{os.getpid()}")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_text(json.dumps({"facts": self._facts, "io": io}) + "\n")
            os.replace(beside, path)
        except OSError as error:
            _log.warning(
                "the profile is not cached (%s); the medium is measured again at the next start."
                " Make the folder writable, name another one by XDG_CACHE_HOME, or pass a file with"
                " profile=",
                error,
            )
            if beside is not None:
                with contextlib.suppress(OSError):
                    beside.unlink()

    @contextlib.contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Holds a lock inside, so that one process measures the medium for all of them.

        Continues without the lock after the timeout, and where the cache cannot be written.
        """
        fd = None
        deadline_s = time.monotonic() + timeout_s
        try:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(self.path.with_suffix(".lock"), flags, 0o600)
                while not _locked(fd) and time.monotonic() < deadline_s:
                    time.sleep(_LOOK_S)
            yield
        finally:
            if fd is not None:
                os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""What stores keep of this process: threads and descriptors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path


class Kept:
    """Threads and descriptors of stores that began after this: other tests may have left some."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._threads = self._threads_of_stores()
        self._descriptors = self._descriptors_of_stores()

    def is_nothing(self) -> bool:
        """Whether all of them have ended."""
        more = self._descriptors_of_stores() - self._descriptors
        return not more and not self._threads_of_stores() - self._threads

    @staticmethod
    def _threads_of_stores() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith(("tutti-", "gio-"))}

    def _descriptors_of_stores(self) -> Counter[str]:
        """How many refer to the pool, and to each kind of object that has no path."""
        found: Counter[str] = Counter()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{fd}")
                found[target] += target == self._path or target.startswith("anon_inode:")
        return found

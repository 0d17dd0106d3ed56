"""Misuses the native library: `python misuse.py use|leak FOLDER`.

Shows that a sanitizer sees the mistakes of a caller: one reads a job after it was freed, the other
never frees it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tutti.gio_uring import _native
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.file_creation import allocate_file


def main(mistake: str, folder: str) -> None:
    path = Path(folder) / "file"
    allocate_file(path, 1 << 20)
    with FileController([path], executor="threads") as controller:
        engine = Engine(controller)
        job = engine.flush([1])
        assert job.wait_released(10)
        job._free = lambda _: None  # it is not freed by itself
        if mistake == "use":
            _native.quick().gio_job_free(job.native)
            job.report()
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

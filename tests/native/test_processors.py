"""Service threads that hash do not wait for each other on one processor."""

from __future__ import annotations

import os
import subprocess
import sys

from native.programs import Build

#: Prints how often threads left their processor, and were free again, with one drive and with two.
LOADS = """
import ctypes, time
import numpy as np
from tutti.bench import threads
from tutti.gio_uring.nvme_spec import OPCODE_WRITE

shim = ctypes.CDLL(None)
for drives, seconds in ((1, 0), (2, 30)):
    rig = threads._Rig((drives, 0), "zero_copy", 512, 2, threads._SLICE_NBYTES)
    end_s = time.monotonic() + seconds
    while True:
        rig.seconds(OPCODE_WRITE, np.zeros(rig.digests, np.uint64))
        if shim.asked_away() or time.monotonic() > end_s:
            break
    rig.close()
    print(shim.asked_away(), shim.asked_anywhere())
"""


def test_one_of_two_threads_that_hash_on_one_processor_leaves_it(build: Build) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(build("one_processor", "library"))}
    done = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    alone, both = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert alone == (0, 0)
    assert both[0] == both[1] > 0

"""The queue behind a linker: what it may use, and the threads that serve it."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

from linker_engine import Rig

from tutti.bench.simulate.hardware import drive_names, machine
from tutti.bench.slack.conditions import CONDITIONS
from tutti.scheduler.policy import Limits


def test_the_limits_that_are_simulated_are_those_of_a_linker(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        served = rig.stored_pool.store.config.schedule.limits
    simulated = CONDITIONS["linker limits"].limits(Limits(), machine(drive_names()[0], "H100"))
    assert served == replace(simulated, read_ahead_nbytes=served.read_ahead_nbytes)


def test_five_threads_serve_a_pool(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Rig(tmp_path):
        begun = Counter(thread.name for thread in set(threading.enumerate()) - before)
    transfers = ("tutti-puts", "tutti-scheduler", "tutti-copy-out", "tutti-offload", "tutti-ahead")
    assert [begun[name] for name in transfers] == [1] * 5, begun

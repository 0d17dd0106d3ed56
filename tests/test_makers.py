"""Several processes that make, open and format one pool at once: one has it, the others get
PoolInUse.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tutti.errors import MemberMissing
from tutti.medium.layout import KVLayout
from tutti.store import format as format_pool
from tutti.store import open as open_pool

ROUNDS, PROCESSES = 8, 4
PERIOD_S = 0.4

#: Opens or makes pool after pool, each at the same moment as the other processes.
WORKER = """
import sys, time
sys.path[:] = {path!r}
import tutti
from tutti.errors import TuttiError
from tutti.gio_uring.controller_file import uring_refusal
uring_refusal()
folder, members, start_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
layout = tutti.KVLayout.mha(4, 2, 64, 16, "bfloat16", model="tiny")
for round_ in range({rounds}):
    paths = [f"{{folder}}/{{round_}}-{{m}}" for m in range(members)]
    time.sleep(max(0.0, start_s + round_ * {period_s} - time.time()))
    try:
        if sys.argv[4] == "format":
            tutti.format(paths, layout, "48MiB", force=True)
        else:
            tutti.open(paths, layout, "48MiB", durability="flush").close()
        print("done")
    except TuttiError as error:
        print(type(error).__name__, "" if type(error).__name__ == "PoolInUse" else error)
"""


@pytest.mark.parametrize("members", [1, 3])
def test_every_loser_gets_pool_in_use(tmp_path: Path, members: int) -> None:
    counts = raced(tmp_path, members, ["open"] * PROCESSES)
    assert set(counts) <= {"done", "PoolInUse"}, counts
    assert counts["done"] >= ROUNDS


def test_formatting_by_force_against_opening(tmp_path: Path) -> None:
    counts = raced(tmp_path, 3, ["open", "format"] * (PROCESSES // 2))
    assert set(counts) <= {"done", "PoolInUse"}, counts
    assert counts["done"] >= ROUNDS


def raced(folder: Path, members: int, verbs: list[str]) -> Counter[str]:
    """What each of several processes got in each round."""
    code = WORKER.format(path=sys.path, rounds=ROUNDS, period_s=PERIOD_S)
    command = [sys.executable, "-c", code, str(folder), str(members), str(time.time() + 4)]
    workers = [
        subprocess.Popen([*command, verb], stdout=subprocess.PIPE, text=True) for verb in verbs
    ]
    try:
        said = [worker.communicate(timeout=60)[0].splitlines() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
    counts = Counter(line.strip() for lines in said for line in lines)
    assert sum(counts.values()) == ROUNDS * len(verbs)
    return counts


def test_a_member_that_is_missing_is_said_so(tmp_path: Path) -> None:
    """Where no other process makes it just now."""
    layout = KVLayout.mha(4, 2, 64, 16, "bfloat16", model="tiny")
    paths = [tmp_path / f"member{i}" for i in range(3)]
    format_pool(paths, layout, "48MiB")
    paths[2].unlink()
    with pytest.raises(MemberMissing, match="member2 does not exist"):
        open_pool(paths, layout, "48MiB")

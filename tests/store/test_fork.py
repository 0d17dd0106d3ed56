"""Forks of a process whose pool is open: the parent's pool stays its own, and whole."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crash.objects import when_unlocked

import tutti
from store.forked import CHILDREN, LAYOUT, OBJECTS
from tutti.errors import ConfigError


def test_forked_children_leave_the_pool_alone(tmp_path: Path) -> None:
    program = Path(__file__).with_name("forked.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "pool")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    *rows, last = (json.loads(line) for line in done.stdout.splitlines())
    assert rows == [{"how": how, "status": 0, "locked": True, "right": OBJECTS} for how in CHILDREN]
    assert last == {"refused": True, "kept": OBJECTS}
    raised = [line for line in done.stderr.splitlines() if line[:1].isalpha() and "Error" in line]
    assert raised == ["RuntimeError: on purpose"]


SURVIVOR = """
import os, signal, sys, time
import tutti
store = tutti.open(sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_its_parent_does_not_keep_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB").close()
    command = [sys.executable, "-c", SURVIVOR, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert parent.wait(30) == -signal.SIGKILL
            os.kill(child, 0)  # it lives
            when_unlocked(lambda: tutti.open(path)).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_open_pool_cannot_be_sent_to_another_process(tmp_path: Path) -> None:
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB") as store:
        store.allocate_memory(1)
        ticket = store.put([b"k" * 16], [0])
        for send in (pickle.dumps, copy.copy):
            for thing in (store, ticket):
                with pytest.raises(ConfigError, match="open the pool in that process"):
                    send(thing)
        assert ticket.wait(30).stored == 1

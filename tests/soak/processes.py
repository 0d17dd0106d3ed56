"""Functions in processes of their own, forked from one that opens no store and has no thread."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from soak.oracle import Finding

Say = Callable[[list[Any]], None]


class Child:
    """A forked process that reports lines of JSON; its last one is the outcome."""

    def __init__(self, body: Callable[[Say], None]) -> None:
        self._pipe, inner = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            os._exit(_live(body, inner))
        os.close(inner)
        os.set_blocking(self._pipe, False)
        self._rest = b""
        self.ended = False
        self.failure = ""

    def reports(self, timeout_s: float) -> list[list[Any]]:
        """What was said since the last call; waits for something, or for the end."""
        if self.ended:
            return []
        ready, _, _ = select.select([self._pipe], [], [], timeout_s)
        part = os.read(self._pipe, 1 << 20) if ready else None
        if part == b"":
            self.ended = True
        *lines, self._rest = (self._rest + (part or b"")).split(b"\n")
        found = [json.loads(line) for line in lines]
        for report in found:
            if report[0] == "failure":
                self.failure = report[1]
        return [report for report in found if report[0] != "failure"]

    def kill(self) -> bool:
        """SIGKILL; whether it was still alive."""
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    def wait(self) -> int:
        """Its status as `os.waitpid` has it; what it said before is lost unless it was read."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pipe)
        return status


def _live(body: Callable[[Say], None], pipe: int) -> int:
    def say(report: list[Any]) -> None:
        os.write(pipe, json.dumps(report).encode() + b"\n")

    try:
        body(say)
        return 0
    except BaseException:
        say(["failure", traceback.format_exc()[-3000:]])
        return 1


def in_child(body: Callable[[Say], None], timeout_s: float) -> list[list[Any]]:
    """Runs it to its end; everything that it reported.  Finding when it failed, died or hung."""
    child, found = Child(body), []
    deadline_s = time.monotonic() + timeout_s
    while not child.ended and time.monotonic() < deadline_s:
        found += child.reports(0.2)
    hung = not child.ended and child.kill()
    status = child.wait()
    if hung:
        raise Finding(f"a process did not end within {timeout_s:g} s")
    if child.failure or status:
        raise Finding(child.failure or f"a process ended with status {status}")
    return found

"""The node's agent and its clients, killed or stopped while four processes use it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from node.worker import CHAIN_PAGES, LAYOUT, chain, connected, content, turn
from soak.oracle import Finding
from soak.processes import Child, Say, in_child

import tutti
from tutti import cli

CLIENTS = 4
KILLS = 8  # and hangs, of an episode
HANGS = 0.05  # share of them: one takes as long as a hundred kills
THROUGH_MAX_S = 120.0  # until every client has moved pages again
HANG_MAX_S = 120.0  # until every client has gone on without the agent
CHECK_MAX_S = 240.0
#: Relative, because the path of a socket has at most 107 bytes.
SOCKET, POOLS, LOG = "socket", "pools", "acknowledged"


class Campaign:
    """One agent with one pool, and the processes that use it.  Works in the current folder.

    The content of a page follows from its key.  Keys of acknowledged puts are appended to the log.
    """

    def __init__(self, seed: int, tally: Counter[str]) -> None:
        self.rng = np.random.default_rng(seed)
        self.tally = tally
        self.keeps = bool(self.rng.random() < 0.5)  # else objects are evicted
        self.chains = 40 if self.keeps else 400
        self._log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._agent = Child(self._serve)
        self._clients = [self._client() for _ in range(CLIENTS)]
        self._through: set[Child] = set()
        self._turns: Counter[Child] = Counter()

    def run(self) -> None:
        self._wait_for_all()
        for _ in range(KILLS):
            if self.rng.random() < 0.3:  # into what the last kill began
                self._hear(lambda: False, float(self.rng.uniform(0, 0.3)))
            else:
                self._wait_for_all()
            if self.rng.random() < HANGS:
                self._hang()
            else:
                self._kill_one()
        self._wait_for_all()
        for child in (*self._clients, self._agent):
            self._end(child)
        self._check()

    def _client(self) -> Child:
        seed = int(self.rng.integers(2**63))
        return Child(lambda say: self._live(say, seed))

    def _kill_one(self) -> None:
        victim = int(self.rng.integers(2 * CLIENTS))
        agent_dies = victim >= CLIENTS
        child = self._agent if agent_dies else self._clients[victim]
        if not child.kill():
            raise Finding(f"a process ended by itself: {child.failure}")
        self._hear(lambda: True, 0.0)
        child.wait()
        self._through.clear()  # all have to get through again
        if agent_dies:
            self._agent = Child(self._serve)
        else:
            self._clients[victim] = self._client()
        self.tally["agents killed" if agent_dies else "clients killed"] += 1

    def _hang(self) -> None:
        """The agent stops for a while; its clients go on, without its pages."""
        self._wait_for_all()  # none is still looking for its first agent
        os.kill(self._agent.pid, signal.SIGSTOP)
        try:
            self._hear(lambda: True, 0.0)
            self._turns.clear()
            # The first turn may have begun before.
            if not self._hear(lambda: all(self._turns[c] > 1 for c in self._clients), HANG_MAX_S):
                raise Finding(f"a client waits longer than {HANG_MAX_S:g} s for a stopped agent")
        finally:
            os.kill(self._agent.pid, signal.SIGCONT)
        self._through.clear()
        self.tally["agents stopped"] += 1

    def _wait_for_all(self) -> None:
        """Until each client has moved pages since the last kill."""
        if not self._hear(lambda: self._through.issuperset(self._clients), THROUGH_MAX_S):
            raise Finding(f"a client moved no page within {THROUGH_MAX_S:g} s of a kill")

    def _hear(self, is_enough: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for child in self._clients:
                for _, counts in child.reports(0.0):
                    self._count(child, counts)
                if child.failure:
                    raise Finding(child.failure)
            if is_enough() or time.monotonic() > deadline_s:
                return is_enough()
            time.sleep(0.005)

    def _count(self, child: Child, counts: dict[str, int]) -> None:
        if counts["wrong"]:
            raise Finding(f"{counts['wrong']} pages have other bytes than their keys stand for")
        self._turns[child] += 1
        if counts["loaded"] or counts["stored"]:
            self._through.add(child)
        self.tally["bytes verified"] += counts["loaded"] * LAYOUT.object_nbytes
        self.tally["pages stored through agents"] += counts["stored"]
        self.tally["pages loaded through agents"] += counts["loaded"]

    def _serve(self, say: Say) -> None:
        """`tutti serve`, which ends at SIGTERM."""
        with open(os.devnull, "w") as nothing:
            for number in (1, 2):
                os.dup2(nothing.fileno(), number)
        # A put that meets a stopped agent waits for its time-out.
        options = ("--folder", POOLS, "--capacity", "1GiB", "--socket", SOCKET, "--timeout", "10")
        status = cli.main(["serve", *options])
        if status:
            raise Finding(f"the agent ended with status {status}")

    def _live(self, say: Say, seed: int) -> None:
        rng = np.random.default_rng(seed)
        ended: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
        with connected(SOCKET) as store:
            memory = store.allocate_memory(2 * CHAIN_PAGES)
            while not ended:
                counts = dict.fromkeys(("loaded", "stored", "missed", "errors", "wrong"), 0)
                turn(store, memory, chain(int(rng.integers(self.chains))), counts, self._log)
                say(["turn", counts])

    def _end(self, child: Child) -> None:
        """SIGTERM, upon which it ends cleanly."""
        os.kill(child.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + THROUGH_MAX_S
        while not child.ended and time.monotonic() < deadline_s:
            for _, counts in child.reports(0.2):
                self._count(child, counts)
        if not child.ended:
            raise Finding(f"a process does not end within {THROUGH_MAX_S:g} s of SIGTERM")
        if child.wait() or child.failure:
            raise Finding(child.failure or "a process did not end cleanly")

    def _check(self) -> None:
        """Every acknowledged object is there, unless some were evicted, and all bytes are right."""
        raw = Path(LOG).read_bytes()
        keys = np.frombuffer(raw[: len(raw) // 16 * 16], np.uint8).reshape(-1, 16)
        (path,) = Path(POOLS).glob("*.tutti")

        def body(say: Say) -> None:
            with tutti.open(path, profile=None) as store:
                store.wait_recovered(60)
                memory = store.allocate_memory(CHAIN_PAGES)
                gone = int((~store.present(np.unique(keys, axis=0))).sum())
                verified = 0
                for number in range(self.chains):
                    found = store.match(chain(number))
                    store.load(chain(number)[:found], np.arange(found)).wait(60)
                    for page in range(found):
                        if memory.read(page) != content(chain(number)[page].tobytes()):
                            raise Finding("a page has other bytes than its key stands for")
                    verified += found
            say(["checked", gone, verified])

        ((_, gone, verified),) = in_child(body, CHECK_MAX_S)
        if gone and self.keeps:
            raise Finding(f"{gone} of {len(keys)} acknowledged objects are gone")
        self.tally["bytes verified"] += verified * LAYOUT.object_nbytes
        self.tally["pools of agents checked"] += 1


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """One campaign."""
    os.chdir(folder)
    os.mkdir(POOLS)
    cli.build_parser(["serve"])  # loads the command before the forks
    Campaign(seed, tally).run()

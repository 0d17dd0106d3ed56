"""Agents with a second tier, each with one client, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from node.agents import LAYOUT, RunningAgent

from tutti.base.arrays import Keys
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.second_tier import Tier
from tutti.node.client import NodeStore

WAIT_S = 90.0
PAGES = 8


def content(key: bytes) -> bytes:
    return np.random.default_rng(list(key)).bytes(LAYOUT.object_nbytes)


def until(condition: Callable[[], Any], what: str | Callable[[], str]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what if isinstance(what, str) else what()
        time.sleep(0.01)


class Node:
    """An agent with a second tier, and one client of it."""

    def __init__(self, folder: Path, remote: RemoteConfig) -> None:
        self.agent = RunningAgent(folder, remote=remote)
        self.store: NodeStore = self.agent.connect()
        self.memory = self.store.allocate_memory(2 * PAGES)

    @property
    def tier(self) -> Tier:
        (service,) = self.agent.pools.services.values()
        assert service.tier is not None
        return service.tier

    def put(self, keys: Keys, namespace: str = "") -> None:
        for page, key in enumerate(keys):
            self.memory.write(page, content(key.tobytes()))
        ticket = self.store.put(keys, range(len(keys)), memory=self.memory, namespace=namespace)
        ticket.wait(WAIT_S)

    def load(self, keys: Keys) -> None:
        """Loads keys and compares every byte."""
        ticket = self.store.load(keys, range(PAGES, PAGES + len(keys)), memory=self.memory)
        ticket.wait(WAIT_S)
        assert ticket.wait_settled(WAIT_S)
        for page, key in enumerate(keys):
            assert self.memory.read(PAGES + page) == content(key.tobytes())

    def share(self, keys: Keys) -> None:
        """Stores and loads pages until they are in the remote store."""
        before = self.remote()
        self.put(keys)
        self.load(keys)

        def replicated() -> bool:
            now = self.remote()
            if any(now[name] > before[name] for name in ("replicate_failed", "refused")):
                self.load(keys)  # a busy machine was too late: pages are offered when they are used
            # One that came too late for its answer is there when it is offered again.
            copied = sum(now[name] - before[name] for name in ("replicated", "there"))
            return bool(copied >= len(keys))

        until(replicated, "not replicated")

    def remote(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.store.stats()["remote"]
        return counts

    def find(self, keys: Keys) -> None:
        """Looks up until all are there."""
        until(lambda: self.store.match(keys) == len(keys), lambda: f"not fetched: {self.remote()}")

    def settle(self, name: str, least: int = 1) -> None:
        until(lambda: self.remote()[name] >= least, f"{name} stays below {least}")

    def miss(self, keys: Keys, name: str) -> None:
        """Looks up keys that are not served whole until that has been counted."""

        def seen() -> bool:
            assert self.store.match(keys) < len(keys)
            return bool(self.remote()[name])

        until(seen, f"{name} stays 0")

    def close(self) -> None:
        self.store.close()
        self.agent.stop()


@contextmanager
def nodes(tmp_path: Path, remote: RemoteConfig, n: int = 2) -> Iterator[list[Node]]:
    running: list[Node] = []
    try:
        for number in range(n):
            running.append(Node(tmp_path / f"node{number}", remote))
        yield running
    finally:
        for node in running:
            node.close()

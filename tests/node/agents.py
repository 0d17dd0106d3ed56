"""Agents for tests: in a thread, or as a process of the command line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.cluster.remote_store import RemoteConfig
from tutti.medium.layout import KVLayout
from tutti.node import agent as agent_module
from tutti.node.agent import Agent
from tutti.node.agent_pools import AgentPools
from tutti.node.client import NodeStore
from tutti.node.served_connection import AgentConfig
from tutti.transfers.store_config import StoreConfig

LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
WAIT_S = 30.0
LOOKUP_S = 10.0  #: on a busy machine a look-up may take more than the second of the default
#: How long an agent of this process listens before it looks whether to end, for which tests wait.
agent_module._SWEEP_S = 0.05


class RunningAgent:
    """An agent in a thread of this process, with a folder of pools, or with the pool of paths."""

    def __init__(
        self,
        folder: Path,
        *,
        paths: Sequence[str] = (),
        config: StoreConfig | None = None,
        remote: RemoteConfig | None = None,
        **agent: object,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = str(folder / "s")
        pools = None if paths else str(folder)
        self.pools = AgentPools(paths, folder=pools, capacity=1 << 30, config=config, remote=remote)
        self.agent = Agent(AgentConfig(self.path, **agent), self.pools)  # type: ignore[arg-type]
        started = threading.Event()
        self._thread = threading.Thread(target=self.agent.serve, args=(started.set,), daemon=True)
        self._thread.start()
        assert started.wait(WAIT_S)

    def connect(
        self, layout: KVLayout | None = LAYOUT, capacity: str = "32MiB", **options: Any
    ) -> NodeStore:
        return NodeStore(self.path, layout, capacity, **{"lookup_timeout_s": LOOKUP_S, **options})

    def stop(self) -> None:
        """A second call does nothing."""
        self.agent.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.pools.close()


@contextlib.contextmanager
def running(folder: Path, **options: object) -> Iterator[RunningAgent]:
    agent = RunningAgent(folder, **options)  # type: ignore[arg-type]
    try:
        yield agent
    finally:
        agent.stop()


def start_process(path: Path | str, folder: Path | None, *options: str) -> subprocess.Popen[str]:
    """`tutti serve` as a user starts it; returns once it listens.  Without a folder: of paths."""
    pools = () if folder is None else ("--folder", str(folder), "--capacity", "1GiB")
    process = subprocess.Popen(
        [*(sys.executable, "-m", "tutti.cli", "serve", "--socket", str(path)), *pools, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        if line.startswith("serving on"):
            return process
        told += line
    raise AssertionError(f"the agent ended: {told}")

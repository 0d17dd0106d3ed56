"""A disk that answers nothing for longer than a client waits for its transfers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crash.objects import when_unlocked
from faulty_disk import Faults, FaultyDisk
from node.agents import LAYOUT, WAIT_S, start_process
from waiting import wait_until

import tutti
from store.pools import fill, some_keys
from tutti.errors import DeviceTimeout
from tutti.node.client import NodeStore


class Stalled:
    """A pool on a disk, its agent, and a client whose put the disk does not answer."""

    def __init__(self, disk: FaultyDisk, folder: Path, rng: np.random.Generator) -> None:
        self.disk, self.pool, self._path = disk, disk.mountpoint / "pool.tutti", folder / "s"
        tutti.open(str(self.pool), LAYOUT, "32MiB").close()
        self.keys = some_keys(rng, 4)
        self.start_agent()
        self.store = self.connect()
        fill(self.store.allocate_memory(4), range(4), rng)
        disk.set(Faults(hang=True))
        self.store.put(self.keys, range(4))

    def start_agent(self) -> None:
        self.agent = start_process(self._path, None, str(self.pool), "--timeout", "1")

    def connect(self) -> NodeStore:
        return tutti.connect(str(self._path), LAYOUT, profile=None)

    def kill_agent(self) -> None:
        self.agent.kill()
        self.agent.communicate(timeout=WAIT_S)


@pytest.fixture
def stalled(tmp_path: Path, seed: int) -> Iterator[Stalled]:
    with FaultyDisk(tmp_path / "files", tmp_path / "disk") as disk:
        if disk.refusal:
            pytest.skip(disk.refusal)
        made = Stalled(disk, tmp_path, np.random.default_rng(seed))
        try:
            yield made
        finally:
            disk.set(Faults())
            made.store.close()
            made.kill_agent()


def test_a_pool_is_opened_again_after_a_stall_in_which_its_agent_died(
    stalled: Stalled, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of the client's lost session would keep the new agent from it."""
    store = stalled.store
    stalled.kill_agent()
    wait_until(lambda: "of a lost session are still under way" in caplog.text)
    stalled.disk.set(Faults())
    when_unlocked(lambda: tutti.open(str(stalled.pool))).close()
    stalled.start_agent()
    wait_until(lambda: store.connected and store.recovered)
    assert store.put(stalled.keys, range(4)).wait(WAIT_S).dropped == 0


def test_a_stall_in_which_a_session_was_lost_leaves_nothing_in_the_agent(
    stalled: Stalled, caplog: pytest.LogCaptureFixture
) -> None:
    store = stalled.store
    stalled.agent.send_signal(signal.SIGSTOP)
    wait_until(lambda: not store.match(stalled.keys) and "no answer within" in caplog.text)
    stalled.agent.send_signal(signal.SIGCONT)
    wait_until(lambda: "of a lost session are still under way" in caplog.text and store.connected)
    assert store.stats()["sessions"] == 2
    stalled.disk.set(Faults())
    wait_until(lambda: store.stats()["sessions"] == 1)
    assert store.put(stalled.keys, range(4)).wait(WAIT_S).dropped == 0
    store.clear()


def test_a_close_during_a_stall_can_be_repeated(stalled: Stalled) -> None:
    with pytest.raises(DeviceTimeout, match="close it again"):
        stalled.store.close()
    stalled.disk.set(Faults())
    stalled.store.close()
    with stalled.connect() as other:
        wait_until(lambda: other.stats()["sessions"] == 1)

"""A pool that is slow to open, or whose medium is slow, delays no client of another pool."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, WAIT_S, RunningAgent, running
from waiting import wait_until

import tutti
from store.pools import some_keys
from tutti.cli import main
from tutti.errors import CapacityError, DeviceTimeout, PoolNotFound, TuttiError
from tutti.node import agent_pools
from tutti.node.pool_service import PoolService
from tutti.transfers.store_config import StoreConfig

OTHER = replace(LAYOUT, model="another-model")


class SlowOpening:
    """Openings of pools of LAYOUT wait for ``go``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.count = 0
        self._open: Callable[..., Any] = agent_pools.open_pool
        monkeypatch.setattr(agent_pools, "open_pool", self.open)

    def open(self, paths: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        if layout == LAYOUT:
            self.count += 1
            self.began.set()
            assert self.go.wait(WAIT_S)
        return self._open(paths, layout, *args, **kwargs)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowOpening]:
    opening = SlowOpening(monkeypatch)
    yield opening
    opening.go.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_others_connect_while_a_pool_opens(
    tmp_path: Path, slow: SlowOpening, threads: ThreadPoolExecutor
) -> None:
    with running(tmp_path / "agent") as agent:
        first = threads.submit(agent.connect)
        assert slow.began.wait(WAIT_S)
        second = threads.submit(agent.connect)
        with agent.connect(OTHER) as other:
            assert other.match([bytes(16)]) == 0
            assert len(agent.pools.stores()) == 1  # as metrics ask for them
        assert not first.done() and not second.done()
        slow.go.set()
        with first.result(WAIT_S), second.result(WAIT_S):
            assert len(agent.pools.stores()) == 2
            assert slow.count == 1


def test_the_capacity_of_pools_that_are_being_made_is_taken(
    tmp_path: Path, slow: SlowOpening, threads: ThreadPoolExecutor
) -> None:
    pools = agent_pools.AgentPools(folder=str(tmp_path), capacity=96 << 20)
    first = threads.submit(pools.open, LAYOUT.to_json(), 64 << 20)
    assert slow.began.wait(WAIT_S)
    with pytest.raises(CapacityError, match="--capacity"):
        pools.open(OTHER.to_json(), 48 << 20)
    pools.open(OTHER.to_json(), 32 << 20)
    slow.go.set()
    first.result(WAIT_S)
    pools.close()


def test_a_pool_that_could_not_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "agent") as agent, monkeypatch.context() as patch:
        patch.setattr(agent_pools, "open_pool", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            agent.pools.open(LAYOUT.to_json(), 32 << 20)
        patch.undo()
        agent.connect().close()


@pytest.mark.parametrize("name", ["docs", ""])
def test_a_pool_that_is_not_named_after_its_layout_is_found_again(
    name: str, tmp_path: Path, seed: int
) -> None:
    """After a restart of the agent: by its name, or as the only one."""
    keys, folder = some_keys(np.random.default_rng(seed), 4), tmp_path / "agent"
    folder.mkdir()
    with tutti.open(str(folder / "docs.tutti"), LAYOUT, "32MiB") as pool:
        pool.allocate_memory(4)
        pool.put(keys, np.arange(4)).wait(WAIT_S)
    with running(folder) as agent:
        store = agent.connect(None, "64MiB", pool=name)
        wait_until(lambda: store.match(keys) == 4)
    with running(folder), store:
        wait_until(lambda: store.match(keys) == 4)
    assert [file.name for file in folder.glob("*.tutti")] == ["docs.tutti"]


def test_a_pool_that_opens_while_the_agent_stops_is_closed(
    tmp_path: Path, slow: SlowOpening, threads: ThreadPoolExecutor
) -> None:
    with running(tmp_path / "agent") as agent:
        opening = threads.submit(agent.pools.open, LAYOUT.to_json(), 32 << 20)
        assert slow.began.wait(WAIT_S)
        closing = threads.submit(agent.pools.close)
        wait_until(lambda: agent.pools._closed)
        assert not closing.done()
        slow.go.set()
        with pytest.raises(PoolNotFound, match="stopping"):
            opening.result(WAIT_S)
        closing.result(WAIT_S)
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        assert store.match([bytes(16)]) == 0


def test_an_interrupt_while_pools_close_leaves_none_unclean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Ctrl-C: the first ended the serving."""
    close, main_thread = PoolService.close, threading.main_thread().ident
    closed: list[PoolService] = []

    def interrupted(service: PoolService) -> None:
        close(service)
        if not closed:
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)
        closed.append(service)

    pools = agent_pools.AgentPools(folder=str(tmp_path), capacity=1 << 30)
    for layout in (LAYOUT, OTHER):
        pools.open(layout.to_json(), 32 << 20)
    monkeypatch.setattr(PoolService, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pools.close()
    assert len(closed) == 2
    for file in tmp_path.glob("*.tutti"):
        assert main(["info", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "clean"


def test_an_opening_that_does_not_end_does_not_keep_the_agent(
    tmp_path: Path, slow: SlowOpening, threads: ThreadPoolExecutor
) -> None:
    config = StoreConfig(timeout_s=0.1)
    pools = agent_pools.AgentPools(folder=str(tmp_path), capacity=1 << 30, config=config)
    opening = threads.submit(pools.open, LAYOUT.to_json(), 32 << 20)
    assert slow.began.wait(WAIT_S)
    with pytest.raises(DeviceTimeout, match="connect again"):
        pools.open(LAYOUT.to_json(), 32 << 20)
    with pytest.raises(DeviceTimeout, match=LAYOUT.fingerprint.hex()):
        pools.close()
    slow.go.set()
    with pytest.raises(TuttiError):  # the agent stops, or its medium is slower than that
        opening.result(WAIT_S)


def test_a_report_that_waits_for_its_medium_delays_no_other_pool(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, go, began = (
        some_keys(np.random.default_rng(seed), 4),
        threading.Event(),
        threading.Event(),
    )
    with running(tmp_path / "agent") as agent, agent.connect() as one:
        table = _store_of(agent)._writer._table
        reserve = table.reserve

        def wait(timeout_s: float) -> int:
            began.set()
            assert go.wait(WAIT_S)
            return int(reserve(timeout_s))

        monkeypatch.setattr(table, "reserve", wait)
        with agent.connect(OTHER) as other:
            for store in (one, other):
                store.allocate_memory(4)
            ticket = one.put(keys, np.arange(4))
            assert began.wait(WAIT_S)
            assert other.put(keys, np.arange(4)).wait(WAIT_S / 2).stored == 4
            go.set()
            assert ticket.wait(WAIT_S).stored == 4


def _store_of(agent: RunningAgent) -> Any:
    (store,) = agent.pools.stores().values()
    return store

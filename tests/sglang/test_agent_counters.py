"""Counters of pools that an agent has open: while it is away or late."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
from linker_engine import Rig
from node.agents import running

from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.node.called_operations import OPERATIONS

#: Reads all counters anew.
Counters = Callable[[], Mapping[str, float]]


@contextmanager
def by_hicache(path: str) -> Iterator[Counters]:
    with closing(TuttiHiCacheStorage(hp.config(path, options={"capacity": "16MiB"}), {})) as made:
        made.register_mem_pool_host(hp.mha_pool("page_first"))
        yield lambda: made.counters()["kv"]


@contextmanager
def by_linker(path: str) -> Iterator[Counters]:
    with Rig(Path(), path=path) as rig:

        def counters() -> Mapping[str, float]:
            rig.linker._maintenance["kv"].refresh()
            return rig.linker.metrics.snapshot()

        yield counters


OPENED = pytest.mark.parametrize("opened", [by_hicache, by_linker])


@OPENED
def test_an_agent_that_is_away_does_not_count_as_an_error(opened: Any, tmp_path: Path) -> None:
    with running(tmp_path / "agent") as agent, opened(f"unix:{agent.path}") as counters:
        there = counters()
        agent.stop()
        away = counters()
    assert away.get("errors", 0) == 0
    assert away["usable_objects"] == there["usable_objects"] > 0


@OPENED
def test_a_start_waits_for_counters_that_take_longer_than_a_look_up(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = OPERATIONS["stats"]

    def late(*arguments: Any) -> Any:
        time.sleep(1.2)
        return read(*arguments)

    monkeypatch.setitem(OPERATIONS, "stats", late)  # type: ignore[arg-type]
    with running(tmp_path / "agent") as agent, opened(f"unix:{agent.path}") as counters:
        assert counters()["usable_objects"] > 0

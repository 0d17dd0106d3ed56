"""Counters of pools that an agent has open: while it is away or late, and over its restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
from linker_engine import Rig, names
from node.agents import LOOKUP_S, running
from prometheus_client import REGISTRY
from waiting import wait_until

import tutti
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
    assert away["agent_away"] == 1


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


def test_the_agents_totals_are_counted_once(tmp_path: Path) -> None:
    """Of a pool that is detached and attached again, and of an agent that is restarted."""
    labels = {"mode": "hicache", "pool": "kv", "rank": "tp0-pp0-cp0-dp0"}
    pool = hp.mha_pool("page_first")

    def published() -> float:
        return REGISTRY.get_sample_value("tutti:device_written_bytes_total", labels) or 0.0

    def attached(path: str) -> Any:
        config = hp.config(path, options={"capacity": "16MiB"}, enable_storage_metrics=True)
        made = TuttiHiCacheStorage(config, {})
        made.register_mem_pool_host(pool)
        return closing(made)

    def written(path: str) -> float:
        with tutti.connect(path, lookup_timeout_s=LOOKUP_S, profile=None) as store:
            return float(store.stats()["bytes_written"])

    def store(storage: Any, salt: str, pages: int) -> None:
        stored = storage.batch_set_v1(names(pages, salt), hp.indices(pool, list(range(pages))))
        assert all(stored)
        storage.counters()

    with running(tmp_path / "agent") as agent:
        path = f"unix:{agent.path}"
        with attached(path) as storage:
            opened, before = written(path), published()
            store(storage, "a", 8)
            first = published() - before
            assert 0 < first == written(path) - opened
        reattached = attached(path)
    with reattached as storage:
        storage.counters()
        assert published() - before == first, "what was written before is not counted again"
        with running(tmp_path / "agent"):
            kept = storage._stores["kv"].store
            wait_until(lambda: kept.connected and kept.recovered)
            store(storage, "b", 4)
            wait_until(lambda: published() - before == first + written(path))

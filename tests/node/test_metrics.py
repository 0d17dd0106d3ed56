"""`tutti serve --metrics`: what Prometheus reads of an agent and its pools."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from free_ports import free_port
from node.agents import LAYOUT, LOOKUP_S, start_process
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from scheduler.drive import Linear
from waiting import wait_until

import tutti
from store.pools import fill, some_keys
from tutti.errors import ConfigError
from tutti.metrics import StoreCollector, published
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import LoadKnown
from tutti.scheduler.policy import Limits
from tutti.transfers.put_limits import Quota

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read_page(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(
        value for (found, own), value in samples.items() if found == name and wanted <= set(own)
    )


@contextmanager
def serving(folder: Path, port: int) -> Iterator[str]:
    path = folder / "s"
    process = start_process(path, folder, "--metrics", str(port))
    try:
        yield str(path)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_agent_publishes_its_pools(tmp_path: Path, rng: np.random.Generator) -> None:
    port = free_port()
    with serving(tmp_path, port) as path:
        assert total(read_page(port), "tutti_agent_open_sessions") == 0
        options = {"lookup_timeout_s": LOOKUP_S, "profile": None}  # a put is one transfer
        with tutti.connect(path, LAYOUT, "32MiB", **options) as store:
            memory = store.allocate_memory(8)
            fill(memory, range(4), rng)
            keys = some_keys(rng, 6)
            store.put(keys[:4], range(4)).wait(30)
            assert store.match(keys) == 4
            ticket = store.load(keys[:4], range(4, 8))
            ticket.wait(30)
            assert ticket.wait_settled(30)
            loads = {"name": "tutti_transfer_seconds_count", "direction": "load"}
            wait_until(lambda: total(read_page(port), **loads) == 1)  # the client has reported it
            samples = read_page(port)
        wait_until(lambda: total(read_page(port), "tutti_agent_open_sessions") == 0)
        assert total(read_page(port), "tutti_agent_lost_total") == 0, "it was closed"
    for name, value in (
        ("tutti_up", 1),
        ("tutti_recovered", 1),
        ("tutti_stored_pages_total", 4),
        ("tutti_loaded_pages_total", 4),
        ("tutti_hit_pages_total", 4),
        ("tutti_lookup_pages_total", 6),
        ("tutti_corrupt_objects_total", 0),
        ("tutti_agent_sessions_total", 1),
        ("tutti_agent_open_sessions", 1),
    ):
        assert total(samples, name) == value, name
    assert total(samples, "tutti_service_threads") >= 1
    assert total(samples, "tutti_drive_moved_bytes_total", drive="0", direction="write") > 0
    for direction in ("load", "store"):
        assert total(samples, "tutti_transfer_seconds_count", direction=direction) == 1
        assert total(samples, "tutti_transfer_seconds_bucket", le="+Inf", direction=direction) == 1
        assert total(samples, "tutti_transfer_seconds_sum", direction=direction) > 0
    assert total(samples, "tutti_info", model="test-model", verify="always") == 1


def test_a_program_of_its_own_registers_a_store(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with tutti.open(str(tmp_path / "pool.tutti"), LAYOUT, "32MiB") as store:
        registry.register(StoreCollector({"chat": store}))
        capacity = store.stats()["capacity_objects"]
        assert registry.get_sample_value("tutti_capacity_objects", {"pool": "chat"}) == capacity
        free = registry.get_sample_value("tutti_slots", {"pool": "chat", "state": "free"})
        assert free == capacity


def test_wear_scheduling_and_residency_are_published(tmp_path: Path, seed: int) -> None:
    rng, registry, labels = np.random.default_rng(seed), CollectorRegistry(), {"pool": "chat"}
    moving = {"residency_moving_ms": 0.0}
    with tutti.open(str(tmp_path / "pool.tutti"), LAYOUT, "32MiB", profile=None) as store:
        seen: Any = SimpleNamespace(
            stats=lambda: {**store.stats(), **moving},
            layout=store.layout,
            config=store.config,
            recovered=True,
        )
        registry.register(StoreCollector({"chat": seen}))

        def value(name: str) -> float:
            found = registry.get_sample_value(f"tutti_{name}", labels)
            assert found is not None, name
            return found

        assert value("bytes_written_per_byte_stored") == 0 and value("scheduling") == 0
        before = value("written_today_bytes")
        fill(store.allocate_memory(8), range(8), rng)
        store.put(some_keys(rng, 8), range(8)).wait(30)
        assert value("written_today_bytes") - before >= 8 * LAYOUT.object_nbytes
        assert value("written_today_bytes") == value("written_bytes_total")
        ticket = store.load(store.catalogue.keys(), range(8))
        assert ticket.wait_settled(30)
        for direction in ("read", "write"):
            drive = {**labels, "drive": "0", "direction": direction}
            moved = registry.get_sample_value("tutti_drive_moved_bytes_total", drive)
            assert moved == value(f"{'read' if direction == 'read' else 'written'}_bytes_total")
            for name in ("window_bytes", "latency_seconds"):
                assert registry.get_sample_value(f"tutti_drive_{name}", drive) > 0, name
        assert value("digest_seconds_total") > 0 and value("cpu_seconds_total") > 0
        assert 1.0 < value("bytes_written_per_byte_stored") < 2.0
        assert value("residency_moving_seconds_total") == 0
        moving["residency_moving_ms"] = 1500.0
        assert value("residency_moving_seconds_total") == 1.5


def test_the_source_of_the_profile_is_published(tmp_path: Path) -> None:
    for source, level in (("estimated", 1), ("measured", 2), ("cache", 2), ("file", 2)):
        config = tutti.StoreConfig(schedule=Schedule(Linear(), source=source))
        registry = CollectorRegistry()
        with tutti.open(str(tmp_path / source), LAYOUT, "32MiB", config=config) as store:
            registry.register(StoreCollector({"chat": store}))
            assert registry.get_sample_value("tutti_scheduling", {"pool": "chat"}) == level
            (info,) = (family for family in registry.collect() if family.name == "tutti")
            assert info.samples[0].labels["profile"] == source


def test_a_missing_member_and_limits_are_published(tmp_path: Path) -> None:
    members = [str(tmp_path / f"{name}.tutti") for name in "ab"]
    tutti.open(members, LAYOUT, "32MiB", profile=None).close()
    quotas = (Quota("team", nbytes=1 << 20), Quota("other", write_budget=1 << 21))
    for given in (members, members[:1]):
        config = tutti.StoreConfig(degraded=True, write_budget="4MiB", quotas=quotas)
        registry = CollectorRegistry()
        with tutti.open(given, config=config, profile=None) as store:
            registry.register(StoreCollector({"chat": store}))
            value = registry.get_sample_value
            assert value("tutti_missing_members", {"pool": "chat"}) == 2 - len(given)
            assert value("tutti_write_budget_bytes", {"pool": "chat"}) == 4 << 20
            limits = {
                (name, team): value(f"tutti_namespace_{name}", {"pool": "chat", "namespace": team})
                for name in ("quota_bytes", "write_budget_bytes")
                for team in ("team", "other")
            }
        assert limits == {
            ("quota_bytes", "team"): 1 << 20,
            ("quota_bytes", "other"): None,
            ("write_budget_bytes", "team"): None,
            ("write_budget_bytes", "other"): 1 << 21,
        }


def test_what_the_scheduler_forced_is_published(tmp_path: Path, seed: int) -> None:
    rng, registry = np.random.default_rng(seed), CollectorRegistry()
    # A page that waits is too many, and a read that does not end leaves no slack.
    schedule = Schedule(Linear(read_gbps=1e-6), Limits(staged_pages=0, pressing_pages=1))
    config = tutti.StoreConfig(schedule=schedule)
    with tutti.open(str(tmp_path / "pool.tutti"), LAYOUT, "32MiB", config=config) as store:
        registry.register(StoreCollector({"chat": store}))
        queue = store.scheduler
        prefix = queue.attach(SimpleNamespace(read=lambda launch: None))
        queue.post(LoadKnown(queue.now_ns(), f"{prefix}1", 64, 1 << 20, 0, 0))
        memory = store.allocate_memory(8)
        fill(memory, range(8), rng)
        assert store.put(some_keys(rng, 8), range(8)).wait(30).stored == 8
        assert registry.get_sample_value("tutti_waiting_loads", {"pool": "chat"}) == 1
        assert registry.get_sample_value("tutti_waiting_writes", {"pool": "chat"}) == 0
        queue.detach(prefix)
        assert store.put(some_keys(rng, 8), range(8)).wait(30).stored == 8  # alone: is measured
        found = store.stats()["scheduler"]
        assert found["forced_pages"] == 8 and found["prediction_error"] > 0
        for name, value in (
            ("forced_pages_total", found["forced_pages"]),
            ("deferred_pages_total", found["deferred_pages"]),
            ("prediction_error", found["prediction_error"]),
            ("slack_seconds_total", found["slack_ns"] / 1e9),
            ("bubble_seconds_total", found["bubble_ns"] / 1e9),
        ):
            assert registry.get_sample_value(f"tutti_{name}", {"pool": "chat"}) == value


def test_an_agent_that_is_away_is_down(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with serving(tmp_path, free_port()) as path:
        store = tutti.connect(path, LAYOUT, "32MiB", lookup_timeout_s=LOOKUP_S)
        registry.register(StoreCollector({"chat": store}))
        assert registry.get_sample_value("tutti_up", {"pool": "chat"}) == 1
    assert registry.get_sample_value("tutti_up", {"pool": "chat"}) == 0
    store.close()


@pytest.mark.parametrize("address", ["", "x", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:-1"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"), published(address):
        pass


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match="Address already in use; choose another"),
            published(f"127.0.0.1:{port}"),
        ):
            pass

"""`tutti serve --metrics`: what Prometheus reads of an agent and its pools."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port
from node.agents import LAYOUT, start_process
from node.test_deaths import wait_until
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import tutti
from store.pools import fill, some_keys
from tutti.errors import ConfigError
from tutti.metrics import StoreCollector, published

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


def test_an_agent_publishes_its_pools(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    port = free_port()
    with serving(tmp_path, port) as path:
        assert total(read_page(port), "tutti_agent_open_sessions") == 0
        with tutti.connect(path, LAYOUT, "32MiB") as store:
            memory = store.allocate_memory(8)
            fill(memory, range(4), rng)
            keys = some_keys(rng, 6)
            store.put(keys[:4], range(4)).wait(30)
            assert store.match(keys) == 4
            ticket = store.load(keys[:4], range(4, 8))
            ticket.wait(30)
            assert ticket.wait_settled(30)
            store.stats()  # after the reports of this client
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


def test_an_agent_that_is_away_is_down(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with serving(tmp_path, free_port()) as path:
        store = tutti.connect(path, LAYOUT, "32MiB")
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
            pytest.raises(ConfigError, match="choose another port"),
            published(f"127.0.0.1:{port}"),
        ):
            pass

"""The second tier behind the agent, over a remote store with faults."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.faulty import Faults
from cluster.nodes import PAGES, WAIT_S, nodes, until
from node.agents import LAYOUT
from prometheus_client import CollectorRegistry

from store.pools import some_keys
from tutti.cluster.recent_keys import RecentKeys
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.worker import VERSION
from tutti.errors import ConfigError, DeviceTimeout
from tutti.metrics import StoreCollector
from tutti.node.remote_transfers import PlannedLoad


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def test_a_page_of_another_node_is_a_hit_after_it_landed(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        assert second.store.match(keys) == 0  # never inside a look-up
        second.find(keys)
        second.load(keys)
        second.settle("fetched", PAGES)  # counted after they are there
        assert second.remote()["fetched"] == PAGES
        infos = second.store.catalogue.objects(keys)
        assert [info.parent for info in infos[1:]] == [key.tobytes() for key in keys[:-1]]
        assert [info.depth for info in infos] == list(range(PAGES))
        registry = CollectorRegistry()
        registry.register(StoreCollector(second.agent.pools.stores))
        pool = next(iter(second.agent.pools.stores()))
        value = registry.get_sample_value("tutti_remote_fetched_pages_total", {"pool": pool})
        assert value == PAGES
        state = {"pool": pool, "state": "closed"}
        assert registry.get_sample_value("tutti_remote_state", state) == 1


def test_fetches_wait_for_a_pause_of_local_loads_and_go_on_without_one(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that does not end is a machine whose loads leave no pause."""
    moved, ended, finish = threading.Event(), threading.Event(), PlannedLoad.finish

    def finish_later(self: PlannedLoad, status: bytes, digests: bytes) -> None:
        moved.set()
        assert ended.wait(WAIT_S)
        finish(self, status, digests)

    keys, own = np.split(some_keys(np.random.default_rng(seed), 2 * PAGES), 2)
    more = some_keys(np.random.default_rng(seed + 1), PAGES)
    with nodes(tmp_path, faults.config(timeout_s=WAIT_S)) as (first, second):
        first.share(keys)
        first.share(more)
        second.put(own)
        assert second.remote()["fetch_waits"] == 0
        monkeypatch.setattr(PlannedLoad, "finish", finish_later)
        with second.agent.connect() as other:
            ticket = other.load(own, range(PAGES), memory=other.allocate_memory(PAGES))
            assert moved.wait(WAIT_S)
            second.miss(keys, "fetch_waits")
            assert not any(call.startswith("get") for call in faults.calls())
            second.find(keys)
            assert not ended.is_set()
            ended.set()
            ticket.wait(WAIT_S)
            second.find(more)
        second.load(keys)


def test_pages_go_to_the_remote_store_at_their_second_use(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 6)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        node.put(keys)
        assert node.remote()["offered"] == 0
        node.put(keys[:2])  # present
        node.load(keys[2:4])
        node.settle("replicated", 4)
        node.load(keys[:4])  # not offered again
        assert node.remote()["offered"] == node.remote()["replicated"] == 4
        assert faults.calls().count("put 2") + 2 * faults.calls().count("put 4") == 2


def test_a_pool_with_a_second_tier_never_evicts_by_uses(tmp_path: Path, faults: Faults) -> None:
    """It would refuse pages that come from the tier, and those that should be copied to it."""
    with nodes(tmp_path, faults.config(), 1) as (node,):
        history = node.tier._store._core.history
        history.native.hits[1] = 10 * history.uses.size  # if most uses decided
        history.choose()
        assert not history.by_uses


@pytest.mark.slow
def test_every_page_goes_where_that_was_asked_for(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(replicate="first"), 1) as (node,):
        node.put(keys)
        node.settle("replicated", 4)


@pytest.mark.parametrize("fault", ["flip", "flip-digest", slow("swap")])
def test_wrong_bytes_are_never_served(
    tmp_path: Path, faults: Faults, seed: int, fault: str
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        faults.set(fault)
        second.miss(keys, "corrupt")
        good = 0 if fault == "swap" else 1
        until(lambda: second.remote()["queued_chains"] == 0, "the chain is still fetched")
        found = second.store.match(keys)
        assert found <= good
        second.load(keys[:found])
        faults.set("")
        second.find(keys)  # after client_ttl
        second.load(keys)


@pytest.mark.parametrize("fault", ["hang", "fail", *map(slow, ("die", "raise"))])
def test_a_failing_remote_store_is_left_alone_and_tried_again(
    tmp_path: Path, faults: Faults, rng: np.random.Generator, fault: str
) -> None:
    keys, own = some_keys(rng, 4), some_keys(rng, 4)
    config = faults.config(timeout_s=1.5, failures_max=2)
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        faults.set(fault)
        second.miss(keys, "opened")
        assert second.remote()["opened"] == 1
        second.put(own)  # the pool itself is not concerned
        second.load(own)
        assert second.store.match(keys) == 0
        faults.set("")
        second.find(keys)
        second.load(keys)
        until(lambda: second.remote()["state"] == "closed", "it is left alone for good")


@pytest.mark.slow
def test_a_remote_store_that_is_away_at_the_start_is_found_later(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    faults.set("unreachable")
    with nodes(tmp_path, faults.config(failures_max=2), 1) as (node,):
        node.miss(keys, "opened")
        faults.set("")
        node.put(keys)

        def replicated() -> bool:
            node.load(keys)
            return bool(node.remote()["replicated"] >= 4)

        until(replicated, "not replicated")


def test_a_hanging_remote_store_is_killed_at_the_deadline(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(timeout_s=1.5)) as (first, second):
        first.share(keys)
        faults.set("hang-get")
        second.miss(keys, "failures")
        faults.set("")
        second.find(keys)
        counts = second.remote()
        assert counts["starts"] == 1 + counts["failures"]  # the one that hung was replaced
        second.load(keys)


def test_closing_does_not_wait_for_a_remote_store_that_hangs(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    faults.set("hang")
    with nodes(tmp_path, faults.config(timeout_s=3000.0), 1) as (node,):
        node.store.match(keys)
        until(faults.calls, "nothing was asked")
    assert not [t for t in threading.enumerate() if t.name == "tutti-second-tier"]


def test_keys_that_failed_are_not_asked_again_for_client_ttl(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(client_ttl_s=3000.0, failures_max=100)) as (first, second):
        first.share(keys)
        faults.set("fail")
        second.store.match(keys)
        second.settle("fetch_failed", 4)
        faults.set("")
        calls = len(faults.calls())
        for _ in range(20):
            assert second.store.match(keys) == 0
        until(lambda: second.remote()["queued_chains"] == 0, "the chain still waits")
        assert len(faults.calls()) == calls
        assert second.remote()["missed"] == 4


def test_the_budget_of_bytes_ends_a_chain(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    nbytes = 3 * LAYOUT.object_nbytes
    with nodes(tmp_path, faults.config(prefetch_nbytes=nbytes)) as (first, second):
        first.share(keys)
        second.store.match(keys)
        second.settle("over_budget", PAGES - 3)
        second.settle("fetched", 3)
        assert second.store.match(keys) == 3


def test_limits_below_a_page_let_one_through(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    config = faults.config(prefetch_nbytes=1, queue_nbytes=1, staging_nbytes=1)
    with nodes(tmp_path, config) as (first, second):
        for number in range(2):
            first.share(keys[number : number + 1])
        second.find(keys)  # a page for each look-up
        second.load(keys)


def test_what_waits_for_replication_is_bounded(
    tmp_path: Path, faults: Faults, rng: np.random.Generator
) -> None:
    nbytes = 4 * LAYOUT.object_nbytes
    faults.set("hang")
    config = faults.config(queue_nbytes=nbytes, timeout_s=3000.0)
    with nodes(tmp_path, config, 1) as (node,):
        keys = some_keys(rng, PAGES)
        node.put(keys)
        node.load(keys[:1])
        until(lambda: faults.calls() and not node.remote()["queued_nbytes"], "nothing was taken")
        node.load(keys[1:])
        node.load(keys[4:])  # they wait already
        assert node.remote()["queued_nbytes"] == nbytes
        assert node.remote()["dropped"] == PAGES - 1 - 4
        assert list(node.tier._offered) == [key.tobytes() for key in keys[4:]]  # the newest


def test_a_chain_that_is_too_late_is_not_fetched(
    tmp_path: Path, faults: Faults, rng: np.random.Generator
) -> None:
    keys = some_keys(rng, 4)
    small = LAYOUT.object_nbytes * 2
    config = faults.config(timeout_s=0.75, staging_nbytes=small)
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        faults.set("slow")
        second.miss(keys, "late")
        assert second.remote()["state"] == "closed"
        faults.set("")
        second.find(keys)
        second.load(keys)


def test_staging_is_reused_without_mixing_pages(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    config = faults.config(staging_nbytes=4 * LAYOUT.object_nbytes)
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        second.find(keys)
        second.load(keys)


def test_a_chain_comes_in_few_gets_with_small_ones_at_its_end(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    config = faults.config(staging_nbytes=4 * (PAGES - 4) * LAYOUT.object_nbytes)
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        second.find(keys)
    gets = [call for call in faults.calls() if call.startswith("get")]
    assert gets == ["get 4", "get 2", "get 2"]


def test_the_thread_that_waits_for_values_comes_after_all_others(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    """Mooncake waits in a loop without sleep."""
    with nodes(tmp_path, faults.config(), 1) as (node,):
        node.share(some_keys(np.random.default_rng(seed), 1))  # its process serves
        process = node.tier._remote._process
        assert process is not None
        threads = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
        nice = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    caller = nice.pop(process.pid)
    assert nice and caller > max(nice.values())


@pytest.mark.slow
def test_other_namespaces_and_layouts_do_not_meet(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    with nodes(tmp_path, faults.config(), 1) as (first,):
        first.share(keys)
    with nodes(tmp_path / "other", faults.config(namespace="other"), 1) as (second,):
        second.store.match(keys)
        second.settle("absent", 2)
        assert second.store.match(keys) == 0
    names = [path.name for path in faults.folder.iterdir() if path.name.startswith("tutti_")]
    assert len(names) == 2
    assert all(name.startswith(f"tutti_{VERSION}_") for name in names)
    assert all(LAYOUT.fingerprint.hex() in name for name in names)


def test_recent_keys_expire() -> None:
    now = [0.0]
    recent = RecentKeys(5.0, lambda: now[0])
    recent.add([b"a"])
    assert b"a" in recent
    assert b"b" not in recent
    now[0] = 5.0
    assert b"a" not in recent
    recent.add([b"c"])
    assert len(recent._until_s) == 1


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("x", "mooncake://"),
        ("mooncake://", "mooncake://"),
        ("mooncake://host", "mooncake://"),
        ("mooncake://host:x", "not an address"),
        ("redis://host:1", "mooncake://"),
        ("mooncake://host:1?bad=1", "option 'bad'"),
        ("mooncake://host:1?timeout=x", "option timeout"),
        ("mooncake://host:1?timeout=0", "timeout_s is 0"),
        ("mooncake://host:1?queue=x", "option queue"),
        ("mooncake://host:1?replicate=x", "replicate"),
        ("mooncake://host:1?replica_num=x", "replica_num"),
        ("mooncake://host:1?namespace=", "namespace of --remote is empty"),
        ("mooncake://[::1]:1", "IPv6"),
        ("mooncake://host:1?tenants=", "tenants of --remote is empty"),
        ("mooncake://host:1?tenants=a,,b", "'' cannot be a tenant"),
        ("mooncake://host:1?tenants=_a", "'_a' cannot be a tenant"),
        ("mooncake://host:1?tenants=a%0a", "cannot be a tenant"),
        ("mooncake://host:1?tenants=a,b,a", "'a' and 'a' have the same number; list each once"),
        ("mooncake://host:1?tenants=a,default", "'default' is tenant_id"),
        ("mooncake://host:1?tenant_id=b&tenants=a,b", "'b' is tenant_id"),
        ("mooncake://host:1?tenants=" + ",".join("abcdefghijklmnopq"), "17 tenants .* at most 16"),
    ],
)
def test_a_wrong_remote_is_refused(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        RemoteConfig.parse(url)


def test_a_remote_by_its_address() -> None:
    config = RemoteConfig.parse(
        "mooncake://10.0.0.1:50051?replica_num=2&namespace=prod&queue=1GiB&client_ttl=8"
    )
    assert config.options == {"replica_num": "2", "master_server_address": "10.0.0.1:50051"}
    assert (config.namespace, config.queue_nbytes, config.client_ttl_s) == ("prod", 1 << 30, 8.0)
    assert config.tenants == ()
    config = RemoteConfig.parse("mooncake://10.0.0.1:50051?tenant_id=rest&tenants=team-a,default")
    assert config.tenants == ("team-a", "default")


def test_a_pool_that_is_busy_for_once_does_not_end_the_tier(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        (store,) = second.agent.pools.stores().values()
        refused: list[object] = []

        def refuse_once(request: object) -> None:
            monkeypatch.undo()
            refused.append(request)
            raise DeviceTimeout("no staging")

        monkeypatch.setattr(store, "put_request", refuse_once)
        second.find(keys)
        second.load(keys)
        assert refused
        assert second.remote()["state"] == "closed"


def test_nothing_is_fetched_before_the_pool_is_recovered(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        node.put(keys)
        (store,) = node.agent.pools.stores().values()
        store._core.ready = False
        assert node.store.match(keys) == 0
        assert node.remote()["missed"] == 0
        store._core.ready = True
        assert node.store.match(keys) == 4

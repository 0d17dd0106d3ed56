"""The second tier with a real Mooncake master and segment servers over TCP."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster.cable import Cable
from cluster.mooncake_cluster import Cluster, running
from cluster.nodes import PAGES, Node, nodes, until
from node.agents import LAYOUT, start_process

import tutti
from store.pools import some_keys
from tutti.base.arrays import Keys
from tutti.bench import second_tier
from tutti.cluster.remote_process import RemoteProcess, Staging, name_prefix
from tutti.cluster.remote_store import RemoteConfig
from tutti.errors import RemoteFailed
from tutti.node.client import NodeStore

pytestmark = pytest.mark.slow

SLACK_S = 30.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path / "mooncake") as made:
        yield made


def tier(cluster: Cluster, **options: object) -> RemoteConfig:
    return RemoteConfig.parse(cluster.url(timeout=3, client_ttl=1, **options))


def shared(node: Node, keys: Keys) -> None:
    """Stores pages, and uses them until the cluster has them."""
    wanted = node.remote()["replicated"] + len(keys)
    node.put(keys)

    def offer() -> bool:
        node.load(keys)
        time.sleep(0.2)  # a segment server needs a while to join or to be given up
        return bool(node.remote()["replicated"] >= wanted)

    until(offer, "not replicated")


def serve_well(node: Node, keys: Keys) -> None:
    """The node's own pages, while the cluster is in trouble."""
    node.put(keys)
    for _ in range(20):
        assert node.store.match(keys) == len(keys)
        node.load(keys)


def test_a_master_that_has_no_address_is_named() -> None:
    config = RemoteConfig.parse("mooncake://no-such-host.invalid:50051?connect=60")
    staging = Staging(LAYOUT, 1, dict)
    with pytest.raises(RemoteFailed, match=r"master no-such-host\.invalid:50051"):
        RemoteProcess(config, staging).connect()
    staging.close_fd()


def test_pages_of_one_node_are_hits_on_another(tmp_path: Path, cluster: Cluster, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, tier(cluster)) as (first, second):
        shared(first, keys)
        assert second.store.match(keys) == 0
        second.find(keys)
        second.load(keys)
        assert second.remote()["fetched"] == PAGES


def test_pages_that_were_removed_are_misses_on_both_nodes(
    tmp_path: Path, cluster: Cluster, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, tier(cluster)) as (first, second):
        shared(first, keys)
        first.store.match(keys)  # the master leases what it was asked for
        assert first.store.catalogue.delete(keys) == PAGES
        first.settle("removed", PAGES)
        assert second.store.match(keys) == 0
        second.settle("absent", PAGES)
        assert second.store.match(keys) == first.store.match(keys) == 0
        counts = first.remote()
        assert (counts["fetched"], counts["remove_failed"]) == (0, 0)


def test_a_killed_segment_server_costs_misses_only(
    tmp_path: Path, cluster: Cluster, rng: np.random.Generator
) -> None:
    keys, own = some_keys(rng, PAGES), some_keys(rng, PAGES)
    with nodes(tmp_path, tier(cluster)) as (first, second):
        shared(first, keys)
        cluster.segments[0].send_signal(signal.SIGKILL)
        second.miss(keys, "failures")
        serve_well(second, own)
        assert second.store.match(keys) == 0
        cluster.add_segment()
        new = some_keys(rng, 4)
        shared(first, new)
        second.find(new)
        second.load(new)


def test_a_stopped_segment_server_costs_its_deadline_only(
    tmp_path: Path, cluster: Cluster, rng: np.random.Generator
) -> None:
    keys, own = some_keys(rng, PAGES), some_keys(rng, PAGES)
    with nodes(tmp_path, tier(cluster)) as (first, second):
        shared(first, keys)
        segment = cluster.segments[0]
        segment.send_signal(signal.SIGSTOP)
        try:
            assert second.store.match(keys) == 0
            serve_well(second, own)
            second.settle("failures")
        finally:
            segment.send_signal(signal.SIGCONT)
        until(lambda: second.store.match(keys) == PAGES or _gone(second), "neither there nor gone")
        second.load(keys[: second.store.match(keys)])


def _gone(node: Node) -> bool:
    """The master gave the server up while it was stopped."""
    return bool(node.remote()["absent"])


def test_a_killed_master_costs_misses_only(
    tmp_path: Path, cluster: Cluster, rng: np.random.Generator
) -> None:
    keys, own = some_keys(rng, PAGES), some_keys(rng, PAGES)
    with nodes(tmp_path, tier(cluster)) as (first, second):
        shared(first, keys)
        cluster.master.send_signal(signal.SIGKILL)
        cluster.master.wait(SLACK_S)
        second.miss(keys, "failures")
        serve_well(second, own)
        assert second.store.match(keys) == 0
        cluster.restart_master()
        cluster.add_segment()
        new = some_keys(rng, 4)
        shared(first, new)
        second.find(new)
        second.load(new)


def test_a_partition_costs_its_deadline_only(tmp_path: Path, rng: np.random.Generator) -> None:
    """Packets to and from the segment server are lost, while the master is reached."""
    keys, own = some_keys(rng, PAGES), some_keys(rng, PAGES)
    with contextlib.closing(Cable()) as far, running(tmp_path / "m", 0, far.near) as cluster:
        cluster.add_segment(far=far)
        with nodes(tmp_path, tier(cluster)) as (first, second):
            shared(first, keys)
            far.fault = "cut"
            second.miss(keys, "failures")
            serve_well(second, own)
            assert second.store.match(keys) == 0
            far.fault = ""
            cluster.add_segment()  # the master may have given up the one that was away

            def come_across() -> bool:
                new = some_keys(rng, 2)
                shared(first, new)
                deadline_s = time.monotonic() + 3.0
                while second.store.match(new) < 2 and time.monotonic() < deadline_s:
                    time.sleep(0.1)
                if found := second.store.match(new):
                    second.load(new[:found])
                return found == 2

            until(come_across, "pages do not come across any more")


def test_replicas_outlive_one_segment_server(tmp_path: Path, cluster: Cluster, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    cluster.add_segment()
    with nodes(tmp_path, tier(cluster, replica_num=2)) as (first, second):
        shared(first, keys)
        cluster.segments[0].send_signal(signal.SIGKILL)
        second.find(keys)  # once the master has given the server up
        second.load(keys)


@contextlib.contextmanager
def two_agents(tmp_path: Path, url: str) -> Iterator[tuple[NodeStore, NodeStore]]:
    """Clients of two agents as a user starts them, with a pool each."""
    agents: list[subprocess.Popen[str]] = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            agents.append(start_process(tmp_path / name / "s", tmp_path / name, "--remote", url))
        with (
            tutti.connect(str(tmp_path / "a" / "s"), LAYOUT, "32MiB") as first,
            tutti.connect(str(tmp_path / "b" / "s"), LAYOUT, "32MiB") as second,
        ):
            yield first, second
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(SLACK_S) == 0


def load_equal(store: NodeStore, keys: Keys, raw: bytes) -> None:
    """Every page of keys has these bytes."""
    memory = store.allocate_memory(len(keys))
    ticket = store.load(keys, range(len(keys)))
    ticket.wait(SLACK_S)
    assert ticket.wait_settled(SLACK_S)
    assert all(memory.read(page) == raw for page in range(len(keys)))


def test_tutti_serve_shares_pages_with_another_agent(
    tmp_path: Path, cluster: Cluster, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with two_agents(tmp_path, cluster.url(client_ttl=1, replicate="first")) as (first, second):
        memory = first.allocate_memory(4)
        raw = np.random.default_rng(seed).bytes(LAYOUT.object_nbytes)
        for page in range(4):
            memory.write(page, raw)
        first.put(keys, range(4)).wait(SLACK_S)
        until(lambda: first.stats()["remote"]["replicated"] == 4, "not replicated")
        until(lambda: second.match(keys) == 4, "not fetched")
        load_equal(second, keys, raw)


def test_tutti_serve_puts_namespaces_in_tenants(tmp_path: Path, seed: int) -> None:
    """The master admits the tenant of the first namespace, and not that of the second."""
    keys = some_keys(np.random.default_rng(seed), 6)
    admitted = ("default", "team-a")
    with running(tmp_path / "mooncake", tenants=admitted) as cluster:
        url = cluster.url(client_ttl=1, replicate="first", tenants="team-a,team-b")
        with two_agents(tmp_path, url) as (first, second):
            memory = first.allocate_memory(2)
            raw = np.random.default_rng(seed).bytes(LAYOUT.object_nbytes)
            for page in range(2):
                memory.write(page, raw)

            def put(keys: Keys, namespace: str) -> None:
                first.put(keys, range(2), namespace=namespace).wait(SLACK_S)

            def copied() -> bool:
                put(keys[:2], "")  # again: a segment server needs a while to join
                put(keys[2:4], "team-a")
                time.sleep(0.2)
                return bool(first.stats()["remote"]["replicated"] == 4)

            until(copied, "not replicated")
            prefix = name_prefix(RemoteConfig.parse(url), LAYOUT)
            names = [prefix + key.tobytes().hex() for key in keys]
            assert cluster.has("default", names) == [True, True, *[False] * 4]
            assert cluster.has("team-a", names) == [False, False, True, True, False, False]
            before = first.stats()["remote"]
            put(keys[4:], "team-b")
            until(
                lambda: (
                    first.stats()["remote"]["replicate_failed"] == before["replicate_failed"] + 2
                ),
                "the master took pages of a tenant that it does not know",
            )
            assert first.stats()["remote"]["failures"] == before["failures"]
            until(lambda: second.match(keys) == 4, "not fetched")
            load_equal(second, keys[:4], raw)
            assert len(second.catalogue.keys("team-a")) == 2


@pytest.mark.parametrize("said", [b"\xff" * 4096, b""], ids=["garbage", "nothing"])
def test_an_address_that_is_not_a_masters_fails_by_the_deadline(
    tmp_path: Path, seed: int, said: bytes
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with contextlib.ExitStack() as peers, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ended = threading.Event()

        def garble() -> None:
            while not ended.is_set():
                try:
                    peer, _ = server.accept()
                except OSError:
                    continue
                if said:
                    with peer:
                        peer.sendall(said)
                else:
                    peers.enter_context(peer)  # stays open

        thread = threading.Thread(target=garble)
        thread.start()
        try:
            url = f"mooncake://127.0.0.1:{server.getsockname()[1]}?connect=2&timeout=2"
            with nodes(tmp_path, RemoteConfig.parse(url), 1) as (node,):
                node.miss(keys, "failures")
                serve_well(node, keys)
        finally:
            ended.set()
            thread.join(SLACK_S)


def test_the_agent_ends_and_its_worker_with_it(tmp_path: Path, cluster: Cluster, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    (tmp_path / "a").mkdir()
    agent = start_process(tmp_path / "a" / "s", tmp_path / "a", "--remote", cluster.url())
    with tutti.connect(str(tmp_path / "a" / "s"), LAYOUT, "32MiB") as store:
        store.match(keys)
        until(lambda: store.stats()["remote"]["absent"], "not asked")
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").parent.parent
        workers = [
            int(pid)
            for task in children.iterdir()
            for pid in (task / "children").read_text().split()
        ]
        assert workers
        agent.kill()
        agent.wait(SLACK_S)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "a worker stays")


def test_the_comparison_with_a_batch_get_runs(tmp_path: Path) -> None:
    """With a cluster of its own."""
    words = ["--dir", str(tmp_path), "--capacity", "256MiB", "--json"]
    command = ["bench", "second-tier", *words, "--pages", "8", "--rounds", "2"]
    run = [sys.executable, "-m", "tutti.cli", *command]
    result = json.loads(subprocess.run(run, check=True, timeout=300, capture_output=True).stdout)
    assert result["benchmark"] == "second_tier" and not list(tmp_path.glob("second-tier*"))
    assert len(result["tier_gb_per_s"]) == len(result["mooncake_gb_per_s"]) == 2
    assert result["ratio"]["median"] > 0
    beside = result["local_p99_ratio"]
    assert set(beside) == {"again", "asking", "fetching", "mooncake", "storing"}
    assert all(ratio["low"] > 0 for ratio in beside.values())
    assert result["cpu_s_per_gb"]["mooncake"]["servers"] > 0
    assert 0 < result["cpu_ratio_bound"] < 1
    assert len(result["exists_keys_per_s"]) == 2 and min(result["exists_keys_per_s"]) > 0
    assert len(second_tier.rows_of(result)) == 6 and second_tier.notes_of(result)

"""Tenants of the remote store: the pages of some namespaces go to a tenant of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from cluster.faulty import SLOW_START_S, Faults, FaultyStore
from cluster.nodes import PAGES, Node, nodes, until

from store.pools import some_keys
from tutti.base.arrays import Keys
from tutti.cluster.remote_store import ValueStatus
from tutti.cluster.tenants import OTHERS, TenantStores
from tutti.medium.slot_record import tenant_of

TENANTS = ("team-a", "team-b")
DONE, ABSENT = ValueStatus.DONE, ValueStatus.ABSENT


def share(node: Node, keys: Keys, namespace: str) -> None:
    """Stores pages of a namespace; all of them are copied."""
    wanted = node.remote()["replicated"] + len(keys)
    node.put(keys, namespace)
    node.settle("replicated", wanted)


def names(faults: Faults, tenant: str) -> set[str]:
    """The keys that a tenant has; of the tenant of all others for ""."""
    files = (path.name for path in faults.folder.iterdir())
    return {name.rpartition("_")[2] for name in files if name.startswith(f"{tenant}tutti_")}


def hexes(keys: Keys) -> set[str]:
    return {key.tobytes().hex() for key in keys}


def test_pages_go_to_the_tenant_of_their_namespace_and_come_back(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    parts = {"": keys[:2], "team-a": keys[2:4], "team-b": keys[4:6], "team-c": keys[6:]}
    with nodes(tmp_path, faults.config(replicate="first", tenants=TENANTS)) as (first, second):
        for namespace, part in parts.items():
            share(first, part, namespace)
        assert names(faults, "team-a") == hexes(keys[2:4])
        assert names(faults, "team-b") == hexes(keys[4:6])
        assert names(faults, "") == hexes(keys[[0, 1, 6, 7]])
        second.find(keys)  # one chain of four namespaces in three tenants
        second.load(keys)
        second.settle("fetched", PAGES)
        tenant = {info.key: info.tenant for info in second.store.catalogue.objects(keys)}
        assert tenant == {
            key.tobytes(): tenant_of(namespace) for namespace, part in parts.items() for key in part
        }


def test_each_tenant_has_time_of_its_own_to_connect(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    """Together they take longer than one may, which is much for the start of a process."""
    connect_s = 1.9 * SLOW_START_S
    faults.set("slow-start")
    config = faults.config(replicate="first", tenants=TENANTS, connect_s=connect_s)
    assert SLOW_START_S * len(TENANTS) > connect_s
    with nodes(tmp_path, config, 1) as (node,):
        keys = some_keys(np.random.default_rng(seed), 2)
        node.put(keys, "team-b")

        def replicated() -> bool:
            node.load(keys)  # offers them again: a busy machine may start the process too late
            return bool(node.remote()["replicated"] >= 2)

        until(replicated, "not replicated")
        assert len(names(faults, "team-b")) == 2


def test_a_page_is_in_one_tenant_only(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    with nodes(tmp_path, faults.config(replicate="first", tenants=TENANTS)) as (first, second):
        share(first, keys, "team-a")
        second.put(keys, "team-b")
        second.settle("offered", 2)
        second.find(keys)
        until(lambda: faults.calls().count("exists 2 team-a") == 2, "the second did not ask")
        assert not names(faults, "team-b")
        assert second.remote()["replicated"] == 0


def test_without_tenants_no_call_is_added(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    with nodes(tmp_path, faults.config(replicate="first")) as (first, second):
        share(first, keys, "team-a")
        second.find(keys)
        assert faults.calls() == ["exists 2", "put 2", "exists 2", "get 2"]


def test_a_tenant_without_quota_does_not_stop_the_others(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    config = faults.config(replicate="first", tenants=TENANTS, failures_max=1, client_ttl_s=3000.0)
    faults.set("full")
    with nodes(tmp_path, config, 1) as (node,):
        node.put(keys[:2], "team-a")
        node.settle("replicate_failed", 2)
        node.put(keys[:2], "team-a")  # not offered again for client_ttl
        share(node, keys[2:], "")
        remote = node.remote()
        assert (remote["replicate_failed"], remote["failures"], remote["offered"]) == (2, 0, 4)
        assert remote["write_state"] == "closed"


class Asked(FaultyStore):
    """Notes what it is asked."""

    def __init__(self, options: Mapping[str, str], memory: ctypes.Array[ctypes.c_char]) -> None:
        super().__init__(options, ctypes.addressof(memory), len(memory))


def test_what_the_last_look_up_did_not_find_is_read_from_the_first(faults: Faults) -> None:
    memory = ctypes.create_string_buffer(64)
    at = [ctypes.addressof(memory) + 8 * row for row in range(3)]
    folder = {"folder": str(faults.folder)}
    stores = TenantStores(
        {OTHERS: Asked(folder, memory), 7: Asked({**folder, "tenant_id": "t"}, memory)}
    )
    assert stores.put(["a", "b", "c"], [0, 7, 9], at, 8) == [DONE] * 3
    assert stores.exists(["b", "x", "a"]) == [DONE, ABSENT, DONE]
    assert stores.get(["b", "a", "x"], at, 8) == [DONE, DONE, ABSENT]
    assert stores.exists(["a", "c"]) == [DONE] * 2  # the tenant is not asked
    assert stores.get(["b"], at[:1], 8) == [ABSENT]
    assert sorted(faults.calls()[:2]) == ["put 1 t", "put 2"]
    assert faults.calls()[2:4] == ["exists 3", "exists 2 t"]
    assert sorted(faults.calls()[4:6]) == ["get 1 t", "get 2"]
    assert faults.calls()[6:] == ["exists 2", "get 1"]

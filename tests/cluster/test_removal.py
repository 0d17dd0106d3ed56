"""What is deleted from a pool with a second tier is not fetched back, and every copy is counted."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.faulty import Faults
from cluster.nodes import PAGES, WAIT_S, Node, nodes, until

from store.pools import some_keys
from tutti import cli
from tutti.base.arrays import Keys
from tutti.cluster.recent_keys import RecentKeys
from tutti.cluster.remote_store import ValueStatus
from tutti.cluster.second_tier import COPIED
from tutti.cluster.tenants import TenantStores
from tutti.cluster.worker import PUT

DONE, ABSENT, FAILED = ValueStatus.DONE, ValueStatus.ABSENT, ValueStatus.FAILED


def values(faults: Faults) -> int:
    return sum(path.name.startswith("tutti_") for path in faults.folder.iterdir())


def is_idle(node: Node) -> bool:
    tier = node.tier
    with tier._changed:
        return not tier._wanted and not tier._fetching


def test_what_was_removed_is_a_miss_on_all_nodes(
    tmp_path: Path, faults: Faults, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        names = [key.tobytes().hex() for key in keys]
        assert cli.main(["rm", f"unix:{first.agent.path}", *names]) == 0, capsys.readouterr().err
        assert first.store.match(keys) == 0
        first.settle("removed", PAGES)
        assert values(faults) == 0
        assert second.store.match(keys) == 0
        second.settle("absent", PAGES)
        until(lambda: is_idle(first) and is_idle(second), "a chain is still fetched")
        for node in (first, second):
            assert node.store.match(keys) == 0
        assert first.remote()["missed"] == first.remote()["fetched"] == 0  # it did not ask
        first.put(keys)  # as new
        first.load(keys)


def test_a_chain_that_lands_while_it_is_removed_does_not_stay(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        (store,) = second.agent.pools.stores().values()
        put = store.put_request

        def remove_meanwhile(request: Any) -> Any:
            ticket = put(request)
            second.store.catalogue.delete(keys[:3])  # before the pool has them, or after
            return ticket

        monkeypatch.setattr(store, "put_request", remove_meanwhile)
        second.store.match(keys)
        second.settle("removed", 3)
        until(lambda: is_idle(second), "the chain is still fetched")
        assert second.store.match(keys) == 0
        assert not second.store.present(keys)[:3].any()


def test_what_waits_to_be_copied_and_is_removed_is_not_copied(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    faults.set("hang")
    with nodes(tmp_path, faults.config(timeout_s=3000.0), 1) as (node,):
        node.put(keys)
        node.load(keys[:1])
        until(lambda: faults.calls() and not node.remote()["queued_nbytes"], "nothing was taken")
        node.load(keys[1:])  # they wait
        assert node.store.catalogue.delete(keys[1:]) == 3
        assert node.remote()["queued_nbytes"] == 0
        assert node.remote()["not_copied"] == 3
        faults.set("raise-remove")
        process = node.tier._remote._process
        assert process is not None
        process.kill()  # which hangs until then
        node.settle("remove_failed", 3)
        assert values(faults) == 0


def test_what_is_removed_while_it_is_copied_can_be_copied_again(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is removed behind the one that had begun, so it is not there any more."""
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        node.put(keys)
        tier, call = node.tier, node.tier._call

        def remove_meanwhile(op: int, own: Keys, pages: Any) -> Any:
            if op == PUT:
                node.store.catalogue.delete(own)
            return call(op, own, pages)

        with monkeypatch.context() as patch:
            patch.setattr(tier, "_call", remove_meanwhile)
            node.load(keys)
            node.settle("removed", 4)
        assert values(faults) == 0
        monkeypatch.setattr(tier._removed, "_now_s", lambda: time.monotonic() + 120.0)
        node.share(keys)
        assert values(faults) == 4


def test_what_waits_long_to_be_removed_is_not_fetched_back(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of removals may be longer than what is done in a minute."""
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        node.share(keys)
        tier, go_on = node.tier, threading.Event()
        monkeypatch.setattr(tier, "_remove", lambda _: go_on.wait(WAIT_S))  # works at others
        tier.removing(some_keys(np.random.default_rng(seed + 1), 1))
        until(lambda: not tier._removals, "nothing is removed")
        monkeypatch.undo()
        assert node.store.catalogue.delete(keys) == PAGES
        monkeypatch.setattr(tier._removed, "_now_s", lambda: time.monotonic() + 120.0)
        assert node.store.match(keys) == 0
        assert node.store.match(keys[1:]) == 0
        go_on.set()
        node.settle("removed", PAGES)
        until(lambda: is_idle(node), "a chain is still fetched")
        assert node.remote()["missed"] == node.remote()["fetched"] == 0
        assert values(faults) == 0


def _few(infos: Any, changes: dict[bytes, dict[str, Any]]) -> list[Any]:
    return [(dataclasses.replace(i, **changes.get(i.key, {})), record) for i, record in infos]


def _refused(node: Node, faults: Faults, offer: Callable[[Keys], None], keys: Keys) -> None:
    faults.set("raise-exists")
    offer(keys[:2])
    node.settle("replicate_failed", 2)
    until(lambda: node.remote()["write_state"] == "open", "it goes on")
    offer(keys[2:5])
    faults.set("")
    assert node.remote()["refused"] == 3


def test_every_page_that_was_offered_is_counted_once(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 8 * PAGES).reshape(8, PAGES, 16)
    config = faults.config(failures_max=1, client_ttl_s=3000.0)
    with nodes(tmp_path, config) as (first, second):

        def offer(some: Keys) -> None:
            second.put(some)
            second.load(some)

        (store,) = second.agent.pools.stores().values()
        first.share(keys[0])
        offer(keys[0])
        second.settle("there", PAGES)
        offer(keys[1])
        second.settle("replicated", PAGES)
        described, row = store.catalogue.described, keys[2]
        changes = {row[0].tobytes(): {"has_digests": False}, row[1].tobytes(): {"expires_s": 0}}
        with monkeypatch.context() as patch:
            patch.setattr(store.catalogue, "described", lambda some: _few(described(some), changes))
            offer(row)
            second.settle("not_copied", 2)
            second.settle("replicated", 2 * PAGES - 2)
        with monkeypatch.context() as patch:  # evicted meanwhile
            patch.setattr(second.tier._outgoing, "_load", lambda own: False)
            offer(keys[3])
            second.settle("not_copied", PAGES + 2)
        _refused(second, faults, offer, keys[4])
        counts = second.remote()
        assert counts["queued_nbytes"] == 0
        assert sum(counts[name] for name in COPIED) == counts["offered"] == 4 * PAGES + 5
        assert counts["local_failures"] == 0


def test_names_are_removed_from_all_tenants() -> None:
    class Answers:
        def __init__(self, *answers: ValueStatus) -> None:
            self.answers = list(answers)

        def remove(self, names: list[str]) -> list[ValueStatus]:
            assert names == ["a", "b", "c"]
            return self.answers

    stores: Any = {0: Answers(DONE, ABSENT, ABSENT), 7: Answers(ABSENT, ABSENT, FAILED)}
    assert TenantStores(stores).remove(["a", "b", "c"]) == [DONE, ABSENT, FAILED]


def test_recent_keys_are_forgotten() -> None:
    recent = RecentKeys(5.0, lambda: 0.0)
    recent.add([b"a", b"b"])
    recent.discard([b"a", b"c"])
    assert (b"a" in recent, b"b" in recent) == (False, True)

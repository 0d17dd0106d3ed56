"""What the second tier owes to the pool and to other nodes when a part of it fails."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cluster.faulty import Faults
from cluster.nodes import PAGES, Node, content, nodes, until
from node.agents import LAYOUT, RunningAgent

from store.pools import some_keys
from tutti.cluster.remote_process import RemoteProcess, Staging, StagingInUse
from tutti.cluster.worker import EXISTS, GET, OK, REPLY
from tutti.errors import ConfigError, DeviceTimeout, RemoteFailed
from tutti.transfers.store_config import StoreConfig


class Waited:
    """A ticket that remembers whether its end was waited for."""

    def __init__(self, ticket: Any) -> None:
        self.ticket = ticket
        self.over = False

    def wait_ended(self, timeout_s: float) -> bool:
        self.over = bool(self.ticket.wait_ended(timeout_s))
        return self.over

    @property
    def outcome(self) -> Any:
        return self.ticket.outcome


def watch_puts(
    node: Node, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int], bool] = lambda _: False
) -> tuple[list[tuple[Waited, set[int]]], list[set[int]], list[bytes]]:
    """Puts of the tier with their pages, and pages that a GET overwrites under a put, and keys
    that were read; the puts of these numbers are refused."""
    tier = node.tier
    puts: list[tuple[Waited, set[int]]] = []
    mixed: list[set[int]] = []
    read: list[bytes] = []
    put_request, ask = tier._store.put_request, tier._remote.ask
    numbers = iter(range(1 << 20))

    def put(request: Any) -> Any:
        if refuse(next(numbers)):
            raise DeviceTimeout("no staging")
        ticket = Waited(put_request(request))
        puts.append((ticket, set(request.pages.tolist())))
        return ticket

    def checked(op: int, keys: Any, pages: Any, timeout_s: float) -> None:
        if op == GET:
            used = [held for ticket, held in puts if not ticket.over]
            read.extend(key.tobytes() for key in keys)
            mixed.extend(held for held in used if held & set(pages.tolist()))
        ask(op, keys, pages, timeout_s)

    monkeypatch.setattr(tier._store, "put_request", put)
    monkeypatch.setattr(tier._remote, "ask", checked)
    return puts, mixed, read


def test_staging_waits_for_the_put_before_one_that_was_refused(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(failures_max=1)) as (first, second):
        for part, namespace in ((keys[:2], "a"), (keys[2:], "b")):
            pages = range(len(part))
            first.store.put(part, pages, memory=first.memory, namespace=namespace).wait(30.0)
        ticket = first.store.load(keys, range(4, 8), memory=first.memory)
        ticket.wait(30.0)
        first.settle("replicated", 4)
        puts, mixed, _ = watch_puts(second, monkeypatch, lambda number: number == 1)
        second.find(keys)
        assert len(puts) >= 2
        until(lambda: all(put.over for put, _ in puts), "a put is not waited for")
        assert not mixed
        counts = second.remote()
        # By a fault of this machine alone, which does not stop fetches.
        assert (counts["local_failures"], counts["failures"], counts["opened"]) == (1, 0, 0)


@pytest.mark.parametrize(("beside", "sizes"), [(True, [3, 3, 2]), (False, [PAGES])])
def test_fetched_pages_are_stored_a_few_at_a_time_beside_local_loads(
    tmp_path: Path,
    faults: Faults,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    beside: bool,
    sizes: list[int],
) -> None:
    """A load waits for one put at most."""
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        tier = second.tier
        monkeypatch.setattr(tier, "_at_once", 3)
        settle, begun = tier._settle, []

        def settled(*parts: int) -> None:
            settle(*parts)
            if beside and not parts:  # a load begins while the put before is waited for
                begun.append(True)

        monkeypatch.setattr(tier, "_settle", settled)
        monkeypatch.setattr(tier._local, "near", lambda: bool(begun))
        put_request, tickets = tier._store.put_request, []

        def put(request: Any) -> Any:
            assert all(ticket.done for ticket in tickets), "the last is under way"
            tickets.append(put_request(request))
            return tickets[-1]

        monkeypatch.setattr(tier._store, "put_request", put)
        second.find(keys)
        second.load(keys)
        assert [len(ticket.outcome) for ticket in tickets] == sizes


def test_the_next_pages_are_asked_for_before_those_that_came_are_stored(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote store works while the pool does."""
    keys = some_keys(np.random.default_rng(seed), PAGES)
    config = faults.config(staging_nbytes=2 * LAYOUT.object_nbytes)  # three parts of one page
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        tier, asked = second.tier, []
        put_request = tier._store.put_request

        def put(request: Any) -> Any:
            asked.append(len(tier._remote._asked))
            return put_request(request)

        monkeypatch.setattr(tier._store, "put_request", put)
        second.find(keys)
        assert asked == [2] * (PAGES - 2) + [1, 0]


@pytest.mark.parametrize("field", ["expiry", "version"])
def test_nothing_is_stored_behind_a_page_that_cannot_be(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    config = faults.config(staging_nbytes=2 * LAYOUT.object_nbytes)  # parts of one page
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        tier = second.tier
        answer, trailers = tier._remote.answer, tier._staging.trailers

        def changed(timeout_s: float) -> Any:
            answers = answer(timeout_s)
            trailers[field][(trailers["key"] == keys[2]).all(axis=1)] += 1
            return answers

        monkeypatch.setattr(tier._remote, "answer", changed)
        _, mixed, read = watch_puts(second, monkeypatch)
        second.miss(keys, "absent")
        until(lambda: not tier._fetching, "the chain is still fetched")
        assert second.store.match(keys) == 2
        assert second.store.present(keys).sum() == 2
        assert not {key.tobytes() for key in keys[4:]} & set(read)  # one read was under way
        assert not mixed


def test_a_read_that_failed_costs_the_worker(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        faults.set("raise-get")
        second.miss(keys, "failures")
        faults.set("")
        second.find(keys)
        counts = second.remote()  # its late bytes cannot reach the staging memory
        assert counts["starts"] == 1 + counts["failures"]
        second.load(keys)


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (REPLY.pack(OK, 7) + bytes(2), "sent an answer to call 7, not 1"),
        (b"x", "sent an invalid reply"),
        (REPLY.pack(OK, 1) + bytes(3), "sent an invalid reply"),
    ],
)
def test_a_reply_that_is_none_to_the_call_is_refused(
    faults: Faults, seed: int, reply: bytes, what: str
) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    staging = Staging(LAYOUT, 2, dict)
    remote = RemoteProcess(faults.config(), staging)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, subprocess.Popen(["sleep", "60"]) as process:
        remote._process, remote._socket = process, ours
        theirs.send(reply)
        with pytest.raises(RemoteFailed, match=what):
            remote.call(EXISTS, keys, None, 5.0)
        assert remote._process is None
    staging.close_fd()
    staging.close_fd()


def test_the_end_of_the_process_names_its_cause(faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    staging = Staging(LAYOUT, 2, dict)
    remote = RemoteProcess(faults.config(), staging)
    faults.set("die")
    with pytest.raises(RemoteFailed, match=r"ended \(signal 6\)"):
        remote.call(EXISTS, keys, None, 60.0)
    faults.set("unreachable")
    with pytest.raises(RemoteFailed, match="the master is away"):
        remote.call(EXISTS, keys, None, 60.0)
    staging.close_fd()


@pytest.mark.parametrize("verify", ["off", "sampled"])
def test_pages_that_are_not_verified_are_not_copied(
    tmp_path: Path, faults: Faults, verify: str
) -> None:
    config = StoreConfig(verify=verify)
    with pytest.raises(ConfigError, match="--verify always, or replicate=off"):
        RunningAgent(tmp_path, config=config, remote=faults.config())
    faults.config(replicate="off").check(verify)


def test_pages_without_digests_or_time_are_not_copied(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        (store,) = node.agent.pools.stores().values()
        described = store.catalogue.described
        changes = {
            keys[0].tobytes(): {"has_digests": False},
            keys[1].tobytes(): {"expires_s": 0},
        }

        def changed(some: Any) -> Any:
            return [
                (dataclasses.replace(info, **changes.get(info.key, {})), record)
                for info, record in described(some)
            ]

        monkeypatch.setattr(store.catalogue, "described", changed)
        node.put(keys)
        node.load(keys)
        node.settle("replicated", 2)
        until(lambda: not node.remote()["queued_nbytes"], "some wait")
        names = {path.name[-32:] for path in faults.folder.iterdir()}
        assert {key.tobytes().hex() for key in keys} & names == {
            key.tobytes().hex() for key in keys[2:]
        }
        assert node.remote()["failures"] == node.remote()["local_failures"] == 0


def test_pages_that_arrived_keep_their_digests_and_are_not_hashed_again(
    tmp_path: Path, faults: Faults, seed: int
) -> None:
    keys = some_keys(np.random.default_rng(seed), PAGES)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        second.find(keys)
        second.settle("fetched", PAGES)
        (there,) = first.agent.pools.stores().values()
        (here,) = second.agent.pools.stores().values()
        assert here.stats()["digest_cpu_s"] == 0 < there.stats()["digest_cpu_s"]
        step = LAYOUT.slice_nbytes
        for info, record in here.catalogue.described(keys):
            payload = content(info.key)
            slices = [payload[i : i + step] for i in range(0, len(payload), step)]
            stored = record["digests"][: LAYOUT.layers].tolist()
            assert stored == [xxhash.xxh3_64_intdigest(part) for part in slices]


def test_an_object_stored_anew_while_it_is_copied_is_not_copied(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be others than those of the digests in the record that was read."""
    keys = some_keys(np.random.default_rng(seed), 2)
    with nodes(tmp_path, faults.config(), 1) as (node,):
        outgoing = node.tier._outgoing
        load = outgoing._load

        def anew(own: Any) -> bool:
            monkeypatch.undo()
            loaded = load(own)
            (store,) = node.agent.pools.stores().values()
            assert store.catalogue.delete(keys[:1]) == 1
            node.put(keys[:1])
            return loaded

        monkeypatch.setattr(outgoing, "_load", anew)
        node.put(keys)
        node.load(keys)
        node.settle("not_copied", 2)
        assert not [call for call in faults.calls() if call.startswith("put")]


def test_pages_written_without_digests_say_so(tmp_path: Path, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 1)
    for number, verify in enumerate(("off", "always")):
        agent = RunningAgent(tmp_path / str(number), config=StoreConfig(verify=verify))
        try:
            with agent.connect() as store:
                store.put(keys, [0], memory=store.allocate_memory(1)).wait(30.0)
                (info,) = store.catalogue.objects(keys)
                assert info.has_digests == (verify == "always")
        finally:
            agent.stop()


def test_each_call_has_the_whole_timeout(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        tier, timeouts = second.tier, []
        answer = tier._remote.answer

        def noted(timeout_s: float) -> Any:
            timeouts.append(timeout_s)
            return answer(timeout_s)

        monkeypatch.setattr(tier._remote, "answer", noted)
        second.find(keys)
        assert timeouts == [faults.config().timeout_s] * 2


def test_copies_that_fail_do_not_stop_fetches(
    tmp_path: Path, faults: Faults, rng: np.random.Generator
) -> None:
    keys, own = some_keys(rng, 4), some_keys(rng, 4)
    config = faults.config(failures_max=1, client_ttl_s=3000.0)
    with nodes(tmp_path, config) as (first, second):
        first.share(keys)
        faults.set("raise-put")
        second.put(own)
        second.load(own)
        second.settle("opened")
        second.find(keys)
        assert (second.remote()["state"], second.remote()["write_state"]) == ("closed", "open")


def test_fetched_pages_expire_without_a_restart(tmp_path: Path, faults: Faults, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 2)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.store.put(keys, range(2), memory=first.memory, ttl_s=3000.0).wait(30.0)
        first.store.load(keys, range(2), memory=first.memory).wait(30.0)
        first.settle("replicated", 2)
        second.find(keys)
        stores = [*first.agent.pools.stores().values(), *second.agent.pools.stores().values()]
        expiries = [store._core.index.expiry[store._core.index.resident()] for store in stores]
        assert expiries[0].all()
        assert np.array_equal(*expiries)
        assert stores[1].catalogue.expiry._thread is not None


def test_the_tier_goes_on_once_its_staging_memory_is_free(
    tmp_path: Path, faults: Faults, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with nodes(tmp_path, faults.config()) as (first, second):
        first.share(keys)
        tier = second.tier
        settle = tier._settle

        def busy(*halves: int) -> None:
            settle(*halves)
            # While it is off, the deletion of what landed may not end in time either.
            raise (DeviceTimeout if tier._is_off else StagingInUse)("the medium hangs")

        with monkeypatch.context() as patch:
            patch.setattr(tier, "_settle", busy)
            second.miss(keys, "local_failures")
            until(lambda: second.remote()["state"] == "off", "not off")
            second.settle("local_failures", 3)
        until(lambda: second.remote()["state"] == "closed", "off for good")
        second.find(keys)
        second.load(keys)


def test_copies_and_fetches_take_turns(
    tmp_path: Path, faults: Faults, rng: np.random.Generator
) -> None:
    chains = [some_keys(rng, 1) for _ in range(6)]
    with nodes(tmp_path, faults.config(staging_nbytes=2 * LAYOUT.object_nbytes), 1) as (node,):
        own = some_keys(rng, 4)
        node.put(own)
        tier, order = node.tier, []
        tier._do = lambda work, keys: order.append(work is not None)  # type: ignore[method-assign]
        with tier._changed:
            tier.used(own)
            for chain in chains:
                tier.missed(chain)
        until(lambda: len(order) == 10, "work waits")
        assert order[:8] in ([True, False] * 4, [False, True] * 4)

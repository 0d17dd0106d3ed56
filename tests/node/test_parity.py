"""One interface, two stores: embedded in this process, and as a client of the node's agent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, RunningAgent
from waiting import wait_until

import tutti
from store.pools import fill, put_some, some_keys
from tutti.base.arrays import Keys
from tutti.base.units import KiB, MiB, format_nbytes
from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    ConfigError,
    KeyMissing,
    KeySizeError,
    PageRangeError,
    PoolClosed,
    PoolMismatch,
)
from tutti.gio_uring import controller_file
from tutti.medium.geometry import RECORD_NBYTES
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import EXPIRY_UNIT_S
from tutti.memory.host_memory import PAGE_FIRST_DIRECT, HostMemory
from tutti.node import client
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadTicket, Outcome, PutTicket

Opener = Callable[..., Any]

#: Agents that the test of now has started.
AGENTS: list[RunningAgent] = []


@pytest.fixture(params=["embedded", "agent"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens a pool by layout, capacity and StoreConfig; everything is closed at the end."""
    with contextlib.ExitStack() as stack:

        def embedded(layout: KVLayout = LAYOUT, capacity: str = "32MiB", **config: Any) -> Any:
            config = {"timeout_s": 30.0, **config}
            path = str(tmp_path / "pool.tutti")
            store = tutti.open(path, layout, capacity, config=StoreConfig(**config))
            return stack.enter_context(store)

        def served(layout: KVLayout = LAYOUT, capacity: str = "32MiB", **config: Any) -> Any:
            config = {"timeout_s": 30.0, **config}
            agent = RunningAgent(tmp_path / "agent", config=StoreConfig(**config))
            AGENTS.append(agent)
            stack.callback(AGENTS.clear)
            stack.callback(agent.stop)
            return stack.enter_context(agent.connect(layout, capacity))

        yield embedded if request.param == "embedded" else served


@pytest.mark.parametrize("verify", ["always", "sampled", "off"])
@pytest.mark.parametrize("durability", ["process", "flush"])
def test_what_was_put_is_loaded(
    opener: Opener, verify: str, durability: str, rng: np.random.Generator
) -> None:
    store = opener(verify=verify, durability=durability)
    pool = store.allocate_memory(48)
    keys = some_keys(rng, 20)
    contents = fill(pool, range(20), rng)
    result = store.put(keys, np.arange(20)).wait(30)
    assert (result.stored, result.present, result.dropped) == (20, 0, 0)
    assert store.match(keys) == 20
    pages = 24 + rng.permutation(20)
    ticket = store.load(keys, pages)
    for layer in range(LAYOUT.layers):
        ticket.wait_layer(layer, 30)
    assert ticket.wait_settled(30)
    assert [pool.read(int(page)) for page in pages] == contents


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.mla(5, 512, 64, 16, "bfloat16", model="test-model"),
        KVLayout.mha(4, 2, 64, 16, "bfloat16", model="test-model").token_major(),
        KVLayout.mha(2, 3, 96, 32, "float32", v_head_dim=40, model="test-model"),
    ],
)
def test_layouts_and_orders(opener: Opener, layout: KVLayout, rng: np.random.Generator) -> None:
    store = opener(layout)
    assert store.layout == layout
    order = None if layout.layers == 1 else PAGE_FIRST_DIRECT
    pool = store.allocate_memory(12, order=order)
    keys = some_keys(rng, 6)
    contents = fill(pool, range(6), rng)
    assert store.put(keys, np.arange(6)).wait(30).stored == 6
    store.load(keys, np.arange(6, 12)).wait(30)
    assert [pool.read(page) for page in range(6, 12)] == contents


def test_prefixes_gaps_and_repetitions(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    store.allocate_memory(8)
    keys = some_keys(rng, 8)
    store.put(keys[:3], [0, 1, 2]).wait(30)
    store.put(keys[5:], [5, 6, 7], parent=keys[4].tobytes(), depth=5).wait(30)
    assert store.match(keys) == 3
    assert store.match(keys[5:]) == 3
    assert store.match(keys[3:]) == 0
    assert store.present(keys).tolist() == [True] * 3 + [False] * 2 + [True] * 3
    result = store.put(np.concatenate((keys, keys)), [*range(8), *range(8)]).wait(30)
    assert (result.stored, result.present) == (2, 14)
    assert store.match(keys) == 8
    assert store.match(keys[:0]) == 0
    assert store.put(keys[:0], []).wait(30).stored == 0


def test_a_store_is_a_container_of_keys(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    memory = store.allocate_memory(8)
    keys = some_keys(rng, 4)
    assert len(store) == 0
    assert store, "an empty store is a store"
    put = store.put(keys[:3], [0, 1, 2])
    put.wait(30)
    load = store.load(keys[:3], [4, 5, 6])
    load.wait(30)
    assert len(store) == 3
    assert [key.tobytes() in store for key in keys] == [True] * 3 + [False]
    with pytest.raises(KeySizeError):
        _ = b"short" in store
    each = format_nbytes(store.layout.object_nbytes)
    assert re.fullmatch(rf"<(Object|Node)Store: 3 of \d+ objects, {each} each>", repr(store))
    assert repr(memory) == f"<HostMemory: 8 pages of {each}>"
    assert (repr(put), repr(load)) == (
        "<PutTicket: 3 stored>",
        "<LoadTicket: 3 keys, done, 0 failed>",
    )
    assert store.delete(keys[:1]) == 1
    assert len(store) == 2
    store.close()
    assert repr(store).endswith("Store: closed>")


@pytest.mark.parametrize("ticket", [PutTicket, LoadTicket])
def test_tickets_show_what_users_need(ticket: type) -> None:
    names = {name for name in dir(ticket) if not name.startswith("_")}
    both = {"done", "failed", "wait"}
    put = {"on_done", "outcome", "wait_ended"}
    load = {"cancel", "keys", "on_settled", "order_stream", "wait_layer", "wait_settled"}
    assert names == both | (put if ticket is PutTicket else load)


def test_many_pages_in_one_call(opener: Opener, rng: np.random.Generator) -> None:
    """More than one plan, and more keys than one message of the agent has digests for."""
    layout = KVLayout.mha(
        layers=2, kv_heads=8, head_dim=128, page_size=8, dtype="bfloat16", model="test-model"
    )
    store = opener(layout, "128MiB")
    pool = store.allocate_memory(2600)
    keys = some_keys(rng, 1300)
    contents = fill(pool, range(1300), rng)
    assert store.put(keys, np.arange(1300)).wait(20).stored == 1300
    assert store.match(keys) == 1300
    store.load(keys, np.arange(1300, 2600)).wait(20)
    assert all(pool.read(1300 + i) == content for i, content in enumerate(contents))


def test_more_keys_than_a_message_has(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    store.allocate_memory(4)
    keys, there = some_keys(rng, 70_000), [0, 40_000, 69_999]
    store.put(keys[there], np.arange(3)).wait(30)
    assert store.match(keys) == 1
    assert np.flatnonzero(store.present(keys)).tolist() == there
    assert store.quarantine(keys) == 3
    assert store.match(keys) == 0


def ten_pages(
    opener: Opener, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Keys]:
    """A store with ten pages, whose look-ups take a message for each four, and their keys."""
    monkeypatch.setattr(client, "LISTED_MAX", 4)
    store = opener()
    keys = put_some(store, rng, 10)
    return store, keys


def test_pins_of_a_look_up_in_several_messages(
    opener: Opener, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = ten_pages(opener, rng, monkeypatch)

    def busy() -> int:
        return int(store.stats()["busy_objects"])

    assert store.match(keys, pin="mine") == 10
    assert busy() == 10
    assert store.match(keys[:2], pin="mine") == 2
    assert busy() == 2
    assert store.present(keys, pin="mine").all()
    assert busy() == 10
    store.unpin("mine")
    assert busy() == 0
    assert store.match(keys, pin="mine") == 10
    store.unpin()
    assert busy() == 0
    assert store.match(keys, pin=True) == 10
    assert busy() == 10


def test_what_is_not_there(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    store.allocate_memory(8)
    keys = some_keys(rng, 4)
    store.put(keys[:2], [0, 1]).wait(30)
    with pytest.raises(KeyMissing, match="key 2 of 4"):
        store.load(keys, [4, 5, 6, 7])
    assert store.stats()["busy_objects"] == 0


def test_bad_arguments(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    with pytest.raises(ConfigError, match="no memory is registered; call allocate_memory"):
        store.put(some_keys(rng, 1), [0])
    pool = store.allocate_memory(4)
    keys = some_keys(rng, 2)
    with pytest.raises(PageRangeError):
        store.put(keys, [3, 4])
    with pytest.raises(ConfigError, match="2 keys and 1 pages"):
        store.put(keys, [0])
    with pytest.raises(ConfigError, match="2 keys and 1 pages"):
        store.load(keys, [0])
    with pytest.raises(KeySizeError):
        store.put([b"short"], [0])
    with pytest.raises(KeySizeError, match="parent"):
        store.put(keys, [0, 1], parent=b"short")
    with pytest.raises(ConfigError, match="depth"):
        store.put(keys, [0, 1], depth=-1)
    store.put(keys, [0, 1]).wait(30)
    with pytest.raises(ConfigError, match="twice"):
        store.load(keys, [2, 2])
    other = HostMemory.allocate(KVLayout.mla(5, 512, 64, 16, "bfloat16", model="test-model"), 2)
    with pytest.raises(PoolMismatch):
        store.register(other)
    store.unregister(pool)
    with pytest.raises(ConfigError, match="not registered"):
        store.put(keys, [0, 1], memory=pool)
    store.close()
    with pytest.raises(PoolClosed):
        store.match(keys)


@pytest.mark.parametrize("name", ["", "*", "mine\0001", "0=mine"])
def test_the_name_of_a_pin_may_be_any(
    opener: Opener, name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a pin, and its end is that of no other."""
    store, keys = ten_pages(opener, rng, monkeypatch)
    assert store.match(keys[:6], pin="mine") == 6  # of two messages
    assert store.match(keys[6:], pin=name) == 4
    assert store.stats()["busy_objects"] == 10
    store.unpin(name)
    assert store.stats()["busy_objects"] == 6
    store.unpin("mine")
    assert store.stats()["busy_objects"] == 0


def test_memory_that_two_threads_unregister_is_an_error_of_one(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is done before this one has begun to wait."""
    store = opener()
    memory = store.allocate_memory(4)
    state: Any = getattr(store, "_core", None) or getattr(store, "_state", None)
    withdrawn = state.withdrawn

    def late(*given: Any) -> Any:
        monkeypatch.undo()
        store.unregister(memory)
        return withdrawn(*given)

    monkeypatch.setattr(state, "withdrawn", late)
    with pytest.raises(ConfigError, match="is not registered"):
        store.unregister(memory)
    store.register(memory)


def test_eviction_and_pins(opener: Opener, rng: np.random.Generator) -> None:
    store = opener(capacity="12MiB", pin_share=0.25)
    capacity = store.stats()["capacity_objects"]
    assert capacity >= 64
    store.allocate_memory(16)
    pinned = some_keys(rng, 8)
    store.put(pinned, np.arange(8)).wait(30)
    for _ in range(2 * capacity // 16):
        assert store.match(pinned, pin="request") == 8
        store.put(some_keys(rng, 16), np.arange(16)).wait(30)
    stats = store.stats()
    assert stats["evicted"] > 0
    assert store.match(pinned) == 8
    store.unpin("request")
    for _ in range(3 * capacity // 16):
        store.put(some_keys(rng, 16), np.arange(16)).wait(30)
    assert store.match(pinned) == 0
    wait_until(lambda: store.stats()["busy_objects"] == 0)  # slots are made free ahead


def test_requests_are_as_long_as_the_pages_of_registered_memory_allow(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener()
    memory = HostMemory.allocate(LAYOUT, 4, hugepages=False)

    def on_large_pages(ranges: list[tuple[int, int]]) -> int:
        return sum(nbytes for _, nbytes in ranges) if memory.buffers[0] in ranges else 0

    monkeypatch.setattr(controller_file, "hugepage_nbytes", on_large_pages)
    limits = [store.stats()["request_nbytes_max"]]
    for change in (store.register, store.unregister):
        change(memory)
        limits.append(store.stats()["request_nbytes_max"])
    assert limits == [512 * KiB, 2 * MiB, 512 * KiB]


def test_clear(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    keys = put_some(store, rng, 8)
    store.clear()
    assert store.match(keys) == 0
    assert store.put(keys, np.arange(8)).wait(30).stored == 8


def test_damage_is_found_and_quarantined(
    opener: Opener, tmp_path: Path, rng: np.random.Generator
) -> None:
    store = opener()
    pool = store.allocate_memory(8)
    keys = some_keys(rng, 4)
    fill(pool, range(4), rng)
    store.put(keys, np.arange(4)).wait(30)
    (path,) = tmp_path.rglob("*.tutti")
    geometry = store.geometry
    content = pool.read(2)[: LAYOUT.segments[0]]
    raw = path.read_bytes()
    at = raw.find(content[:RECORD_NBYTES])
    assert at >= geometry.groups_offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[0] ^ 1]))
    ticket = store.load(keys, np.arange(4, 8))
    with pytest.raises(ChecksumMismatch):
        ticket.wait(30)
    assert ticket.failed().tolist() == [2]
    assert ticket.wait_settled(30)
    wait_until(lambda: store.stats()["quarantined"] == 1)  # a client reports it a moment later
    assert store.present(keys).tolist() == [True, True, False, True]


def test_tickets_call_back(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    store.allocate_memory(8)
    keys = some_keys(rng, 4)
    done: list[list[int]] = []
    ticket = store.put(keys, np.arange(4))
    ticket.on_done(lambda each: done.append(each.outcome.tolist()))
    ticket.wait(30)
    load = store.load(keys, np.arange(4, 8))
    load.on_settled(lambda: done.append([]))
    assert load.wait_settled(30)
    wait_until(lambda: len(done) == 2)  # waiters are woken first
    assert sorted(done) == [[], [int(Outcome.STORED)] * 4]


def test_counters(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    keys = put_some(store, rng, 4, 8)
    assert store.match(keys) == 4
    load = store.load(keys, np.arange(4, 8))
    load.wait(30)
    assert load.wait_settled(30)
    wait_until(lambda: store.stats()["loaded"] == 4)  # a client reports it a moment later
    stats = store.stats()
    nbytes = 4 * LAYOUT.object_nbytes
    assert stats["stored"] == stats["hits"] == 4
    assert stats["payload_written_nbytes"] == stats["payload_read_nbytes"] == nbytes
    assert stats["slots"]["ready"] == 4


def test_catalogue_lists_and_describes(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    store.allocate_memory(8)
    keys = some_keys(rng, 8)
    store.put(keys[:5], np.arange(5)).wait(30)
    store.put(keys[5:], np.arange(3), ttl_s=3600, namespace="team").wait(30)
    load = store.load(keys[:2], [6, 7])
    load.wait(30)
    assert load.wait_settled(30)
    wait_until(lambda: store.stats()["loaded"] == 2)
    every = store.catalogue.keys()
    listed = {key.tobytes() for key in every}
    assert listed == {key.tobytes() for key in keys}
    assert len(store.catalogue.keys("team")) == 3
    assert len(store.catalogue.keys("")) == 5
    assert len(store.catalogue.keys("other")) == 0
    infos = {info.key: info for info in store.catalogue.objects(keys)}
    chain = [infos[key.tobytes()] for key in keys[:5]]
    assert [info.depth for info in chain] == [0, 1, 2, 3, 4]
    assert [info.parent for info in chain[1:]] == [info.key for info in chain[:-1]]
    assert [info.hits for info in chain] == [1, 1, 0, 0, 0]
    assert chain[0].nbytes == LAYOUT.object_nbytes
    assert chain[0].expires_s is None
    assert not chain[0].pinned
    expires_s = infos[keys[7].tobytes()].expires_s
    assert expires_s is not None
    assert 3600 - 60 < expires_s <= 3600 + EXPIRY_UNIT_S  # rounded up, less the time since the put


def test_catalogue_deletes(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    keys = put_some(store, rng, 8)
    store.match(keys, pin="request")
    assert store.catalogue.delete(keys[4:]) == 4
    assert store.catalogue.delete(keys[4:]) == 0
    assert store.match(keys) == 4
    slots = store.stats()["slots"]
    assert (slots["ready"], slots["voiding"]) == (4, 0)
    assert store.put(keys[4:], np.arange(4), parent=keys[3].tobytes(), depth=4).wait(30).stored == 4


def test_catalogue_pins_survive(opener: Opener, tmp_path: Path, rng: np.random.Generator) -> None:
    store = opener(capacity="12MiB", pin_share=0.25)
    capacity = store.stats()["capacity_objects"]
    memory = store.allocate_memory(32)
    pinned = some_keys(rng, 8)
    contents = fill(memory, range(8), rng)
    store.put(pinned, np.arange(8), ttl_s=7200, namespace="team").wait(30)
    assert store.catalogue.pin(pinned) == 8
    assert store.stats()["pinned_objects"] == 8
    for _ in range(3 * capacity // 16):
        store.put(some_keys(rng, 16), np.arange(16)).wait(30)
    assert store.stats()["evicted"] > 0
    assert store.match(pinned) == 8
    everything = store.catalogue.keys()
    with pytest.raises(CapacityError, match="pin_share"):
        store.catalogue.pin(everything)
    store.close()
    for agent in AGENTS:
        agent.stop()
    (path,) = tmp_path.rglob("*.tutti")
    config = StoreConfig(pin_share=0.25)
    with tutti.open(str(path), config=config) as again:
        again.wait_recovered(30)
        wait_until(lambda: again.stats()["pinned_objects"] == 8)  # counted behind recovery
        (info,) = again.catalogue.objects(pinned[:1])
        assert info.pinned
        assert info.expires_s is not None
        assert len(again.catalogue.keys("team")) == 8
        memory = again.allocate_memory(32)
        for _ in range(3 * capacity // 16):
            again.put(some_keys(rng, 16), np.arange(16, 32)).wait(30)
        again.load(pinned, np.arange(8)).wait(30)
        assert [memory.read(page) for page in range(8)] == contents
        assert again.catalogue.unpin(pinned) == 8
        assert again.stats()["pinned_objects"] == 0


def test_what_expires_is_removed(opener: Opener, rng: np.random.Generator) -> None:
    store = opener()
    keys = put_some(store, rng, 8)
    with pytest.raises(ConfigError, match="ttl_s"):
        store.put(keys, np.arange(8), ttl_s=0)
    assert store.catalogue.expire(keys[6:], 1.0) == 2
    assert store.catalogue.expire(keys[7:], None) == 1
    (info,) = store.catalogue.objects(keys[6:7])
    assert info.expires_s is not None
    assert 0 < info.expires_s <= 128


def test_expired_objects_are_swept(tmp_path: Path, rng: np.random.Generator) -> None:
    with tutti.open(str(tmp_path / "pool.tutti"), LAYOUT, "32MiB") as store:
        keys = put_some(store, rng, 8)
        store.catalogue.expire(keys[5:], 1.0)
        assert store.catalogue.expiry.sweep().size == 0
        store._core.index.expiry[store._core.index.expiry > 0] = 1  # long ago
        assert store.catalogue.expiry.sweep().size == 3
        assert store.present(keys).tolist() == [True] * 5 + [False] * 3
        assert store.stats()["expired"] == 3

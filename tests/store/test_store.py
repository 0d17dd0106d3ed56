"""The store over memory controllers: what is put comes back, and nothing else ever does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from integrity import check_allocator, check_index

from store.pools import (
    GEOMETRY,
    LAYOUT,
    fill,
    formatted,
    left_by,
    opened,
    put_some,
    some_keys,
)
from tutti.errors import ConfigError, KeyMissing, PageRangeError, PoolClosed
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import PAGE_FIRST_DIRECT, HostMemory
from tutti.placement.index import SlotState
from tutti.transfers.store_config import StoreConfig

SHAPES = {
    "mha": KVLayout.mha(4, 2, 64, 16, "bfloat16", model="test-model"),
    "gqa": KVLayout.gqa(3, 8, 2, 80, 16, "float16", model="test-model"),
    "mha-odd-v": KVLayout.mha(2, 3, 96, 7, "float32", v_head_dim=40, model="test-model"),
    "mla": KVLayout.mla(5, 512, 64, 16, "bfloat16", model="test-model"),
    "token-major": KVLayout.mha(4, 2, 64, 16, "bfloat16", model="test-model").token_major(),
    "one-layer": KVLayout.mha(1, 8, 128, 64, "bfloat16", model="test-model"),
}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("order", [None, PAGE_FIRST_DIRECT])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_put_is_loaded(
    shape: str, order: str | None, members: int, rng: np.random.Generator
) -> None:
    layout = SHAPES[shape]
    geometry = Geometry(layout.layers, layout.segments, 4096, 4, 6)
    with opened(formatted(layout, geometry, members)) as store:
        pool = store.allocate_memory(24, order=order)
        keys = some_keys(rng, 11)
        contents = fill(pool, range(11), rng)
        assert store.put(keys, np.arange(11)).wait(5).stored == 11
        assert store.match(keys) == 11
        pages = 12 + rng.permutation(11)
        ticket = store.load(keys, pages)
        for layer in range(layout.layers):
            ticket.wait_layer(layer, 5)
            ticket.wait_layer(layer, 5)  # repeated waits are allowed
        for layer in (-1, layout.layers):
            with pytest.raises(PageRangeError, match="pass one from 0"):
                ticket.wait_layer(layer, 5)
        assert [pool.read(int(page)) for page in pages] == contents


def test_memory_of_layers_and_foreign_buffers(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        layers = [
            [np.zeros(8 * nbytes, np.uint8) for nbytes in LAYOUT.segments]
            for _ in range(LAYOUT.layers)
        ]
        separate = store.register(HostMemory.from_layers(LAYOUT, layers, 8))
        whole = store.register(
            HostMemory.from_buffer(LAYOUT, bytearray(8 * LAYOUT.object_nbytes), 8)
        )
        keys = some_keys(rng, 5)
        contents = fill(separate, range(5), rng)
        store.put(keys, np.arange(5), memory=separate).wait(5)
        store.load(keys, np.arange(3, 8), memory=whole).wait(5)
        assert [whole.read(page) for page in range(3, 8)] == contents
        assert layers[1][0][: LAYOUT.segments[0]].any()
        store.unregister(separate)
        with pytest.raises(ConfigError, match="not registered"):
            store.put(keys, np.arange(5), memory=separate)


@pytest.mark.parametrize("timeout_s", [0, -1, 1e6, float("inf"), float("nan")])
def test_a_command_takes_a_day_at_most(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="at most a day"):
        StoreConfig(timeout_s=timeout_s)
    assert StoreConfig(timeout_s=86_400).timeout_s == 86_400


@pytest.mark.parametrize("pages", [0, -1, 2.5, "2", None])
def test_memory_has_a_whole_number_of_pages(pages: Any) -> None:
    layers = [[bytearray(nbytes) for nbytes in LAYOUT.segments] for _ in range(LAYOUT.layers)]
    for make in (
        lambda: HostMemory.allocate(LAYOUT, pages),
        lambda: HostMemory.from_buffer(LAYOUT, bytearray(LAYOUT.object_nbytes), pages),
        lambda: HostMemory.from_layers(LAYOUT, layers, pages),
    ):
        with pytest.raises(ConfigError, match="pass an integer"):
            make()


def test_a_key_is_stored_once(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        pool = store.allocate_memory(8)
        keys = some_keys(rng, 4)
        contents = fill(pool, range(4), rng)
        twice = keys[[0, 1, 1, 2, 3, 0]]
        result = store.put(twice, [0, 1, 1, 2, 3, 0]).wait(5)
        assert (result.stored, result.present, result.dropped) == (4, 2, 0)
        again = store.put(keys, [4, 5, 6, 7]).wait(5)
        assert (again.stored, again.present) == (0, 4)
        store.load(keys, [4, 5, 6, 7]).wait(5)
        assert [pool.read(page) for page in range(4, 8)] == contents


def test_churn_keeps_the_books(rng: np.random.Generator) -> None:
    images = formatted(members=2)
    with opened(images) as store:
        pool = store.allocate_memory(64)
        for _ in range(40):
            n = int(rng.integers(1, 14))
            keys = some_keys(rng, n)
            contents = fill(pool, range(n), rng)
            result = store.put(keys, np.arange(n)).wait(5)
            assert result.stored == n
            store.load(keys, np.arange(32, 32 + n)).wait(5)
            assert [pool.read(32 + page) for page in range(n)] == contents
        assert store.stats()["evicted"] > 0
        store._core.wait_quiet(5)
        with store._core.lock:
            check_index(store._core.index)
            check_allocator(store._core.allocator)
            free = store._core.index.state <= SlotState.VOIDED
            slots = np.arange(store._core.index.slots)
            assert np.array_equal(store._core.allocator.is_free(slots), free)


def test_tails_go_before_heads(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        store.allocate_memory(40)
        old, new = some_keys(rng, 16), some_keys(rng, 12)
        store.put(old, np.arange(16)).wait(5)
        store.match(old)
        store.put(new, np.arange(16, 28)).wait(5)
        store.put(some_keys(rng, 8), np.arange(28, 36)).wait(5)
        kept = store.match(old)
        assert 0 < kept < 16
        store.load(old[:kept], np.arange(kept)).wait(5)


def test_pins_survive_pressure_and_expire_by_lookups(rng: np.random.Generator) -> None:
    with opened(formatted(), pin_lookups=4) as store:
        store.allocate_memory(40)
        pinned = some_keys(rng, 8)
        store.put(pinned, np.arange(8)).wait(5)
        assert store.match(pinned, pin=True) == 8
        for _ in range(4):
            store.put(some_keys(rng, 16), np.arange(16)).wait(5)
        assert store.match(pinned) == 8
        for _ in range(6):
            store.match(some_keys(rng, 1))
        for _ in range(4):
            store.put(some_keys(rng, 16), np.arange(16)).wait(5)
        assert store.match(pinned) < 8


def test_a_named_pin_is_let_go_and_all_of_them_have_a_share(rng: np.random.Generator) -> None:
    for wrong in ({"pin_share": 1.5}, {"pin_lookups": 0}):
        with pytest.raises(ConfigError, match="pin_"):
            StoreConfig(**wrong)
    with opened(formatted(), pin_share=0.25) as store:
        store.allocate_memory(32)
        most = store.stats()["capacity_objects"] // 4
        keys = some_keys(rng, most + 4)
        assert store.put(keys, np.arange(len(keys))).wait(5).stored == len(keys)
        assert store.match(keys, pin="a") == store.match(keys, pin="b") == most
        assert store.match(keys[4:], pin="c") == most - 4
        assert store.present(keys[most:], pin="d").tolist() == [False] * 4
        assert store.match(keys) == len(keys), "who pins nothing sees all"
        assert store.stats()["busy_objects"] == most
        store.unpin("a")
        store.unpin("nobody")
        assert store.stats()["busy_objects"] == most
        store.unpin("b")
        assert store.stats()["busy_objects"] == most - 4
        assert store.present(keys[most - 1 :], pin="d").tolist() == [True] * 5
        store.match(keys[:1], pin="d")
        store.unpin()
        assert store.stats()["busy_objects"] == 0


def test_what_cannot_be_evicted_is_dropped_and_counted(rng: np.random.Generator) -> None:
    with opened(formatted(), pin_lookups=1000) as store:
        store.allocate_memory(64)
        first = some_keys(rng, 32)
        store.put(first, np.arange(32)).wait(5)
        pinned = store.match(first, pin=True)  # without those that made room for the reserve
        assert pinned > 0
        result = store.put(some_keys(rng, 32), np.arange(32)).wait(5)
        assert result.dropped > 0
        assert result.stored + result.dropped == 32
        assert store.stats()["dropped"] == result.dropped
        assert store.match(first) == pinned


def test_a_chain_continues_in_its_run(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 4)
        for i in range(4):
            parent = keys[i - 1].tobytes() if i else None
            store.put(keys[i : i + 1], [i], parent=parent, depth=i).wait(5)
        assert store.load(keys, [4, 5, 6, 7]).wait_settled(5)
        assert store.stats()["mean_run_length"] == 4.0


def test_clear_forgets_everything(rng: np.random.Generator) -> None:
    store = opened(formatted(members=2))
    keys = put_some(store, rng, 16)
    epoch = store.members.superblock(0).epoch
    store.clear()
    assert store.members.superblock(0).epoch != epoch
    assert store.match(keys) == 0
    store.put(keys[:4], np.arange(4)).wait(5)
    with opened(left_by(store, clean=False)) as again:
        again.wait_recovered(5)  # the old records are still on the medium
        assert again.match(keys) == 4


def test_a_closed_store_says_so(rng: np.random.Generator) -> None:
    store = opened(formatted())
    store.allocate_memory(2)
    store.close()
    store.close()
    keys = some_keys(rng, 1)
    for call in (store.match, lambda k: store.put(k, [0]), lambda k: store.load(k, [0])):
        with pytest.raises((PoolClosed, ConfigError)):
            call(keys)
    with pytest.raises(PoolClosed):
        store.clear()


def test_threads_share_a_store(rng: np.random.Generator) -> None:
    seeds = rng.integers(0, 2**32, 4).tolist()
    wrong: list[str] = []
    with opened(formatted(members=2)) as store:
        pools = [store.allocate_memory(16) for _ in seeds]

        def work(seed: int, pool: HostMemory) -> None:
            mine = np.random.default_rng(seed)
            for _ in range(15):
                n = int(mine.integers(1, 8))
                keys = some_keys(mine, n)
                contents = fill(pool, range(n), mine)
                store.put(keys, np.arange(n), memory=pool).wait(10)
                found = store.match(keys)
                try:
                    store.load(keys[:found], np.arange(8, 8 + found), memory=pool).wait(10)
                except KeyMissing:
                    continue  # evicted between match and load, as they were not pinned
                if [pool.read(8 + page) for page in range(found)] != contents[:found]:
                    wrong.append(f"seed {seed}")

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(seeds, pools, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


def test_work_per_batch_is_by_runs(rng: np.random.Generator) -> None:
    """A long prefix in whole groups is one command per group and layer, as MDTS allows."""
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 16, 16)
    with opened(formatted(geometry=geometry)) as store:
        keys = put_some(store, rng, 128)
        before = store.stats()["commands"]
        store.load(keys, np.arange(128)).wait(5)
        assert store.stats()["commands"] - before == 128 // 16 * LAYOUT.layers


def test_present_answers_for_every_key(rng: np.random.Generator) -> None:
    with opened(formatted(LAYOUT, GEOMETRY)) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 5)
        store.put(keys[[0, 1, 4]], np.arange(3)).wait(5)
        assert store.present(keys).tolist() == [True, True, False, False, True]
        assert store.present(keys, pin=True, proven=True).tolist() == [1, 1, 0, 0, 1]
        assert store.stats()["hits"] == 6


def test_what_is_loaded_stays_also_when_nobody_looks_up(rng: np.random.Generator) -> None:
    with opened(formatted()) as store:
        store.allocate_memory(16)
        hot = some_keys(rng, 4)
        store.put(hot, np.arange(4)).wait(5)
        for _ in range(12):
            store.load(hot, np.arange(8, 12)).wait(5)
            store.put(some_keys(rng, 4), np.arange(4)).wait(5)
        assert store.stats()["evicted"] > 0
        assert store.match(hot) == 4

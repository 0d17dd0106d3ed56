"""Room for puts is made when look-ups miss, before the puts come.

Without a profile where a put has to be one batch: one that the scheduler thinks to meet another
may come in parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tutti
from store.pools import LAYOUT, some_keys
from tutti.errors import TuttiError
from tutti.placement.eviction import reserve_slots

PAGES = 12


@pytest.mark.parametrize("eviction", ["mq", "lru"])
@pytest.mark.parametrize("ask", ["match", "present"])
def test_a_put_of_what_a_look_up_missed_does_not_wait_for_space(
    ask: str, eviction: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    config = tutti.StoreConfig(eviction=eviction)
    path = tmp_path / "pool"
    with tutti.open(path, LAYOUT, "8MiB", profile=None, config=config) as store:
        store.allocate_memory(PAGES)
        slots = store.stats()["capacity_objects"]
        assert slots >= 16 * PAGES, "a look-up may make room for so many"
        for _ in range(slots):  # runs of one page, so that no more than needed goes
            store.put(some_keys(rng, 1), [0]).wait(30)
        store.put(some_keys(rng, PAGES), range(PAGES)).wait(30)
        before = store.stats()
        assert before["space_waits"] > 0, "this is what costs time without a look-up"
        for _ in range(20):
            keys = some_keys(rng, PAGES)
            getattr(store, ask)(keys, pin=True)
            wait_until(lambda: store.stats()["free_objects"] >= PAGES)
            assert store.put(keys, range(PAGES)).wait(30).stored == PAGES
        after = store.stats()
        assert after["space_waits"] == before["space_waits"]
        evicted = after["evicted"] - before["evicted"]
        assert evicted <= 20 * PAGES + slots // 16, "not more than the puts need, but once"


def test_look_ups_alone_evict_a_sixteenth_once(tmp_path: Path, rng: np.random.Generator) -> None:
    with tutti.open([tmp_path / "pool"], LAYOUT, "8MiB") as store:
        store.allocate_memory(PAGES)
        slots = store.stats()["capacity_objects"]
        for _ in range(-(-slots // PAGES) + 4):
            store.put(some_keys(rng, PAGES), range(PAGES)).wait(30)
        before = store.stats()["evicted"]
        store.match(some_keys(rng, slots))
        store.present(some_keys(rng, slots))
        store.put(some_keys(rng, 1), [0]).wait(30)  # the thread that evicts has had its turn
        assert store.stats()["evicted"] - before <= 2 * (slots // 64 + 1), (
            "what just looks keeps all"
        )
        for _ in range(20):
            store.match(some_keys(rng, slots), pin=True)
        wait_until(lambda: store.stats()["free_objects"] >= slots // 16)
        assert store.stats()["free_objects"] <= slots // 16 + 2 * (slots // 64 + 1) + PAGES


def test_a_policy_that_fails_does_not_end_the_thread(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    class Failing:
        def victims(self, view: Any, n: int) -> Any:
            raise ValueError("made up")

    config = tutti.StoreConfig(eviction=Failing())
    with tutti.open([tmp_path / "pool"], LAYOUT, "8MiB", config=config) as store:
        store.allocate_memory(PAGES)
        keys = some_keys(rng, store.stats()["capacity_objects"])
        for start in range(0, len(keys) - PAGES, PAGES):
            store.put(keys[start : start + PAGES], range(PAGES)).wait(30)
        store.match(some_keys(rng, len(keys)), pin=True)
        wait_until(lambda: store.stats()["callback_errors"] > 0)
        with pytest.raises((ValueError, TuttiError)):
            store.put(some_keys(rng, 3 * PAGES), np.arange(3 * PAGES) % PAGES).wait(30)
        assert store.match(keys[:PAGES]) == PAGES


def filled_by_uses(store: tutti.ObjectStore, rng: np.random.Generator) -> int:
    """Fills a pool that evicts by uses, with objects of one use each; returns its slots."""
    slots: int = store.stats()["capacity_objects"]
    history = store._core.history
    history.by_uses, history.native.hits[0] = True, slots
    for _ in range(slots):
        assert store.put(some_keys(rng, 1), [0]).wait(30).stored == 1
    return slots


def test_all_pages_of_a_put_that_is_refused_count_as_used(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None) as store:
        store.allocate_memory(PAGES)
        filled_by_uses(store, rng)
        store._writer.batch_pages = 4
        keys, history = some_keys(rng, PAGES), store._core.history
        before = history.native.references
        with pytest.MonkeyPatch.context() as patched:  # nothing has fewer uses: no search
            patched.setattr(store._core, "choose_victims", None)
            assert store.put(keys, range(PAGES)).wait(30).dropped == PAGES
        assert history.native.references == before + PAGES
        assert store.put(keys, range(PAGES)).wait(30).stored == PAGES, "used twice by now"


def test_a_put_that_waits_for_room_counts_as_one_use(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, a look-up comes."""
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None) as store:
        store.allocate_memory(1)
        filled_by_uses(store, rng)
        core, key = store._core, some_keys(rng, 1)
        assert store.put(key, [0]).wait(30).dropped == 1
        wait_for, looked_up = core.changed.wait_for, []

        def look_up(*arguments: Any) -> bool:
            core.index.begin_use()
            looked_up.append(core.index.uses)
            return wait_for(*arguments)

        monkeypatch.setattr(core.changed, "wait_for", look_up)
        assert store.put(key, [0]).wait(30).stored == 1
        (slot,) = np.flatnonzero((core.index.key == key).all(axis=1) & (core.history.uses > 0))
        assert looked_up and core.history.uses[slot] == 2


def test_no_chain_loses_its_start_to_an_end_that_is_used_more_often(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None) as store:
        store.allocate_memory(PAGES)
        slots = filled_by_uses(store, rng)
        core, chain = store._core, some_keys(rng, 3)
        chain[:2] = core.index.key[:2]  # two pages that are there
        core.index.begin_use()
        core.history.loaded(np.arange(2, slots), core.index.uses)
        for _ in range(2):  # the second use of its end
            result = store.put(chain, range(3)).wait(30)
            assert (result.present, result.dropped) == (2, 1)
        assert store.match(chain) == 2


def test_a_full_pool_makes_room_for_the_next_short_put(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is written, so that none of them has to choose what goes."""
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None) as store:
        slots = store.stats()["capacity_objects"]
        reserve = reserve_slots(slots)
        assert reserve > 1
        store.allocate_memory(reserve)
        for _ in range(slots):
            assert store.put(some_keys(rng, 1), [0]).wait(30).stored == 1
        monkeypatch.setattr(store._reclaimer, "make_room", None)
        for n in [1, reserve, reserve] * 10:
            wait_until(lambda: store.stats()["free_objects"] > reserve)
            assert store.put(some_keys(rng, n), np.arange(n)).wait(30).stored == n
        assert store.stats()["space_waits"] == 0

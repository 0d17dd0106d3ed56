"""The bench of eviction policies: the same hits as a store with bytes, and bars that can fail."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from integrity import check_allocator, check_index

from store.pools import formatted, opened
from tutti.base.terminal import progress
from tutti.bench import belady, eviction
from tutti.bench.belady import PUBLISHED
from tutti.bench.eviction_pool import Pool, _Parts
from tutti.bench.replay import Replayer
from tutti.bench.shape import KvPageShape
from tutti.bench.traces import Synthetic, TraceRequest, block_keys, generate
from tutti.commands.bench import report_of
from tutti.errors import ConfigError
from tutti.medium.geometry import Geometry
from tutti.placement.eviction import POLICIES, EvictionView

LAYOUT = KvPageShape(2, 16384).layout(512)
GROUP_SLOTS = 4
SLOTS = 128


def trace(requests: int = 150) -> list[TraceRequest]:
    return generate(Synthetic(requests=requests, seed=3, message_median=1500, tokens_max=8000))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_store_with_bytes_hits_as_often(policy: str) -> None:
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, GROUP_SLOTS, SLOTS // GROUP_SLOTS)
    pool = Pool(SLOTS, policy, GROUP_SLOTS)
    with opened(formatted(LAYOUT, geometry), pin_lookups=1, eviction=policy) as store:
        replayer = Replayer(store, pages=256, page_size=512, hugepages=False)
        for request in trace():
            replayer.play(request)
            pool.play(block_keys(LAYOUT.fingerprint, request.hash_ids))
        stats = store.stats()
    assert replayer.wrong == 0
    assert stats["evicted"] > SLOTS
    assert pool.hits == pytest.approx(replayer.hit_blocks, rel=0.03)
    assert stats["eviction"] == policy
    assert (stats["evicted_too_early"] > 0) == (pool.history.regretted > 0)


def test_a_scan_does_not_push_out_what_is_used_again() -> None:
    hits = {}
    for policy in sorted(POLICIES):
        pool = Pool(SLOTS, policy, GROUP_SLOTS)
        for turn in range(200):
            pool.play(block_keys(bytes(16), range(8)))
            new = range(1000 + 40 * turn, 1040 + 40 * turn)
            for start in (0, 20):
                pool.play(block_keys(bytes(16), new[start : start + 20]))
            if turn % 4 == 0:
                pool.play(block_keys(bytes(16), range(500 + turn % 16, 530 + turn % 16)))
        hits[policy] = pool.hits
        check_index(pool.index)
        check_allocator(pool.allocator)
    assert hits["mq"] >= hits["lru"]


def test_what_is_no_longer_used_makes_room_for_what_is() -> None:
    hits = {}
    for policy in sorted(POLICIES):
        pool = Pool(SLOTS, policy, GROUP_SLOTS)
        for turn in range(400):
            pool.play(block_keys(bytes(16), range(40 * (turn % 3), 40 * (turn % 3) + 40)))
        for turn in range(200):  # other users
            first = 10_000 + 40 * (turn % 3)
            found = pool.play(block_keys(bytes(16), range(first, first + 40)))
            hits[policy] = hits.get(policy, 0) + (found if turn >= 100 else 0)
    assert hits["mq"] == hits["lru"] == 100 * 40


def test_what_was_used_often_long_ago_does_not_outlive_what_lru_keeps() -> None:
    found = {}
    for policy in sorted(POLICIES):
        pool = Pool(SLOTS, policy, GROUP_SLOTS)
        for turn in range(60):
            for _ in range(16):
                pool.play(block_keys(bytes(16), range(10_000 + 4 * turn, 10_004 + 4 * turn)))
            pool.play(block_keys(bytes(16), range(4 * turn, 4 * turn + 4)))
            if turn >= 10:
                again = range(4 * turn - 40, 4 * turn - 36)
                found[policy] = found.get(policy, 0) + pool.play(block_keys(bytes(16), again))
    assert found["mq"] == found["lru"] == 50 * 4


def documents_in_turn(policy: str) -> Pool:
    """A pool of 128 slots, after 60 turns of 4 documents of 40 blocks."""
    pool = Pool(SLOTS, policy, GROUP_SLOTS)
    for turn in range(240):
        first = 40 * (turn % 4)
        pool.play(block_keys(bytes(16), range(first, first + 40)))
    check_index(pool.index)
    check_allocator(pool.allocator)
    return pool


def test_what_does_not_fit_keeps_a_part_instead_of_nothing() -> None:
    lru, mq = documents_in_turn("lru"), documents_in_turn("mq")
    assert (mq.history.by_uses, lru.history.by_uses) == (True, False)
    assert mq.hits > 2 * lru.hits


def test_what_is_used_as_often_is_not_replaced() -> None:
    lru, mq = documents_in_turn("lru"), documents_in_turn("mq")
    assert mq.hits > 0.6 * 240 * 40, "three of four documents fit"
    assert mq.evicted < lru.evicted / 4


def test_a_store_refuses_what_it_would_evict_before_its_next_use() -> None:
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, GROUP_SLOTS, SLOTS // GROUP_SLOTS)
    with opened(formatted(LAYOUT, geometry), pin_lookups=1, eviction="mq") as store:
        replayer = Replayer(store, pages=256, page_size=512, hugepages=False)
        for turn in range(240):
            ids = range(40 * (turn % 4), 40 * (turn % 4) + 40)
            replayer.play(TraceRequest(turn, 40 * 512, 1, tuple(ids)))
        stats = store.stats()
    assert replayer.wrong == 0
    assert replayer.hit_blocks > 0.5 * 240 * 40
    assert stats["dropped"] > 40 and stats["evicts_by_uses"]


def test_a_large_pool_keeps_less_than_a_64th_free() -> None:
    pool = Pool(256 * 128, "mq")
    requests = [block_keys(bytes(16), range(at, at + 64)) for at in range(0, 253 * 128, 64)]
    for keys in requests:
        pool.play(keys)
    assert [pool.play(keys) for keys in requests] == [64] * len(requests)
    pool.play(block_keys(bytes(16), range(10**6, 10**6 + 640)))
    assert pool.evicted > 0


def test_parts_of_groups_are_evicted_as_a_whole_and_busy_ones_last() -> None:
    size = 16
    view = EvictionView(
        resident=np.ones(size, np.bool_),
        busy=np.arange(size) == 1,
        access=np.array([1, 1, 9, 2, 3, 3, 4, 4, *[8] * 8], np.uint32),
        depth=np.zeros(size, np.uint32),
        group_slots=8,
        uses=np.ones(size, np.uint8),
        now=9,
        lifetime_bits=4,
    )
    parts = _Parts(POLICIES["lru"], 2)
    assert parts.victims(view, 0).size == 0
    assert sorted(parts.victims(view, 1)) == [4, 5]
    assert sorted(parts.victims(view, 3)) == [4, 5, 6, 7]
    everything = parts.victims(view, size).tolist()
    assert sorted(everything) == [slot for slot in range(size) if slot != 1]
    assert everything[-1] == 0


def cell(**changes: object) -> dict[str, object]:
    facts: dict[str, object] = {
        "trace": "t",
        "capacity_blocks": 10,
        "policy": "mq",
        "hit_rate": 0.4,
        "lru_hit_rate": 0.2,
        "minimum_hit_rate": 0.5,
        "mean_run_length": 4.0,
    }
    return {**facts, **changes}


def test_bars_can_be_missed() -> None:
    whole = cell(policy="groups")
    assert eviction.missed_bars([whole, cell()]) == []
    assert "plain LRU" in eviction.missed_bars([whole, cell(hit_rate=0.19)])[0]
    assert "a third" in eviction.missed_bars([whole, cell(hit_rate=0.21)])[0]
    assert "runs of" in eviction.missed_bars([whole, cell(mean_run_length=3.5)])[0]
    larger = cell(capacity_blocks=20, hit_rate=0.21)
    assert eviction.missed_bars([whole, cell(), larger]) == []


def test_the_command(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    eviction.add_arguments(parser)
    file = tmp_path / "small.jsonl"
    file.write_text("".join(f"{request.to_json()}\n" for request in trace(60)))
    argv = ["--trace", str(file), "--capacity", "0.3", "--group-slots", "4"]
    result = eviction.run(parser.parse_args(argv), progress)
    assert [c["policy"] for c in result["cells"]] == [*sorted(POLICIES), "groups"]
    for c in result["cells"]:
        assert 0 < c["hit_rate"] <= c["minimum_hit_rate"] <= c["unlimited_hit_rate"]
    assert "mean run" in report_of(eviction, result)
    with pytest.raises(ConfigError):
        eviction.run(parser.parse_args(["--capacity", "0"]), progress)


def test_published_policies_say_how_far_a_policy_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    eviction.add_arguments(parser)
    args = parser.parse_args(["--requests", "40", "--capacity", "0.2", "--published"])
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    with pytest.raises(ConfigError, match="pip install libcachesim"):
        eviction.run(args, progress)
    library = SimpleNamespace(Request=SimpleNamespace, **dict.fromkeys(PUBLISHED, Kept))
    monkeypatch.setitem(sys.modules, "libcachesim", library)
    result = eviction.run(args, progress)
    [best] = result["published"]
    assert best["hit_rates"] == dict.fromkeys(PUBLISHED, best["lru_hit_rate"])
    notes = eviction.notes_of({"cells": [], "published": [best]})
    assert f"published policies, synthetic, {best['capacity_blocks']} blocks" in notes[-1]
    assert len(result["others"]) == 7  # halves, and other seeds
    for each in result["cells"]:
        bounds = [each[name] for name in eviction._BOUNDS]
        assert bounds[1] <= bounds[2] <= bounds[0]
        assert bounds[0] <= each["minimum_hit_rate"]


def test_of_the_committed_results_no_bound_is_an_order_that_is_none() -> None:
    """Where requests are larger than a window, the bounds are below that order by themselves."""
    for file in (Path(__file__).parents[2] / "bench/results").glob("eviction*.json"):
        for each in json.loads(file.read_text())["cells"]:
            if each["trace"] == "synthetic_trace" and eviction._BOUNDS[0] in each:
                order, *bounds = (each[bound] for bound in eviction._BOUNDS)
                assert max(bounds) < order


def test_beside_a_bar_that_is_missed_stands_what_published_policies_reach() -> None:
    facts = {"free_slots": 1, "less_reserve": {"MQ": 0.2, "LIRS": 0.2}}
    small = {"A": 0.25, "B": 0.35}, {"A": 0.2, "B": 0.1}
    published = [
        {**cell(hit_rate=0.35), **facts, "policy": "B", "hit_rates": small[0]},
        {**cell(capacity_blocks=20, hit_rate=0.2), **facts, "policy": "A", "hit_rates": small[1]},
    ]
    whole = cell(policy="groups", hit_rate=0.1, mean_run_length=9.0)
    notes = eviction.notes_of({"cells": [whole, cell(hit_rate=0.19)], "published": published})
    assert "plain LRU 0.2000; published at most 0.3500 (B)" in notes[0]
    assert "a third is wanted; published at most 0.50 (B)" in notes[1]
    assert "runs of 4.00, with groups 9.00, which hit 0.1000" in notes[2]
    assert (
        "in more than 2 of 2 pools (A), and none gains a third in more than 1 of the 1" in notes[3]
    )
    assert notes[4] == "B, which gains it there, hits 10.0 points less at t, 20 blocks"


class Kept:
    """Plain LRU, in the place of a cache of libcachesim."""

    def __init__(self, cache_size: int) -> None:
        self.lru = belady._LeastRecentlyUsed(cache_size)

    def get(self, request: SimpleNamespace) -> bool:
        return self.lru.reference(request.obj_id, request.clock_time)

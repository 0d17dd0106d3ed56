"""What look-ups keep from eviction: shared pages once, until their load has landed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from linker_engine import Rig, names
from linker_states import StatesRig

CAPACITY = 320  # pages of the rig's pool, more or less


def pinned(rig: Rig) -> int:
    return int(rig.stored_pool.store._core.lookup_pins.count)


def share_of(rig_pages: int) -> float:
    return rig_pages / CAPACITY


def test_long_shared_prompts_are_answered_in_full(tmp_path: Path, seed: int) -> None:
    """Forty requests over two long prompts, whose distinct pages just fit into the share."""
    rng = random.Random(seed)
    prompts = names(24, "a"), names(20, "b")
    with Rig(tmp_path, pin_share=share_of(56), pin_lookups=256) as rig:
        rig.fill(1)
        assert rig.store(prompts[0], range(24))
        assert rig.store(prompts[1], range(24, 44))
        waiting = [f"r{i}" for i in range(40)]
        wants = {rid: rng.choice(prompts)[: rng.randint(10, 24)] for rid in waiting}
        while waiting:
            for rid in waiting:
                assert rig.lookup(wants[rid], rid) == len(wants[rid]), rid
            assert pinned(rig) == len({page for want in wants.values() for page in want})
            for rid in rng.sample(waiting, min(len(waiting), 3)):
                assert rig.load(wants[rid], range(1, 1 + len(wants[rid])), rid)
                index = rig.linker.start_layer_wise_loading()
                assert rig.linker.finish_layer_wise_loading(index)
                waiting.remove(rid)
                del wants[rid]
        assert pinned(rig) == 0, "what has landed is the engine's"


def test_the_share_holds_over_distinct_pages(tmp_path: Path) -> None:
    with Rig(tmp_path, pin_share=share_of(16)) as rig:
        rig.fill(2)
        everything = names(30)
        assert rig.store(everything, range(30))
        most = rig.stored_pool.store._core.lookup_pins._slots_max
        assert 0 < most < 24
        assert rig.lookup(everything[:most], "a") == most
        assert rig.lookup(everything, "b") == most
        assert rig.lookup(everything[10:], "c") == most - 10, "what a keeps, from the tenth on"
        assert rig.lookup(everything[most:], "d") == 0
        for rid in "abc":
            rig.linker._lookups.release([rid])
        assert rig.lookup(everything[most:], "d") == min(most, 30 - most)


def test_pins_go_at_calls_that_all_ranks_make(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(8)
        assert rig.lookup(names(8), "a") == rig.lookup(names(8), "b") == 8
        assert rig.load(names(6), range(20, 26), "a")
        assert rig.lookup([], "c") == 0
        index = rig.linker.start_layer_wise_loading()
        rig.linker.layer_done_counter.set_consumer(index)
        rig.linker.layer_done_counter.wait_until(2)
        held = rig.stored_pool.store._core.lookup_pins.holders
        assert set(held) == {"a", "b"}, "landed, but not reported to all ranks"
        assert held["a"][1].size == 6, "what is loaded, and nothing else"
        assert rig.linker.finish_layer_wise_loading(index)
        assert set(held) == {"b"}
        assert pinned(rig) == 8
        assert rig.load(names(8), range(30, 38), "b")
        assert rig.linker.cancel_queued_load("b")
        assert pinned(rig) == 0


@pytest.mark.parametrize("why", ["slots", "gone", "reset", "worth"])
def test_what_is_not_loaded_is_not_kept(tmp_path: Path, why: str) -> None:
    options = {"min_tokens": 1000} if why == "worth" else {}
    with Rig(tmp_path, **options) as rig:
        rig.stored(4)
        assert rig.lookup(names(4)) == (0 if why == "worth" else 4)
        if why != "worth":
            assert pinned(rig) == 4
        if why == "slots":
            assert not rig.load(names(4), range(3))
        elif why == "gone":
            assert not rig.load([*names(4), *names(1, "never")], range(5))
        elif why == "reset":
            rig.linker.reset()
        assert pinned(rig) == 0


def test_pools_of_states_let_go_too(tmp_path: Path) -> None:
    windows = {"mamba": 1}
    with StatesRig(tmp_path, "mamba") as rig:
        at = {source: list(range(1, 1 + windows.get(source, 6))) for source in rig.sources}
        rig.fill(1)
        assert rig.store(rig.transfers(names(6), at, windows))
        assert rig.linker.lookup("r", rig.transfers(names(6), None, windows))[-1:] == [6]
        pins = [p.store._core.lookup_pins for p in rig.linker.stored_pools.values()]
        assert [p.count for p in pins] == [6, 1]
        assert rig.restore(rig.transfers(names(6), at, windows))
        assert [p.count for p in pins] == [0, 0]

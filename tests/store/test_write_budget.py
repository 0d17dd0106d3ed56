"""A budget of bytes a day: what it grants, and what becomes of puts beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tutti
from store.pools import LAYOUT, formatted, left_by, opened, some_keys
from tutti.errors import ConfigError
from tutti.medium.geometry import RECORD_NBYTES
from tutti.transfers.core import Core
from tutti.transfers.put_limits import Quota, WriteBudget
from tutti.transfers.tickets import Outcome

OBJECT_NBYTES = LAYOUT.object_nbytes + RECORD_NBYTES
HOURS = 24


def test_a_bucket_holds_an_hour_and_fills_with_time() -> None:
    now_s = [100.0]
    budget = WriteBudget(HOURS * 10 * OBJECT_NBYTES, OBJECT_NBYTES, clock=lambda: now_s[0])
    assert [granted(budget, 7), granted(budget, 7), granted(budget, 1)] == [7, 3, 0]
    now_s[0] += 1800
    assert granted(budget, 100) == 5
    now_s[0] += 1e9
    assert granted(budget, 100) == 10, "no more than an hour's"
    now_s[0] -= 1e9
    assert granted(budget, 1) == 0, "a clock that goes back earns nothing"
    assert granted(WriteBudget(None, OBJECT_NBYTES), 10**9) == 10**9
    assert granted(WriteBudget(1, OBJECT_NBYTES), 5) == 1, "one object at least"


def granted(budget: WriteBudget, objects: int) -> int:
    allowed = budget.allowed(objects)
    assert budget.allowed(objects) == allowed, "a question takes nothing"
    budget.take(allowed)
    return allowed


def test_puts_beyond_the_budget_are_dropped_from_the_end(tmp_path: Path, seed: int) -> None:
    config = tutti.StoreConfig(write_budget=f"{HOURS * 6 * OBJECT_NBYTES} B")
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", config=config) as store:
        store.allocate_memory(pages=8)
        keys = some_keys(np.random.default_rng(seed), 8)
        first = store.put(keys[:4], np.arange(4))
        assert first.wait().stored == 4
        second = store.put(keys, np.arange(8))
        result = second.wait()
        assert (result.present, result.stored, result.dropped) == (4, 2, 2)
        assert second.outcome[6:].tolist() == [Outcome.DROPPED] * 2
        assert store.match(keys) == 6
        stats = store.stats()
        assert (stats["over_budget"], stats["dropped"]) == (2, 2)
        assert stats["bytes_written_per_byte_stored"] >= 1.0
        store.load(keys[:6], np.arange(6)).wait()


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("of_a_namespace", [True, False])
def test_a_restart_does_not_refill_the_budget(
    is_clean: bool, of_a_namespace: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_64s = [20_000 * 1350]
    monkeypatch.setattr(Core, "now_64s", lambda _: now_64s[0])
    budget, keys = HOURS * 6 * OBJECT_NBYTES, some_keys(np.random.default_rng(seed), 24)
    config: dict[str, Any] = {"write_budget": budget}
    if of_a_namespace:
        config = {"quotas": (Quota("team", write_budget=budget),)}
    images = formatted()
    # (units of 64 s since the last close or put, pages stored of six)
    for turn, (later, stored) in enumerate([(0, 6), (0, 0), (29, 2), (60, 6)]):
        now_64s[0] += later
        with opened(images, **config) as store:
            store.allocate_memory(pages=6)
            for _ in range(200):  # look-ups are no time
                store.match(keys[-1:])
            mine = keys[6 * turn : 6 * turn + 6]
            ticket = store.put(mine, np.arange(6), namespace="team" if of_a_namespace else "")
            assert ticket.wait().stored == stored, turn
            for _ in range(200):
                store.match(keys[-1:])
            images = left_by(store, clean=is_clean)


def test_what_is_written_today_begins_at_midnight(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noon_64s = 20_000 * 1350 + 675
    now_64s = [noon_64s]
    monkeypatch.setattr(Core, "now_64s", lambda _: now_64s[0])
    keys = some_keys(np.random.default_rng(seed), 8)
    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB") as store:
        store.allocate_memory(pages=8)
        store.put(keys[:4], np.arange(4)).wait()
        first = store.stats()["written_today_nbytes"]
        assert first == store.stats()["bytes_written"] >= 4 * OBJECT_NBYTES
        now_64s[0] += 674  # the last 64 s of the day
        store.put(keys[4:6], np.arange(4, 6)).wait()
        assert store.stats()["written_today_nbytes"] - first >= 2 * OBJECT_NBYTES
        now_64s[0] += 1  # before the first put of the day
        store.put(keys[6:], np.arange(6, 8)).wait()
        assert 2 * OBJECT_NBYTES <= store.stats()["written_today_nbytes"] < first
        now_64s[0] += 1350  # nothing is written on this day
        assert store.stats()["written_today_nbytes"] == 0
        now_64s[0] = noon_64s  # the clock was set back
        assert store.stats()["written_today_nbytes"] == 0


@pytest.mark.parametrize("name", ["write_budget", "eviction", "degraded", "any_owner", "timeout_s"])
def test_open_names_the_config_for_a_setting_of_it(tmp_path: Path, name: str) -> None:
    rare: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=rf"{name} .*config=StoreConfig"):
        tutti.open(tmp_path / "pool", LAYOUT, "8MiB", **rare)
    assert not (tmp_path / "pool").exists()


def test_a_budget_of_nothing_is_refused() -> None:
    for budget in (0, -1, "a lot"):
        with pytest.raises(ConfigError):
            tutti.StoreConfig(write_budget=budget)

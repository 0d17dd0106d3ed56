"""Unexpected input and clocks, in pools as `tutti.open` gives them: scheduled, on files."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from scheduler.drive import Linear
from waiting import wait_until

import tutti
from store.pools import LAYOUT, fill, some_keys
from tutti.base.clock import SystemClock
from tutti.errors import KeyMissing
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.policy import Limits

PAGES = 8
HOUR_NS = 3600 * 10**9


def open_pool(path: Path, **settings: object) -> tutti.ObjectStore:
    config = tutti.StoreConfig(timeout_s=20.0, **settings)  # type: ignore[arg-type]
    store = tutti.open([path / "pool"], LAYOUT, "16MiB", config=config)
    assert store.stats()["profile"] != "off", "scheduled by default"
    return store


@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS, 10**18])
def test_a_clock_that_jumps_stops_nothing_and_loses_nothing(
    jump_ns: int, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, offset, jumps = SystemClock.now_ns, [HOUR_NS], threading.Event()

    def jumping(clock: SystemClock) -> int:
        if jumps.is_set():  # at every look, there and back
            offset[0] = HOUR_NS if offset[0] != HOUR_NS else HOUR_NS + jump_ns
        return now_ns() + offset[0]

    monkeypatch.setattr(SystemClock, "now_ns", jumping)
    with open_pool(tmp_path) as store:
        memory = store.allocate_memory(3 * PAGES)
        contents = fill(memory, range(PAGES), rng)
        jumps.set()
        for _ in range(8):
            keys = some_keys(rng, PAGES)
            old = store.put(keys, range(PAGES))
            assert old.wait(30).stored == PAGES
            new = store.put(some_keys(rng, PAGES), range(PAGES))  # beside the load
            store.load(keys, range(PAGES, 2 * PAGES)).wait(30)
            assert new.wait(30).stored == PAGES
            assert [memory.read(page) for page in range(PAGES, 2 * PAGES)] == contents
        jumps.clear()
        offset[0] = HOUR_NS
        assert store.put(some_keys(rng, PAGES), range(PAGES)).wait(30).stored == PAGES
        kinds = ("loads_waiting", "writes_waiting")
        wait_until(lambda: not any(store.stats()["scheduler"][kind] for kind in kinds))
        stats = store.stats()
    assert (stats["dropped"], stats["store_errors"], stats["callback_errors"]) == (0, 0, 0)


@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS])
def test_a_clock_that_jumps_is_told_once(
    jump_ns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_ns, offset = SystemClock.now_ns, [2 * HOUR_NS]
    monkeypatch.setattr(SystemClock, "now_ns", lambda clock: now_ns() + offset[0])
    looks: list[int] = []

    def told() -> list[str]:
        return [line for line in caplog.messages if "the clock jumped by" in line]

    with open_pool(tmp_path) as store:
        assert store.scheduler is not None
        run_due = store.scheduler.run_due
        monkeypatch.setattr(store.scheduler, "run_due", lambda: looks.append(1) or run_due())
        wait_until(lambda: bool(looks))
        offset[0] += jump_ns
        wait_until(lambda: bool(told()))
        offset[0] -= jump_ns
        seen = len(looks)
        wait_until(lambda: len(looks) > seen + 1)
        (line,) = told()
    seconds = int(line.split(" s,")[0].rsplit(" ", 1)[1])
    assert abs(seconds - jump_ns / 1e9) < 600


def test_a_load_of_100_000_keys_of_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    with open_pool(tmp_path, verify="off") as store:
        memory = store.allocate_memory(2 * PAGES)
        contents = fill(memory, range(4), rng)
        keys = some_keys(rng, 4)
        store.put(keys, range(4)).wait(30)
        load = store.load(np.tile(keys, (25_000, 1)), np.tile(np.arange(4, 8), 25_000))
        assert store.put(some_keys(rng, 4), range(4)).wait(60).stored == 4
        load.wait(60)
        assert [memory.read(page) for page in range(4, 8)] == contents
        with pytest.raises(KeyMissing):
            store.load(some_keys(rng, 100_000), np.arange(100_000) % PAGES)
        store.load(keys, range(4)).wait(30)
        wait_until(lambda: store.stats()["scheduler"]["loads_waiting"] == 0)


def test_a_put_larger_than_the_backlog_is_stored_whole(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    limits = Limits(locked_pages=PAGES // 2, staged_pages=0)
    with open_pool(tmp_path, schedule=Schedule(Linear(), limits)) as store:
        memory = store.allocate_memory(2 * PAGES)
        contents = fill(memory, range(PAGES), rng)
        keys, small = some_keys(rng, PAGES), some_keys(rng, 2)
        load_keys = some_keys(rng, 1)
        store.put(load_keys, [0]).wait(30)
        load = store.load(load_keys, [2 * PAGES - 1])  # for which a put would wait
        large = store.put(keys, range(PAGES))
        assert large.wait(30).stored == PAGES
        assert store.put(small, range(2)).wait(30).stored == 2
        load.wait(30)
        store.load(keys, range(PAGES)).wait(30)
        assert [memory.read(page) for page in range(PAGES)] == contents
        assert store.stats()["dropped"] == 0

"""Quotas of namespaces, by `tutti serve` and by `tutti stat`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integrity import check_index
from node.agents import LAYOUT, LOOKUP_S, WAIT_S, start_process
from scheduler.drive import Linear

import tutti
from store.policies import OneByOne
from store.pools import GEOMETRY, fill, formatted, images_of, opened, some_keys
from tutti.cli import main
from tutti.errors import ConfigError, DeviceTimeout
from tutti.medium.slot_record import tenant_of
from tutti.node.client import NodeStore
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.put_limits import Quota, Quotas
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import Outcome

OBJECT_NBYTES = LAYOUT.object_nbytes + 4096
OBJECT_KIB = OBJECT_NBYTES // 1024


def test_a_namespace_evicts_its_own_and_stays_within_its_bytes_of_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    # A day's budget whose hour is three objects.
    quotas = (f"small={4 * OBJECT_KIB}KiB", f"slow={24 * 3 * OBJECT_KIB}KiB")
    options = ("--quota", quotas[0], "--write-quota", quotas[1])
    path = tmp_path / "s"
    process = start_process(path, tmp_path, *options)
    try:
        # Without a schedule a put is one plan; of one in parts, the agent is not asked about those
        # behind the part that was cut.
        chosen = {"profile": None, "lookup_timeout_s": LOOKUP_S}
        with NodeStore(str(path), LAYOUT, "32MiB", **chosen) as store:
            memory = store.allocate_memory(16)
            fill(memory, range(16), rng)
            keys = some_keys(rng, 40)
            store.put(keys[:2], range(2)).wait(WAIT_S)
            for start in range(10, 16):
                ticket = store.put(keys[start : start + 1], [0], namespace="small")
                ticket.wait(WAIT_S)
                assert ticket.outcome[0] == Outcome.STORED
            long = store.put(keys[20:30], range(10), namespace="small")
            long.wait(WAIT_S)
            slow = store.put(keys[30:38], range(8), namespace="slow")
            slow.wait(WAIT_S)
            assert store.match(keys[:2]) == 2, "other namespaces lose nothing"
            assert len(store.catalogue.keys("small")) <= 4
        assert np.count_nonzero(long.outcome == Outcome.DROPPED) >= 6
        assert (slow.outcome[:3] == Outcome.STORED).all()
        assert (slow.outcome[3:] == Outcome.DROPPED).all()
        assert main(["stat", f"unix:{path}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["namespaces"]
        assert main(["stat", f"unix:{path}"]) == 0
        assert "namespace small" in capsys.readouterr().out
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
    assert found["small"]["used_nbytes"] <= found["small"]["quota_nbytes"]
    assert found["small"]["evicted"] >= 2
    assert found["small"]["over_quota"] == np.count_nonzero(long.outcome == Outcome.DROPPED)
    assert found["slow"]["over_budget"] == 5
    assert found["slow"]["written_nbytes"] == 3 * OBJECT_NBYTES


def test_what_the_quota_drops_takes_nothing_from_the_budget(rng: np.random.Generator) -> None:
    quota = Quota("small", 4 * OBJECT_NBYTES, write_budget=24 * 6 * OBJECT_NBYTES)
    with opened(formatted(), quotas=(quota,), write_budget=24 * 7 * OBJECT_NBYTES) as store:
        store.allocate_memory(16)
        keys = some_keys(rng, 16)
        first = store.put(keys[:10], range(10), namespace="small").wait(WAIT_S)
        assert (first.stored, first.dropped) == (4, 6)
        store.catalogue.delete(keys[:2])
        second = store.put(keys[10:13], range(3), namespace="small").wait(WAIT_S)
        assert (second.stored, second.dropped) == (2, 1), "six an hour"
        third = store.put(keys[13:], range(3)).wait(WAIT_S)
        assert (third.stored, third.dropped) == (1, 2), "seven an hour in all"
        found = store.stats()
    assert found["namespaces"]["small"]["over_quota"] == 6
    assert found["namespaces"]["small"]["over_budget"] == 1
    assert (found["over_budget"], found["dropped"]) == (3, 9)


@pytest.mark.parametrize("present", [0, 6])
def test_a_chain_longer_than_its_quota_keeps_its_start(
    present: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each page is a part of its own, and some were there before."""
    quota = Quota("small", 10 * OBJECT_NBYTES)
    schedule = Schedule(Linear(), policy=OneByOne)
    with opened(formatted(), quotas=(quota,), schedule=schedule) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        store.allocate_memory(16)
        old, keys = some_keys(rng, 7), some_keys(rng, 16)
        store.put(old, range(7), namespace="small").wait(WAIT_S)
        store.put(keys[:present], range(present), namespace="small").wait(WAIT_S)
        result = store.put(keys, range(16), namespace="small").wait(WAIT_S)
        assert (result.present, result.stored, result.dropped) == (present, 10 - present, 6)
        assert store.match(keys) == 10
        assert store.match(old) == 0, "what is not of the chain goes first"


@pytest.mark.parametrize(
    ("quota", "budget", "counts"),
    [
        (Quota("small", 10 * OBJECT_NBYTES), None, (6, 0, 0)),
        (Quota("small", write_budget=24 * 10 * OBJECT_NBYTES), None, (0, 6, 6)),
        (Quota("small", 2**40), 24 * 10 * OBJECT_NBYTES, (0, 0, 6)),
    ],
)
def test_of_a_put_in_parts_every_refused_page_is_counted(
    quota: Quota,
    budget: int | None,
    counts: tuple[int, int, int],
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a put in one part, by the limit that refused the first of them."""
    rng, path = np.random.default_rng(seed), tmp_path / "pool"
    tutti.format([path], LAYOUT, 32 << 20)
    schedule = Schedule(Linear(), policy=OneByOne)  # each page is a part
    config = StoreConfig(quotas=(quota,), write_budget=budget, schedule=schedule)
    with tutti.open([path], LAYOUT, config=config) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        store.allocate_memory(16)
        put = store.put(some_keys(rng, 16), range(16), namespace="small").wait(WAIT_S)
        found = store.stats()
    assert (put.stored, put.dropped, found["dropped"]) == (10, 6, 6)
    small = found["namespaces"]["small"]
    assert (small["over_quota"], small["over_budget"], found["over_budget"]) == counts


def test_what_was_dropped_has_nothing_behind_it(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a budget has more a moment later."""
    schedule = Schedule(Linear(), policy=OneByOne)  # each page is a part
    with opened(formatted(), write_budget=2**40, schedule=schedule) as store:
        monkeypatch.setattr(store._queue, "_short", 1)
        store.allocate_memory(8)
        most = [1, 1, 0, 1, 1, 1, 1, 1]
        budget = store._core.quotas._budget
        monkeypatch.setattr(budget, "allowed", lambda n: min(n, most.pop(0)))
        ticket = store.put(some_keys(rng, 8), range(8))
        ticket.wait(WAIT_S)
    assert ticket.outcome.tolist() == [Outcome.STORED] * 2 + [Outcome.DROPPED] * 6
    assert store._core.counters.dropped == 6


def test_behind_a_batch_that_cannot_start_the_quota_drops_what_it_would(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(formatted(), write_budget=24 * 10 * OBJECT_NBYTES) as store:
        store.allocate_memory(16)
        monkeypatch.setattr(store._writer, "batch_pages", 4)
        put_batch, left = store._writer._put_batch, [1]

        def late(*arguments: Any) -> Any:
            if not left:
                raise DeviceTimeout("made up")
            left.pop()
            return put_batch(*arguments)

        monkeypatch.setattr(store._writer, "_put_batch", late)
        ticket = store.put(some_keys(rng, 16), range(16))
        with pytest.raises(DeviceTimeout):
            ticket.wait(WAIT_S)
    each = [Outcome.STORED] * 4 + [Outcome.FAILED] * 6 + [Outcome.DROPPED] * 6
    assert ticket.outcome.tolist() == each


def test_what_finds_no_space_takes_nothing_from_the_budget(rng: np.random.Generator) -> None:
    quota = Quota("slow", write_budget=24 * 8 * OBJECT_NBYTES)
    with opened(formatted(), quotas=(quota,), write_budget=24 * 100 * OBJECT_NBYTES) as store:
        store.allocate_memory(32)
        slots = GEOMETRY.slots
        held = some_keys(rng, slots - 3)
        store.put(held, range(slots - 3)).wait(WAIT_S)
        there = held[store.present(held)]
        store.catalogue.pin(there)
        first = store.put(some_keys(rng, 8), range(8), namespace="slow").wait(WAIT_S)
        assert 0 < first.stored < 8
        found = store.stats()["namespaces"]["slow"]
        assert found["written_nbytes"] == first.stored * OBJECT_NBYTES
        store.catalogue.unpin(there)
        store.clear()
        second = store.put(some_keys(rng, 8), range(8), namespace="slow").wait(WAIT_S)
        assert second.stored == 8 - first.stored, "eight an hour"


def test_usage_is_what_a_scan_finds(rng: np.random.Generator) -> None:
    names = ("a", "b", "c")
    most = {"a": 6, "b": 20, "c": 1000}
    quotas = tuple(Quota(name, most[name] * OBJECT_NBYTES) for name in names)
    images = formatted()
    capacity = GEOMETRY.slots
    for _ in range(3):  # each opening but the first recovers what an unclean close left
        store = opened(images, quotas=quotas)
        store.wait_recovered(WAIT_S)
        store.allocate_memory(8)
        for turn in range(20):
            keys = some_keys(rng, 8)
            name = str(rng.choice(names))
            store.put(keys, range(8), namespace=name).wait(WAIT_S)
            if turn % 5 == 0:
                store.catalogue.delete(store.catalogue.keys(name)[:3])
            used = {n: int(each["used_nbytes"]) for n, each in store.stats()["namespaces"].items()}
            scan = {n: len(store.catalogue.keys(n)) * OBJECT_NBYTES for n in names}
            assert used == scan
            assert all(used[n] <= min(most[n], capacity) * OBJECT_NBYTES for n in names)
        assert sum(used.values()) > 0
        images = images_of(store.controller)  # type: ignore[arg-type]
        check_index(store._core.index)
        store.close()


def test_wrong_quotas_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["serve", "--folder", str(tmp_path), "--socket", str(tmp_path / "s")]
    assert main([*serve, "--quota", "team=1GiB", "--quota", "team=2GiB"]) == 2
    assert "pass it once" in capsys.readouterr().err
    assert main([*serve, "--quota", "team"]) == 2
    assert "NAME=SIZE" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="empty namespace"):
        Quota("", 1)
    with pytest.raises(ConfigError, match="nbytes of team"):
        StoreConfig(quotas=(Quota("team", 0),))


def test_two_names_with_one_number_are_refused() -> None:
    seen: dict[int, str] = {}
    for number in range(70_000):  # more names than numbers
        other = seen.setdefault(tenant_of(str(number)), str(number))
        if other != str(number):
            with pytest.raises(ConfigError, match="same number"):
                Quotas((Quota(other, 1), Quota(str(number), 1)), 1)
            return
    raise AssertionError("as many numbers as names")


def test_settings_that_are_refused_leave_the_pool_closed_cleanly(tmp_path: Path, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    with tutti.open(tmp_path / "pool", LAYOUT, "16MiB", verify="off") as store:
        store.allocate_memory(4)
        assert store.put(keys, np.arange(4)).wait(WAIT_S).stored == 4
    twice = StoreConfig(quotas=(Quota("team", 1), Quota("team", 2)))
    with pytest.raises(ConfigError, match="same number"):
        tutti.open(tmp_path / "pool", config=twice)
    with tutti.open(tmp_path / "pool", verify="off") as store:
        assert store.match(keys, proven=True) == 4

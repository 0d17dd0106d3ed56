"""What SGLang is answered, and by two ranks: what one of them cannot do, both of them say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_pools as hp
import pytest
from scheduler.drive import Linear

from tutti.integration.sglang.direct import control_requests
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import Event, LoadKnown, WriteKnown, WriteStopped
from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Decision
from tutti.transfers import transfer_queue

HERE = Path(__file__).resolve().parent
_S = 120


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the ranks says that it was answered."""
    folder = tmp_path_factory.mktemp("ranks")
    places = [str(HERE), str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, str(HERE / "hicache_rank.py"), str(folder)]
    subprocess.run(command, env=environment, check=True, timeout=_S)
    return [json.loads((folder / f"said{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("what", "reason"),
    [("kv", "MiB"), ("sidecar", "--hicache-mem-layout"), ("hashes", "install g++")],
)
def test_a_pool_of_one_rank_that_cannot_be_opened_fails_all(
    said: list[dict[str, Any]], what: str, reason: str
) -> None:
    """A rank that fails alone leaves the others waiting in SGLang's next collective."""
    for number, rank in enumerate(said):
        error, open_pools = rank[what]
        assert reason in error and open_pools == 0
        assert ("tp1-" in error) == (number == 0), "the other rank says which one it was"


def test_a_clear_that_failed_on_one_rank_is_not_answered_with_success(
    said: list[dict[str, Any]],
) -> None:
    assert [rank["clear"] for rank in said] == [[True, False, True]] * 2


def test_an_update_that_one_rank_fails_keeps_no_rank_waiting(said: list[dict[str, Any]]) -> None:
    """SGLang flushes where it succeeded alone, so at the flush the ranks cannot ask each other."""
    assert [rank["update"] for rank in said] == [[False, True], [None, None]]


def test_no_rank_flushes_while_the_device_of_one_holds_a_load(said: list[dict[str, Any]]) -> None:
    """A rank that does while another does not would match other prefixes from then on."""
    assert [rank["flush"] for rank in said] == [[False, True]] * 2


def test_what_is_dropped_ends_sglangs_operation(make: hp.Make, seed: int) -> None:
    """Pages of its later batches would lie behind a hole, where no look-up finds them."""
    pool = hp.mha_pool("page_first")
    storage = make(pool, options={"write_budget": "2MiB"})
    hp.fill(pool, seed)
    hashes = [f"{i:064x}" for i in range(1, 9)]
    answer = storage.batch_set_v1(hashes, hp.indices(pool, list(range(8))))
    stored = storage.batch_exists(hashes)
    assert 0 < stored < 8, "the budget is too small or too large: nothing is tested"
    assert answer == [True] * stored + [False] * (8 - stored)
    counts = storage.counters()["kv"]
    assert counts["dropped_pages"] == counts["over_budget_pages"] == 8 - stored
    assert counts["written_today_bytes"] == counts["device_written_bytes"] > 0
    assert 1 <= counts["bytes_written_per_byte_stored"] < 2


def test_a_clear_while_pages_are_offered(make: hp.Make) -> None:
    """SGLang clears on its scheduler's thread, also while another one stores."""

    class Cleared(OrderedDict[bytes, None]):
        def __setitem__(self, key: bytes, value: None) -> None:
            super().__setitem__(key, value)
            self.clear()

    pool = hp.mha_pool("page_first")
    storage = make(pool, options={"second_touch": True})
    second_touch = storage._stores["kv"]._second_touch
    assert second_touch is not None
    second_touch._touched = Cleared()
    hashes = [f"{i:064x}" for i in (1, 2)]
    assert storage.batch_set_v1(hashes, hp.indices(pool, [0, 1])) == [True, True]
    assert not storage.counters()["kv"].get("errors")


def test_the_longest_deadline_is_waited_for(make: hp.Make, seed: int) -> None:
    """A wait that is refused would give the host pages back while the device uses them."""
    pool = hp.mha_pool("page_first")
    storage = make(pool, options={"timeout_s": 86_400})
    hp.fill(pool, seed)
    hashes, where = [f"{i:064x}" for i in (1, 2)], hp.indices(pool, [0, 1])
    assert storage.batch_set_v1(hashes, where) == [True, True]
    assert storage.batch_get_v1(hashes, where) == [True, True]
    assert not storage.counters()["kv"].get("errors")


@pytest.mark.parametrize("chosen", [True, False])
def test_scheduling_and_the_page_cache_are_in_the_metrics(make: hp.Make, chosen: bool) -> None:
    """Scheduling without an option, the page cache with a share of the free memory."""
    options = {"page_cache_share": 1.0} if chosen else {"profile": "off"}
    found = make(hp.mha_pool("page_first"), options=options).counters()["kv"]
    assert (found["scheduling"] > 0) == chosen
    assert (found["page_cache_bytes"] > 0) == chosen


def test_what_the_scheduler_forced_is_in_the_metrics(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that waits is too many, and a read that does not end leaves no slack."""
    schedule = Schedule(Linear(read_gbps=1e-6), Limits(staged_pages=0, pressing_pages=1))
    monkeypatch.setattr("tutti.store.find_schedule", lambda *_, **__: schedule)
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    queue = storage._stores["kv"].store.scheduler
    prefix = queue.attach(SimpleNamespace(read=lambda launch: None))
    queue.post(LoadKnown(queue.now_ns(), f"{prefix}1", 64, 1 << 20, 0, 0))
    hashes = [f"{i:064x}" for i in range(1, 9)]
    assert all(storage.batch_set_v1(hashes[:4], hp.indices(pool, list(range(4)))))
    queue.detach(prefix)
    assert all(storage.batch_set_v1(hashes[4:], hp.indices(pool, list(range(4, 8)))))
    found = storage.counters()["kv"]
    assert found["forced_pages"] == 4 and found["prediction_error"] > 0


def test_a_put_of_pages_of_one_slice_stops_for_a_load(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Memory ordered by page has one layer an object: such puts stop between batches of pages."""
    seen: list[tuple[Event, Decision]] = []
    schedule = Schedule(
        Linear(write_gbps=0.01), Limits(staged_pages=0), record=lambda *one: seen.append(one)
    )
    monkeypatch.setattr("tutti.store.find_schedule", lambda *_, **__: schedule)
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    want = [hp.page_bytes(pool, page) for page in range(20)]
    store = storage._stores["kv"].store
    assert store.layout.layers == 1
    for name in ("LONG_NBYTES", "UNIT_NBYTES"):
        monkeypatch.setattr(transfer_queue, name, 4 * store.layout.object_nbytes)
    monkeypatch.setattr(store._queue, "_short", 1)
    hashes = [f"{i:064x}" for i in range(1, 25)]
    assert all(storage.batch_set_v1(hashes[20:], hp.indices(pool, list(range(20, 24)))))
    start, stored = store._writer.put, []
    began, gate = threading.Event(), threading.Event()

    def held(parts: Any) -> Any:
        began.set()
        gate.wait(_S)
        return start(parts)

    monkeypatch.setattr(store._writer, "put", held)
    places = hp.indices(pool, list(range(20)))
    putting = threading.Thread(
        target=lambda: stored.extend(storage.batch_set_v1(hashes[:20], places))
    )
    putting.start()
    assert began.wait(_S)
    assert storage.batch_get_v1(hashes[20:], hp.indices(pool, list(range(20, 24)))) == [True] * 4
    assert not stored and not gate.is_set(), "the load did not wait for the put"
    gate.set()
    putting.join(_S)
    assert stored == [True] * 20
    hp.wipe(pool)
    assert storage.batch_get_v1(hashes[:20], places) == [True] * 20
    assert [hp.page_bytes(pool, page) for page in range(20)] == want
    store._queue.stop(10.0)
    counters = store.scheduler.counters()
    assert (counters["written_pages"], counters["ignored"]) == (24, 0)
    storage.close()
    known = [one for one, _ in seen if isinstance(one, WriteKnown)]
    assert [(one.can_stop, one.unit_pages) for one in known] == [(True, 4), (True, 4)]
    assert any(known[1].name in made.stops for _, made in seen)
    assert next(one.pages for one, _ in seen if isinstance(one, WriteStopped)) == 0


def test_an_attach_with_stages_is_refused() -> None:
    """In SGLang the first stage waits for the next, which has not got the request."""
    tree = SimpleNamespace(pp_size=2, enable_storage=False)
    scheduler = SimpleNamespace(tree_cache=tree, enable_hierarchical_cache=True)
    request = SimpleNamespace(hicache_storage_backend="dynamic")
    answer = control_requests._attach(pytest.fail, scheduler, request)
    assert not answer.success and "start the server" in answer.message

    def sglangs(*_: Any) -> str:
        return "SGLang's"

    tree.enable_storage = True  # only the policy changes
    assert control_requests._attach(sglangs, scheduler, request) == "SGLang's"
    scheduler = SimpleNamespace(tree_cache=object(), enable_hierarchical_cache=False)
    assert control_requests._attach(sglangs, scheduler, request) == "SGLang's"

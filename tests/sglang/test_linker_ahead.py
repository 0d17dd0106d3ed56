"""The linker reads ahead for requests that wait: within bounds, and no answer changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import linker_engine as engine
import pytest
from linker_engine import Rig, ahead_pages, damage, in_use, kept_ahead, names, wait_for

from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct.reads import Read
from tutti.scheduler.event import StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase

OBJECT = 3 * 2 * 4096


def stored(rig: Rig, count: int) -> list[bytes]:
    """Pages 0 to count - 1 in the store; SGLang's memory is empty afterwards."""
    want = rig.stored(count)
    rig.wipe()
    return want


def quiet(rig: Rig, pages: int) -> None:
    """Waits until so many pages were read ahead."""
    wait_for(lambda: ahead_pages(rig.linker) >= pages)


def loads_of(rig: Rig) -> int:
    """Objects read from the medium."""
    return int(rig.stored_pool.store.stats()["loaded"])


def test_a_look_up_reads_ahead_and_the_load_takes_it(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        want = stored(rig, 10)
        assert rig.lookup(names(10)) == 10
        quiet(rig, 10)
        assert kept_ahead(rig.linker.ahead) == 10
        before = loads_of(rig)
        rig.check_restored(names(10), range(20, 30), want)
        assert loads_of(rig) == before == 10, "the load read nothing itself"
        assert kept_ahead(rig.linker.ahead) == 0
        wait_for(lambda: in_use(rig.stored_pool.loads) == 0)
        counts = rig.linker.metrics.snapshot()
        assert (counts["ahead_pages"], counts["ahead_used_pages"]) == (10, 10)
        assert "ahead_unused_pages" not in counts
        read_nbytes = rig.stored_pool.store.stats()["payload_read_nbytes"]
        assert counts["moved_bytes/load"] == read_nbytes == 10 * OBJECT, "once, for all requests"
        assert counts["busy_seconds/load"] > 0
        assert rig.lookup(names(4), "s") == 4
        quiet(rig, 14)
        rig.linker.cancel_queued_load("s")
        assert rig.linker.metrics.snapshot()["ahead_unused_pages"] == 4


def test_a_slow_load_counts_what_was_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linker_module, "crawls", lambda *args, **how: True)
    with Rig(tmp_path) as rig:
        stored(rig, 10)
        assert rig.lookup(names(10)) == 10
        quiet(rig, 10)
        assert rig.restore(names(10), range(20, 30))
        wait_for(lambda: rig.linker.error_log.counts.get("load: slow") == 1)
    assert f"{10 * OBJECT} bytes in " in caplog.text


def test_what_is_read_ahead_comes_after_other_loads(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        stored(rig, 10)
        orders: list[bool] = []
        store = rig.stored_pool.store
        load = store.load
        store.load = lambda *args, **how: (orders.append(how["ahead"]), load(*args, **how))[1]
        assert rig.lookup(names(4)) == 4
        quiet(rig, 4)
        assert set(orders) == {True}
        orders.clear()
        assert rig.restore(names(10)[4:], range(20, 26))
        assert set(orders) == {False}


def test_a_load_takes_what_is_staged_and_reads_the_rest(tmp_path: Path) -> None:
    share = 4.5 / (2 * 2**20 // OBJECT)
    with Rig(tmp_path, read_ahead_share=share) as rig:
        want = stored(rig, 10)
        assert rig.lookup(names(10)) == 10
        quiet(rig, 4)
        assert kept_ahead(rig.linker.ahead) == 4, "no more than its share"
        rig.check_restored(names(10), range(20, 30), want)
        wait_for(lambda: loads_of(rig) == 10)
        assert rig.linker.metrics.snapshot()["moved_bytes/load"] == 10 * OBJECT


def test_requests_share_what_is_staged(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        want = stored(rig, 8)
        assert rig.lookup(names(8), "a") == 8
        assert rig.lookup(names(5), "b") == 5
        quiet(rig, 8)
        assert rig.load(names(8), range(8, 16), "a")
        assert rig.load(names(5), range(20, 25), "b")
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert rig.content(range(8, 16)) == want
        assert rig.content(range(20, 25)) == want[:5]
        assert loads_of(rig) == 8
        assert kept_ahead(rig.linker.ahead) == 0


def test_what_one_request_took_stays_for_the_other(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        want = stored(rig, 6)
        assert rig.lookup(names(6), "a") == rig.lookup(names(6), "b") == 6
        quiet(rig, 6)
        wait_for(lambda: all(len(s.rids) == 2 for s in rig.linker.ahead._staged))
        assert rig.load(names(6), range(6, 12), "a")
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert kept_ahead(rig.linker.ahead) == 6
        assert rig.load(names(6), range(12, 18), "b")
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert rig.content(range(12, 18)) == want
        assert loads_of(rig) == 6
        assert kept_ahead(rig.linker.ahead) == 0


@pytest.mark.parametrize("forgotten", ["", "b"])
def test_the_request_that_asked_first_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Also if it was looked up again since, and where another wants the same pages."""
    with Rig(tmp_path, load_staging=60 * OBJECT, read_ahead_share=1.0) as rig:
        want = stored(rig, 40)
        assert rig.store(names(10, "c"), range(10))
        read: list[bytes] = []
        ahead, gate, load = rig.linker.ahead, threading.Event(), rig.stored_pool.store.load

        def held(keys: Any, *args: Any, **how: Any) -> Any:
            assert gate.wait(30)
            read.extend(key.tobytes() for key in keys)
            return load(keys, *args, **how)

        monkeypatch.setattr(rig.stored_pool.store, "load", held)
        assert rig.lookup(names(30), "a") == 30
        wait_for(lambda: kept_ahead(ahead))
        assert rig.lookup(names(10, "c"), "c") == 10
        assert rig.lookup(names(40), "b") == 40
        assert rig.lookup(names(30), "a") == 30
        first, then = ([*ahead._notes[rid].wanted[0][1]] for rid in ("b", "c"))
        if forgotten:
            ahead.forget(forgotten)
        gate.set()
        quiet(rig, 40 if forgotten else 50)
        last = [] if forgotten else first[30:]
        assert read == [key.tobytes() for key in [*first[:30], *then, *last]], "each page once"
        assert not ahead._offers
        monkeypatch.setattr(rig.stored_pool.store, "load", load)
        rig.check_restored(names(30), range(20, 50), want[:30])


def test_a_request_that_goes_away_gives_its_staging_back(tmp_path: Path) -> None:
    with Rig(tmp_path, pin_lookups=3) as rig:
        stored(rig, 6)
        for how in ("cancelled", "forgotten", "reset"):
            assert rig.lookup(names(6), "gone") == 6
            wait_for(lambda: kept_ahead(rig.linker.ahead) == 6)
            if how == "cancelled":
                assert rig.load(names(6), range(6, 12), "gone")
                assert rig.linker.cancel_queued_load("gone")
            elif how == "forgotten":
                for _ in range(4):
                    assert rig.lookup(names(2, "other"), "other") == 0
            else:
                rig.linker.reset()
            assert kept_ahead(rig.linker.ahead) == 0
            wait_for(lambda: in_use(rig.stored_pool.loads) == 0)


@pytest.mark.parametrize("why", ["cap", "slots", "gone"])
def test_a_refused_load_ends_what_is_read_ahead_for_it(tmp_path: Path, why: str) -> None:
    with Rig(tmp_path, max_load_tokens=4 * engine.PAGE) as rig:
        stored(rig, 5)
        assert rig.lookup(names(4)) == 4
        quiet(rig, 4)
        if why == "cap":
            assert not rig.load(names(5), range(20, 25)), "more than the look-up answered"
        elif why == "slots":
            assert not rig.load(names(4), range(20, 23))
        else:
            assert not rig.load([*names(3), *names(1, "never")], range(20, 24))
        assert rig.linker.metrics.snapshot().get("ahead_unused_pages") == 4
        wait_for(lambda: in_use(rig.stored_pool.loads) == 0)


def test_a_batch_takes_back_the_staging_that_it_needs(tmp_path: Path) -> None:
    with Rig(tmp_path, load_staging=12 * OBJECT, read_ahead_share=1.0) as rig:
        want = stored(rig, 20)
        assert rig.lookup(names(20)[:10], "waits") == 10
        quiet(rig, 10)
        rig.check_restored(names(20)[8:20], range(30, 42), want[8:20])
        assert loads_of(rig) == 10 + 10, "two were staged"
        assert kept_ahead(rig.linker.ahead) == 4, "pieces that it used were not dropped for it"
        rig.check_restored(names(20), range(40, 60), want)


def test_damage_is_found_ahead_and_never_served(tmp_path: Path) -> None:
    with Rig(tmp_path, breaker_failures=100) as rig:
        want = stored(rig, 10)
        damage(rig.file(tmp_path))
        assert rig.lookup(names(10)) == 10
        wait_for(lambda: rig.stored_pool.store.stats()["quarantined"] > 0)
        wait_for(lambda: kept_ahead(rig.linker.ahead) == 0)
        found = rig.lookup(names(10))
        assert found < 10
        assert not rig.load(names(10), range(20, 30)), "known before the batch: computed instead"
        if found:
            rig.check_restored(names(10)[:found], range(20, 20 + found), want[:found])


def test_the_queue_forgets_a_failed_read_that_a_batch_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the batch reads itself is behind it in the queue until the batch's deadline."""
    taken, seen = threading.Event(), threading.Event()
    with Rig(tmp_path, breaker_failures=100) as rig:
        stored(rig, 37)
        damage(rig.file(tmp_path))
        ahead = rig.linker.ahead
        ended = ahead._ended

        def after_the_batch_took_it(*arguments: Any) -> None:
            if not seen.is_set():
                assert taken.wait(30)
            ended(*arguments)
            seen.set()

        monkeypatch.setattr(ahead, "_ended", after_the_batch_took_it)
        # A batch that comes after the failure would not take it.
        monkeypatch.setattr(Read, "has_failed", False)
        assert rig.lookup(names(37)) == 37
        wait_for(lambda: kept_ahead(ahead) > 0)
        piece = ahead._staged[0]
        found = ahead.take(rig.stored_pool, [bytes(key) for key in piece.read.keys])
        assert found and piece.name in ahead._queue.state.loads
        taken.set()
        wait_for(lambda: piece.name not in ahead._queue.state.loads)
        assert piece in ahead._staged, "its staging is the batch's until it is released"
        ahead.release(piece.read)
        assert piece not in ahead._staged


def test_a_piece_that_is_still_being_read_joins_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's step waits for it.  One that has arrived is withdrawn from the queue instead."""
    with Rig(tmp_path) as rig:
        stored(rig, 4)
        ahead, gate, ended = rig.linker.ahead, threading.Event(), rig.linker.ahead._ended

        def late(*arguments: Any) -> None:
            assert gate.wait(30)
            ended(*arguments)

        monkeypatch.setattr(ahead, "_ended", late)
        assert rig.lookup(names(4)) == 4
        wait_for(lambda: kept_ahead(ahead) == 4)
        (piece,), loads = ahead._staged, ahead._queue.state.loads
        ahead.join([piece.read], "batch")
        wait_for(lambda: loads[piece.name].batch == "batch")
        gate.set()
        wait_for(lambda: piece.arrived)
        ahead.join([piece.read], "batch")
        wait_for(lambda: piece.name not in loads)


def test_nothing_is_under_way_once_a_step_used_what_was_read_ahead(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        stored(rig, 10)
        assert rig.lookup(names(10)) == 10
        quiet(rig, 10)
        queue = rig.linker.ahead._queue
        used = tuple(queue.state.loads)
        queue.post(StepBegan(queue.now_ns(), Phase.PREFILL, 3, 1, 1, used))
        queue.post(StepEnded(queue.now_ns()))
        wait_for(lambda: not queue.state.loads)
        assert used and set(used) == set(queue.under_way)
        assert rig.restore(names(10), range(20, 30))
        wait_for(lambda: not queue.under_way)


def test_answers_do_not_depend_on_what_is_staged(tmp_path: Path) -> None:
    answers = []
    for share in (0.0, 0.5):
        with Rig(tmp_path / str(share), read_ahead_share=share) as rig:
            stored(rig, 12)
            seen: list[Any] = []
            for start in (12, 3, 0):
                look = [engine.transfer(names(14)[start:])]
                seen.append(rig.linker.lookup("a", look))
                seen.append(rig.linker.lookup("a", look))
            if share:
                quiet(rig, 12)
            seen.append(rig.load(names(12), range(20, 32), "a"))
            seen.append(rig.load(names(14), range(40, 54), "b"))
            answers.append(seen)
    assert answers[0] == answers[1]


def test_a_slow_medium_shortens_the_answer_to_what_is_staged_and_fits(tmp_path: Path) -> None:
    with Rig(tmp_path, max_load_ms=10.0, read_ahead_share=4.5 / (2 * 2**20 // OBJECT)) as rig:
        stored(rig, 10)
        assert rig.lookup(names(10)) == 10, "nothing was measured yet"
        quiet(rig, 4)
        admission = rig.linker._admission
        assert admission.page_s > 0, "what was read ahead was measured"
        admission._seconds_per_byte = 0.005 / OBJECT
        assert rig.lookup(names(10)) == 6, "four are staged, two more fit"
        rig.linker.ahead.close(10.0)
        assert rig.lookup(names(10)) == 2


def test_a_hit_that_computes_sooner_is_not_read_ahead(tmp_path: Path) -> None:
    with Rig(tmp_path, recompute_us_per_token=1.0) as rig:
        stored(rig, 10)
        assert rig.lookup(names(10)) == 10, "nothing was measured yet"
        assert rig.linker.ahead._notes
        rig.linker._admission.loaded(OBJECT, 3600.0)
        assert rig.lookup(names(10)) == 0
        assert not rig.linker.ahead._notes, "what is not loaded would be read for nothing"
        assert rig.linker.metrics.snapshot()["refused_pages"] == 10


def test_reading_ahead_ends_while_the_breaker_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path, breaker_failures=1, breaker_pause_s=600.0) as rig:
        stored(rig, 6)
        calls: list[int] = []
        gate = threading.Event()
        load = rig.stored_pool.store.load

        def late(keys: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(len(keys))
            gate.wait(30)
            return load(keys, *args, **kwargs)

        monkeypatch.setattr(rig.stored_pool.store, "load", late)
        assert rig.lookup(names(6), "a") == 6
        wait_for(lambda: len(calls) == 1)
        rig.stored_pool.reads.failure()
        assert rig.lookup(names(6), "b") == 0
        rig.linker.cancel_queued_load("a")  # while its read is being started
        gate.set()
        wait_for(lambda: in_use(rig.stored_pool.loads) == 0)
        assert calls == [6]


class StuckTicket:
    """A read that the device does not answer, until it does."""

    def __init__(self) -> None:
        self.settled = threading.Event()

    def wait_settled(self, timeout_s: float) -> bool:
        return self.settled.wait(min(timeout_s, 0.2))


def test_staging_that_a_device_may_still_fill_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path, load_staging=8 * OBJECT, read_ahead_share=1.0) as rig:
        stored(rig, 6)
        ticket = StuckTicket()
        monkeypatch.setattr(rig.stored_pool.store, "load", lambda *_, **__: ticket)
        assert rig.lookup(names(6)) == 6
        wait_for(lambda: rig.linker.error_log.counts.get("read-ahead: timeout", 0) == 3)
        wait_for(lambda: kept_ahead(rig.linker.ahead) == 0)  # no request is served from it
        assert in_use(rig.stored_pool.loads) == 6
        assert rig.stored_pool.loads.allocate(3) is None
        ticket.settled.set()
        assert in_use(rig.stored_pool.loads) == 0

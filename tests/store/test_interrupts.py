"""Ctrl-C at any instruction of any call: nothing stays in flight, and no thread hangs."""

from __future__ import annotations

import _thread
import gc
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tutti
from store.kept import Kept
from store.pools import some_keys
from store.storm import LAYOUT, PAGES, left
from tutti.base import interrupts
from tutti.base.interrupts import Latch
from tutti.errors import CapacityError
from tutti.gio_uring.controller import NativeController
from tutti.placement.lookup_pins import LookupPins
from tutti.store import ObjectStore
from tutti.transfers.tickets import LoadProgress, LoadTicket

NOTHING_LEFT = {
    "quiet": True,
    "in flight": 0,
    "writing": 0,
    "busy": 0,
    "kept": 0,
    "staging": [3, 6, 3],
    "slots": True,
}


@pytest.mark.timeout(240)  # what is interrupted may cost others the store's time-out, 20 s
@pytest.mark.parametrize(("signals", "how"), [(2000, "plain"), (500, "scheduled")])
def test_a_storm_of_signals_leaves_nothing_behind(tmp_path: Path, signals: int, how: str) -> None:
    program = Path(__file__).with_name("storm.py")
    tests = str(program.parents[1])
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "pool"), str(signals), how],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": tests},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("raised") >= signals
    found.pop("seed")
    assert found == {
        **NOTHING_LEFT,
        "stored": 4,
        "why": [0, False, 0, "None"],
        "snapshot": True,
    }, done.stdout


def interrupt(call: Callable[[], object], instruction: int) -> bool:
    """Whether `call` was interrupted: at its so many-th instruction on this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if str(frame.f_globals.get("__name__")).startswith(
            "hypothesis"
        ):  # its hook of garbage collections
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == instruction:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def at_every_instruction(
    call: Callable[[], object], after: Callable[[], object], step: int = 1, first: int = 1
) -> int:
    """Interrupts `call` once at each of its instructions; how many there are.

    step: at every so many-th only, from the first on.  A call may be shorter than others, or lose
    its interrupt in a hook that may not fail: it ends with several in a row.
    """
    instruction, ended = first, 0
    while ended < 5:  # bounded by the length of the call
        ended = 0 if interrupt(call, instruction) else ended + 1
        after()
        instruction += step
    return instruction - 1


CALLS: dict[str, Callable[[ObjectStore, np.ndarray, Any], object]] = {
    "put": lambda store, keys, pool: store.put(some_keys(RNG, 2), [4, 5], memory=pool),
    "put and wait": lambda store, keys, pool: store.put(some_keys(RNG, 1), [4], memory=pool).wait(),
    "load": lambda store, keys, pool: store.load(keys, [0, 1, 2, 3], memory=pool),
    "load and wait": lambda store, keys, pool: store.load(keys, [0, 1, 2, 3], memory=pool).wait(),
    "settle": lambda store, keys, pool: store.load(keys, [0, 1, 2, 3], memory=pool).wait_settled(),
    "match": lambda store, keys, pool: store.match(keys, pin=True),
    "present": lambda store, keys, pool: store.present(keys, pin="name"),
    "unpin": lambda store, keys, pool: (store.match(keys, pin="name"), store.unpin("name")),
    "memory": lambda store, keys, pool: store.unregister(store.allocate_memory(1)),
    "prove": lambda store, keys, pool: store.prove(),
    "stats": lambda store, keys, pool: store.stats(),
}
RNG = np.random.default_rng(0)
#: One of so many instructions is tried, by the seed: this call reads /proc, which has many.
STEPS = {"memory": 7}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_every_instruction(
    tmp_path: Path, rng: np.random.Generator, name: str
) -> None:
    store = tutti.open(tmp_path / "pool", LAYOUT, "8MiB")
    pool, keys = store.allocate_memory(PAGES), some_keys(rng, 4)
    store.put(keys, [0, 1, 2, 3]).wait()
    core = store._core

    def lock() -> None:
        assert core.lock.acquire(timeout=30), "an interrupted call left it taken"
        core.lock.release()

    def after() -> None:
        with ThreadPoolExecutor(1) as another:  # the thread that was interrupted may take it again
            another.submit(lock).result()
        assert core.wait_quiet(30)
        store.unpin()  # or the next call is shorter, and its end is not tried

    step = STEPS.get(name, 1)
    first = 1 + int(rng.integers(step))
    assert at_every_instruction(lambda: CALLS[name](store, keys, pool), after, step, first) > 10
    assert left(store, pool)["quiet"]
    assert left(store, pool) == NOTHING_LEFT
    store.clear()
    store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_look_up_that_asks_for_room_does_not_block_puts(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """In a full pool a look-up wakes the thread that makes room for the pages it missed."""
    store = tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None)
    store.wait_recovered(30)
    core, missing = store._core, some_keys(rng, 4)
    core._reserve = core.index.slots  # more than are free, as in a full pool

    def made_room() -> bool:
        return core.expected == 0

    def after() -> None:
        wait_until(made_room, "the thread that starts puts is blocked", timeout_s=30)
        store.unpin()

    assert core._expected_most > 0
    assert at_every_instruction(lambda: store.match(missing, pin=True), after) > 10
    store.close()


def test_a_load_settles_after_an_interrupted_request_for_a_callback() -> None:
    progress = LoadProgress(1, 1)
    ticket = LoadTicket(progress)

    def after() -> None:
        nonlocal progress, ticket
        engine = threading.Thread(target=progress.settle, daemon=True)
        engine.start()
        engine.join(30)
        assert not engine.is_alive(), "an interrupted call left a lock taken"
        progress = LoadProgress(1, 1)
        ticket = LoadTicket(progress)

    def late() -> None:
        progress.settle()
        ticket.on_settled(list)

    assert at_every_instruction(lambda: ticket.on_settled(list), after) > 10
    assert at_every_instruction(late, after) > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_opening_or_close_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB").close()
    kept = Kept(path)

    def use() -> None:
        tutti.open(path).close()

    def after() -> None:  # a second opening works as soon as the dropped store is gone
        gc.collect()

    assert at_every_instruction(use, after, step=23) > 10
    wait_until(kept.is_nothing)
    with tutti.open(path) as store:
        store.wait_recovered(30)


def test_a_store_that_is_dropped_gives_threads_and_descriptors_back(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB").close()

    def drop_one() -> None:
        kept = Kept(path)
        store = tutti.open(path)
        pool = store.allocate_memory(4)
        ticket = store.put(some_keys(RNG, 2), [0, 1])
        assert not kept.is_nothing()
        del store
        wait_until(kept.is_nothing)
        assert ticket.done
        assert pool.read(0)

    for _ in range(3):
        with pytest.warns(ResourceWarning, match="close the store"):
            drop_one()


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_store_is_dropped_where_warnings_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB", profile=None).close()
    kept = Kept(path)
    tutti.open(path, profile=None)
    gc.collect()
    wait_until(kept.is_nothing)
    tutti.open(path, profile=None).close()


@pytest.mark.parametrize("call", ["_read_info", "served_by"])
def test_an_opening_that_has_no_memory_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB", profile=None).close()
    kept = Kept(path)
    with monkeypatch.context() as patched:
        patched.setattr(NativeController, call, fail)
        with pytest.raises(MemoryError):
            tutti.open(path, profile=None)
    gc.collect()
    wait_until(kept.is_nothing)
    tutti.open(path, profile=None).close()


def test_a_call_that_gets_no_thread_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    with tutti.open(tmp_path / "pool", LAYOUT, "8MiB", profile=None) as store:
        with monkeypatch.context() as patched:
            patched.setattr(interrupts, "_idle", deque())
            patched.setattr(_thread, "start_new_thread", refuse)
            with pytest.raises(CapacityError, match="ulimit -u"):
                store.clear()
        store.clear()


def test_pins_count_right_after_any_interrupt() -> None:
    kept = np.zeros(16, np.uint16)
    pins = LookupPins(kept, lookups=3, slots_max=12)
    rng = np.random.default_rng(0)

    def use() -> None:
        pins.lookup()
        for name in ("a", "b", None):
            pins.pin(name, rng.integers(0, 16, 5))
        pins.release("a")

    def after() -> None:
        pins.lookup()
        expected = np.zeros(16, np.uint32)
        for _, slots in pins.holders.values():
            np.add.at(expected, slots, 1)
        assert kept.tolist() == expected.tolist()
        assert pins.count == np.count_nonzero(expected)

    assert at_every_instruction(use, after) > 100


def test_a_call_reaches_a_thread_that_was_about_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its caller finds out a second later."""
    monkeypatch.setattr(interrupts, "_LINGER_S", 0.0)
    inbox: queue.SimpleQueue[interrupts._Call] = queue.SimpleQueue()  # a caller took it
    call = interrupts._Call(int)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(interrupts._next, inbox)
        time.sleep(0.1)
        inbox.put(call)
        assert found.result() is call


class Struck(deque[Any]):
    """Threads that wait for a call: the next callers are interrupted when they take one."""

    strikes = 0

    def pop(self) -> Any:
        if self.strikes:
            self.strikes -= 1
            raise KeyboardInterrupt
        return super().pop()


def test_a_call_whose_start_and_undo_are_interrupted_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = Struck()
    idle.strikes = 3
    monkeypatch.setattr(interrupts, "_idle", idle)
    wait_until(lambda: not interrupts._running)
    with pytest.raises(KeyboardInterrupt):
        interrupts.uninterrupted(lambda first, result: None)(int)()
    gc.collect()  # what was raised refers to frames that refer to the calls
    assert not interrupts._running


def test_an_undo_whose_start_is_interrupted_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, finish = Struck(), interrupts._Call.finish
    undone: list[object] = []

    def strike(call: interrupts._Call) -> Any:
        finish(call)
        idle.strikes = 1  # and once more, when the undo starts
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupts, "_idle", idle)
    monkeypatch.setattr(interrupts._Call, "finish", strike)
    with pytest.raises(KeyboardInterrupt):
        interrupts.uninterrupted(lambda first, result: undone.append(result))(int)(7)
    wait_until(lambda: undone == [7])


def test_a_latch_wakes_all_waiters_after_any_interrupt() -> None:
    woken: list[bool] = []
    latch = Latch()
    assert not latch.wait(0)
    assert at_every_instruction(lambda: latch.wait(0.001), lambda: None) > 10
    waiters = [threading.Thread(target=lambda: woken.append(latch.wait(30))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    latch.set()
    for waiter in waiters:
        waiter.join()
    assert woken == [True] * 4
    assert latch.is_set()
    assert latch.wait(0)

"""Loads that nothing waits for: proofs after a crash, and loads ahead."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_until

from store.pools import controller_of, fill, formatted, opened, put_some, some_keys
from tutti.errors import DeviceTimeout
from tutti.placement.index import SlotState
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import LoadKnown
from tutti.scheduler.loads_and_writes import LoadKind
from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Decision


def test_puts_and_loads_do_not_wait_for_proofs(rng: np.random.Generator) -> None:
    """As after a crash.  Of the proof only that flies which was issued before they came."""
    seen: list[tuple[Any, Decision]] = []
    controller = controller_of(formatted())
    limits = Limits(staged_pages=0, probe_us=1e15)  # the interference is known
    schedule = Schedule(
        Linear(interference=4.0, read_gbps=0.001), limits, record=lambda *one: seen.append(one)
    )
    with opened(
        [], controller=controller, schedule=schedule, window_nbytes=1 << 14, timeout_s=60.0
    ) as store:
        keys = put_some(store, rng, 12, 24)
        core, scheduler = store._core, store.scheduler
        assert scheduler is not None
        with core.lock:  # as after an unclean close
            core.index.state[core.index.find(keys[:8])] = SlotState.UNPROVEN
        controller.set_faults(Faults(stall_from=1))
        prover = threading.Thread(target=store.prove, daemon=True)
        prover.start()
        wait_until(lambda: scheduler.state.background_ns or scheduler.state.background)
        load = store.load(keys[8:], np.arange(12, 16))
        put = store.put(some_keys(rng, 4), np.arange(16, 20))
        for _ in range(10_000):  # ends when both are done
            if put.done and load.done:
                break
            controller.release()
            time.sleep(0.001)
        load.wait(10)
        assert put.wait(10).stored == 4
        controller.recover()
        prover.join(20.0)
        assert not prover.is_alive()
        assert store.stats()["proven"] == 8
        scheduler.run_due()
        assert scheduler.counters()["ignored"] == 0
        known = [event for event, _ in seen if isinstance(event, LoadKnown)]
        assert [event.kind for event in known] == [LoadKind.BACKGROUND, LoadKind.LOAD]
        proof, other = (event.name for event in known)
        issues = [one for _, found in seen for one in (*found.reads, *found.writes)]
        assert [one.name for one in issues[:2]] == [proof, other]
        rest = [one.name for one in issues[2:]]
        first = rest.index(proof)
        assert set(rest[first:]) == {proof}, "the rest of the proof came last"
        assert len(set(rest[:first])) == 2, "the load and the put"


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_ahead_goes_behind_puts_until_something_waits_for_it(
    rng: np.random.Generator, waits: bool
) -> None:
    controller = controller_of(formatted())
    schedule = Schedule(Linear(read_gbps=0.001), Limits(staged_pages=0, probe_us=1e15))
    with opened([], controller=controller, schedule=schedule, timeout_s=60.0) as store:
        pool = store.allocate_memory(24)
        contents = fill(pool, np.arange(8), rng)
        keys = some_keys(rng, 8)
        store.put(keys, np.arange(8)).wait(10)
        scheduler = store.scheduler
        assert scheduler is not None
        scheduler.run_due()
        controller.set_faults(Faults(stall_from=1))
        put = store.put(some_keys(rng, 4), np.arange(20, 24))
        load = store.load(keys, np.arange(8, 16), ahead=True)
        assert [one.issued for one in scheduler.state.background.values()] == [0]
        if waits:
            with pytest.raises(DeviceTimeout):
                load.wait_layer(0, 0.01)
            scheduler.run_due()
            assert not scheduler.state.background and not scheduler.state.background_ns
        controller.recover()
        assert put.wait(10).stored == 4
        assert load.wait_settled(20.0)
        assert [pool.read(page) for page in range(8, 16)] == contents

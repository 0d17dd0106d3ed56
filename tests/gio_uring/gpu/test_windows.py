"""Loads into GPU memory are read a few layers at a time, as the scheduler grants them.

On a stand-in for the CUDA driver: no GPU is involved.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gio_uring.gpu.test_host_engine import memory_of, rig_over_memory
from memory_controller import Faults
from scheduler.drive import Linear
from waiting import wait_idle

from store.pools import GEOMETRY, LAYOUT, some_keys
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, Issue, State

LAYERS = LAYOUT.layers


class LayerByLayer:
    """Issues a layer of the newest load, then a write, and each when the one before is over."""

    def __init__(self, limits: Limits) -> None:
        self._reads_next = True

    def decide(self, state: State) -> Decision:
        is_read = any(load.issued > load.ready for load in state.loads.values())
        if is_read or any(write.issued for write in state.writes.values()):
            return Decision()
        reads = [Issue(load.name, load.issued, 1) for load in state.unread.values()][-1:]
        writes = [Issue(w.name, w.issued, w.pages - w.issued) for w in state.unwritten.values()][:1]
        if reads and (self._reads_next or not writes):
            self._reads_next = False
            return Decision(tuple(reads))
        self._reads_next = True
        return Decision(writes=tuple(writes))


def test_layers_are_granted_one_by_one_and_loads_one_after_another(seed: int) -> None:
    """The policy prefers the newest: what follows on the stream is announced to it in its turn."""
    rng, issues = np.random.default_rng(seed), list[Issue]()
    schedule = Schedule(
        Linear(), policy=LayerByLayer, record=lambda _, decision: issues.extend(decision.reads)
    )
    with rig_over_memory(timeout_s=30.0, schedule=schedule) as rig:
        keys, contents = rig.stored(rng, 4)

        def load(first: int) -> None:
            rig.store.load(keys, list(range(first, first + 4))).wait(20)

        threads = [threading.Thread(target=load, args=(first,)) for first in (8, 12, 16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for first in (8, 12, 16):
            assert [rig.pool.read(first + n) for n in range(4)] == contents
    names = list(dict.fromkeys(issue.name for issue in issues))
    assert len(names) == 3
    found = [(issue.name, issue.first, issue.count) for issue in issues]
    assert found == [(name, layer, 1) for name in names for layer in range(LAYERS)]


def test_a_load_is_granted_before_its_thread_calls_the_driver(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams wait for layers that only this thread grants.  A call of another one, such as
    the load of a kernel, may wait for these streams, and hold up the calls of every thread.
    """
    submit, grant, held = Engine.submit, Job.grant, list[int]()

    def noted_submit(engine: Engine, *arguments: Any, **options: Any) -> Job:
        job = submit(engine, *arguments, **options)
        if options.get("held"):
            words = options["words"]
            owed = words.nbytes_of(words.layers), threading.get_ident()
            rig.driver.owed[words.address] = owed
            job.debt = words.address  # type: ignore[attr-defined]
            held.append(words.address)
        return job

    def noted_grant(job: Job, *arguments: Any) -> None:
        rig.driver.owed.pop(getattr(job, "debt", 0), None)
        grant(job, *arguments)

    with rig_over_memory(schedule=Schedule(Linear(), policy=LayerByLayer)) as rig:
        keys, contents = rig.stored(np.random.default_rng(seed), 4)
        monkeypatch.setattr(Engine, "submit", noted_submit)
        monkeypatch.setattr(Job, "grant", noted_grant)
        rig.store.load(keys, list(range(8, 12))).wait(20)
        assert held
        assert not rig.driver.owed
        assert [rig.pool.read(8 + n) for n in range(4)] == contents


def test_a_load_that_is_granted_no_more_is_read_after_all(seed: int) -> None:
    class OneLayer(LayerByLayer):
        def decide(self, state: State) -> Decision:
            decision = super().decide(state)
            return Decision(tuple(one for one in decision.reads if not one.first), decision.writes)

    schedule = Schedule(Linear(), policy=OneLayer)
    with rig_over_memory(timeout_s=1.0, schedule=schedule) as rig:
        keys, contents = rig.stored(np.random.default_rng(seed), 4)
        for first in (8, 12):  # the second waits for its turn, and goes without it
            ticket = rig.store.load(keys, list(range(first, first + 4)))
            ticket.wait_layer(0, 10)
        ticket.wait(10)
        assert [rig.pool.read(12 + n) for n in range(4)] == contents
        ticket = rig.store.load(keys, list(range(16, 20)))
        assert ticket.cancel(10)
        wait_idle(rig.store.scheduler)


def writes_among_reads(trace: Any, layers: range) -> int:
    """Write commands of data between the first and the last read of these layers."""
    first = GEOMETRY.groups_offset // GEOMETRY.lba_nbytes
    data = trace[(trace[:, 0] != 0) & (trace[:, 1] >= first)]
    at = (data[:, 1] - np.uint64(first)) // np.uint64(GEOMETRY.layer_stride_nlb)
    layer = at % np.uint64(GEOMETRY.layers)
    is_ours = (layer >= layers.start) & (layer < layers.stop)
    reads = np.flatnonzero((data[:, 0] == OPCODE_READ) & is_ours)
    assert reads.size > 1, "several commands"
    return int(np.count_nonzero(data[reads[0] : reads[-1], 0] == OPCODE_WRITE))


def each_layer() -> list[range]:
    return [range(layer, layer + 1) for layer in range(LAYERS)]


def traced(policy: Any, rng: np.random.Generator, *, is_due: bool) -> Any:
    """The commands of a load during puts, on a drive that answers slowly once it has come."""
    limits = Limits(staged_pages=0, probe_us=1e15)  # the interference is known
    schedule = Schedule(Linear(interference=4.0), limits, policy=policy)
    with rig_over_memory(
        timeout_s=30.0, verify="off", schedule=schedule, window_nbytes=1 << 15
    ) as rig:
        keys, contents = rig.stored(rng, 8)
        controller, scheduler = memory_of(rig), rig.store.scheduler
        assert scheduler is not None
        controller.set_faults(Faults(stall_from=1))
        if is_due:
            scheduler.post(
                StepBegan(scheduler.now_ns(), Phase.PREFILL, LAYERS, tokens=1, loads=("due",))
            )
        trace = controller.trace(4096)
        over = threading.Event()

        def answer() -> None:
            while not over.wait(0.001):  # ended below
                if scheduler.state.loads:
                    controller.release()
            controller.release()

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            pages, before = [[16 + 2 * n, 17 + 2 * n] for n in range(4)], 1 if is_due else 4
            puts = [rig.store.put(some_keys(rng, 2), both) for both in pages[:before]]
            ticket = rig.store.load(keys[::2], list(range(8, 12)), batch="due")
            puts += [rig.store.put(some_keys(rng, 2), both) for both in pages[before:]]
            ticket.wait(20)
            controller.recover()
            assert [each.wait(20).stored for each in puts] == [2] * 4
        finally:
            over.set()
            answering.join(10)
        if is_due:
            scheduler.post(StepEnded(scheduler.now_ns()))
        controller.recover()
        assert [rig.pool.read(8 + n) for n in range(4)] == contents[::2]
        return trace


def test_writes_go_between_layers_and_never_into_one_that_is_due(rng: np.random.Generator) -> None:
    """Seen by the drive.  A policy that minds nothing shows that it would see them."""
    assert writes_among_reads(traced(LayerByLayer, rng, is_due=False), range(LAYERS)) > 0
    for _ in range(3):
        due = traced(SlackPolicy, rng, is_due=True)
        assert not any(writes_among_reads(due, one) for one in each_layer())
    seen = (traced(ImmediatePolicy, rng, is_due=True) for _ in range(20))
    assert any(writes_among_reads(trace, one) for trace in seen for one in each_layer())

"""TuttiLinker with a profile: its writes yield to reads as a scheduler says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linker_engine as engine
import numpy as np
import pytest
from linker_engine import (
    WAIT_S,
    FlatProfile,
    Rig,
    SlowProfile,
    ahead_pages,
    kept_ahead,
    names,
    wait_for,
)
from linker_gpu import gpu_rig
from node.agents import running
from waiting import wait_idle

import tutti
from tutti.bench.simulate.server_io import policy_of
from tutti.errors import ConfigError, DeviceTimeout, ProfileError
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct import backlog as backlog_module
from tutti.integration.sglang.direct import model_steps as steps_module
from tutti.integration.sglang.direct.backlog import Backlog
from tutti.integration.sglang.direct.chains import Chains
from tutti.integration.sglang.direct.model_steps import STEPS, StepsWatch
from tutti.integration.sglang.metrics import Metrics
from tutti.integration.sglang.server_log import ErrorLog
from tutti.machine import machine_facts
from tutti.medium.layout import KVLayout
from tutti.scheduler import trace
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import (
    BatchJoined,
    Event,
    LayerBegan,
    LoadGone,
    LoadKnown,
    StepBegan,
    StepEnded,
    WriteKnown,
    WriteStopped,
    from_json,
)
from tutti.scheduler.loads_and_writes import LoadKind, Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import GPUS, ModelShape
from tutti.scheduler.state import Decision, Policy
from tutti.transfers.core import StoreConfig
from tutti.transfers.tickets import Outcome

TRIAL = "r4"  # the hash of this request's id lets it load what others would compute


def totals(rig: Rig, *kinds: str) -> list[int]:
    """Of its scheduler, once that knows that all is over."""
    wait_idle(scheduler := rig.stored_pool.store.scheduler)
    return [scheduler.counters()[kind] for kind in kinds]


def test_with_a_profile_the_scheduler_launches_what_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        Rig(tmp_path / "none", profile=str(tmp_path / "missing.json"))
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    with Rig(tmp_path, profile="profile.json", backlog_share=0.1) as rig:
        rig.fill(13)
        want = rig.content(range(24))
        for start in range(0, 24, 4):
            assert rig.offload(names(24)[start : start + 4], range(start, start + 4))
        wait_for(lambda: rig.linker.num_completed_offloads() == 6)
        assert all(rig.linker.pop_completed_offload() for _ in range(6))
        wait_for(lambda: rig.lookup(names(24), TRIAL) == 24)
        assert rig.restore(names(24), range(30, 54), TRIAL)
        assert rig.content(range(30, 54)) == want
        read_nbytes, *pages = totals(rig, "read_nbytes", "written_pages", "dropped_pages")
        assert read_nbytes > 0 and pages == [24, 0]


def test_a_linker_shares_the_queue_of_its_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store that `tutti.open` opens there; the linker's bounds are not the store's."""
    slow = SlowProfile()
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (slow, "given"))
    layout = KVLayout.mha(
        layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
    )
    staged = {"store_staging": "512KiB", "backlog_share": 0.1}
    with (
        Rig(tmp_path / "linker", **staged) as rig,
        tutti.open(tmp_path / "pool.tutti", layout, "16MiB") as store,
    ):
        assert store.config.schedule.source != "given"
        assert store.scheduler is rig.stored_pool.store.scheduler
        store.allocate_memory(300)
        keys = np.random.default_rng(1).integers(0, 256, (300, 16), np.uint8)
        ticket = store.put(keys, np.arange(300))
        rig.stored(4)
        ticket.wait(WAIT_S)
        assert (ticket.outcome == Outcome.STORED).all()
        wait_for(lambda: store.scheduler.counters()["written_pages"] == 304)


def test_one_put_beyond_the_backlog_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped at once and said to be; what was taken before and after is stored."""
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (SlowProfile(), "given"))
    bounds = {"backlog_share": 16 / 64, "store_staging": 10 * 3 * 2 * 4096}
    with Rig(tmp_path, recompute_us_per_token=1e6, **bounds) as rig:
        rig.fill(22)
        want = rig.content(range(12))
        gate, put = threading.Event(), rig.stored_pool.store.put

        def late_put(*args: Any, **kwargs: Any) -> Any:
            gate.wait(WAIT_S)
            return put(*args, **kwargs)

        monkeypatch.setattr(rig.stored_pool.store, "put", late_put)
        for part in range(2):  # the first is under way, some of the other waits
            assert rig.offload(names(4, str(part)), range(4 * part, 4 * part + 4))
        assert rig.offload(names(40, "long"), range(20, 60))
        wait_for(lambda: rig.linker.metrics.snapshot().get("dropped_pages", 0) == 40)
        assert rig.linker.backlog.locked == 8, "none of SGLang's pages waits for nothing"
        assert rig.stored_pool.store.scheduler.counters()["copied_pages"] == 0
        assert "40 pages of kv are not stored" in caplog.text
        assert "may wait for the SSD (16 pages)" in caplog.text
        assert rig.linker.num_completed_offloads() == 0, "in order"
        assert rig.offload(names(4, "after"), range(8, 12))
        gate.set()
        wait_for(lambda: rig.linker.num_completed_offloads() == 4)
        kept = [rig.linker.pop_completed_offload() for _ in range(4)]
        assert kept == [True, True, False, True]
        assert rig.linker.backlog.wait_quiet(WAIT_S)
        assert rig.linker.metrics.snapshot().get("errors", 0) == 0
        for number, salt in enumerate(("0", "1", "after")):
            assert rig.lookup(names(4, salt), salt) == 4
            rig.check_restored(names(4, salt), range(20, 24), want[4 * number : 4 * number + 4])
        assert rig.lookup(names(40, "long"), "long") == 0


class Batch:
    """What SGLang's ScheduleBatch says of a step."""

    def __init__(self, phase: Phase, index: int = -1) -> None:
        self.forward_mode = self
        self.is_decode = lambda: phase is Phase.DECODE
        self.is_extend = lambda: phase is Phase.PREFILL
        self.reqs = [SimpleNamespace(seqlen=300)] * 3
        self.extend_num_tokens, self.prefix_lens = 70, [16, 32]
        self.hicache_consumer_index = index


def test_the_scheduler_is_told_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    with Rig(tmp_path, profile="profile.json") as rig:
        scheduler = rig.stored_pool.store.scheduler

        def computes(*expected: Any) -> None:
            step = attrgetter("phase", "tokens", "context_tokens")
            wait_for(lambda: step(scheduler.state.step) == expected)

        STEPS.launched(Batch(Phase.PREFILL))
        computes(Phase.PREFILL, 70, 48)
        assert scheduler.state.step.layers == engine.LAYERS
        STEPS.launched(Batch(Phase.DECODE))  # overlap: launched while the prefill computes
        time.sleep(0.01)
        computes(Phase.PREFILL, 70, 48)
        STEPS.processed()
        computes(Phase.DECODE, 3, 900)
        STEPS.processed()
        computes(Phase.IDLE, 0, 0)
        STEPS.processed()
        rig.fill(16)
        assert rig.store(names(4), range(4)), "while the model is idle"
    STEPS.launched(Batch(Phase.DECODE))
    assert not STEPS._steps, "no observer is left"


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the pools' schedulers are told, in order."""
    events: list[Event] = []
    add, alone = Dispatcher.add, Dispatcher.alone

    def added(dispatcher: Dispatcher, event: Event) -> None:
        events.append(event)
        add(dispatcher, event)

    def went_alone(dispatcher: Dispatcher, known: Any, *over: int) -> bool:
        return alone(dispatcher, known, *over) and not events.append(known)

    monkeypatch.setattr(Dispatcher, "add", added)
    monkeypatch.setattr(Dispatcher, "alone", went_alone)
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    return events


def run_batch(rig: Rig, batch: Batch, asks: Sequence[int]) -> list[bool]:
    """SGLang's, as the plugin hooks it: the forward asks for layers, then loads are finished."""
    counter, index = rig.linker.layer_done_counter, batch.hicache_consumer_index

    def original(scheduler: object, batch: Batch) -> list[bool]:
        counter.set_consumer(index)
        for layer in asks:
            counter.wait_until(layer)
        return [index < 0 or rig.linker.finish_layer_wise_loading(index)]

    return list(steps_module._around_run(original, None, batch))


def test_a_cpu_tells_each_layer_and_whose_loads_it_waits_for(
    tmp_path: Path, posted: list[Event]
) -> None:
    with Rig(tmp_path, profile="profile.json", read_ahead_share=0.0) as rig:
        rig.stored(8)
        assert rig.load(names(8), range(20, 28))
        index = rig.linker.start_layer_wise_loading()
        del posted[:]
        assert run_batch(rig, Batch(Phase.PREFILL, index), [0, 0, 1, 0, 2, 2, 1]) == [True]
        assert run_batch(rig, Batch(Phase.DECODE), [0, 1, 2])  # the other one is not processed yet
        told = [event for event in posted if isinstance(event, StepBegan | LayerBegan | StepEnded)]
        STEPS.processed()
        STEPS.processed()
        assert sum(isinstance(event, StepEnded) for event in posted) == 2, "over when launched"
        kinds = [StepBegan, *[LayerBegan] * 3, StepEnded, StepBegan, StepEnded]
        assert [type(event) for event in told] == kinds
        assert told[0].loads == (str(index),)
        assert [event.layer for event in told[1:4]] == [0, 1, 2]
        waited_s = sum(event.waited_ns for event in told[1:4]) / 1e9
        assert waited_s == pytest.approx(rig.linker.metrics.snapshot()["bubble_seconds"], rel=0.2)
        assert told[5].loads == ()
        scheduler = rig.stored_pool.store.scheduler
        wait_for(lambda: scheduler.counters()["bubble_ns"] == round(waited_s * 1e9))
        assert scheduler.counters()["ignored"] == 0


def test_reads_carry_the_name_of_their_batch(tmp_path: Path, posted: list[Event]) -> None:
    with Rig(tmp_path, profile="profile.json") as rig:
        rig.stored(8)
        wait_for(lambda: rig.lookup(names(4), TRIAL) == 4)
        wait_for(lambda: ahead_pages(rig.linker) == 4)
        for _ in range(2):
            assert rig.restore(names(8), range(20, 28), TRIAL)
        known = [event for event in posted if isinstance(event, LoadKnown)]
        assert [event.batch for event in known if not is_ahead(event)] == ["0", "1"]
        ahead = [event.batch for event in known if is_ahead(event)]
        assert ahead and all("ahead" in batch for batch in ahead), "for no step yet"
        gone = [event.name for event in posted if isinstance(event, LoadGone)]
        assert set(ahead) <= set(gone) and not any(isinstance(e, BatchJoined) for e in posted)


def test_on_a_gpu_a_step_ends_when_it_was_processed(
    tmp_path: Path, posted: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpu_rig(tmp_path, monkeypatch, profile="profile.json") as rig:
        rig.stored(4)
        assert rig.load(names(4), range(20, 24))
        index = rig.linker.start_layer_wise_loading()
        assert run_batch(rig, Batch(Phase.PREFILL, index), [0, 1, 2]) == [True]
        assert not any(isinstance(event, StepEnded) for event in posted)
        STEPS.processed()
        assert [e.loads for e in posted if isinstance(e, StepBegan)] == [(str(index),)]
        assert any(isinstance(event, StepEnded) for event in posted)


def test_a_step_that_is_not_understood_costs_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    watch = StepsWatch()
    monkeypatch.setattr(linker_module, "STEPS", watch)
    with Rig(tmp_path, profile="profile.json") as rig:
        watch.launched(object())
        watch.launched(Batch(Phase.DECODE))
        watch.processed()
        assert rig.stored_pool.store.scheduler.state.step.phase is Phase.IDLE


@pytest.mark.parametrize("foreign", ["", "machine", "model"])
def test_a_foreign_profile_is_replaced_by_what_is_found(
    tmp_path: Path, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv_nbytes = 2 * engine.LAYERS * 4096 // engine.PAGE * (2 if foreign == "model" else 1)
    model = ModelShape("small", engine.LAYERS, 1e9, 4096, kv_nbytes, 2e9)
    machine = {**machine_facts(tmp_path), **({"cpu": "another"} if foreign == "machine" else {})}
    file = tmp_path / "profile.json"
    document = {**estimated_document(model, GPUS["H100"], machine=machine), "mark": "the file's"}
    file.write_text(json.dumps(document))
    with Rig(tmp_path / "pools" / "new", profile=str(file)) as rig:
        rig.stored(4)
        used = rig.stored_pool.store.config.schedule.profile
        assert bool(used.warnings) == bool(foreign)
        assert used.document.get("mark") == (None if foreign else "the file's")
    assert bool([r for r in caplog.records if "not used" in r.message]) == bool(foreign)
    file.write_text(json.dumps({**document, "model": {"name": "nameless"}}))
    with pytest.raises(ProfileError, match="does not name its model"):
        Rig(tmp_path / "none", profile=str(file))


@pytest.mark.parametrize("policy", ["slack", "none"])
def test_a_server_is_served_by_the_policy_that_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """What a linker's queue was told and decided, and what the simulator's policy decides of it."""
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (FlatProfile(), "given"))
    limits: list[Limits] = []
    lines: list[str] = []

    def chosen(given: Limits) -> Policy:
        limits.append(given)
        return SlackPolicy(given) if policy == "slack" else ImmediatePolicy(given)

    def record(event: Event, decision: Decision) -> None:
        lines.append(trace.line(event, decision))

    recorded = partial(Schedule, policy=chosen, record=record)
    monkeypatch.setattr("tutti.integration.sglang.direct.open_pools.Schedule", recorded)
    page = 3 * 2 * 4096
    staged = {"store_staging": 8 * page, "load_staging": 20 * page, "read_ahead_share": 0.25}
    with Rig(tmp_path, backlog_share=8 / 64, recompute_us_per_token=1e6, **staged) as rig:
        rig.fill(19)
        for part in range(6):
            assert rig.offload(names(6, str(part)), range(6 * part, 6 * part + 6))
        wait_for(lambda: rig.linker.num_completed_offloads() == 6)
        kept = [rig.linker.pop_completed_offload() for _ in range(6)]
        assert rig.linker.backlog.wait_quiet(WAIT_S)
        stored = kept.index(True)
        assert limits[0].read_ahead_nbytes == 5 * page
        assert rig.lookup(names(6, str(stored)), "waits") == 6
        wait_for(lambda: ahead_pages(rig.linker) == 5)
        assert kept_ahead(rig.linker.ahead) == 5, "the sixth waits for the queue"
        for number in range(3):
            assert rig.load(names(6, str(stored)), range(40, 46), str(number))
            index = rig.linker.start_layer_wise_loading()
            run_batch(rig, Batch(Phase.PREFILL, index), range(engine.LAYERS))
            rig.offload(names(3, f"more {number}"), range(3))
        assert rig.linker.backlog.wait_quiet(WAIT_S)
    decided = "".join(lines)
    assert all(
        word in decided for word in ('"writes":', '"reads":', '"SpaceKnown"', '"LayerBegan"')
    )
    assert '"copy_outs":' in decided, "more than may be locked"
    again = list(trace.replay(lines, policy_of(policy, limits[0]), FlatProfile()))
    assert again == lines
    ahead = [event.name for event in map(event_of, lines) if is_ahead(event)]
    assert len(ahead) >= 6, "a page each"
    # With no limit the policy answers otherwise: what was read ahead is what it decided.
    unlimited = policy_of(policy, replace(limits[0], read_ahead_nbytes=1 << 40))
    assert list(trace.replay(lines, unlimited, FlatProfile())) != lines
    # The trials had each piece read alone; else two would have had their turns at once.
    beside = [one.replace('"alone":true', '"alone":false') for one in lines]
    chosen_again = policy_of(policy, limits[0])
    assert list(trace.replay(beside, chosen_again, FlatProfile())) != beside != lines


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Event, Decision]]:
    """What the linker's queue was told and decided, on a machine that writes slowly."""
    seen: list[tuple[Event, Decision]] = []
    recorded = partial(Schedule, record=lambda *one: seen.append(one))
    monkeypatch.setattr("tutti.integration.sglang.direct.open_pools.Schedule", recorded)
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (SlowProfile(), "given"))
    return seen


def test_a_long_offload_stops_for_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: list[tuple[Event, Decision]]
) -> None:
    """It was issued whole.  What the load finds begun is one batch; the rest comes behind it."""
    monkeypatch.setattr(backlog_module, "_BATCH_NBYTES", 4 * 3 * 2 * 4096)
    with Rig(tmp_path, backlog_share=1.0, recompute_us_per_token=1e6, read_ahead_share=0.0) as rig:
        rig.fill(23)
        want = rig.content(range(44))
        assert rig.store(names(4), range(4))
        begun: list[int] = []  # pages of each put
        gate, put = threading.Event(), rig.stored_pool.store.put

        def held(keys: Any, *args: Any, **kwargs: Any) -> Any:
            begun.append(len(keys))
            gate.wait(WAIT_S)
            return put(keys, *args, **kwargs)

        monkeypatch.setattr(rig.stored_pool.store, "put", held)
        assert rig.offload(names(40, "long"), range(4, 44))
        assert rig.offload(names(4, "last"), range(4))
        wait_for(lambda: begun == [4])
        assert rig.load(names(4), range(50, 54))
        index = rig.linker.start_layer_wise_loading()
        assert run_batch(rig, Batch(Phase.PREFILL, index), range(engine.LAYERS)) == [True]
        assert rig.content(range(50, 54)) == want[:4]
        assert begun == [4] and not gate.is_set(), "the load did not wait for the put"
        gate.set()
        wait_for(lambda: rig.linker.num_completed_offloads() == 2)
        assert [rig.linker.pop_completed_offload() for _ in range(2)] == [True, True]
        assert rig.linker.backlog.wait_quiet(WAIT_S)
        assert sum(begun) == 44 and max(begun) == 4
        wait_for(lambda: rig.lookup(names(40, "long"), "long") == 40)
        rig.check_restored(names(40, "long"), range(20, 60), want[4:44])
        assert totals(rig, "written_pages", "ignored", "locked_pages") == [48, 0, 0]
    (first,) = [one for one, _ in decided if isinstance(one, WriteKnown) and one.can_stop]
    issues = [one for _, made in decided for one in made.writes if one.name == first.name]
    assert issues[0].count == 40, "whole, as no load waited"
    assert next(made.stops for _, made in decided if made.stops) == (first.name,)
    stopped = [one.pages for one, _ in decided if isinstance(one, WriteStopped)]
    assert stopped[0] == issues[1].first == 4


def test_a_batch_that_fails_costs_an_offload_its_own_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decided: list[tuple[Event, Decision]]
) -> None:
    monkeypatch.setattr(backlog_module, "_BATCH_NBYTES", 2 * 3 * 2 * 4096)
    with Rig(tmp_path, backlog_share=1.0, recompute_us_per_token=1e6) as rig:
        rig.fill(24)
        put, calls = rig.stored_pool.store.put, [0]

        def broken(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise DeviceTimeout("the medium does not answer")
            return put(*args, **kwargs)

        monkeypatch.setattr(rig.stored_pool.store, "put", broken)
        assert rig.offload(names(20), range(20))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert not rig.linker.pop_completed_offload(), "a part of it failed"
        assert rig.linker.backlog.wait_quiet(WAIT_S)
        assert calls == [10]
        assert totals(rig, "written_pages", "failed_pages", "ignored") == [18, 2, 0]
        assert rig.lookup(names(20)) == 2


def event_of(line: str) -> Event:
    """Of a line of a trace."""
    return from_json(line[: json.JSONDecoder().raw_decode(line)[1]])


def is_ahead(event: Event) -> bool:
    return isinstance(event, LoadKnown) and event.kind is LoadKind.READ_AHEAD


def test_a_store_that_queues_its_puts_has_no_backlog(tmp_path: Path) -> None:
    """The queue would start the store's put on the thread that waits for it."""
    layout = KVLayout.mha(
        layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
    )
    config = StoreConfig(schedule=Schedule(FlatProfile()))
    with tutti.open(tmp_path / "pool", layout, "8MiB", config=config) as store:
        threads = set(threading.enumerate())
        with pytest.raises(ConfigError, match="puts=False"):
            Backlog(
                [SimpleNamespace(name="kv", store=store)],  # type: ignore[list-item]
                schedule=config.schedule,
                locked_share=0.5,
                timeout_s=5.0,
                chains=Chains(),
                errors=ErrorLog(Metrics({"mode": "linker", "pool": "kv", "rank": "0"})),
            )
        assert set(threading.enumerate()) <= threads


def test_an_agents_client_is_scheduled_by_the_agents_speeds(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        with Rig(Path(f"unix:{agent.path}"), read_ahead_share=0.0) as rig:
            schedule = rig.stored_pool.store.config.schedule
            assert schedule.source == agent.pools.speeds.source
            assert schedule.profile.document["io"] == agent.pools.speeds.io
            want = rig.stored(8)
            wait_for(lambda: rig.lookup(names(8)) == 8)
            rig.check_restored(names(8), range(20, 28), want)
            read_nbytes, written = totals(rig, "read_nbytes", "written_pages")
            assert read_nbytes > 0 and written == 8
        with Rig(Path(f"unix:{agent.path}"), profile="off") as rig:
            assert rig.stored_pool.store.scheduler is None
        with pytest.raises(ConfigError, match=r"verify: the agent at .* has settings of its own"):
            Rig(Path(f"unix:{agent.path}"), verify="off")

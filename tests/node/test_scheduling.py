"""The puts and loads of an agent's client are scheduled as those of an embedded store."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_devices import loop_devices
from node.agents import LAYOUT, LOOKUP_S, RunningAgent, running, start_process
from scheduler.drive import Linear
from waiting import wait_idle, wait_until

import tutti
from store.policies import DropsLong, LayerByLayer, Never, OneByOne
from store.pools import fill, put_some, some_keys
from tutti.base.units import MiB
from tutti.errors import CapacityError, ConfigError, KeyMissing, PoolNotFound, ProfileError
from tutti.gio_uring.job import Job
from tutti.machine import machine_facts
from tutti.node.agent_pools import AgentPools
from tutti.node.client import NodeStore
from tutti.profiles import at_open
from tutti.profiles.at_open import media_of, model_of
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.event import PagesWritten, StepEnded, WriteKnown
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import GPUS
from tutti.scheduler.state import Decision, Issue, State
from tutti.transfers import transfer_queue
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import Outcome

WAIT_S = 30.0
KNOWN = ("cache", "measured", "estimated")


class HalfOfEach(Never):
    """Half of each write is issued, and the rest never."""

    def decide(self, state: State) -> Decision:
        new = [write for write in state.unwritten.values() if not write.issued]
        return Decision(writes=tuple(Issue(w.name, 0, w.pages // 2) for w in new))


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put of two pages can stop."""
    monkeypatch.setattr(transfer_queue, "LONG_NBYTES", 1)


def connect(agent: RunningAgent, policy: Callable[[Limits], Any], **more: Any) -> NodeStore:
    schedule = Schedule(more.pop("profile", Linear()), policy=policy, **more)
    store = tutti.connect(agent.path, LAYOUT, "32MiB", lookup_timeout_s=LOOKUP_S, profile=schedule)
    store._queue._short = 1
    return store


def test_a_client_is_scheduled_by_the_speeds_that_its_agent_found(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    socket = tmp_path / "s"
    (tmp_path / "pools").mkdir()
    process = start_process(socket, tmp_path / "pools")
    caplog.set_level(logging.INFO, "tutti")
    try:
        with tutti.connect(f"unix:{socket}", LAYOUT, "32MiB", lookup_timeout_s=LOOKUP_S) as store:
            (line,) = [one for one in caplog.messages if "scheduling with" in one]
            source = store.stats()["profile"]
            assert source in KNOWN
            assert f"the medium is the agent's, {source} (" in line
            pool = store.allocate_memory(16)
            keys, contents = some_keys(rng, 8), fill(pool, range(8), rng)
            assert store.put(keys, np.arange(8)).wait(WAIT_S).stored == 8
            load = store.load(keys, np.arange(8, 16))
            load.wait(WAIT_S)
            assert load.wait_settled(WAIT_S)
            assert [pool.read(page) for page in range(8, 16)] == contents
            wait_idle(store.scheduler)
            scheduler = store.stats()["scheduler"]
            assert (scheduler["written_pages"], scheduler["ignored"]) == (8, 0)
            assert scheduler["read_nbytes"] == 8 * LAYOUT.object_nbytes
            assert store.config.schedule is not None
            assert store.config.schedule.media == media_of([str(tmp_path)])[1]
            with tutti.connect(str(socket), LAYOUT) as other:
                assert other.scheduler is store.scheduler, "the medium has one queue"
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_S)


def test_a_client_chooses_its_profile(tmp_path: Path) -> None:
    file, others = tmp_path / "profile.json", tmp_path / "others.json"
    machine = machine_facts(tmp_path)
    document = estimated_document(model_of(LAYOUT), GPUS["H100"], machine=machine)
    file.write_text(json.dumps(document))
    others.write_text(json.dumps({**document, "machine": {**machine, "disk": "another"}}))
    with running(tmp_path / "agent") as agent:
        with tutti.connect(agent.path, LAYOUT, "32MiB", profile=None) as store:
            stats = store.stats()
            assert (stats["profile"], stats["scheduler"], store.scheduler) == ("off", {}, None)
        with tutti.connect(agent.path, LAYOUT, profile=file) as store:
            assert store.stats()["profile"] == "file"
        with tutti.connect(agent.path, LAYOUT, profile=others) as store:
            assert store.stats()["profile"] in KNOWN
        with pytest.raises(ProfileError, match="cannot read"):
            tutti.connect(agent.path, LAYOUT, profile=str(tmp_path / "missing.json"))
        with pytest.raises(ConfigError, match="profile is 3"):
            tutti.connect(agent.path, LAYOUT, profile=3)  # type: ignore[arg-type]
        assert agent.agent.counters.sessions == 3, "wrong choices open none"


def test_an_agent_measures_devices_before_it_opens_their_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(at_open, "_ROUNDS_S", 0.0)
    for name in ("_WRITTEN_S", "BUDGET_S"):  # on a busy machine it takes longer
        monkeypatch.setattr(at_open, name, 60.0)
    with loop_devices(tmp_path) as make:
        device = make(64 * MiB)
        tutti.format(device, LAYOUT, "24MiB")
        with contextlib.closing(AgentPools([device])) as pools:
            pools.open_given()
            assert pools.speeds.source == "measured"


def test_an_agent_measures_nothing_for_a_path_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with contextlib.closing(AgentPools([str(tmp_path / "missing.tutti")])) as pools:
        with pytest.raises(PoolNotFound):
            pools.open_given()
        assert not list(tmp_path.iterdir())


def test_layers_are_read_as_they_are_granted(tmp_path: Path, rng: np.random.Generator) -> None:
    seen: list[Decision] = []
    with running(tmp_path / "agent") as agent:
        keep = lambda _, decision: seen.append(decision)  # noqa: E731
        with connect(agent, LayerByLayer, record=keep) as store:
            pool = store.allocate_memory(8)
            keys, contents = some_keys(rng, 4), fill(pool, range(4), rng)
            assert store.put(keys, np.arange(4)).wait(WAIT_S).stored == 4
            load = store.load(keys, np.arange(4, 8))
            load.wait(WAIT_S)
            assert load.wait_settled(WAIT_S)
            assert [pool.read(page) for page in range(4, 8)] == contents
        reads = [issue for decision in seen for issue in decision.reads]
        assert [(one.first, one.count) for one in reads] == [(i, 1) for i in range(LAYOUT.layers)]


def test_a_load_that_waits_is_cancelled(tmp_path: Path, rng: np.random.Generator) -> None:
    with running(tmp_path / "agent") as agent, connect(agent, OneByOne) as store:
        keys = put_some(store, rng, 4, 8)
        load = store.load(keys, np.arange(4))
        assert not load.done
        assert load.cancel(WAIT_S)
        wait_idle(store.scheduler)
        assert store._kept.need().wait_quiet(WAIT_S)  # it has been reported
        assert store.delete(keys) == 4, "the agent keeps nothing for it"
        with pytest.raises(KeyMissing):
            store.load(keys, np.arange(4))
        wait_idle(store.scheduler)


def test_puts_that_wait_claim_nothing_and_are_stored_at_the_close(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with running(tmp_path / "agent") as agent, agent.connect() as other:
        store = connect(agent, Never)
        store.allocate_memory(8)
        keys = some_keys(rng, 8)
        put = store.put(keys, np.arange(8))
        assert not put.done
        assert other.stats()["busy_objects"] == 0
        wait_until(lambda: store.stats()["scheduler"]["writes_waiting"] == 1)
        store.close()
        assert put.wait(WAIT_S).stored == 8
        assert other.match(keys) == 8


def test_the_speed_of_writes_is_not_learnt_from_what_is_not_written(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    seen: list[Any] = []
    with running(tmp_path / "agent") as agent:
        keep = lambda event, _: seen.append(event)  # noqa: E731
        with connect(agent, SlackPolicy, record=keep) as store:
            store.allocate_memory(8)
            keys = some_keys(rng, 8)
            assert store.put(keys[:4], np.arange(4)).wait(WAIT_S).stored == 4
            assert store.scheduler is not None
            wait_idle(store.scheduler)
            before = store.scheduler.counters()
            for _ in range(8):
                assert store.put(keys[:4], np.arange(4)).wait(WAIT_S).present == 4
            wait_idle(store.scheduler)
            after = store.scheduler.counters()
            assert [event.there for event in seen if isinstance(event, PagesWritten)][1:] == [4] * 8
            assert after["write_factor"] == before["write_factor"]
            assert (after["written_pages"], after["ignored"]) == (4, 0)
            agent.stop()
            for _ in range(8):
                assert store.put(keys, np.arange(8)).wait(WAIT_S).dropped == 8
            wait_idle(store.scheduler)
            after = store.scheduler.counters()
            assert after["write_factor"] == before["write_factor"]
            assert (after["written_pages"], after["failed_pages"]) == (4, 64)


def test_long_puts_stop_for_loads_and_lose_nothing(
    tmp_path: Path, rng: np.random.Generator, stoppable: None
) -> None:
    seen: list[Any] = []
    with running(tmp_path / "agent") as agent:
        keep = lambda *both: seen.append(both)  # noqa: E731
        profile = Linear(write_gbps=0.01, interference=4.0)
        with connect(agent, SlackPolicy, profile=profile, record=keep) as store:
            pool = store.allocate_memory(24)
            contents = fill(pool, range(12), rng)
            for _ in range(20):
                keys = some_keys(rng, 12)
                puts = [store.put(keys[at : at + 4], np.arange(at, at + 4)) for at in (0, 4, 8)]
                assert puts[0].wait(WAIT_S).stored == 4
                load = store.load(keys[:4], np.arange(12, 16))
                assert sum(put.wait(WAIT_S).stored for put in puts[1:]) == 8
                load.wait(WAIT_S)
                load = store.load(keys, np.arange(12, 24))
                load.wait(WAIT_S)
                assert load.wait_settled(WAIT_S)
                assert [pool.read(page) for page in range(12, 24)] == contents
            wait_idle(store.scheduler)
            counters = store.stats()["scheduler"]
            assert (counters["written_pages"], counters["ignored"]) == (20 * 12, 0)
        assert any(event.can_stop for event, _ in seen if isinstance(event, WriteKnown))


def test_a_put_whose_grant_finds_no_memory_says_so(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, stoppable: None
) -> None:
    def without_memory(*_: object) -> None:
        raise CapacityError("no memory for a grant")

    with running(tmp_path / "agent") as agent, connect(agent, LayerByLayer) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 8)
        with monkeypatch.context() as patch:
            patch.setattr(Job, "grant", without_memory)
            with pytest.raises(CapacityError, match="no memory for a grant"):
                store.put(keys, np.arange(8)).wait(WAIT_S)
        wait_idle(store.scheduler)
        again = store.put(keys, np.arange(8)).wait(WAIT_S)
        assert again.stored + again.present == 8


def test_a_put_that_stopped_is_dropped_with_its_agent(
    tmp_path: Path, rng: np.random.Generator, stoppable: None
) -> None:
    """What it had begun is given up at once, so that the next agent can open the pool."""
    late = StoreConfig(timeout_s=300.0)  # not by the deadline of its commands
    with running(tmp_path / "agent", config=late) as agent:
        store = connect(agent, HalfOfEach)
        store.allocate_memory(8)
        put = store.put(some_keys(rng, 8), np.arange(8))
        assert not put.wait_ended(0.2)
        agent.stop()
        with running(tmp_path / "agent") as after, after.connect() as other:
            assert other.stats()["busy_objects"] == 0
        assert put.wait_ended(0.0)
        store.close()


def test_a_page_that_another_client_brings_meanwhile_is_not_dropped(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a store of its own."""
    with (
        running(tmp_path / "agent") as agent,
        connect(agent, DropsLong) as store,
        agent.connect(profile=None) as other,
    ):
        store.allocate_memory(3)
        other.allocate_memory(1)
        keys = some_keys(rng, 3)
        ticket = store.put(keys, np.arange(3))
        assert other.put(keys[1:2], [0]).wait(WAIT_S).stored == 1
        assert not ticket.done
        monkeypatch.setattr(DropsLong, "drops", True)
        assert store.scheduler is not None
        store.scheduler.post(StepEnded(store.scheduler.now_ns()))
        ticket.wait(WAIT_S)
        each = [Outcome.DROPPED, Outcome.PRESENT, Outcome.DROPPED]
        assert ticket.outcome.tolist() == each
        assert (store.stats()["present"], store.stats()["dropped"]) == (1, 2)

"""Agent and clients die, hang and come back, and no byte is ever wrong."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.objects import when_unlocked
from node.agents import LAYOUT, LOOKUP_S, WAIT_S, running, start_process
from waiting import wait_until

import tutti
import tutti.errors
from store.pools import fill, some_keys
from tutti.errors import AgentLost, ConfigError, DeviceTimeout, KeyMissing
from tutti.gio_uring.controller_file import FileController
from tutti.memory.host_memory import HostMemory
from tutti.node import client
from tutti.node.agent_session import AgentSession
from tutti.node.client import NodeStore
from tutti.node.kept_session import KeptSession
from tutti.node.messages import Moved, MoveJob, PlanLoad, PlanPut
from tutti.transfers.loader import Loader
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import Outcome

WORKER = Path(__file__).with_name("worker.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(WORKER.parents[1])}


def start_worker(path: Path, seed: int, chains: int, log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(path), str(seed), str(chains), str(log)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=WAIT_S)


def stop(process: subprocess.Popen[str]) -> None:
    """Stops every thread of a process; one that runs notices the signal later."""
    process.send_signal(signal.SIGSTOP)
    states = list(Path(f"/proc/{process.pid}/task").glob("*/stat"))
    wait_until(
        lambda: all(file.read_text().rpartition(")")[2].split()[0] == "T" for file in states)
    )


def test_a_client_that_dies_leaves_nothing(tmp_path: Path) -> None:
    """Its pins go, and slots that it was to fill are free again."""
    code = f"""
import os, sys, numpy as np, tutti
from node.agents import LAYOUT
from tutti.node.messages import Moved, PlanPut
store = tutti.connect({str(tmp_path / "agent" / "s")!r}, LAYOUT, lookup_timeout_s={LOOKUP_S})
store.allocate_memory(8)
keys = np.arange(160, dtype=np.uint8).reshape(10, 16)
assert store.match(keys[:4], pin="mine") == 4
store._kept.need().plan(PlanPut(keys[4:].tobytes()), 5.0)
print(store.stats()["busy_objects"], flush=True)
os.kill(os.getpid(), 9)
"""
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        store.allocate_memory(8)
        keys = np.arange(160, dtype=np.uint8).reshape(10, 16)
        store.put(keys[:4], np.arange(4)).wait(WAIT_S)
        dead = subprocess.run(
            [sys.executable, "-c", code],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert dead.stdout == "10\n", dead.stderr
        wait_until(lambda: store.stats()["busy_objects"] == 0)
        wait_until(lambda: store.stats()["sessions"] == 1)
        assert store.match(keys) == 4
        assert store.put(keys, np.arange(8).repeat(2)[:10]).wait(WAIT_S).stored == 6
        assert agent.agent.counters.lost == 1


def test_a_child_that_outlives_a_client_does_not_keep_its_session(tmp_path: Path) -> None:
    code = f"""
import os, signal, time, tutti
from node.agents import LAYOUT
store = tutti.connect({str(tmp_path / "agent" / "s")!r}, LAYOUT, lookup_timeout_s={LOOKUP_S})
store.stats()
child = os.fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        command = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, text=True) as client:
            assert client.stdout is not None
            child = int(client.stdout.readline())
            try:
                assert client.wait(WAIT_S) == -signal.SIGKILL
                wait_until(lambda: store.stats()["sessions"] == 1)
            finally:
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_use_its_parents_client(tmp_path: Path) -> None:
    """It raises at once, and the parent's session goes on."""
    code = f"""
import os, sys, numpy as np, tutti
from node.agents import LAYOUT
store = tutti.connect({str(tmp_path / "agent" / "s")!r}, LAYOUT, lookup_timeout_s={LOOKUP_S})
keys = np.arange(16, dtype=np.uint8).reshape(1, 16)
for use in (lambda: store.match(keys), store.stats, store.__enter__, store.close):
    child = os.fork()
    if child == 0:
        try:
            use()
        except BaseException as error:
            print(type(error).__name__, end=" ", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(store.match(keys), store.stats()["reconnects"])
"""
    with running(tmp_path / "agent") as agent, agent.connect():
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=WAIT_S
        )
    assert done.stdout == "ForkedProcess " * 3 + "0 0\n", done.stderr


def test_a_session_that_ends_after_the_plan_of_a_load_is_a_miss(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "agent") as agent, agent.connect(profile=None) as store:
        memory, keys = store.allocate_memory(8), some_keys(rng, 4)
        contents = fill(memory, range(4), rng)
        assert store.put(keys, range(4)).wait(WAIT_S).stored == 4
        session = store._kept.need()
        request = session.request

        def planned(message: Any, timeout_s: float) -> Any:
            answer = request(message, timeout_s)
            if isinstance(message, PlanLoad):
                session.close(0.1)
            return answer

        monkeypatch.setattr(session, "request", planned)
        with pytest.raises(KeyMissing):
            store.load(keys, range(4, 8))
        wait_until(lambda: store.match(keys) == 4)  # by a new session
        store.load(keys, range(4, 8)).wait(WAIT_S)
        assert [memory.read(page) for page in range(4, 8)] == contents


def test_while_the_agent_is_away_everything_misses(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LISTED_MAX", 4)  # look-ups take two messages
    path, folder = tmp_path / "s", tmp_path / "pools"
    folder.mkdir()
    with pytest.raises(AgentLost, match="start one"):
        tutti.connect(str(path))
    agent = start_process(path, folder)
    try:
        with tutti.connect(f"unix:{path}", LAYOUT, "32MiB", lookup_timeout_s=LOOKUP_S) as store:
            memory = store.allocate_memory(16)
            keys = some_keys(rng, 8)
            contents = fill(memory, range(8), rng)
            store.put(keys, np.arange(8)).wait(WAIT_S)
            answered = store.stats()
            agent.kill()
            agent.communicate(timeout=WAIT_S)
            assert store.match(keys) == 0
            assert not store.present(keys, pin="a").any()
            store.unpin("a")
            store.unpin()
            assert store.stats()["missed_calls"] == 2
            result = store.put(some_keys(rng, 2), [0, 1]).wait(WAIT_S)
            assert result.dropped == 2
            with pytest.raises(KeyMissing):
                store.load(keys, np.arange(8, 16))
            with pytest.raises(AgentLost):
                store.clear()
            stats = store.stats()
            assert (stats["connected"], stats["stored"]) == (0, 8), "the last answer's"
            assert stats.keys() == answered.keys()
            agent = start_process(path, folder)
            wait_until(lambda: store.match(keys) == 8)
            store.load(keys, np.arange(8, 16)).wait(WAIT_S)
            assert [memory.read(page) for page in range(8, 16)] == contents
            stats = store.stats()
            assert stats["connected"] == 1
            assert stats["reconnects"] == 1
    finally:
        end([agent])


def test_a_plan_has_the_digests_that_were_still_to_be_read(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new agent knows no digests: a plan that leaves before their records came names wrong ones,
    and what the client then reports as damaged is lost.
    """
    rng, folder = np.random.default_rng(seed), tmp_path / "agent"
    keys = some_keys(rng, 8)
    with running(folder) as agent, agent.connect() as store:
        contents = fill(store.allocate_memory(8), range(8), rng)
        store.put(keys, np.arange(8)).wait(WAIT_S)
    check = Loader._check_records

    def check_late(*arguments: Any) -> Any:
        time.sleep(0.2)
        return check(*arguments)

    monkeypatch.setattr(Loader, "_check_records", check_late)
    with running(folder) as agent, agent.connect() as store:
        memory = store.allocate_memory(8)
        store.load(keys, np.arange(8)).wait(WAIT_S)
        assert [memory.read(page) for page in range(8)] == contents


def test_a_put_does_not_wait_for_an_agent_that_hangs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look-up runs meanwhile, which would find it.  Nor for a log handler that raises."""

    def raising(record: logging.LogRecord) -> bool:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("tutti.node.agent_session._SEND_S", 0.0)
    path, folder = tmp_path / "s", tmp_path / "pools"
    folder.mkdir()
    agent = start_process(path, folder, "--timeout", "1")
    report = AgentSession._report

    def stop_first(self: AgentSession, moved: Moved) -> None:
        stop(agent)
        report(self, moved)

    try:
        with NodeStore(str(path), LAYOUT, "32MiB") as store:
            store.allocate_memory(4)
            keys = some_keys(np.random.default_rng(seed), 4)
            with monkeypatch.context() as patch:
                patch.setattr(AgentSession, "_report", stop_first)
                patch.setattr(logging.getLogger("tutti.node.agent_session"), "filters", [raising])
                ticket = store.put(keys, np.arange(4))
                assert ticket.wait_ended(WAIT_S)
            assert not (ticket.outcome == Outcome.STORED).any()
            agent.send_signal(signal.SIGCONT)
            wait_until(lambda: store.put(keys, np.arange(4)).wait(WAIT_S).dropped == 0)
    finally:
        end([agent])


def test_an_agent_that_hangs_is_a_miss_after_the_deadline(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = tmp_path / "s", tmp_path / "pools"
    folder.mkdir()
    agent = start_process(path, folder)
    try:
        with (
            NodeStore(str(path), LAYOUT, "32MiB", lookup_timeout_s=0.2) as store,
            NodeStore(str(path), LAYOUT, "32MiB", lookup_timeout_s=0.2) as fresh,
        ):
            memory = store.allocate_memory(16)
            keys = some_keys(rng, 8)
            contents = fill(memory, range(8), rng)
            store.put(keys, np.arange(8)).wait(WAIT_S)
            stop(agent)
            # What waited too long would get an answer: also where a connection has to be made.
            wakes = threading.Timer(10.0, agent.send_signal, (signal.SIGCONT,))
            wakes.start()
            assert fresh.match(keys) == 0
            assert store.match(keys) == 0
            assert store.put(some_keys(rng, 2), [0, 1]).wait(WAIT_S).dropped == 2
            counts = store.stats()
            assert (counts["missed_calls"], counts["lost_pages"]) == (1, 2)
            assert caplog.text.count("no answer within 0.2 s") == 2, "each store says so once"
            wakes.cancel()
            agent.send_signal(signal.SIGCONT)
            wait_until(lambda: store.match(keys) == 8)
            store.load(keys, np.arange(8, 16)).wait(WAIT_S)
            assert [memory.read(page) for page in range(8, 16)] == contents
    finally:
        end([agent])


def test_an_agent_that_is_lost_while_a_client_opens_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(kept: KeptSession) -> AgentSession:
        raise AgentLost("made up: it died")

    def keepers() -> int:
        return [thread.name for thread in threading.enumerate()].count("tutti-reconnect")

    before = keepers()
    with running(tmp_path / "agent") as agent:
        with monkeypatch.context() as patch:
            patch.setattr(KeptSession, "need", lost)
            with pytest.raises(AgentLost, match="made up"):
                agent.connect()
        assert keepers() == before
        wait_until(lambda: not agent.agent.sessions)


def test_memory_registered_twice_while_the_agent_is_away(tmp_path: Path) -> None:
    """It is refused as it would be otherwise, and the agent is found again."""
    folder = tmp_path / "agent"
    with running(folder) as agent:
        store = agent.connect()
        memory = store.allocate_memory(8)
    with store:
        wait_until(lambda: store._kept.session is None)
        with pytest.raises(ConfigError, match="do not register it again"):
            store.register(memory)
        half = HostMemory.from_buffer(LAYOUT, memory.owner, 4)
        with pytest.raises(ConfigError, match="register memory once"):
            store.register(half)
        store.allocate_memory(4)
        with running(folder):
            wait_until(lambda: store.connected)
            assert store.stats()["reconnects"] == 1


def test_whatever_fails_while_connecting_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failures = tmp_path / "agent", [RuntimeError("can't start new thread")]
    register = AgentSession.register

    def fail_once(session: AgentSession, memory: HostMemory) -> None:
        if failures:
            raise failures.pop()
        register(session, memory)

    with running(folder) as agent:
        store = agent.connect()
        store.allocate_memory(8)
    monkeypatch.setattr(AgentSession, "register", fail_once)
    with store, running(folder) as agent:
        wait_until(lambda: store.connected)
        assert not failures
        wait_until(lambda: store.stats()["sessions"] == 1)


def test_why_an_agent_that_answers_is_no_longer_used_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its clients miss for good, and their logs end with an agent that did not answer."""
    folder = tmp_path / "agent"
    with running(folder) as agent:
        store = agent.connect()
    with store:
        (pool,) = folder.glob("*.tutti")
        pool.unlink()
        tutti.open(str(pool), LAYOUT, "16MiB", profile=None).close()
        with running(folder) as agent:
            wait_until(lambda: agent.agent.counters.sessions >= 3)
        assert not store.connected
    assert caplog.text.count("the agent has another pool now; restart this process") == 1


def test_memory_stays_while_a_lost_session_moves_it(tmp_path: Path, seed: int) -> None:
    keys = some_keys(np.random.default_rng(seed), 4)
    config = StoreConfig(timeout_s=3.0)
    with running(tmp_path / "agent", config=config) as agent, agent.connect() as store:
        memory = store.allocate_memory(4)
        session = store._kept.need()
        plan = session.plan(PlanPut(keys.tobytes()), WAIT_S)  # its transfers do not end
        session.fail()
        wait_until(lambda: store._kept.session is not session)
        with pytest.raises(DeviceTimeout, match="stays registered"):
            store.unregister(memory)
        session.give_up(plan.jobs)
        wait_until(lambda: store.connected)
        store.unregister(memory)


def test_memory_is_unregistered_beside_transfers_of_other_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    keys, jobs = some_keys(np.random.default_rng(seed), 4), list[MoveJob]()
    config = StoreConfig(timeout_s=1.0)
    with running(tmp_path / "agent", config=config) as agent, agent.connect() as store:
        used, unused = store.allocate_memory(4), store.allocate_memory(4)
        session = store._kept.need()
        monkeypatch.setattr(session, "write", lambda job, *_, **__: jobs.append(job))
        ticket = store.put(keys, range(4), memory=used)
        store.unregister(unused)
        with pytest.raises(DeviceTimeout, match="stays registered"):
            store.unregister(used)
        session.give_up(jobs)
        assert ticket.wait_ended(WAIT_S)
        store.unregister(used)


def test_a_close_that_failed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    failures, close, part = [DeviceTimeout("the device is busy")], FileController.close, Part()

    def fail_once(controller: FileController) -> None:
        if failures:
            raise failures.pop()
        close(controller)

    with running(tmp_path / "agent") as agent:
        store = agent.connect()
        store.allocate_memory(4)
        store.attach(part)
        monkeypatch.setattr(FileController, "close", fail_once)
        with pytest.raises(DeviceTimeout):
            store.close()
        assert not part.is_closed
        store.close()
        assert part.is_closed
        (service,) = agent.pools.services.values()
        wait_until(lambda: not service.sessions)


def test_a_session_that_was_closed_is_not_lost(tmp_path: Path) -> None:
    with running(tmp_path / "agent") as agent:
        counters = agent.agent.counters
        agent.connect().close()
        wait_until(lambda: counters.sessions == 1 and not agent.agent.sessions)
        assert counters.lost == 0
        store = agent.connect()
        session = store._kept.need()
        plan = session.plan(PlanPut(bytes(16)), WAIT_S)
        with pytest.raises(DeviceTimeout, match="close it again"):
            store.close(0.1)  # before it is reported
        session.give_up(plan.jobs)
        store.close()
        wait_until(lambda: counters.sessions == 2 and not agent.agent.sessions)
        assert counters.lost == 1


def test_a_new_agent_waits_for_the_files_of_an_old_client(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A client that is stopped could still write: the pool cannot be opened before it has gone."""
    path, folder, log = tmp_path / "s", tmp_path / "pools", tmp_path / "log"
    folder.mkdir()
    agent = start_process(path, folder)
    worker = start_worker(path, int(rng.integers(1000)), 10, log)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "running\n"
        wait_until(lambda: log.stat().st_size > 0)
        stop(worker)
        agent.kill()
        agent.communicate(timeout=WAIT_S)
        (file,) = folder.glob("*.tutti")

        def refusal() -> str:
            with pytest.raises(tutti.errors.PoolInUse) as caught:
                tutti.open(str(file))
            return str(caught.value)

        # A kernel may hold the locks of a process for some time after its end.
        wait_until(lambda: f"process {worker.pid} still has" in refusal())
        worker.kill()
        worker.communicate(timeout=WAIT_S)
        when_unlocked(lambda: tutti.open(str(file))).close()
    finally:
        end([agent, worker])

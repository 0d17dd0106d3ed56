"""More files, connections and keys than usual."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, WAIT_S, RunningAgent, running, start_process
from waiting import wait_until

from store.pools import put_some, some_keys
from tutti.errors import AgentRefused, CapacityError, DeviceTimeout, KeyMissing
from tutti.medium.keys import KEY_NBYTES
from tutti.node import (
    called_operations,
    client_transfers,
    listener,
    remote_catalogue,
    served_connection,
)
from tutti.node.connection import Connection
from tutti.node.messages import (
    HEADER,
    VERSION,
    Failure,
    Hello,
    Join,
    Match,
    MoveJob,
    Plan,
    frame,
    read_reply,
)
from tutti.node.pool_service import ClientSession
from tutti.node.served_connection import AgentConfig, ServedConnection
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import Outcome

_FILES = 1100


def test_a_client_with_many_open_files(tmp_path: Path, rng: np.random.Generator) -> None:
    """select() takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * _FILES:
        pytest.skip(f"no more than {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _FILES), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(_FILES)]
    try:
        with running(tmp_path / "agent") as agent, agent.connect() as store:
            store.allocate_memory(4)
            assert store.put(some_keys(rng, 4), np.arange(4)).wait(WAIT_S).stored == 4
            assert store.stats()["reconnects"] == 0
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_agent_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 256:
        pytest.skip(f"no more than {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        process = start_process(tmp_path / "s", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def free_files(count: int) -> Iterator[None]:
    """This process, and with it the agent in it, may open so few files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(1024):
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for fd in taken[len(taken) - count :]:
            os.close(fd)
        del taken[len(taken) - count :]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def refusal(agent: RunningAgent, peer: socket.socket) -> str:
    """What a client is told that asks for a session over a socket of its own."""
    peer.settimeout(WAIT_S)
    peer.connect(agent.path)
    content = b""
    with contextlib.suppress(ConnectionError):  # it may be refused before it has asked
        peer.send(frame(Hello(VERSION, LAYOUT.to_json(), 32 << 20)))
    with contextlib.suppress(ConnectionError):
        while part := peer.recv(1 << 16):
            content += part
    reply = read_reply(content[HEADER.size :])
    assert isinstance(reply, Failure), reply
    return reply.message


@pytest.mark.parametrize("left", [0, 1])
def test_without_a_free_descriptor_clients_are_told_and_others_go_on(
    left: int, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """left: descriptors; one is that of the connection, and a session needs another."""
    caplog.set_level(logging.WARNING)
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        keys = put_some(store, rng, 4)
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
            with free_files(left):
                for peer in peers:
                    assert "as many files open as it may" in refusal(agent, peer)
                assert store.match(keys) == 4
                store.load(keys, np.arange(4)).wait(WAIT_S)
        assert agent.agent.counters.refused == 3
        with agent.connect() as other:
            assert other.match(keys) == 4
        assert store.stats()["reconnects"] == 0
    # The descriptor of one that was refused may be free only after the next has come.
    assert caplog.text.count("no connection could be accepted") in ((0, 1) if left else (1,))


def test_a_client_without_a_free_descriptor_is_told_why(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, open(os.devnull) as file:
        server.bind(path)
        server.listen()
        connection = Connection(path, WAIT_S)
        peer, _ = server.accept()
        with peer, contextlib.closing(connection):
            socket.send_fds(peer, [b"a welcome"], [file.fileno()])
            with free_files(0), pytest.raises(AgentRefused, match="ulimit -n"):
                connection.open(Hello(VERSION), WAIT_S)


def test_a_peer_whose_groups_cannot_be_read_is_told_why() -> None:
    with free_files(0), pytest.raises(AgentRefused, match="as many files open"):
        listener._groups_of(os.getpid())


def test_requests_in_pieces_and_several_at_once(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each is answered; one is longer than what the agent receives at a time."""
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        keys = put_some(store, rng, 4)
        asked = [keys[:n].tobytes() for n in (1, 2, 3, 4)]
        asked[1] += bytes(KEY_NBYTES * 8192)  # keys that are not there
        stream = b"".join(frame(Match(raw)) for raw in asked)
        with contextlib.closing(Connection(agent.path, WAIT_S)) as connection:
            connection.request(Join(store._kept.need().welcome.session), WAIT_S)
            for start, end in itertools.pairwise((0, 10, 100, 100_000, len(stream))):
                connection._socket.sendall(stream[start:end])
                time.sleep(0.05)
            assert [connection.receive(WAIT_S).value for _ in asked] == [1, 2, 3, 4]


def test_a_long_plan_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is started to send the rest of it."""
    monkeypatch.setattr(served_connection, "start_thread", pytest.fail)
    near, far = socket.socketpair()
    host, plan = SimpleNamespace(config=AgentConfig("s")), Plan(0, [MoveJob(1, bytes(300_000))])
    with near, far:
        ServedConnection(host, near, os.getpid())._send(plan)  # type: ignore[arg-type]
        far.settimeout(WAIT_S)
        nbytes = 0
        while nbytes < len(frame(plan)):
            nbytes += len(far.recv(1 << 20))


def test_a_connection_too_many_fails_one_call(
    tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"connections_max": 2, "hello_s": WAIT_S}
    with running(tmp_path / "agent", **options) as agent, agent.connect() as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        before = agent.agent.counters.connections
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.connect(agent.path)
            wait_until(lambda: agent.agent.counters.connections == before + 1)
            assert store.match(keys) == 0
            assert not store.present(keys).any()
            assert store.put(keys, np.arange(4)).wait(WAIT_S).dropped == 4
            assert store.connected
            counts = store.stats()
            assert (counts["missed_calls"], counts["lost_pages"]) == (2, 4)
            assert caplog.text.count("a call got no connection to the agent") == 1
        wait_until(lambda: store.put(keys, np.arange(4)).wait(WAIT_S).dropped == 0)
        assert store.match(keys) == 4
        assert store.stats()["reconnects"] == 0


def test_a_connection_that_gets_no_thread_fails_one_call(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has no more threads: a miss, as with too many connections."""

    def refuse(_: ServedConnection) -> None:
        raise CapacityError("cannot start the thread")

    with running(tmp_path / "agent") as agent, agent.connect() as store:
        store.allocate_memory(4)
        keys = some_keys(rng, 4)
        with monkeypatch.context() as patch:
            patch.setattr(ServedConnection, "start", refuse)
            assert store.match(keys) == 0
            assert store.put(keys, np.arange(4)).wait(WAIT_S).dropped == 4
            assert store.connected
        assert store.put(keys, np.arange(4)).wait(WAIT_S).stored == 4
        assert store.match(keys) == 4
        assert store.stats()["reconnects"] == 0


def test_keys_are_listed_once_while_others_go(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (called_operations, remote_catalogue):
        monkeypatch.setattr(module, "LISTED_MAX", 4)
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        store.allocate_memory(10)
        store.put(some_keys(rng, 10), np.arange(10)).wait(WAIT_S)
        keys = store.catalogue.keys()
        call = store.catalogue._call

        def delete_then(name: str, *args: Any, **kwargs: Any) -> Any:
            answer = call(name, *args, **kwargs)
            if name == "list":
                call("delete", keys=keys[:1].tobytes())
            return answer

        monkeypatch.setattr(store.catalogue, "_call", delete_then)
        assert store.catalogue.keys().tolist() == keys.tolist()


def test_more_pins_than_fit_into_a_request_are_all_or_none(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an embedded store: what exceeds pin_share pins nothing, and unpins nothing."""
    monkeypatch.setattr(remote_catalogue, "LISTED_MAX", 4)
    config = StoreConfig(pin_share=0.02)
    with running(tmp_path / "agent", config=config) as agent, agent.connect() as store:
        store.allocate_memory(64)
        most = store.stats()["capacity_objects"] // 50
        assert 8 < most < 64
        keys = some_keys(rng, 64)
        store.put(keys, np.arange(64)).wait(WAIT_S)
        assert store.catalogue.pin(keys[2:3]) == 1
        with pytest.raises(CapacityError, match="pin_share"):
            store.catalogue.pin(keys)
        infos = store.catalogue.objects(keys)
        assert [info.key for info in infos if info.pinned] == [keys[2].tobytes()]
        assert store.catalogue.pin(keys[:8]) == 8


def test_recovery_takes_longer_than_one_call(tmp_path: Path) -> None:
    config = StoreConfig(timeout_s=2.0)
    with running(tmp_path / "agent", config=config) as agent, agent.connect() as store:
        store.wait_recovered(WAIT_S)
        (pool,) = agent.pools.stores().values()
        core = pool._core

        def set_ready(ready: bool) -> None:
            with core.lock:
                core.ready = ready
                core.changed.notify_all()

        set_ready(False)
        assert not store.recovered
        with pytest.raises(DeviceTimeout, match=r"0\.1 s"):
            store.wait_recovered(0.1)
        timer = threading.Timer(3.0, set_ready, (True,))
        timer.start()
        store.wait_recovered(WAIT_S)
        timer.join(WAIT_S)
        assert store.recovered


def test_a_put_that_fails_midway_has_a_ticket(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, plans = ClientSession.plan_put, []

    def fail_later(session: ClientSession, message: Any) -> Any:
        plans.append(message)
        if len(plans) > 1:
            raise CapacityError("no staging is left")
        return plan(session, message)

    monkeypatch.setattr(ClientSession, "plan_put", fail_later)
    with running(tmp_path / "agent") as agent, agent.connect(profile=None) as store:
        store.allocate_memory(8)
        keys = some_keys(rng, 8)
        store._kept.need().welcome.batch_pages = 4
        ticket = store.put(keys, np.arange(8))
        assert ticket.wait_ended(WAIT_S)
        assert ticket.outcome.tolist() == [Outcome.STORED] * 4 + [Outcome.FAILED] * 4
        with pytest.raises(CapacityError, match="no staging"):
            ticket.wait(WAIT_S)
        assert store.match(keys) == 4


def test_what_the_agent_drops_has_nothing_behind_it(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its budget has more a moment later."""
    config = StoreConfig(write_budget="1TiB")
    with (
        running(tmp_path / "agent", config=config) as agent,
        agent.connect(profile=None) as store,  # a scheduler may put a few pages first
    ):
        store.allocate_memory(12)
        keys, most = some_keys(rng, 12), [4, 2, 4]
        store._kept.need().welcome.batch_pages = 4
        (pool,) = agent.pools.stores().values()
        monkeypatch.setattr(pool._core.quotas._budget, "allowed", lambda n: min(n, most.pop(0)))
        ticket = store.put(keys, np.arange(12))
        ticket.wait(WAIT_S)
        assert ticket.outcome.tolist() == [Outcome.STORED] * 6 + [Outcome.DROPPED] * 6
        assert most == [4], "the agent was not asked for the rest"
        assert store.match(keys) == 6
        counts = store.stats()
        assert (counts["dropped"], counts["over_budget"], counts["lost_pages"]) == (6, 2, 0)


def test_behind_what_the_agent_drops_a_page_that_is_there_is_present(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a store of its own; keys are asked for in parts."""
    config = StoreConfig(write_budget="1TiB")
    with (
        running(tmp_path / "agent", config=config) as agent,
        agent.connect(profile=None) as store,
        agent.connect(profile=None) as other,
    ):
        store.allocate_memory(12)
        other.allocate_memory(2)
        keys, most = some_keys(rng, 12), [2, 0]
        assert other.put(keys[[7, 11]], [0, 1]).wait(WAIT_S).stored == 2
        store._kept.need().welcome.batch_pages = 4
        (pool,) = agent.pools.stores().values()
        monkeypatch.setattr(pool._core.quotas._budget, "allowed", lambda n: min(n, most.pop(0)))
        monkeypatch.setattr(client_transfers, "LISTED_MAX", 3)
        ticket = store.put(keys, np.arange(12))
        ticket.wait(WAIT_S)
        dropped = [Outcome.DROPPED] * 3
        assert ticket.outcome[:4].tolist() == [Outcome.STORED] * 2 + dropped[:2]
        assert ticket.outcome[4:].tolist() == [*dropped, Outcome.PRESENT] * 2
        assert most == [0], "the agent was not asked to store the rest"
        counts = store.stats()
        assert (counts["present"], counts["dropped"], counts["lost_pages"]) == (2, 8, 0)


def test_parts_of_a_load_that_is_a_miss_do_not_count_as_errors(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """As in a store of its own, which begins nothing of it."""
    with running(tmp_path / "agent") as agent, agent.connect(profile=None) as store:
        store.allocate_memory(12)
        keys = some_keys(rng, 12)
        assert store.put(keys[:8], np.arange(8)).wait(WAIT_S).stored == 8
        store._kept.need().welcome.batch_pages = 4
        with pytest.raises(KeyMissing):
            store.load(keys, np.arange(12))
        assert (store.stats()["loaded"], store.stats()["load_errors"]) == (0, 0)
        assert store.delete(keys[:4]) == 4, "nothing is pinned"
        store.load(keys[4:8], np.arange(4)).wait(WAIT_S)
        wait_until(lambda: store.stats()["loaded"] == 4)  # a client reports it a moment later
        assert store.stats()["load_errors"] == 0

"""A client that breaks the protocol gets an error, and no other client notices."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from node.agents import LAYOUT, WAIT_S, RunningAgent, running
from waiting import wait_until

import tutti
from store.pools import some_keys
from tutti.errors import (
    AgentLost,
    AgentRefused,
    ConfigError,
    KeyMissing,
    PoolClosed,
    PoolInUse,
    PoolNotFound,
)
from tutti.medium.layout import KVLayout
from tutti.node import pool_service
from tutti.node.client import NodeStore
from tutti.node.connection import Connection
from tutti.node.listener import listen
from tutti.node.messages import (
    FRAME_NBYTES_MAX,
    HEADER,
    VERSION,
    Answer,
    Call,
    Failure,
    Hello,
    Join,
    Match,
    Moved,
    Plan,
    PlanPut,
    Pools,
    Written,
    frame,
    read_reply,
)
from tutti.node.served_connection import AgentConfig


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running(tmp_path / "agent", hello_s=2.0, unread_s=1.0) as one:
        yield one


@pytest.fixture
def good(agent: RunningAgent, seed: int) -> Iterator[NodeStore]:
    """A client that must not notice anything."""
    with agent.connect() as store:
        store.allocate_memory(8)
        keys = some_keys(np.random.default_rng(seed), 4)
        store.put(keys, np.arange(4)).wait(WAIT_S)
        yield store
        assert store.match(keys) == 4
        store.load(keys, np.arange(4, 8)).wait(WAIT_S)
        assert store.stats()["reconnects"] == 0


def raw(agent: RunningAgent) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(WAIT_S)
    peer.connect(agent.path)
    return peer


def answer(peer: socket.socket) -> Any:
    """The only answer, and then the end of the connection."""
    content = b""
    while part := peer.recv(1 << 16):
        content += part
    return read_reply(content[HEADER.size :])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (struct.pack("<I", 0xFFFFFFFF), "4294967295 bytes"),
        (struct.pack("<I", FRAME_NBYTES_MAX + 1), "at most"),
        (struct.pack("<I", 0), "0 bytes"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "cannot be read"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "bytes"),
        (frame(Match(b"")), "opens or joins"),
        (frame(Hello(99)), "version 99"),
        (frame(Join(b"0" * 16)), "connect again"),
        (frame(Hello(1))[:6], "closed"),
        (b"", "no request came"),
    ],
)
def test_a_first_message_that_is_wrong(
    content: bytes, what: str, agent: RunningAgent, good: NodeStore
) -> None:
    with raw(agent) as peer:
        peer.sendall(content)
        found = answer(peer)
    assert isinstance(found, Failure)
    assert found.kind == "AgentRefused"
    assert what in found.message


def test_another_layout_needs_a_capacity(agent: RunningAgent, good: NodeStore) -> None:
    other = KVLayout.mla(5, 512, 64, 16, "bfloat16", model="test-model")
    with pytest.raises(PoolNotFound, match="pass a capacity"):
        tutti.connect(agent.path, other)
    with pytest.raises(tutti.errors.CapacityError, match="the agent's"):
        tutti.connect(agent.path, other, "8GiB")
    with raw(agent) as peer:
        peer.sendall(frame(Hello(VERSION, "{}", 1)))
        assert answer(peer).kind == "ConfigError"


def test_requests_that_are_wrong_are_answered(agent: RunningAgent, good: NodeStore) -> None:
    session = good._kept.need()
    with pytest.raises(ConfigError, match="whole keys"):
        session.request(Match(b"short"), WAIT_S)
    with pytest.raises(ConfigError, match="in one plan"):
        session.request(PlanPut(bytes(16 * 1025)), WAIT_S)
    with pytest.raises(ConfigError, match="no operation"):
        good.call("format_disk")
    with pytest.raises(ConfigError, match="not acceptable"):
        good.call("wait_recovered", seconds="soon")
    with pytest.raises(ConfigError, match="not acceptable"):
        good.call("list", start=2**63)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": b"123"},
        {"slots": bytes(24)},
        {"rows": bytes(3)},
        {"rows": np.array([0, 1, 2, 4], "<u4").tobytes()},
        {"digests": bytes(8), "compare": True},
    ],
    ids=["part of a slot", "three slots", "part of a page", "a fifth page", "a digest"],
)
def test_a_plan_that_makes_no_sense_is_a_miss(
    agent: RunningAgent, good: NodeStore, change: dict[str, Any], seed: int
) -> None:
    """Nothing waits for it, and nothing that was not written is taken for stored."""

    def use_odd_plans(session: Any) -> None:
        request = session.request

        def odd(message: Any, timeout_s: float) -> Any:
            answer = request(message, timeout_s)
            if isinstance(answer, Plan):
                answer.jobs = [msgspec.structs.replace(job, **change) for job in answer.jobs]
            return answer

        session.request = odd

    def matched(keys: Any, count: int) -> bool:
        """The agent may have closed the session; another one is opened."""
        ends = time.monotonic() + WAIT_S
        while store.match(keys) != count and time.monotonic() < ends:
            time.sleep(0.01)
        return store.match(keys) == count

    with agent.connect() as store:
        store.allocate_memory(8)
        keys = some_keys(np.random.default_rng(seed + 1), 8)
        assert store.put(keys[:4], np.arange(4)).wait(WAIT_S).stored == 4
        session = store._kept.need()
        use_odd_plans(session)
        with pytest.raises(KeyMissing, match="compute the pages"):
            store.load(keys[:4], np.arange(4, 8))
        assert session.wait_quiet(WAIT_S)
    with agent.connect() as store:
        store.allocate_memory(8)
        assert matched(keys[:4], 4)
        store.load(keys[:4], np.arange(4, 8)).wait(WAIT_S)
        if "compare" not in change:
            session = store._kept.need()
            use_odd_plans(session)
            with contextlib.suppress(PoolClosed):  # "cancelled"
                assert store.put(keys[4:], np.arange(4)).wait(WAIT_S).stored == 0
            assert session.wait_quiet(WAIT_S)
    with agent.connect() as store:
        assert matched(keys[:4], 4)
        assert store.match(keys[4:]) == 0


@pytest.mark.parametrize("change", [{"outcome": b"\1"}, {"status": bytes(3)}])
def test_an_outcome_of_other_pages_is_none(
    agent: RunningAgent, seed: int, change: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put ends, and the session with it."""

    def odd(number: int, outcome: bytes, status: bytes) -> Written:
        return msgspec.structs.replace(Written(number, outcome, status), **change)

    with agent.connect() as store:
        store.allocate_memory(4)
        keys = some_keys(np.random.default_rng(seed), 4)
        with monkeypatch.context() as patch:
            patch.setattr(pool_service, "Written", odd)
            assert store.put(keys, np.arange(4)).wait(WAIT_S).dropped == 4
            assert store.stats()["lost_pages"] == 4
        wait_until(lambda: store.match(keys) == 4)
        assert store.stats()["reconnects"] == 1


def test_a_client_that_is_gone_before_its_welcome(
    agent: RunningAgent,
    good: NodeStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    opens, is_gone, open_pool = threading.Event(), threading.Event(), agent.pools.open

    def late(*pool: Any) -> Any:
        opens.set()
        assert is_gone.wait(WAIT_S)
        return open_pool(*pool)

    monkeypatch.setattr(agent.pools, "open", late)
    with raw(agent) as peer:
        peer.sendall(frame(Hello(VERSION, LAYOUT.to_json(), 1)))
        assert opens.wait(WAIT_S)
    is_gone.set()
    wait_until(lambda: agent.agent.counters.lost == 1)
    assert not caplog.records


def test_a_report_of_what_is_not_under_way(agent: RunningAgent, good: NodeStore) -> None:
    session = good._kept.need()
    with raw(agent) as peer:
        peer.sendall(frame(Join(session.welcome.session)))
        peer.recv(1 << 16)
        peer.sendall(frame(Moved(12345)))
        content = peer.recv(1 << 16)
        assert read_reply(content[HEADER.size :]).kind == "ConfigError"


def test_a_flood_and_a_client_that_does_not_listen(agent: RunningAgent, good: NodeStore) -> None:
    """Their answers are never read; the good client is served meanwhile."""
    keys = some_keys(np.random.default_rng(0), 1024)
    message = frame(Match(keys.tobytes())) * 8
    session = good._kept.need()
    stop = threading.Event()

    def flood() -> None:
        with raw(agent) as peer:
            peer.sendall(frame(Join(session.welcome.session)))
            try:
                while not stop.is_set():
                    peer.sendall(message)
            except OSError:
                pass  # it was closed

    threads = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert good.match(keys) == 0
    assert good.stats()["connected"] == 1
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that all users can enter, as pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
@pytest.mark.parametrize(
    ("group", "name", "groups", "is_served"),
    [
        (65533, b"\xff\xfe", [65533], True),
        (65533, b"x", [65533], True),
        (65533, b"x", [], False),
        (65533, b"\x0cGroups:\t65533", [], False),
        (None, b"x", [], False),
    ],
    ids=["not UTF-8", "a member", "no member", "a name that says so", "no group"],
)
def test_members_of_a_group(
    public: Path, group: int | None, name: bytes, groups: list[int], is_served: bool
) -> None:
    """Other users are refused, whatever their processes are called."""
    code = f"""
import contextlib, os, socket
open("/proc/self/comm", "wb").write({name!r})
os.setgroups({groups})
os.setgid(65534)
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.settimeout({WAIT_S})
peer.connect({str(public / "s")!r})
with contextlib.suppress(BrokenPipeError):  # it was refused already
    peer.sendall({frame(Pools())!r})
print(peer.recv(65536))
"""
    with running(public, group=group) as agent:
        os.chmod(agent.path, 0o666)  # the credentials alone keep them out
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, cwd="/"
        )
        assert ("answer" in done.stdout) == is_served, done.stderr
        assert ("user 65534 may not use the agent" in done.stdout) != is_served, done.stderr
        with agent.connect() as store:
            assert store.match([bytes(16)]) == 0


def test_the_socket_is_for_its_owner(agent: RunningAgent, tmp_path: Path) -> None:
    assert os.stat(agent.path).st_mode & 0o777 == 0o600
    with pytest.raises(PoolInUse, match="listens on"):
        listen(agent.path, None)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="not a socket"):
        listen(str(file), None)
    with pytest.raises(ConfigError, match="choose one that this user can write"):
        listen(str(file / "s"), None)


def test_of_two_agents_that_start_on_a_dead_ones_socket_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one starts between the first one's look and its removal of the socket."""
    path, unlink = str(tmp_path / "s"), os.unlink
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    found: list[object] = []

    def start() -> None:
        try:
            found.append(listen(path, None))
        except PoolInUse as error:
            found.append(error)

    other = threading.Thread(target=start)

    def unlink_late(name: str) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        other.start()
        other.join(0.5)
        unlink(name)

    monkeypatch.setattr(os, "unlink", unlink_late)
    with listen(path, None):
        other.join(WAIT_S)
        assert [type(one) for one in found] == [PoolInUse]


def test_a_group_that_the_owner_is_not_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(ConfigError, match="pass a group that this user is in"):
        listen(str(tmp_path / "s"), 65533)
    assert not (tmp_path / "s").exists()


def test_an_agent_that_answers_garbage(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    server.listen(4)

    def serve() -> None:
        for content in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff\xff\xff\xff", b""):
            peer, _ = server.accept()
            peer.recv(1 << 16)
            peer.sendall(content)
            peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for _ in range(3):
        with pytest.raises((AgentRefused, AgentLost)):
            tutti.connect(path, LAYOUT)
    thread.join(WAIT_S)
    server.close()


def test_each_request_has_its_own_deadline(tmp_path: Path) -> None:
    """However long those before it might wait, and though the agent reads late."""
    path, reads = str(tmp_path / "s"), threading.Event()
    message, answer = Match(bytes(FRAME_NBYTES_MAX // 2)), frame(Answer(1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        connection = Connection(path, 0.05)
        peer, _ = server.accept()
        with peer, contextlib.closing(connection):
            peer.sendall(answer + answer[:5])
            assert connection.receive(0.05) == Answer(1)
            # Both begin after several of the time-outs above.
            threading.Timer(0.3, peer.sendall, (answer[5:],)).start()
            assert connection.receive(WAIT_S) == Answer(1)
            threading.Timer(0.3, reads.set).start()
            sender = threading.Thread(target=connection.send, args=(message, WAIT_S), daemon=True)
            sender.start()
            assert reads.wait(WAIT_S)
            peer.settimeout(WAIT_S)
            received = bytearray()
            while len(received) < len(frame(message)):
                received += peer.recv(1 << 16) or b"the end" * len(frame(message))
            sender.join(WAIT_S)
            assert received == frame(message)
            with pytest.raises(AgentLost, match=r"no answer within 0\.05 s"):
                connection.receive(0.05)
            assert not connection.is_open


def test_answers_in_pieces_and_several_at_once(tmp_path: Path) -> None:
    """Some are longer than the buffer that they are received in."""
    path = str(tmp_path / "s")
    answers = [Answer(bytes([i]) * n) for i, n in enumerate((1000, 3000, 500_000, 10))]
    stream = b"".join(map(frame, answers))

    def send(peer: socket.socket) -> None:
        for start, end in itertools.pairwise((0, 1500, 1501, 4500, len(stream))):
            peer.sendall(stream[start:end])
            time.sleep(0.05)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        connection = Connection(path, WAIT_S)
        peer, _ = server.accept()
        with peer, contextlib.closing(connection):
            sender = threading.Thread(target=send, args=(peer,), daemon=True)
            sender.start()
            assert [connection.receive(WAIT_S) for _ in answers] == answers
            sender.join(WAIT_S)


def test_a_message_that_is_never_read_has_a_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        connection = Connection(path, WAIT_S)
        with contextlib.closing(connection), pytest.raises(AgentLost, match=r"within 0\.05 s"):
            connection.send(Match(bytes(FRAME_NBYTES_MAX // 2)), 0.05)


def test_a_number_that_no_message_can_carry() -> None:
    with pytest.raises(ConfigError, match="64 bits"):
        frame(Call("ls", {"start": 1 << 64}))


def test_too_many_connections(tmp_path: Path) -> None:
    with running(tmp_path / "agent", connections_max=2) as agent, agent.connect() as store:
        store.allocate_memory(1)
        assert store.match([bytes(16)]) == 0
        # The client has two by now; a third is told the limit.
        with pytest.raises(AgentRefused, match="its limit"):
            Connection(agent.path, 1.0).receive(5.0)
        assert AgentConfig("x").connections_max > 2

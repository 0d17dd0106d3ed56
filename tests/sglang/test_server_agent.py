"""A real server on CPU whose ranks use one agent: what one of them stored, the others load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from server_modes import Mode, again, both_modes, near, prompts
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch
from sglang_server import Server, make_model

import tutti
from tutti import cli

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks need two processors")
_WAIT_S = 60.0


class Agent:
    """`tutti serve` as a user starts it; path is that of SGLang's options."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder / "pools", folder / "s"
        self.folder.mkdir()
        self.path = f"unix:{self.socket}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tutti.cli", "serve", "--folder", str(self.folder)]
        command += ["--capacity", "1GiB", "--socket", str(self.socket)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert any(line.startswith("serving on") for line in self.process.stderr)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=_WAIT_S)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """One that ends cleanly after the test."""
    served = Agent(tmp_path)
    try:
        yield served
        served.process.terminate()
        served.process.communicate(timeout=_WAIT_S)
        assert served.process.returncode == 0
    finally:
        served.kill()


def bound() -> dict[str, str]:
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[1]}"}


@both_modes
@needs_two
def test_a_replica_loads_what_the_other_stored(
    mode: Mode, agent: Agent, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """SGLang deals requests out in turn: the second time each goes to the other replica."""
    log = tmp_path / "log"
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(agent.path, capacity="48MiB"), "--dp-size", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0] * len(asked)
        server.settle()
        # Nothing is flushed: the other replica has none of it in its memory.
        mode.served(computed, [server.ask(prompt) for prompt in asked], 576)
    (pool,) = (tmp_path / "pools").glob("*.tutti")
    assert pool.stat().st_size <= 48 << 20


@both_modes
@needs_two
def test_two_ranks_of_tensor_parallelism(
    mode: Mode, agent: Agent, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """Each has a pool of its own in the agent."""
    log = tmp_path / "log"
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(agent.path, capacity="48MiB"), "--tp", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)
    assert len(list((tmp_path / "pools").glob("*.tutti"))) == 2


@both_modes
@needs_two
def test_ranks_of_a_latent_share_one_copy(
    mode: Mode, agent: Agent, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Both offer every page; one of the offers is written."""
    model = make_model(tmp_path_factory.mktemp("latent"), kind="mla")
    asked = prompts(seed, 2)
    arguments = [*mode.arguments(agent.path, capacity="48MiB"), "--tp", "2"]
    with Server(
        model, tmp_path / "log", arguments, page_size=128, overlap=False, env=bound()
    ) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 512)
        server.settle()
    (_,) = (tmp_path / "pools").glob("*.tutti")
    with tutti.connect(str(agent.socket)) as store:
        stats = store.stats()
    assert stats["present"] >= stats["stored"] > 0
    assert stats["stored"] == stats["capacity_objects"] - stats["free_objects"]


@both_modes
def test_answers_are_right_while_the_agent_is_dead_or_hangs_and_hits_come_back(
    mode: Mode, agent: Agent, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    asked = prompts(seed, 2)
    with Server(tiny_model, tmp_path / "log", mode.arguments(agent.path), page_size=64) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)

        def misses() -> None:
            replies = again(server, asked)
            assert [mode.loaded(reply) for reply in replies] == [0, 0]
            assert all(near(a, b) for a, b in zip(computed, replies, strict=True))

        agent.kill()
        misses()
        agent.start()
        mode.recovers(server, asked, computed, 576)
        agent.process.send_signal(signal.SIGSTOP)
        try:
            misses()
        finally:
            agent.process.send_signal(signal.SIGCONT)
        mode.recovers(server, asked, computed, 576)


@both_modes
def test_a_router_hears_of_pages_on_disk_until_they_are_removed(
    mode: Mode, agent: Agent, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """A subscriber of SGLang's own format, of a real server; `tutti rm` removes the pages."""
    endpoint = f"ipc://{tmp_path}/events"
    arguments = [
        *mode.arguments(agent.path, kv_events=True),
        *("--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": endpoint})),
    ]
    with (
        Server(tiny_model, tmp_path / "log", arguments, page_size=64) as server,
        zmq.Context.instance().socket(zmq.SUB) as subscriber,
    ):
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        blocks: dict[type, dict[str, set[int]]] = {BlockStored: {}, BlockRemoved: {}}

        def hear(kind: type, medium: str, count: int) -> set[int]:
            """Asks, as events leave with the scheduler's turns, until there are so many."""
            deadline_s = time.monotonic() + _WAIT_S
            while len(blocks[kind].get(medium, ())) < count:
                assert time.monotonic() < deadline_s, blocks
                server.ask(prompts(seed + len(blocks), 1, 20)[0], 1)
                while subscriber.poll(200):
                    body = subscriber.recv_multipart()[2]
                    for event in msgspec.msgpack.decode(body, type=KVEventBatch).events:
                        if isinstance(event, BlockStored | BlockRemoved):
                            told = blocks[type(event)].setdefault(event.medium or "", set())
                            told |= set(event.block_hashes)
            return blocks[kind][medium]

        server.ask(prompts(seed, 1)[0])
        stored = hear(BlockStored, "DISK", 9)  # pages of 64 tokens, of a prompt of 600
        assert stored <= blocks[BlockStored]["GPU"], "the hashes of the GPU's pages"
        with tutti.connect(str(agent.socket)) as store:
            keys = store.catalogue.keys()
        assert cli.main(["rm", agent.path, *(key.tobytes().hex() for key in keys)]) == 0
        assert stored <= hear(BlockRemoved, "DISK", len(stored))

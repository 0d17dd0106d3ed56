"""A real server on CPU whose ranks use one agent: what one of them stored, the others load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_model
from server_modes import HICACHE, LINKER, Mode, near, prompts
from sglang_server import Server

import tutti

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks need two processors")
_WAIT_S = 60.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """A path for SGLang's options."""
    folder, path = tmp_path / "pools", tmp_path / "s"
    folder.mkdir()
    command = [sys.executable, "-m", "tutti.cli", "serve", "--folder", str(folder)]
    with subprocess.Popen(
        [*command, "--capacity", "1GiB", "--socket", str(path)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("serving on") for line in process.stderr)
        yield f"unix:{path}"
        process.terminate()
        process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0


def bound() -> dict[str, str]:
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[1]}"}


@pytest.mark.parametrize("mode", [HICACHE, LINKER], ids=lambda mode: mode.name)
@needs_two
def test_a_replica_loads_what_the_other_stored(
    mode: Mode, agent: str, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """SGLang deals requests out in turn: the second time each goes to the other replica."""
    log = tmp_path / "log"
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(agent, capacity="48MiB"), "--dp-size", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0] * len(asked)
        server.settle()
        # Nothing is flushed: the other replica has none of it in its memory.
        replies = [server.ask(prompt) for prompt in asked]
        mode.served(computed, replies, 576)
    (pool,) = (tmp_path / "pools").glob("*.tutti")
    assert pool.stat().st_size <= 48 << 20


@pytest.mark.parametrize("mode", [HICACHE, LINKER], ids=lambda mode: mode.name)
@needs_two
def test_two_ranks_of_tensor_parallelism(
    mode: Mode, agent: str, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """Each has a pool of its own in the agent, and both survive its restart as misses."""
    log = tmp_path / "log"
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(agent, capacity="48MiB"), "--tp", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        server.settle()
        server.flush()
        replies = [server.ask(prompt) for prompt in asked]
        mode.served(computed, replies, 576)
        assert all(near(a, b) for a, b in zip(computed, replies, strict=True))
    assert len(list((tmp_path / "pools").glob("*.tutti"))) == 2


@pytest.mark.parametrize("mode", [HICACHE, LINKER], ids=lambda mode: mode.name)
@needs_two
def test_ranks_of_a_latent_share_one_copy(
    mode: Mode, agent: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Both offer every page; one of the offers is written."""
    model = make_model(tmp_path_factory.mktemp("latent"), kind="mla")
    asked = prompts(seed, 2)
    arguments = [*mode.arguments(agent, capacity="48MiB"), "--tp", "2"]
    with Server(
        model, tmp_path / "log", arguments, page_size=128, overlap=False, env=bound()
    ) as server:
        computed = [server.ask(prompt) for prompt in asked]
        server.settle()
        server.flush()
        mode.served(computed, [server.ask(prompt) for prompt in asked], 512)
        server.settle()
    (_,) = (tmp_path / "pools").glob("*.tutti")
    with tutti.connect(agent.removeprefix("unix:")) as store:
        stats = store.stats()
    assert stats["present"] >= stats["stored"] > 0
    assert stats["stored"] == stats["capacity_objects"] - stats["free_objects"]

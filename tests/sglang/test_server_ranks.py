"""A real server of two ranks on CPU: what one of them lacks, both do without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from medium_damage import flip_objects, pool_files
from server_modes import (
    HICACHE,
    LINKER,
    Mode,
    again,
    at_once,
    families,
    near,
    prompts,
    right_or_503,
)
from sglang_server import Server

pytestmark = pytest.mark.timeout(600)
#: Of both ranks; a linker's pool has larger groups, so here nothing is evicted from it.
CAPACITY = {"hicache": "16MiB", "linker": "48MiB"}
CPUS = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="two ranks need two processors")
STAGES, REPLICAS = "--pp-size", "--dp-size"


def _bound() -> dict[str, str]:
    """Each rank has a processor of its own."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[1]}"}


def crowd_is_served(mode: Mode, server: Server, crowd: list[list[int]]) -> None:
    """Prompts with shared prefixes, one after another and, after a flush, all at once."""
    right = [server.ask(prompt) for prompt in crowd]
    server.settle()
    server.flush()
    replies = at_once(server, crowd)
    assert sum(mode.loaded(reply) for reply in replies) > 0
    for reply, want in zip(replies, right, strict=True):
        assert near(reply, want)


# With HiCache SGLang itself keeps its ranks in step; the linker has to.
@pytest.mark.parametrize(
    "mode",
    [pytest.param(HICACHE, marks=pytest.mark.slow), LINKER],
    ids=lambda mode: mode.name,
)
@needs_two
def test_two_ranks_stay_aligned(mode: Mode, tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """Damage of one rank's pool; then many at once, for HiCache with evictions in both."""
    pools, log = tmp_path / "pools", tmp_path / "log"
    asked = prompts(seed, 3)
    arguments = [*mode.arguments(pools, capacity=CAPACITY[mode.name]), "--tp", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=_bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 576)
        server.settle()
        server.flush()
        (second,) = [path for path in pool_files(pools) if "-tp1-" in path.name]
        assert len(pool_files(pools)) == 2
        flip_objects(second)
        for prompt, want in zip(asked, computed, strict=True):
            reply = right_or_503(server, prompt, want)
            assert reply or mode.name == "linker", "HiCache has no reason to refuse"
            reply = reply or right_or_503(server, prompt, want)
            assert reply, "a retry failed"
            assert mode.loaded(reply) == 0, "one rank's damage is all's"
            mode.equal([want], [reply])
        mode.recovers(server, asked, computed, 576)
        mode.served(computed, again(server, asked), 576)
        crowd_is_served(mode, server, families(seed, roots=6, tails=8))
        if mode.name == "hicache":
            assert server.counted("evicted_objects_total") > 0


# The linker refuses stages: test_linker.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [(HICACHE, STAGES), (HICACHE, REPLICAS), (LINKER, REPLICAS)],
    ids=["hicache-stages", "hicache-replicas", "linker-replicas"],
)
@needs_two
def test_stages_and_replicas(
    mode: Mode, ranks: str, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """A flush, a crowd with shared prefixes, a restart, and one rank's pool lost and damaged."""
    pools, log = tmp_path / "pools", tmp_path / "log"
    arguments = [*mode.arguments(pools, capacity=CAPACITY[mode.name]), ranks, "2"]
    # An even number: SGLang deals the requests out in turn, so each replica gets its own again.
    asked, crowd = prompts(seed, 4), families(seed, roots=3, tails=4)
    with Server(tiny_model, log, arguments, page_size=64, env=_bound()) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0] * len(asked)
        mode.served(computed, again(server, asked), 576)
        found = {path.name: path.stat().st_ino for path in pool_files(pools)}
        assert len(found) == len(set(found.values())) == 2, "a pool for each rank"
        crowd_is_served(mode, server, crowd)
    with Server(tiny_model, log, arguments, page_size=64, env=_bound()) as server:
        mode.recovers(server, asked, computed, 576)
        mode.served(computed, again(server, asked), 576)
        server.settle()
        server.flush()
        second = pool_files(pools)[-1]
        flip_objects(second)
        replies = [
            right_or_503(server, prompt, want) for prompt, want in zip(asked, computed, strict=True)
        ]
        hurt = len(asked) if ranks == STAGES else len(asked) // 2
        assert sum(reply is None or mode.loaded(reply) == 0 for reply in replies) == hurt
        assert mode.name == "linker" or all(replies), "HiCache has no reason to refuse"
        mode.recovers(server, asked, computed, 576)
    second.unlink()
    with Server(tiny_model, log, arguments, page_size=64, env=_bound()) as server:
        for prompt, want in zip(asked, computed, strict=True):
            assert near(server.ask(prompt), want)
        mode.recovers(server, asked, computed, 576)

"""TuttiLinker in a real SGLang server: the same numbers from the SSD, and never a wrong token."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here")

from conftest import make_model
from medium_damage import flip_objects, pool_files
from sglang_server import HERE, Reply, Server, ServerFailed

pytestmark = pytest.mark.slow

#: Logprobs of other shapes of batches differ in their last bits; damaged KV moves them by 0.5.
NEAR = 0.05


def linker(path: Path, **options: Any) -> list[str]:
    config = {
        "linker": "TuttiLinker",
        "linker_module_path": "tutti.integration.sglang.linker",
        "linker_extra_config": {
            "path": str(path),
            "capacity": "64MiB",
            "load_staging": "8MiB",
            "store_staging": "8MiB",
            "breaker_pause_s": 0.2,
            **options,
        },
    }
    return [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend",
        "dynamic",
        "--unified-cache-external-linker-config",
        json.dumps(config),
    ]


def prompts(seed: int, n: int, tokens: int = 600) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1024) for _ in range(tokens)] for _ in range(n)]


def again(server: Server, asked: Sequence[Sequence[int]]) -> list[Reply]:
    """The same prompts once more, with nothing in SGLang's memory."""
    server.settle()
    server.flush()
    return [server.ask(prompt) for prompt in asked]


def loaded(reply: Reply) -> int:
    """Tokens that came through the linker: SGLang counts them as the host's."""
    details = reply.meta.get("cached_tokens_details") or {}
    return int(details.get("host", 0))


def served(computed: Sequence[Reply], replies: Sequence[Reply], tokens: int) -> None:
    """The replies are the computed ones to the last bit, and so many tokens were loaded."""
    assert [loaded(reply) for reply in replies] == [tokens] * len(computed)
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in computed]
    assert [reply.logprobs for reply in replies] == [reply.logprobs for reply in computed]


def near(one: Reply, other: Reply) -> bool:
    """The same but for the order of summation: right KV, another batch."""
    same = 0
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        if abs(a - b) > NEAR:
            break
        same += 1
    # Two tokens of nearly the same logit may swap; what follows is another text.
    return same == len(one.logprobs) or (same > 0 and one.tokens != other.tokens)


def wait_served(server: Server, prompt: Sequence[int], tokens: int) -> None:
    """After an unclean end objects are verified before they are served."""
    deadline = time.monotonic() + 30
    while loaded(server.ask(prompt)) < tokens:
        assert time.monotonic() < deadline, server.tail()
        server.flush()


@pytest.mark.timeout(300)
def test_flush_restart_kill_and_damage(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    pools, log = tmp_path / "pools", tmp_path / "log"
    asked = prompts(seed, 3)
    with Server(tiny_model, log, linker(pools), page_size=16) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0, 0, 0]
        served(computed, again(server, asked), 592)
        server.settle()
        with ThreadPoolExecutor(4) as threads:  # killed while it stores
            more = prompts(seed + 1, 4)
            replies = list(threads.map(server.ask, more))
            server.kill()
    with Server(tiny_model, log, linker(pools), page_size=16) as server:
        wait_served(server, asked[0], 592)
        served(computed, again(server, asked), 592)
        for prompt, reply in zip(more, replies, strict=True):
            assert near(server.ask(prompt), reply)
        server.settle()
        server.flush()
        (path,) = pool_files(pools)
        flip_objects(path)
        for prompt, want in zip(asked, computed, strict=True):
            _fails_then_right(server, prompt, want)
        served(computed, again(server, asked), 592)
        server.stop()
    with Server(tiny_model, log, linker(pools), page_size=16) as server:
        wait_served(server, asked[0], 592)
        served(computed, again(server, asked), 592)


def _fails_then_right(server: Server, prompt: list[int], want: Reply) -> None:
    """A damaged medium costs one 503; the retry computes what is damaged."""
    failures = 0
    for _ in range(3):
        try:
            reply = server.ask(prompt)
        except ServerFailed as error:
            if "503" not in str(error):
                raise
            failures += 1
        else:
            assert reply.logprobs == want.logprobs
            assert reply.tokens == want.tokens
            break
    else:
        pytest.fail(f"every retry failed:\n{server.tail()}")
    assert failures <= 1


@pytest.mark.timeout(240)
def test_without_verification_damage_is_seen_and_new_weights_miss(
    tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """The other tests could fail: here damaged KV does change what the model says."""
    pools = tmp_path / "pools"
    other = make_model(tmp_path_factory.mktemp("other"), seed=1)
    arguments = linker(pools, verify="off")
    asked = prompts(seed, 2)
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64, overlap=False) as server:
        computed = [server.ask(prompt) for prompt in asked]
        served(computed, again(server, asked), 576)
        for model in (other, tiny_model):
            server.settle()
            body = {"model_path": str(model)}
            status, text = server.call("POST", "/update_weights_from_disk", body)
            assert status == 200, text
            replies = [server.ask(prompt) for prompt in asked]
            assert [loaded(reply) for reply in replies] == [0, 0]
            same = [reply.logprobs for reply in replies] == [r.logprobs for r in computed]
            assert same == (model == tiny_model)
        served(computed, again(server, asked), 576)
        server.flush()
        (path,) = pool_files(pools)
        flip_objects(path)
        damaged = again(server, asked)
        assert [loaded(reply) for reply in damaged] == [576, 576]
        for reply, right in zip(damaged, computed, strict=True):
            far = max(abs(a - b) for a, b in zip(reply.logprobs, right.logprobs, strict=True))
            assert far > 2 * NEAR


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [True, False])
def test_many_at_once_with_shared_prefixes_and_evictions(
    tiny_model: Path, tmp_path: Path, seed: int, overlap: bool
) -> None:
    """More KV than SGLang's memory and than the pool: no wrong token, and no 503 at all."""
    arguments = [
        *linker(tmp_path / "pools", capacity="16MiB", load_staging="1MiB", backlog_share=0.1),
        "--schedule-policy",
        "lpm",
        "--enable-metrics",
    ]
    roots = prompts(seed, 6, tokens=480)
    asked = [root + tail for root in roots for tail in prompts(seed + 1, 5, tokens=160)]
    random.Random(seed).shuffle(asked)
    log = tmp_path / "log"
    with Server(tiny_model, log, arguments, page_size=16, overlap=overlap) as server:
        right = [server.ask(prompt) for prompt in asked]
        total = 0
        for _ in range(2):
            server.settle(0.5)
            server.flush()
            with ThreadPoolExecutor(12) as threads:
                replies = list(threads.map(server.ask, asked))
            total += sum(loaded(reply) for reply in replies)
            for reply, want in zip(replies, right, strict=True):
                assert near(reply, want)
        assert total > 0, "nothing was ever loaded: the test says nothing"
        status, metrics = server.call("GET", "/metrics")
        assert status == 200
        for name in ("hit_pages_total", "moved_bytes_total", "bubble_seconds_total", "fullness"):
            assert f"tutti:{name}" in metrics, name


@pytest.mark.timeout(300)
def test_latent_attention(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    model = make_model(tmp_path_factory.mktemp("latent"), kind="mla")
    asked = prompts(seed, 2)
    arguments = linker(tmp_path / "pools")
    folders = [HERE / "linker_latent", HERE / "stand_in", os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders)}
    log = tmp_path / "log"
    with Server(model, log, arguments, page_size=128, overlap=False, env=env) as server:
        computed = [server.ask(prompt) for prompt in asked]
        # Restored from SGLang's own cache: the same computation as after a load.
        cached = [server.ask(prompt) for prompt in asked]
        restored = again(server, asked)
        assert [loaded(reply) for reply in restored] == [512, 512]
        for reply, first, device in zip(restored, computed, cached, strict=True):
            assert reply.logprobs == device.logprobs
            assert near(reply, first)


@pytest.mark.timeout(300)
def test_two_ranks_stay_aligned(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """Each rank has its own pool; what is wrong in one of them is wrong for both."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("two ranks need two processors")
    pools, log = tmp_path / "pools", tmp_path / "log"
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[1]}"}
    asked = prompts(seed, 3)
    arguments = [*linker(pools, capacity="128MiB"), "--tp", "2"]
    with Server(tiny_model, log, arguments, page_size=64, env=env) as server:
        computed = [server.ask(prompt) for prompt in asked]
        served(computed, again(server, asked), 576)
        server.settle()
        server.flush()
        first, second = pool_files(pools)
        assert first.name != second.name
        flip_objects(second)
        for prompt, want in zip(asked, computed, strict=True):
            _fails_then_right(server, prompt, want)
        served(computed, again(server, asked), 576)

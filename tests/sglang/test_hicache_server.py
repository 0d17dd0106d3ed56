"""TuttiHiCacheStorage in a real SGLang server: same numbers, whatever happened to the medium."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here")

from conftest import make_model
from medium_damage import flip_objects, pool_files
from sglang_server import Reply, Server

# Starting a server takes 10 s on an idle machine, and one test waits for another's server.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Logprobs of other shapes of batches differ in their last bits; damaged KV moves them by 0.5.
NEAR = 0.05

IO_BACKENDS = {"layer_first": "kernel", "page_first": "kernel", "page_first_direct": "direct"}


def extra(path: Path, **options: Any) -> dict[str, Any]:
    return {
        "backend_name": "tutti",
        "module_path": "tutti.integration.sglang.hicache",
        "class_name": "TuttiHiCacheStorage",
        "interface_v1": 1,
        "path": str(path),
        "capacity": "48MiB",
        "prefetch_threshold": 16,
        "hicache_storage_pass_prefix_keys": True,
        **options,
    }


def hicache(layout: str, path: Path, **options: Any) -> list[str]:
    return [
        "--enable-hierarchical-cache",
        "--hicache-size",
        "1",
        "--hicache-io-backend",
        IO_BACKENDS[layout],
        "--hicache-mem-layout",
        layout,
        "--hicache-storage-prefetch-policy",
        "wait_complete",
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
        json.dumps(extra(path, **options)),
    ]


def prompts(seed: int, n: int, tokens: int = 600) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1024) for _ in range(tokens)] for _ in range(n)]


def again(server: Server, asked: Sequence[Sequence[int]]) -> list[Reply]:
    """The same prompts once more, with nothing in SGLang's memory."""
    server.settle()
    server.flush()
    return [server.ask(prompt) for prompt in asked]


def near(one: Reply, other: Reply) -> bool:
    """The same but for the order of summation: right KV, another batch."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    same = 0
    for a, b in pairs:
        if abs(a - b) > NEAR:
            break
        same += 1
    # Two tokens of nearly the same logit may swap; what follows is another text.
    return same == len(one.logprobs) or (same > 0 and one.tokens != other.tokens)


def test_flush_clear_detach_kill_restart_and_damage(
    tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    pools, log = tmp_path / "pools", tmp_path / "log"
    arguments = hicache("page_first_direct", pools)
    asked = prompts(seed, 3)
    with Server(tiny_model, log, arguments, page_size=16) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.storage for reply in computed] == [0, 0, 0]
        assert (restored := again(server, asked)) == from_storage(computed, 592)
        assert [reply.meta["cached_tokens_details"]["storage"] for reply in restored] == [592] * 3
        _detach_and_attach(server, extra(pools), asked, computed)
        assert server.call("POST", "/hicache/storage-backend/clear")[0] == 200
        assert [reply.storage for reply in again(server, asked)] == [0, 0, 0]
        with ThreadPoolExecutor(4) as threads:  # killed while it writes
            more = prompts(seed + 1, 4)
            replies = list(threads.map(server.ask, more))
            server.kill()
    with Server(tiny_model, log, arguments, page_size=16) as server:
        for prompt, reply in zip(more, replies, strict=True):
            assert near(server.ask(prompt), reply)
        assert again(server, asked) == from_storage(computed, 592)
        (path,) = pool_files(pools)
        flip_objects(path)
        recomputed = again(server, asked)
        assert [reply.storage for reply in recomputed] == [0, 0, 0], "damaged pages were served"
        assert [reply.logprobs for reply in recomputed] == [r.logprobs for r in computed]
        assert again(server, asked) == from_storage(computed, 592), "stored again, served again"
        path.unlink()
        assert [reply.logprobs for reply in again(server, asked)] == [r.logprobs for r in computed]
    with Server(tiny_model, log, arguments, page_size=16) as server:
        assert [server.ask(prompt).storage for prompt in asked] == [0, 0, 0]
        assert again(server, asked) == from_storage(computed, 592), "a new pool took over"


def from_storage(computed: Sequence[Reply], tokens: int) -> list[Reply]:
    """What the same prompts must give when so many tokens come from storage."""
    return [
        Reply(reply.tokens, reply.logprobs, cached=tokens, storage=tokens, meta={})
        for reply in computed
    ]


def _detach_and_attach(
    server: Server, config: dict[str, Any], asked: list[list[int]], computed: list[Reply]
) -> None:
    server.settle()
    status, text = server.call("DELETE", "/hicache/storage-backend")
    assert status == 200, text
    assert [reply.storage for reply in again(server, asked)] == [0, 0, 0]
    body = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(config),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    wrong = {**body, "hicache_storage_backend_extra_config_json": json.dumps({**config, "x": 1})}
    status, text = server.call("PUT", "/hicache/storage-backend", wrong)
    assert status == 400
    assert "unknown option 'x'" in text
    status, text = server.call("PUT", "/hicache/storage-backend", body)
    assert status == 200, text
    assert again(server, asked) == from_storage(computed, 592)


def test_without_verification_damage_is_seen_and_new_weights_miss(
    tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """The other tests could fail: here damaged KV does change what the model says."""
    pools = tmp_path / "pools"
    other = make_model(tmp_path_factory.mktemp("other"), seed=1)
    arguments = hicache("layer_first", pools, verify="off")
    asked = prompts(seed, 2)
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64, overlap=False) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert again(server, asked) == from_storage(computed, 576)
        for model, expected in ((other, None), (tiny_model, computed)):
            server.settle()
            body = {"model_path": str(model)}
            status, text = server.call("POST", "/update_weights_from_disk", body)
            assert status == 200, text
            replies = [server.ask(prompt) for prompt in asked]
            assert [reply.storage for reply in replies] == [0, 0]
            if expected is None:
                assert replies[0].logprobs != computed[0].logprobs
            else:
                assert [r.logprobs for r in replies] == [r.logprobs for r in expected]
        assert again(server, asked) == from_storage(computed, 576)
        (path,) = pool_files(pools)
        flip_objects(path)
        damaged = again(server, asked)
        assert [reply.storage for reply in damaged] == [576, 576]
        for reply, right in zip(damaged, computed, strict=True):
            assert max(abs(a - b) for a, b in zip(reply.logprobs, right.logprobs, strict=True)) > (
                2 * NEAR
            )


def test_faults_evictions_and_many_at_once(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """SGLang's own fault injector, a pool that is too small, shared prefixes, metrics."""
    env = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
    }
    arguments = [*hicache("page_first", tmp_path / "pools", capacity="8MiB"), "--enable-metrics"]
    roots = prompts(seed, 4, tokens=320)
    asked = [root + tail for root in roots for tail in prompts(seed + 1, 4, tokens=128)]
    random.Random(seed).shuffle(asked)
    log = tmp_path / "log"
    with Server(tiny_model, log, arguments, page_size=64, env=env) as server:
        right = [server.ask(prompt) for prompt in asked]
        storage = 0
        for _ in range(2):
            server.settle(0.5)
            server.flush()
            with ThreadPoolExecutor(8) as threads:
                replies = list(threads.map(server.ask, asked))
            storage += sum(reply.storage for reply in replies)
            for reply, want in zip(replies, right, strict=True):
                assert near(reply, want)
        assert storage > 0, "nothing ever came from storage: the test says nothing"
        status, metrics = server.call("GET", "/metrics")
        assert status == 200
        for name in ("hit_pages_total", "moved_bytes_total", "batch_seconds_bucket", "fullness"):
            assert f"tutti:{name}" in metrics, name


def test_latent_attention(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    model = make_model(tmp_path_factory.mktemp("latent"), kind="mla")
    arguments = hicache("page_first", tmp_path / "pools")
    asked = prompts(seed, 1)
    log = tmp_path / "log"
    with Server(model, log, arguments, page_size=64, overlap=False) as server:
        computed = [server.ask(prompt) for prompt in asked]
        restored = again(server, asked)
        assert [reply.storage for reply in restored] == [576]
        assert near(restored[0], computed[0])


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two CPUs")
def test_two_ranks_serve_what_both_have(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    pools = tmp_path / "pools"
    arguments = [*hicache("page_first", pools, capacity="96MiB"), "--tp", "2"]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    asked = prompts(seed, 2)
    with Server(tiny_model, tmp_path / "log", arguments, page_size=64, env=env) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert again(server, asked) == from_storage(computed, 576)
        damaged = [path for path in pool_files(pools) if "-tp1-" in path.name]
        assert len(pool_files(pools)) == 2
        flip_objects(*damaged)
        recomputed = again(server, asked)
        assert [reply.storage for reply in recomputed] == [0, 0], "one rank's damage is all's"
        assert [reply.logprobs for reply in recomputed] == [r.logprobs for r in computed]
        assert again(server, asked) == from_storage(computed, 576)

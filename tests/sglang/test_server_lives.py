"""One path through several lives of a real server on CPU: the same numbers, whatever happened."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import pytest
from medium_damage import flip_objects, pool_files
from server_modes import (
    Mode,
    again,
    at_once,
    both_modes,
    families,
    hicache_config,
    linker_options,
    near,
    prompts,
    right_or_503,
)
from sglang_server import Reply, Server, ServerFailed

pytestmark = pytest.mark.timeout(600)

#: SGLang's own fault injector, which it has for storage backends alone.
INJECTOR = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
}
METRICS = {
    "hit_pages_total",
    "miss_pages_total",
    "moved_pages_total/load",
    "moved_pages_total/store",
    "moved_bytes_total/load",
    "moved_bytes_total/store",
    "busy_seconds_total/load",
    "busy_seconds_total/store",
    "batch_seconds_bucket/load",
    "batch_seconds_bucket/store",
    "device_read_bytes_total",
    "device_written_bytes_total",
    "drive_moved_bytes_total/read",
    "drive_window_bytes/write",
    "service_threads",
    "digest_seconds_total",
    "waiting_loads",
    "waiting_writes",
    "missing_members",
    "fullness",
    "busy_objects",
}
OF_LINKER = {"backlog_pages", "bubble_seconds_total"}


@both_modes
def test_flush_kill_damage_deletion_and_a_crowd(
    mode: Mode, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    pools, log = tmp_path / "pools", tmp_path / "log"
    # Advice comes too late for memory that is in use: what is on large pages was allocated there.
    advised = {"hugepages": "advise"} if mode.name == "hicache" else {}
    arguments = mode.arguments(pools, "page_first_direct", **advised)
    asked, more = prompts(seed, 3), prompts(seed + 1, 4)
    with Server(tiny_model, log, arguments, page_size=16) as server:
        computed = [server.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0, 0, 0]
        mode.served(computed, again(server, asked), 592)
        _all_metrics(mode, server)
        _detach_attach_and_clear(mode, server, pools, asked, computed)
        replies = at_once(server, more)
        server.kill()  # while it stores
    _start_beside_another_server(tiny_model, tmp_path / "refused", arguments, pools)
    with Server(tiny_model, log, arguments, page_size=16) as server:
        mode.recovers(server, asked, computed, 592)
        mode.served(computed, again(server, asked), 592)
        for prompt, reply in zip(more, replies, strict=True):
            assert near(server.ask(prompt), reply)
        _damage(mode, server, pools, asked, computed)
        pool_files(pools)[0].unlink()
        for reply, want in zip(again(server, asked), computed, strict=True):
            assert near(reply, want)
        server.stop()
    env = INJECTOR if mode.name == "hicache" else None
    overlap = mode.name == "hicache"
    arguments = mode.arguments(pools, "page_first", capacity="12MiB")
    with Server(tiny_model, log, arguments, page_size=64, overlap=overlap, env=env) as server:
        assert [mode.loaded(server.ask(prompt)) for prompt in asked] == [0, 0, 0]
        _crowd(mode, server, seed)


def _start_beside_another_server(model: Path, log: Path, arguments: list[str], pools: Path) -> None:
    """A pool that another server has is an error at start."""
    with pool_files(pools)[0].open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as the other server would
        with (
            pytest.raises(ServerFailed, match="in use"),
            Server(model, log, arguments, page_size=16),
        ):
            pass


def _all_metrics(mode: Mode, server: Server) -> None:
    wanted = METRICS | OF_LINKER if mode.name == "linker" else METRICS
    server.counted("fullness")
    found = server.metrics()
    assert wanted <= set(found), wanted - set(found)
    # 37 pages of 16 tokens, three times; a token is 2 KiB in the tiny model.
    assert found["moved_pages_total/load"] == 3 * 37
    # A linker may have begun to read ahead what a batch then read itself.
    assert 1 <= found["moved_bytes_total/load"] / (3 * 592 * 2048) < 2
    if mode.name == "hicache":
        assert found["moved_bytes_total/load"] == 3 * 592 * 2048
        if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            assert found["hugepage_bytes"] > 0, "SGLang's host pool, with its flags alone"
    assert found["service_threads"] == 1 and found["drive_moved_bytes_total/read"] > 0
    info = re.search("tutti:info{.*}", server.call("GET", "/metrics")[1])
    assert info and re.search('profile="(measured|cache|estimated)"', info[0]), info
    assert 0 < found["fullness"] <= 1
    assert found["errors_total"] == 0, server.tail()


def _detach_attach_and_clear(
    mode: Mode, server: Server, pools: Path, asked: list[list[int]], computed: list[Reply]
) -> None:
    server.settle()
    assert _asked(server) == "dynamic"
    status, text = server.call("DELETE", "/hicache/storage-backend")
    assert (status, _asked(server)) == (200, None), text
    assert server.metrics()["attached"] == 0
    assert [mode.loaded(reply) for reply in again(server, asked)] == [0, 0, 0]
    config = hicache_config(pools) if mode.name == "hicache" else linker_options(pools)
    status, text = _attach(server, {**config, "x": 1})
    assert (status, "unknown option 'x'" in text) == (400, True), text
    with pool_files(pools)[0].open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # as another server on this path would
        status, text = _attach(server, config)
        assert (status, "in use" in text) == (400, True), text
    status, text = _attach(server, config if mode.name == "hicache" else None)
    assert (status, _asked(server)) == (200, "dynamic"), text
    mode.served(computed, again(server, asked), 592)
    assert server.call("POST", "/hicache/storage-backend/clear")[0] == 200
    assert [mode.loaded(reply) for reply in again(server, asked)] == [0, 0, 0]
    mode.served(computed, again(server, asked), 592)


def _attach(server: Server, config: dict[str, Any] | None) -> tuple[int, str]:
    """config: None for the options of the start, which a linker alone remembers."""
    body = {"hicache_storage_backend": "dynamic"}
    if config is not None:
        body["hicache_storage_backend_extra_config_json"] = json.dumps(config)
        body["hicache_storage_prefetch_policy"] = "wait_complete"
    return server.call("PUT", "/hicache/storage-backend", body)


def _asked(server: Server) -> str | None:
    status, text = server.call("GET", "/hicache/storage-backend")
    assert status == 200, text
    backend: str | None = json.loads(text)["hicache_storage_backend"]
    return backend


def _damage(
    mode: Mode, server: Server, pools: Path, asked: list[list[int]], computed: list[Reply]
) -> None:
    """HiCache computes what is damaged; a linker's request may fail once, and is right on retry."""
    server.settle()
    server.flush()
    flip_objects(pool_files(pools)[0])
    for prompt, want in zip(asked, computed, strict=True):
        first = right_or_503(server, prompt, want)
        assert first or mode.name == "linker", "HiCache has no reason to refuse"
        reply = first or right_or_503(server, prompt, want)
        assert reply, "a retry failed"
        assert mode.loaded(reply) == 0, "damaged pages were served"
        mode.equal([want], [reply])
    assert server.counted("corrupt_objects_total") > 0
    mode.recovers(server, asked, computed, 592)
    # Pages that were found one by one were computed in other batches, which round differently.
    mode.served(again(server, asked), again(server, asked), 592)


def _crowd(mode: Mode, server: Server, seed: int) -> None:
    """48 at once, with more KV than SGLang's memory and than the pool: no 503, no leak."""
    asked = families(seed, roots=6, tails=8)
    right = [server.ask(prompt) for prompt in asked]
    server.settle()
    total, held = 0, set()
    for round_ in range(10):
        if round_ >= 2 and total:
            break  # which beginnings survive in so small a pool depends on who came first
        server.flush()
        replies = at_once(server, asked)
        total += sum(mode.loaded(reply) for reply in replies)
        for reply, want in zip(replies, right, strict=True):
            assert near(reply, want)
        server.settle()
        held.add(server.held())
    assert total > 0, "nothing was ever loaded: the test says nothing"
    assert len(held) == 1, f"threads or files grow: {held}"
    assert server.counted("evicted_objects_total") > 0
    assert server.metrics().get("backlog_pages", 0) == 0
    assert "memory leak" not in server.text()

"""Prefill and decode apart: HiCache of two servers, in one process, through one node's agent, or
through two nodes' agents and the second tier.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
from cluster.faulty import Faults
from node.agents import RunningAgent, running
from waiting import wait_idle

from tutti.integration.sglang.hicache import TuttiHiCacheStorage

WAIT_S = 30.0
Connect = Callable[[RunningAgent], "Server"]


class Server:
    """The storage of a server, with host memory of its own."""

    def __init__(self, agent: RunningAgent) -> None:
        self.pool = hp.mha_pool("page_first")
        self.storage = TuttiHiCacheStorage(hp.config(f"unix:{agent.path}"), {})
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()

    def write(self, hashes: list[str], seed: int) -> list[bytes]:
        """Makes up pages and stores them."""
        hp.fill(self.pool, seed)
        pages = range(len(hashes))
        done = self.storage.batch_set_v1(hashes, hp.indices(self.pool, list(pages)))
        assert done == [True] * len(hashes)
        return [hp.page_bytes(self.pool, page) for page in pages]

    def read(self, hashes: list[str], seed: int) -> list[bytes]:
        """Pages that must all be there, into other places."""
        hp.wipe(self.pool)
        pages = random.Random(seed).sample(range(hp.PAGES), len(hashes))
        done = self.storage.batch_get_v1(hashes, hp.indices(self.pool, pages))
        assert done == [True] * len(hashes)
        return [hp.page_bytes(self.pool, page) for page in pages]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with ExitStack() as stack:

        def one(agent: RunningAgent) -> Server:
            server = Server(agent)
            stack.enter_context(closing(server.storage))
            return server

        yield one


def hashes(n: int, start: int = 0) -> list[str]:
    return [f"{i:064x}" for i in range(start + 1, start + n + 1)]


def test_turns_go_from_decode_to_prefill_and_back(
    tmp_path: Path, connect: Connect, seed: int
) -> None:
    with running(tmp_path / "node") as agent:
        prefill, decode = connect(agent), connect(agent)
        prompt, answer = hashes(6), hashes(4, 6)
        want = prefill.write(prompt, seed)
        assert decode.storage.batch_exists(prompt + answer) == 6
        assert decode.read(prompt, seed) == want
        want += decode.write(answer, seed + 1)
        assert prefill.storage.batch_exists(prompt + answer) == 10
        assert prefill.read(prompt + answer, seed) == want
        (kv,) = prefill.storage._stores.values()
        assert kv.store.stats()["profile"] == agent.pools.speeds.source
        wait_idle(kv.store.scheduler)
        assert kv.store.stats()["scheduler"]["written_pages"] == 10, "of both, on one medium"
        assert len(list((tmp_path / "node").glob("*.tutti"))) == 1


def test_a_turn_before_its_write_is_durable_is_a_miss(
    tmp_path: Path, connect: Connect, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "node") as agent:
        prefill, decode = connect(agent), connect(agent)
        seen: list[int] = []
        store = next(iter(agent.pools.stores().values()))
        records = store._writer._table.write

        def looked_up(*given: Any, **options: Any) -> Any:
            """The data is written and its record is not."""
            seen.append(prefill.storage.batch_exists(hashes(4)))
            return records(*given, **options)

        monkeypatch.setattr(store._writer._table, "write", looked_up)
        want = decode.write(hashes(4), seed)
        assert seen == [0]
        assert prefill.storage.batch_exists(hashes(4)) == 4
        assert prefill.read(hashes(4), seed) == want


def test_turns_travel_between_two_nodes(tmp_path: Path, connect: Connect, seed: int) -> None:
    """A stand-in of the remote store.  What has not landed is a miss, and never waited for."""
    faults = Faults(tmp_path / "remote")
    remote = faults.config(replicate="first")
    with (
        running(tmp_path / "one", remote=remote) as one,
        running(tmp_path / "two", remote=remote) as two,
    ):
        prefill, decode = connect(one), connect(two)
        prompt, answer = hashes(6), hashes(4, 6)
        faults.set("slow")
        want = prefill.write(prompt, seed)
        began_s = time.monotonic()
        assert decode.storage.batch_exists(prompt) == 0
        assert time.monotonic() - began_s < faults.config().timeout_s
        faults.set("")
        lands(decode, prompt)
        assert decode.read(prompt, seed) == want
        want += decode.write(answer, seed + 1)
        lands(prefill, prompt + answer)
        assert prefill.read(prompt + answer, seed) == want


def lands(server: Server, wanted: list[str]) -> None:
    """Looks up until all pages are there; each look-up answers at once."""
    deadline_s = time.monotonic() + WAIT_S
    while server.storage.batch_exists(wanted) < len(wanted):
        assert time.monotonic() < deadline_s, "not fetched"
        time.sleep(0.05)

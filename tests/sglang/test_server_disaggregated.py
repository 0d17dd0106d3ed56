"""SGLang's prefill and decode servers on CPU, which transfer by NIXL, with one node's pool or two.

The prefill server stores prompts, the decode server the turns that it generates, and the next turn
loads both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster.mooncake_cluster import running
from cluster.nodes import until
from server_modes import HICACHE, near, prompts
from sglang_server import Reply, Server, free_port
from test_server_agent import Agent, agent
from test_server_cluster import agents

import tutti
from tutti.integration.sglang.page_keys import prompt_keys

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]
_PAGE = 64
_PROMPT, _ANSWER = 600, 200
_PROMPTS_PAGES, _TURNS_PAGES = _PROMPT // _PAGE, (_PROMPT + _ANSWER) // _PAGE

__all__ = ["agent"]  # a fixture


class Pair:
    """A prefill and a decode server; a request goes to both, as SGLang's router sends it."""

    def __init__(self, prefill: Server, decode: Server, port: int) -> None:
        self.prefill, self.decode = prefill, decode
        self._port, self._rooms = port, itertools.count(1)

    def ask(self, prompt: Sequence[int], new_tokens: int = 8) -> tuple[Reply, Reply]:
        """What the prefill server says, and the answer, of the decode server."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": next(self._rooms),
        }

        def one(server: Server) -> Reply:
            return server.ask(prompt, new_tokens, **where)

        with ThreadPoolExecutor(2) as threads:
            told, answer = threads.map(one, (self.prefill, self.decode))
        return told, answer

    def flush(self) -> None:
        for server in (self.prefill, self.decode):
            server.settle()
            server.flush()


@contextmanager
def pair(folder: Path, model: Path, prefills: str, decodes: str, *, reads: bool) -> Iterator[Pair]:
    """Their paths.  reads: the decode server looks up prefixes too; else it only stores turns."""
    port = free_port()
    common = ["--disaggregation-transfer-backend", "nixl"]
    common += ["--disaggregation-bootstrap-port", str(port), "--disaggregation-mode"]
    decode = [*HICACHE.arguments(decodes), *common, "decode"]
    if reads:
        decode.append("--disaggregation-decode-enable-radix-cache")
    else:
        decode.remove("--enable-hierarchical-cache")
        decode.append("--disaggregation-decode-enable-offload-kvcache")
    prefill = [*HICACHE.arguments(prefills), *common, "prefill"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(model, folder / f"log{n}", words, page_size=_PAGE))
            for n, words in enumerate((prefill, decode))
        ]
        yield Pair(servers[0], servers[1], port)


@pytest.mark.parametrize("reads", [False, True], ids=["decode stores", "decode reads and stores"])
def test_the_next_turn_loads_what_both_servers_stored(
    reads: bool, agent: Agent, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    prompt, more = prompts(seed, 1, _PROMPT)[0], prompts(seed + 1, 1, 80)[0]
    with pair(tmp_path, tiny_model, agent.path, agent.path, reads=reads) as servers:
        told, first = servers.ask(prompt, _ANSWER)
        assert told.cached == first.cached == 0
        with tutti.connect(str(agent.socket)) as store:
            until(lambda: len(store.catalogue.keys()) == _TURNS_PAGES, lambda: str(store.stats()))
        servers.flush()
        told, second = servers.ask([*prompt, *first.tokens, *more])
        assert HICACHE.loaded(told) == told.cached == _TURNS_PAGES * _PAGE
        if reads:
            assert HICACHE.loaded(second) == second.cached == _TURNS_PAGES * _PAGE
        servers.flush()
        told, again = servers.ask(prompt, _ANSWER)
        assert HICACHE.loaded(told) == _PROMPTS_PAGES * _PAGE
        assert near(again, first), "computed, and from the pool"


def test_turns_travel_between_two_nodes(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """The prefill server's node gets the turn that the decode server stored on its own."""
    prompt, more = prompts(seed, 1, _PROMPT)[0], prompts(seed + 1, 1, 80)[0]
    turns = _TURNS_PAGES - _PROMPTS_PAGES
    with ExitStack() as stack:
        cluster = stack.enter_context(running(tmp_path / "mooncake", segments=1))
        one, two = stack.enter_context(agents(tmp_path, cluster))
        paths = f"unix:{one.path}", f"unix:{two.path}"
        servers = stack.enter_context(pair(tmp_path, tiny_model, *paths, reads=False))
        _, first = servers.ask(prompt, _ANSWER)
        until(lambda: two.remote()["replicated"] == turns, lambda: str(two.remote()))
        with one.connect() as here:
            keys = prompt_keys(here.layout.fingerprint, [*prompt, *first.tokens], _PAGE)
            turn = keys[_PROMPTS_PAGES:_TURNS_PAGES]
            assert here.match(turn) == 0
            until(lambda: here.match(turn) == turns, lambda: str(one.remote()))
        assert one.remote()["fetched"] == turns
        servers.flush()
        told, _ = servers.ask([*prompt, *first.tokens, *more])
        assert HICACHE.loaded(told) == told.cached == _TURNS_PAGES * _PAGE

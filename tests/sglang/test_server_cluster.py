"""Two real servers on CPU, each with an agent and a pool of its own, on one Mooncake cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.cable import Cable
from cluster.mooncake_cluster import Cluster, python, running
from cluster.nodes import until
from server_modes import Mode, again, both_modes, near, prompts
from sglang_server import Server

import tutti
from tutti.node.client import NodeStore

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
_WAIT_S = 60.0
_PROMPTS, _PAGES = 3, 9  # of 64 tokens, of each prompt of 600


class _Agent:
    """`tutti serve --remote` as a user starts it."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        folder.mkdir()
        self.path = str(folder / "s")
        command = [python(), "-m", "tutti.cli", "serve", "--folder", str(folder)]
        command += ["--capacity", "1GiB", "--socket", self.path]
        command += ["--remote", cluster.url(replicate="first", timeout=3, client_ttl=1)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert any(line.startswith("serving on") for line in self.process.stderr)

    def connect(self) -> NodeStore:
        return tutti.connect(self.path)

    def remote(self) -> dict[str, Any]:
        with self.connect() as store:
            counts: dict[str, Any] = store.stats()["remote"]
        return counts

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=_WAIT_S)
        assert self.process.returncode == 0


@contextmanager
def agents(tmp_path: Path, cluster: Cluster) -> Iterator[tuple[_Agent, _Agent]]:
    with ExitStack() as stack:
        agents = []
        for name in ("one", "two"):
            agents.append(_Agent(tmp_path / name, cluster))
            stack.callback(agents[-1].stop)
        yield agents[0], agents[1]


def _fetch(one: _Agent, two: _Agent, pages: int) -> None:
    """What the first node stored is looked up on the second, until it is there."""
    with one.connect() as theirs:
        infos = theirs.catalogue.objects(theirs.catalogue.keys())
    assert len(infos) == pages
    chains: dict[bytes, list[bytes]] = {}  # by their last key
    for info in sorted(infos, key=lambda info: info.depth):
        chains[info.key] = [*chains.pop(info.parent, []), info.key]
    with two.connect() as ours:
        for chain in chains.values():
            assert ours.match(chain) == 0
            until(lambda c=chain: ours.match(c) == len(c), lambda: str(two.remote()))
    assert two.remote()["fetched"] == pages


@both_modes
def test_a_second_server_is_served_by_the_bytes_of_the_first(
    mode: Mode, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """And is right, and serves its own pool, once segment server and master are killed."""
    asked, more = prompts(seed, _PROMPTS), prompts(seed + 1, 2)
    with ExitStack() as stack:
        cluster = stack.enter_context(running(tmp_path / "mooncake", segments=2))
        one, two = stack.enter_context(agents(tmp_path, cluster))
        first, second = (
            stack.enter_context(
                Server(
                    tiny_model,
                    tmp_path / f"log{number}",
                    mode.arguments(f"unix:{agent.path}"),
                    page_size=64,
                )
            )
            for number, agent in enumerate((one, two))
        )
        computed = [first.ask(prompt) for prompt in asked]
        assert [reply.cached for reply in computed] == [0] * _PROMPTS
        pages = _PROMPTS * _PAGES
        until(lambda: one.remote()["replicated"] == pages, lambda: str(one.remote()))
        _fetch(one, two, pages)
        mode.served(computed, [second.ask(prompt) for prompt in asked], 64 * _PAGES)

        cluster.segments[0].kill()
        want = [first.ask(prompt) for prompt in more]
        assert all(near(a, b) for a, b in zip(want, map(second.ask, more), strict=True))
        mode.served(computed, again(second, asked), 64 * _PAGES)
        cluster.master.kill()
        mode.served(computed, again(second, asked), 64 * _PAGES)


@both_modes
def test_servers_are_right_over_a_network_that_lies_is_slow_and_is_cut(
    mode: Mode, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    """The second server's own look-ups bring the first one's bytes: it stores none of its own, as
    each prompt is offered once."""
    well, slow, lying, cut = prompts(seed, 4)
    with ExitStack() as stack:
        cable = stack.enter_context(closing(Cable()))
        cluster = stack.enter_context(running(tmp_path / "mooncake", 0, cable.near))
        cluster.add_segment(far=cable)
        one, two = stack.enter_context(agents(tmp_path, cluster))
        first, second = (
            stack.enter_context(
                Server(
                    tiny_model,
                    tmp_path / f"log{number}",
                    mode.arguments(f"unix:{agent.path}", second_touch=bool(number)),
                    page_size=64,
                )
            )
            for number, agent in enumerate((one, two))
        )
        want = {id(prompt): first.ask(prompt) for prompt in (well, slow, lying, cut)}
        until(lambda: one.remote()["replicated"] == 4 * _PAGES, lambda: str(one.remote()))

        def right(prompt: list[int]) -> None:
            reply = second.ask(prompt)
            assert mode.loaded(reply) == 0 and near(reply, want[id(prompt)])

        right(well)
        until(lambda: two.remote()["fetched"] == _PAGES, lambda: str(two.remote()))
        mode.served([want[id(well)]], again(second, [well]), 64 * _PAGES)
        for fault, prompt, counts in (
            ("slow", slow, ("fetched", "late", "fetch_failed", "failures")),
            ("flip", lying, ("corrupt",)),
            ("cut", cut, ("late", "fetch_failed", "failures", "refused")),
        ):
            before = two.remote()
            cable.fault = fault
            right(prompt)
            until(lambda b=before, c=counts: _more(b, two.remote(), c), lambda: str(two.remote()))
            mode.served([want[id(well)]], again(second, [well]), 64 * _PAGES)
            cable.fault = ""
        assert cable.flipped


def _more(before: dict[str, Any], now: dict[str, Any], counts: Sequence[str]) -> bool:
    return sum(now[name] - before[name] for name in counts) > 0

"""The two modes of a server with Tutti, and what tests of both have in common."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sglang_server import Reply, Server, ServerFailed

#: Logprobs of other shapes of batches differ in their last bits; damaged KV moves them by 0.5.
NEAR = 0.05

IO_BACKENDS = {"layer_first": "kernel", "page_first": "kernel", "page_first_direct": "direct"}
_RECOVERS_S = 60.0


@dataclass(frozen=True)
class Mode:
    """name: "hicache" or "linker"."""

    name: str

    def arguments(
        self,
        path: Path | str | list[str],
        layout: str = "page_first",
        prefetch: str = "wait_complete",
        **options: Any,
    ) -> list[str]:
        """SGLang's arguments; layout and prefetch policy are of HiCache alone."""
        if self.name == "linker":
            return _linker_arguments(path, **options)
        return [
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            "4",
            "--hicache-io-backend",
            IO_BACKENDS[layout],
            "--hicache-mem-layout",
            layout,
            "--hicache-storage-prefetch-policy",
            prefetch,
            "--hicache-storage-backend",
            "dynamic",
            "--hicache-storage-backend-extra-config",
            json.dumps(hicache_config(path, **options)),
        ]

    def loaded(self, reply: Reply) -> int:
        """Tokens whose KV came from the SSD. SGLang counts those of a linker as the host's."""
        source = "host" if self.name == "linker" else "storage"
        return int((reply.meta.get("cached_tokens_details") or {}).get(source, 0))

    def served(self, want: Sequence[Reply], replies: Sequence[Reply], tokens: int) -> None:
        """The replies are the same to the last bit, and so many tokens were loaded for each."""
        found = [(self.loaded(reply), reply.cached) for reply in replies]
        assert found == [(tokens, tokens)] * len(want), f"(loaded, cached) are {found}"
        self.equal(want, replies)

    @staticmethod
    def equal(want: Sequence[Reply], replies: Sequence[Reply]) -> None:
        same = [reply == other for reply, other in zip(_texts(replies), _texts(want), strict=True)]
        assert all(same), f"{replies} for {want}"

    def recovers(
        self, server: Server, asked: Sequence[list[int]], want: Sequence[Reply], tokens: int
    ) -> None:
        """Soon everything is served again, once stored again; no answer is ever a wrong one."""
        deadline = time.monotonic() + _RECOVERS_S
        loaded: list[int] = []
        while loaded != [tokens] * len(asked):
            assert time.monotonic() < deadline, f"{loaded} are served:\n{server.tail()}"
            server.settle()
            server.flush()
            pairs = zip(asked, want, strict=True)
            replies = [right_or_503(server, prompt, reply) for prompt, reply in pairs]
            loaded = [self.loaded(reply) if reply else 0 for reply in replies]


def _texts(replies: Sequence[Reply]) -> list[tuple[list[int], list[float]]]:
    return [(reply.tokens, reply.logprobs) for reply in replies]


HICACHE, LINKER = Mode("hicache"), Mode("linker")
both_modes = pytest.mark.parametrize("mode", [HICACHE, LINKER], ids=lambda mode: mode.name)


def hicache_config(path: Path | str | list[str], **options: Any) -> dict[str, Any]:
    """The JSON object of HiCache's extra config."""
    return {
        "backend_name": "tutti",
        "module_path": "tutti.integration.sglang.hicache",
        "class_name": "TuttiHiCacheStorage",
        "interface_v1": 1,
        "path": path if isinstance(path, list) else str(path),
        "capacity": "48MiB",
        "prefetch_threshold": 16,
        "hicache_storage_pass_prefix_keys": True,
        **options,
    }


def linker_options(path: Path | str | list[str], **options: Any) -> dict[str, Any]:
    """The JSON object of the linker's extra config."""
    # Pools are small here: more would pin all of them.  An agent's have settings of its own.
    pins = {} if str(path).startswith("unix:") else {"pin_lookups": 4}
    return {
        "path": path if isinstance(path, list) else str(path),
        "capacity": "48MiB",
        "load_staging": "8MiB",
        "store_staging": "8MiB",
        "breaker_pause_s": 0.2,
        **pins,
        **options,
    }


def _linker_arguments(path: Path | str | list[str], **options: Any) -> list[str]:
    config = {
        "linker": "TuttiLinker",
        "linker_module_path": "tutti.integration.sglang.linker",
        "linker_extra_config": linker_options(path, **options),
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


def families(seed: int, roots: int, tails: int, shared: int = 320) -> list[list[int]]:
    """Prompts that share their first tokens with others, in random order."""
    asked = [
        root + tail
        for number, root in enumerate(prompts(seed, roots, shared))
        for tail in prompts(seed + 1 + number, tails, 128)
    ]
    random.Random(seed).shuffle(asked)
    return asked


def again(server: Server, asked: Sequence[list[int]]) -> list[Reply]:
    """The same prompts once more, with nothing in SGLang's memory."""
    server.settle()
    server.flush()
    return [server.ask(prompt) for prompt in asked]


def at_once(server: Server, asked: Sequence[list[int]], new_tokens: int = 8) -> list[Reply]:
    """All of them together."""
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(lambda prompt: server.ask(prompt, new_tokens), asked))


def near(one: Reply, other: Reply) -> bool:
    """The same but for the order of summation: right KV, another batch."""
    same = 0
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        if abs(a - b) > NEAR:
            break
        same += 1
    # Two tokens of nearly the same logit may swap; what follows is another text.
    return same == len(one.logprobs) or (same > 0 and one.tokens != other.tokens)


def far(one: Reply, other: Reply) -> bool:
    """So different that it shows wrong KV."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs) > 2 * NEAR


def right_or_503(server: Server, prompt: list[int], want: Reply) -> Reply | None:
    """The reply, which must be right; None for the 503 that a damaged load costs."""
    try:
        reply = server.ask(prompt)
    except ServerFailed as error:
        if "status 503" not in str(error):
            raise
        return None
    assert near(reply, want), f"a wrong answer: {reply} for {want}"
    return reply

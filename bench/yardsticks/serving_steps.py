"""The steps of `serving`: each runs a client with its arguments against a server.

Each result has `possible_tokens`, computed from the prompts alone: the tokens that hit in a cache
that loses nothing and shares whole pages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tutti.bench.statistics import median
from tutti.bench.ttft.client import Run, TimedCall, drive
from tutti.bench.ttft.http import Endpoint, ServerError
from tutti.bench.ttft.metrics import latencies_ms
from tutti.bench.ttft.protocol import Generate
from tutti.bench.ttft.workloads.chat import generate_chats
from tutti.bench.ttft.workloads.prompt import IDS, Renderer
from tutti.bench.yardsticks.sglang_clients import Clients

#: Titles of steps.
STEPS = {
    "first": "bench_serving",
    "again": "the same after a flush",
    "turns": "multi-turn test",
    "sharegpt": "turns as in ShareGPT",
    "sharegpt_again": "turns as in ShareGPT after a flush",
    "multiturn": "long turns",
    "multiturn_again": "long turns after a flush",
    "bench_multiturn": "bench_multiturn",
    "bench_multiturn_again": "bench_multiturn after a flush",
}
#: Steps with too small a storage: the second one shows the loss.
SMALL_STEPS = ("first", "again")
_MULTITURN_TEST = "sglang.test.kits.cache_hit_kit.run_multiturn_cache_hit_test"
_REQUEST_S = 300.0
_VOCABULARY = 1000  # no model's is smaller
_TURN_SCALE = 0.25  # factor on questions: long turns have 256 tokens, for a context of 4096
_WARM_SEED = 1_000_003
#: A step: runs a client and returns its result.
Step = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A server under test: its port, the clients, a folder for their output, and their texts."""

    port: int
    clients: Clients
    folder: Path
    texts: Path
    args: argparse.Namespace

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def steps_of(target: Target, *, small: bool) -> dict[str, Step]:
    steps: dict[str, Step] = {
        "first": partial(_bench_serving, target),
        "again": partial(_bench_serving, target, stored=True),
        "turns": partial(_turns, target),
        "sharegpt": partial(_chat, target, "sharegpt", 1.0),
        "sharegpt_again": partial(_chat, target, "sharegpt", 1.0, stored=True),
        "multiturn": partial(_chat, target, "multiturn", _TURN_SCALE),
        "multiturn_again": partial(_chat, target, "multiturn", _TURN_SCALE, stored=True),
    }
    if target.args.bench_multiturn is not None:
        steps["bench_multiturn"] = partial(_bench_multiturn, target)
        steps["bench_multiturn_again"] = partial(_bench_multiturn, target, stored=True)
    return {name: step for name, step in steps.items() if not small or name in SMALL_STEPS}


def warm_up(target: Target) -> None:
    """Sends a few unique prompts, whose numbers are discarded."""
    given = {**vars(target.args), "groups": 2, "prompts": 1, "seed": _WARM_SEED}
    _bench_serving(replace(target, args=argparse.Namespace(**given)))


def _bench_serving(target: Target, *, stored: bool = False) -> dict[str, Any]:
    """Runs `bench_serving` with groups of shared prefixes, in its own order.

    stored: every prompt was sent before.  Otherwise the first one of each group misses, and the
    others may hit less than possible, because they may arrive before it has ended.
    """
    args, out = target.args, target.folder / "bench_serving.jsonl"
    out.unlink(missing_ok=True)
    shape = {
        "num-groups": args.groups,
        "prompts-per-group": args.prompts,
        "system-prompt-len": args.prefix_tokens,
        "question-len": args.question_tokens,
        "output-len": args.output_tokens,
    }
    words = ["--backend", "sglang", "--model", args.model, "--base-url", target.url]
    words += ["--dataset-name", "generated-shared-prefix"]
    words += [word for name, value in shape.items() for word in (f"--gsp-{name}", value)]
    words += ["--request-rate", args.rate, "--seed", args.seed, "--output-file", out]
    target.clients.program("sglang.bench_serving", *words, "--disable-tqdm", "--warmup-requests", 0)
    row = _last_row(out)
    shared = _whole_pages(args.prefix_tokens, args) * (args.prompts - 1)
    every = _whole_pages(args.prefix_tokens + args.question_tokens - 1, args) * args.prompts
    return {
        "requests": args.groups * args.prompts,
        "possible_tokens": args.groups * (every if stored else shared),
        "completed": row["completed"],
        "median_ttft_ms": row["median_ttft_ms"],
        "request_throughput": row["request_throughput"],
    }


def _turns(target: Target) -> dict[str, Any]:
    """SGLang's multi-turn test: whether all pages of the previous turn hit in every turn."""
    args = target.args
    given = {
        "base_url": target.url,
        "model_path": args.model,
        "num_clients": args.clients,
        "num_rounds": args.rounds,
        "request_length": args.prefix_tokens // 2,
        "output_length": args.output_tokens,
        "dataset_path": str(target.texts),
        "max_parallel": 2,
        "seed": args.seed,
    }
    answer = target.clients.ask({"function": _MULTITURN_TEST, "given": given})
    requests = {"requests": args.clients * args.rounds, "possible_tokens": _of_turns(args)}
    if "error" not in answer:
        rounds = answer["value"]["rounds"].values()
        return requests | {"completed": sum(one["request_count"] for one in rounds), "passed": True}
    if answer["error"] != "AssertionError":
        why = f"{answer['error']}: {answer['why']}"
        raise ServerError(f"SGLang's multi-turn test did not run: {why}")
    lost = [line for line in answer["said"].splitlines() if line.startswith("Round ")]
    return requests | {"passed": False, "lost": lost[-1] if lost else answer["why"]}


def _chat(target: Target, name: str, scale: float, *, stored: bool = False) -> dict[str, Any]:
    """Turns of `tutti bench ttft`, one request at a time, so that counts are reproducible.

    stored: every prompt was there before.
    """
    args, run, renderer = target.args, Run(), Renderer(IDS, _VOCABULARY)
    count = args.clients * args.rounds
    prompts = generate_chats(name, count, args.seed, scale=scale, users=args.clients)
    values = [renderer.json_value(prompt.parts) for prompt in prompts]
    calls = [
        TimedCall(number, 0.0, name, args.output_tokens, partial(bytes, value))
        for number, value in enumerate(values)
    ]
    endpoint = Endpoint("127.0.0.1", target.port)
    drive(endpoint, Generate(IDS), calls, run, timeout_s=_REQUEST_S, concurrency=1)
    good = [record for record in run.records if not record.error]
    if not good:
        raise ServerError(f"no turn of {name} was answered: {run.records[0].error}")
    span_s = max(record.done_s for record in run.records)
    tokens = [json.loads(value) for value in values]
    possible = found_by_all(tokens, args.page_size)
    if stored:
        possible = found_by_all(tokens * 2, args.page_size) - possible
    return {
        "requests": count,
        "possible_tokens": possible,
        "completed": len(good),
        "median_ttft_ms": median([latencies_ms(record)["ttft_sent"] for record in good]),
        "request_throughput": len(good) / span_s,
    }


def _bench_multiturn(target: Target, *, stored: bool = False) -> dict[str, Any]:
    """Sends one request at a time: the order of requests must not depend on response times.

    stored: every prompt was there before.
    """
    args, log = target.args, target.folder / "bench_multiturn.jsonl"
    log.unlink(missing_ok=True)
    words = ["--model-path", args.model, "--host", "127.0.0.1", "--port", target.port]
    words += ["--dataset-path", target.texts]
    words += ["--num-clients", args.clients, "--num-rounds", args.rounds]
    words += ["--request-length", args.prefix_tokens // 2]
    words += ["--max-parallel", 1, "--ready-queue-policy", "fifo"]
    words += ["--output-length", args.output_tokens, "--request-rate", args.rate]
    # Other texts than in the multi-turn test, whose texts are stored.
    words += ["--disable-auto-run", "--seed", args.seed + 1, "--log-file", log]
    target.clients.program(str(args.bench_multiturn.resolve()), *words)
    summary = _last_row(log)["summary"]
    return {
        "requests": args.clients * args.rounds,
        "possible_tokens": _of_turns(args, stored=stored),
        "completed": summary["total_requests"],
        "median_ttft_ms": 1e3 * summary["median_ttft"],
        "request_throughput": summary["throughput"],
    }


def _of_turns(args: argparse.Namespace, *, stored: bool = False) -> int:
    """Possible hits of turns that each contain the previous turn and its answer, whose last token
    has no KV.

    stored: every turn was sent before; its last token is always computed.
    """
    turn = args.prefix_tokens // 2 + args.output_tokens
    first = turn - args.output_tokens if stored else turn
    ends = range(first, args.rounds * turn, turn)
    return int(args.clients * sum(_whole_pages(end - 1, args) for end in ends))


def found_by_all(prompts: Sequence[Sequence[int]], page_size: int) -> int:
    """Possible hits of sequential prompts; the last token of each is always computed."""
    seen: set[tuple[int, ...]] = set()
    found = 0
    for ids in prompts:
        ends = range(page_size, len(ids) + 1, page_size)
        pages = [tuple(ids[:end]) for end in ends]
        known = next((n for n, page in enumerate(pages) if page not in seen), len(pages))
        found += min(known, (len(ids) - 1) // page_size) * page_size
        seen.update(pages)
    return found


def _whole_pages(tokens: int, args: argparse.Namespace) -> int:
    return int(tokens // args.page_size * args.page_size)


def _last_row(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ServerError(f"a client of SGLang left no {file.name}")
    row: dict[str, Any] = json.loads(file.read_text().splitlines()[-1])
    return row

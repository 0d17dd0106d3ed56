"""A whole workload: the source of its prompts, left-out prompts, and order of arrival."""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.arguments import positive
from tutti.bench.belady import least_recently_used, unlimited
from tutti.bench.traces import BLOCK_TOKENS, TraceRequest, reach, read_trace
from tutti.bench.ttft.workloads.chat import CHATS, REQUESTS, generate_chats
from tutti.bench.ttft.workloads.documents import load_documents
from tutti.bench.ttft.workloads.orders import AS_GIVEN, ORDERS, ROUND_ROBIN, SHUFFLED, arrange
from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart, block_ids
from tutti.bench.ttft.workloads.synthetic import TABLES, generate_documents
from tutti.bench.writable import options
from tutti.errors import ConfigError

MOONCAKE = "mooncake"
NAMES = (*TABLES, *(f"{name}-synthetic" for name in (*TABLES, *CHATS)), MOONCAKE)
#: Default number of requests, and order.
_DEFAULTS = {"leval": (3000, SHUFFLED), "loogle": (4000, ROUND_ROBIN)}
_HIT_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Workload:
    """Prompts in order of arrival.  left_out: reason -> number of prompts or rows."""

    name: str
    prompts: list[Prompt]
    order: str
    seed: int
    left_out: dict[str, int] = field(default_factory=dict)
    source_sha256: str = ""

    def digest(self) -> str:
        """Digest of the prompts and their order: equal digests mean equal requests."""
        state = hashlib.sha256()
        for prompt in self.prompts:
            names = ",".join(f"{part.name}:{part.tokens}" for part in prompt.parts)
            state.update(f"{names};{prompt.output_tokens}\n".encode())
        return state.hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Description of the workload for a result."""
        lengths = [prompt.input_tokens for prompt in self.prompts]
        outputs = [prompt.output_tokens for prompt in self.prompts]
        return {
            "name": self.name,
            "order": self.order,
            "seed": self.seed,
            "requests": len(self.prompts),
            "documents": len({prompt.document for prompt in self.prompts}),
            "tasks": sorted({prompt.task for prompt in self.prompts}),
            "input_tokens_mean": round(sum(lengths) / len(lengths), 1),
            "input_tokens_max": max(lengths),
            "output_tokens_mean": round(sum(outputs) / len(outputs), 1),
            "left_out": self.left_out,
            "source_sha256": self.source_sha256,
            "digest": self.digest(),
        }

    def hit_rates(self, capacities_tokens: Sequence[int]) -> dict[str, float]:
        """Share of whole 64-token blocks that LRU serves as a prefix, by its capacity in tokens."""
        blocks = [
            ids[: prompt.input_tokens // _HIT_BLOCK_TOKENS]
            for ids, prompt in zip(
                block_ids(self.prompts, _HIT_BLOCK_TOKENS), self.prompts, strict=True
            )
        ]
        rates = {
            str(tokens): least_recently_used(blocks, tokens // _HIT_BLOCK_TOKENS).prefix_hit_rate
            for tokens in capacities_tokens
        }
        return {**rates, "unlimited": unlimited(blocks).prefix_hit_rate}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Options: prompts and their order."""
    option = options(parser.add_argument_group("workload"))
    option(
        "--workload NAME",
        "leval-synthetic",
        "leval, loogle: real texts (--data or --hub); leval-synthetic, loogle-synthetic: "
        "their lengths, generated content; sharegpt-synthetic, multiturn-synthetic: conversations; "
        "mooncake: a trace (--data FILE)",
        NAMES,
    )
    option("--data", None, "folder of .jsonl files, or the trace", Path)
    option("--hub", False, "fetch the data set's files")
    option("--tasks TASK", [], "tasks to include (default: all)", nargs="*")
    option("--order", None, "order of requests (default: shuffled; round-robin for LooGLE)", ORDERS)
    what = "number of requests (default: 3000; LooGLE 4000; a trace: all)"
    option("--requests N", None, what, positive)
    option("--workload-seed", 1, "seed of the requests")
    what = "skip requests longer than this, prompt and answer together"
    option("--context-tokens", 128 * 1024, what, positive)
    option("--scale", 1.0, "factor for the lengths of generated documents")
    option("--skip-malformed", False, "skip malformed rows and count them")


def build_workload(args: argparse.Namespace, context_tokens: int | None = None) -> Workload:
    """The workload that the arguments describe.

    context_tokens: context length of the server; the smaller of it and --context-tokens counts.
    Raises ConfigError for contradictory arguments and if no prompt is left.
    """
    if args.scale <= 0:
        raise ConfigError(f"--scale is {args.scale}; it must be positive")
    limit = min(args.context_tokens, context_tokens or args.context_tokens)
    name, left_out, sha256 = args.workload, Counter[str](), ""
    base = name.removesuffix("-synthetic")
    if name == MOONCAKE:
        prompts = _trace_prompts(args)
    elif name in TABLES:
        documents = load_documents(
            name, args.data, hub=args.hub, tasks=args.tasks, skip_malformed=args.skip_malformed
        )
        prompts, left_out, sha256 = documents.prompts, documents.left_out, documents.sha256
    elif base in CHATS:
        prompts = _conversations(base, args)
    else:
        prompts = _generated(base, args)
    fitting = [p for p in prompts if p.input_tokens + p.output_tokens <= limit]
    if len(fitting) < len(prompts):
        left_out[f"longer than {limit} tokens"] = len(prompts) - len(fitting)
    if not fitting:
        raise ConfigError(
            f"every prompt of {name} is longer than {limit} tokens; start the server with a longer "
            "context, name other --tasks, or shrink generated documents with --scale"
        )
    requests, order = _DEFAULTS.get(base, (len(fitting), AS_GIVEN))
    order = args.order or order
    arranged = arrange(fitting, order, args.requests or requests, args.workload_seed)
    return Workload(name, arranged, order, args.workload_seed, dict(left_out), sha256)


def mooncake_requests(workload: Workload, timestamps_ms: Sequence[int]) -> list[TraceRequest]:
    """The workload in Mooncake's form, with hash ids for blocks of 512 tokens."""
    blocks = block_ids(workload.prompts, BLOCK_TOKENS)
    return [
        TraceRequest(at, prompt.input_tokens, prompt.output_tokens, tuple(ids))
        for at, prompt, ids in zip(timestamps_ms, workload.prompts, blocks, strict=True)
    ]


def _generated(base: str, args: argparse.Namespace) -> list[Prompt]:
    shapes = tuple(s for s in TABLES[base] if not args.tasks or s.task in args.tasks)
    unknown = set(args.tasks) - {shape.task for shape in shapes}
    if unknown:
        known = ", ".join(dict.fromkeys(shape.task for shape in TABLES[base]))
        raise ConfigError(f"no task {', '.join(sorted(unknown))}; there are {known}")
    return generate_documents(shapes, args.workload_seed, scale=args.scale)


def _conversations(base: str, args: argparse.Namespace) -> list[Prompt]:
    if args.tasks or args.order not in (None, AS_GIVEN):
        raise ConfigError("conversations have no tasks and one order; leave out --tasks, --order")
    return generate_chats(base, args.requests or REQUESTS, args.workload_seed, scale=args.scale)


def _trace_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.tasks:
        raise ConfigError("a trace has no tasks; leave out --tasks")
    if args.data is None:
        raise ConfigError("--workload mooncake needs --data FILE, a trace in Mooncake's format")
    return [_from_trace(request) for request in read_trace(args.data)]


def _from_trace(request: TraceRequest) -> Prompt:
    parts = tuple(
        PromptPart(f"block-{block}", reach(request, place + 1) - reach(request, place))
        for place, block in enumerate(request.hash_ids)
    )
    document = parts[0].name if parts else "empty"
    return Prompt(
        MOONCAKE, document, parts, max(1, request.output_tokens), arrival_ms=request.timestamp_ms
    )

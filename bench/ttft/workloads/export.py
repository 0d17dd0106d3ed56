"""`tutti bench workload`: describes a workload, and writes it for other clients.

The description has lengths, documents, omissions and expected hit rates.

openai: a line is {"messages", "max_tokens", ...}, which sglang.bench_serving, GuideLLM and AIPerf
read in file order.  mooncake: Mooncake's trace format with 512-token blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, facts, table
from tutti.base.units import format_nbytes
from tutti.bench.ttft.arrivals import arrival_times_s
from tutti.bench.ttft.workloads.prompt import Prompt, plain_text
from tutti.bench.ttft.workloads.source import (
    Workload,
    add_workload_arguments,
    build_workload,
    mooncake_requests,
)
from tutti.bench.writable import check_writable, options
from tutti.errors import CapacityError, system_message

OPENAI, MOONCAKE = "openai", "mooncake"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    option = options(parser.add_argument_group("export"))
    option("--format", OPENAI, "format of --out", (OPENAI, MOONCAKE))
    option("--out", None, "file to write (default: write nothing)", Path)
    option("--rate", 1.0, "requests/s of the timestamps")
    option("--seed", 1, "seed of the arrivals")
    what = "print the hit rates of plain LRU caches of so many tokens"
    option("--capacity-tokens N", [], what, int, nargs="*")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Builds the workload, describes it, and writes it to --out if given."""
    if args.out is not None:
        check_writable(args.out)
    workload = build_workload(args)
    result: dict[str, Any] = {"benchmark": "workload", **workload.facts()}
    if args.capacity_tokens:
        with progress("hit rates", 1) as bar:
            result["lru_hit_rates"] = workload.hit_rates(args.capacity_tokens)
            bar.advance(1)
    if args.out is not None:
        with progress("writing", len(workload.prompts)) as bar:
            result["written_nbytes"] = write_lines(args.out, _lines(workload, args), bar.advance)
        result["format"] = args.format
    return result


def report(result: dict[str, Any]) -> str:
    shown = [(name, value) for name, value in result.items() if not isinstance(value, dict | list)]
    shown += [("tasks", ", ".join(result["tasks"]))]
    shown += [(f"left out: {reason}", count) for reason, count in result["left_out"].items()]
    lines = [facts(shown)]
    if "lru_hit_rates" in result:
        rows = [(tokens, f"{rate:.1%}") for tokens, rate in result["lru_hit_rates"].items()]
        lines.append(table(("capacity, tokens", "blocks hit by LRU"), rows))
    if "written_nbytes" in result:
        lines.append(f"wrote {format_nbytes(result['written_nbytes'])}")
    return "\n\n".join(lines)


def openai_line(prompt: Prompt) -> str:
    """One request in the form of OpenAI's chat API; all its tokens are to be generated."""
    messages = [{"role": "user", "content": plain_text(prompt.parts)}]
    body = {"messages": messages, "max_tokens": prompt.output_tokens}
    return json.dumps({**body, "temperature": 0, "ignore_eos": True})


def write_lines(
    path: Path, lines: Iterable[str], advance: Callable[[int], object] = lambda n: None
) -> int:
    """Writes lines and returns their size in bytes; an unfinished file is removed.

    Raises CapacityError or another OSError that names the file.
    """
    nbytes = 0
    try:
        out = path.open("w", encoding="utf-8")
    except OSError as error:
        raise CapacityError(f"cannot write {system_message(error)}") from error
    try:
        with out:
            for line in lines:
                nbytes += out.write(f"{line}\n")
                advance(1)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CapacityError(f"cannot write {path}: {system_message(error)}") from error
    return nbytes


def _lines(workload: Workload, args: argparse.Namespace) -> Iterable[str]:
    if args.format == OPENAI:
        return map(openai_line, workload.prompts)
    times_s = arrival_times_s(len(workload.prompts), args.rate, args.seed)
    times_ms = [round(1000 * at) for at in times_s]
    traced_ms = [prompt.arrival_ms for prompt in workload.prompts if prompt.arrival_ms is not None]
    if len(traced_ms) == len(times_ms) and traced_ms == sorted(traced_ms):
        times_ms = traced_ms
    return (request.to_json() for request in mooncake_requests(workload, times_ms))

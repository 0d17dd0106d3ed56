"""TTFT of one prompt at a time, by the length of its cached prefix.

For each length a fresh prefix is computed once, the server's own cache is flushed, and a prompt of
the full length that begins with it is timed. With --no-flush the prefix may still be in GPU memory.
"""

from __future__ import annotations

import argparse
from typing import Any

from tutti.arguments import positive
from tutti.base.terminal import table
from tutti.bench.environment import describe
from tutti.bench.statistics import interval_text
from tutti.bench.ttft.http import ServerError
from tutti.bench.ttft.metrics import latencies_ms, mean_interval
from tutti.bench.ttft.output import Output
from tutti.bench.ttft.session import BenchSession
from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart
from tutti.bench.writable import options
from tutti.errors import ConfigError

_OUTPUT_TOKENS = 8


def add_prefix_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the measurement with one request at a time."""
    option = options(
        parser.add_argument_group(
            "cached prefixes",
            "send one prompt at a time, of which --prefix-tokens are cached, instead of rates",
        )
    )
    option("--prefix-tokens TOKENS", None, "cached tokens of a prompt", int, nargs="+")
    option("--total-tokens", 32 * 1024, "length of every prompt", positive)
    option("--repeats", 3, "prompts of each length (default 3)", positive)


def run_prefix(session: BenchSession, output: Output) -> dict[str, Any]:
    """Rows by prefix length.  Raises ConfigError for lengths beyond the prompt or the context."""
    args = session.args
    total = args.total_tokens
    if not all(0 <= tokens < total for tokens in args.prefix_tokens):
        raise ConfigError(f"--prefix-tokens must be below --total-tokens, which is {total}")
    context = session.context_tokens
    if context is not None and total + _OUTPUT_TOKENS > context:
        raise ConfigError(f"the server's context is {context} tokens; give less --total-tokens")
    rows: list[dict[str, Any]] = []
    stopped, interrupted = "", False
    try:
        for tokens in args.prefix_tokens:
            rows.append(_row(session, tokens, total, output))
    except KeyboardInterrupt:
        stopped, interrupted = "interrupted", True
    except ServerError as error:
        if not rows:
            raise
        stopped = str(error)
    result = {
        "benchmark": "ttft-prefix",
        "source": "measured",
        "system": args.system,
        "note": args.note,
        "model": session.model,
        "total_tokens": total,
        "rows": rows,
        "partial": bool(stopped or output.failed or any(row["failed"] for row in rows)),
        "stopped": stopped,
        "interrupted": interrupted,
        "output": output.failed,
        "server": session.facts,
        "machine": describe(),
    }
    output.result(result)
    return result


def prefix_report(result: dict[str, Any]) -> str:
    headers = ["prefix tokens", "share", "TTFT ms, mean [95 %]", "cached by the server", "failed"]
    rows = [
        [
            row["prefix_tokens"],
            f"{row['prefix_tokens'] / result['total_tokens']:.1%}",
            interval_text(row["ttft_ms"], 1) or "-",
            row["cached_tokens"],
            row["failed"],
        ]
        for row in result["rows"]
    ]
    lines = [
        table(headers, rows),
        f"{result['system']}, prompts of {result['total_tokens']} tokens",
    ]
    return "\n".join(lines + (["PARTIAL"] if result["partial"] else []))


def _row(session: BenchSession, tokens: int, total: int, output: Output) -> dict[str, Any]:
    """Measures prompts with `tokens` of cached prefix, one after another."""
    args = session.args
    latencies: list[float] = []
    cached: list[int] = []
    failed = 0
    with session.progress(f"prefix of {tokens} tokens", args.repeats) as bar:
        for repeat in range(args.repeats):
            name = f"{session.nonce}-{total}-{tokens}-{repeat}"
            prefix = PromptPart(f"prefix-{name}", tokens)
            rest = PromptPart(f"rest-{name}", total - tokens)
            if tokens:
                session.ask(Prompt("prefix", name, (prefix,), 1), repeat)
            session.flush()
            run = session.ask(Prompt("prefix", name, (prefix, rest), _OUTPUT_TOKENS), repeat)
            (record,) = run.records
            output.requests({"prefix_tokens": tokens}, run.records)
            if record.error:
                failed += 1
            else:
                latencies.append(latencies_ms(record)["ttft_sent"])
                cached.append(sum(record.cached.values()))
            bar.advance(1)
    return {
        "prefix_tokens": tokens,
        "ttft_ms": mean_interval(latencies) if latencies else None,
        "cached_tokens": round(sum(cached) / len(cached)) if cached else None,
        "failed": failed,
    }

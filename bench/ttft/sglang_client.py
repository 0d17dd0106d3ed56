"""`sglang.bench_serving` as a second client: run as a subprocess, its JSON line read.

It differs from the builtin client.  It sleeps for each gap after the previous one, so its rate is
lower than asked.  Latencies count from the sending of a request, and ITL counts stream events.
Prompts are chats, so the tokenizer needs a chat template.  A result names its client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.bench.ttft.http import ServerError
from tutti.bench.ttft.metrics import Slo, spread
from tutti.bench.ttft.workloads.export import openai_line, write_lines
from tutti.bench.ttft.workloads.prompt import Prompt
from tutti.errors import Unsupported

_START_S = 180.0
_MODULE = "sglang.bench_serving"


@dataclass(frozen=True)
class ServingClient:
    """SGLang's own client and its server.

    python: an interpreter with SGLang.  model: path or name of the tokenizer; by default the
    server's.
    """

    url: str
    timeout_s: float
    api_key: str | None = None
    python: str = sys.executable
    model: str | None = None


def bench_serving(
    client: ServingClient, prompts: Sequence[Prompt], *, rate: float, seed: int, slos: Sequence[Slo]
) -> dict[str, Any]:
    """One point, measured by SGLang's own client.

    Raises Unsupported without SGLang, ServerError when the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="tutti-ttft-") as folder:
        requests, out = Path(folder, "requests.jsonl"), Path(folder, "out.jsonl")
        write_lines(requests, map(openai_line, prompts))
        command = [client.python, "-m", _MODULE, "--backend", "sglang-oai-chat"]
        command += ["--base-url", client.url]
        command += ["--dataset-name", "openai", "--dataset-path", str(requests)]
        command += ["--num-prompts", str(len(prompts)), "--request-rate", str(rate)]
        command += ["--seed", str(seed), "--output-file", str(out), "--output-details"]
        command += ["--cache-report", "--disable-tqdm", "--warmup-requests", "0"]
        command += ["--model", client.model] if client.model else []
        _run(command, len(prompts) / rate + client.timeout_s + _START_S, client.api_key)
        return read_point(out, slos)


def read_point(path: Path, slos: Sequence[Slo]) -> dict[str, Any]:
    """Reads a point from the last line of the output.  Raises ServerError if it is invalid."""
    try:
        row = json.loads(path.read_text().splitlines()[-1])
        return _point(row, slos)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise ServerError(
            f"{_MODULE} left no result that can be read ({type(error).__name__}: {error}); "
            "run it by hand to see why"
        ) from error


def _run(command: list[str], timeout_s: float, api_key: str | None) -> None:
    environment = {**os.environ, **({"OPENAI_API_KEY": api_key} if api_key else {})}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise Unsupported(f"no interpreter {command[0]}; give --sglang-python") from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{_MODULE} did not end within {timeout_s:g} s") from error
    if done.returncode:
        if "No module named" in done.stderr:
            missing = done.stderr.rpartition("No module named ")[2].splitlines()[0]
            raise Unsupported(
                f"{_MODULE} lacks the module {missing}; install it there, name another interpreter "
                "with --sglang-python, or use --client builtin"
            )
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ServerError(f"{_MODULE} ended with {done.returncode}:\n{last}")


def _point(row: dict[str, Any], slos: Sequence[Slo]) -> dict[str, Any]:
    errors = [error for error in row["errors"] if error]
    sent, failed = len(row["errors"]), len(errors)
    values, gaps = [], []
    details = zip(row["errors"], row["ttfts"], row["itls"], row["output_lens"], strict=True)
    for error, ttft_s, itls_s, tokens in details:
        if error:
            continue
        after_s = sum(itls_s)
        tpot_s = after_s / (tokens - 1) if tokens > 1 else 0.0
        values.append({"ttft": 1e3 * ttft_s, "tpot": 1e3 * tpot_s, "e2e": 1e3 * (ttft_s + after_s)})
        gaps += [1e3 * gap for gap in itls_s]
    met = {slo: sum(slo.is_met(value) for value in values) for slo in slos}
    duration_s = row["duration"]
    return {
        "requests": sent,
        "failed": failed,
        "errors": {error[:120]: errors.count(error) for error in dict.fromkeys(errors[:10])},
        "warmup_requests": 0,
        "partial": False,
        "duration_s": duration_s,
        "request_throughput": row["request_throughput"],
        "input_tokens_per_s": row["input_throughput"],
        "output_tokens_per_s": row["output_throughput"],
        **{f"{name}_ms": spread([v[name] for v in values]) for name in ("ttft", "tpot", "e2e")},
        "itl_ms": spread(gaps),
        "slo": {
            str(slo): {"goodput": count / duration_s, "attainment": count / sent}
            for slo, count in met.items()
        },
        "cached": _cached(row.get("cache_report") or {}),
        # Unknown: the output has no times at which requests ended.
        "unstable": None,
    }


def _cached(report: dict[str, Any]) -> dict[str, Any]:
    prompt = report.get("total_prompt_tokens") or 0
    total = report.get("total_cached_tokens") or 0
    places = {
        f"{place}_tokens": report.get(f"{place}_cached_tokens") or 0
        for place in ("device", "host", "storage")
    }
    return {
        "prompt_tokens": prompt,
        **places,
        "unknown_tokens": total - sum(places.values()),
        "hit_rate": total / prompt if prompt else None,
    }

"""SGLang's own clients against a server of each system: what they count as hits, and from where.

    python -m tutti.bench.yardsticks.serving --model FOLDER --dir /mnt/nvme --out serving.json

The Python that runs it has SGLang.  A server of each system is started as `tutti bench serve` does
and asked three times: by `bench_serving` with groups of shared prefixes; by the same prompts again
after a flush of the server's own caches, so that what hits comes from storage; and by SGLang's
multi-turn test, which refuses less than every page of the turns before.  `--bench-multiturn` names
SGLang's benchmark/hicache/bench_multiturn.py, which its packages lack, to be run as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.bench.environment import describe
from tutti.bench.ttft.http import Endpoint, ServerError
from tutti.bench.ttft.recipes import RECIPES
from tutti.bench.ttft.server_control import Control
from tutti.bench.writable import check_writable
from tutti.errors import ConfigError, DeviceTimeout, TuttiError, Unsupported

SOURCES = ("device", "host", "storage", "total")
SCRIPT = "https://github.com/sgl-project/sglang, benchmark/hicache/bench_multiturn.py"
_UP_S, _END_S, _STEP_S, _POLL_S = 600.0, 120.0, 600.0, 0.3
_SETTLE_S = 3.0  # for write-through
_DATA_WORDS = 4000
_SETTINGS = (
    *("groups", "prompts", "prefix_tokens", "question_tokens", "clients", "rounds"),
    *("output_tokens", "rate", "seed", "page_size", "dram", "capacity", "more", "note"),
)
#: SGLang's test prints as it goes; what it returns is the last line.
_KIT = """
import json, sys
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
result = run_multiturn_cache_hit_test(**json.loads(sys.argv[1]))
print(json.dumps(result))
"""
_METRIC = re.compile(
    r"^(sglang:(?:cached|prompt)_tokens_total)\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--model", required=True, help="folder or name of a model with tokenizer")
    parser.add_argument("--dir", default=".", help="folder on the drive (%(default)s)")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=RECIPES,
        default=list(RECIPES),
        help="systems (default: all)",
    )
    parser.add_argument("--capacity", default="1GiB", help="size of the storage (%(default)s)")
    parser.add_argument("--dram", default="1GB", help="host memory for KV (%(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per page (%(default)s)")
    parser.add_argument("--groups", type=int, default=12, help="shared prefixes (%(default)s)")
    parser.add_argument("--prompts", type=int, default=3, help="prompts per group (%(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=512, help="shared part (%(default)s)")
    parser.add_argument(
        "--question-tokens",
        type=int,
        default=64,
        help="tokens of a question that no other request has (%(default)s)",
    )
    parser.add_argument("--clients", type=int, default=6, help="multi-turn clients (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="turns per client (%(default)s)")
    parser.add_argument(
        "--output-tokens", type=int, default=8, help="tokens per answer (%(default)s)"
    )
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts (%(default)s)")
    parser.add_argument("--bench-multiturn", type=Path, help=f"a copy of {SCRIPT}")
    parser.add_argument("--note", default="", help="kept with the result")
    parser.add_argument(
        "--more",
        default="",
        metavar="ARGUMENTS",
        help="more arguments for SGLang, in one word: --more='...'",
    )
    parser.add_argument("--out", type=Path, help="also write the result to this file (JSON)")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures; the result for JSON.  Raises TuttiError."""
    counts = (args.groups, args.prompts, args.clients, args.rounds, args.output_tokens)
    if min(*counts, args.prefix_tokens, args.question_tokens) < 1 or args.rate <= 0:
        raise ConfigError("every count and the rate must be positive")
    if not Path(args.dir).is_dir():
        raise ConfigError(f"{args.dir} is not a directory; make it, or name another with --dir")
    if find_spec("sglang") is None:
        raise Unsupported("sglang is not installed for this Python; use one that has it")
    skipped = {name: f"{needs} is not installed" for name in args.systems
               if (needs := RECIPES[name].needs) and find_spec(needs) is None}  # fmt: skip
    if args.bench_multiturn is None:
        skipped["bench_multiturn"] = f"not in SGLang's packages; --bench-multiturn takes {SCRIPT}"
    elif not args.bench_multiturn.is_file():
        raise ConfigError(f"{args.bench_multiturn} is not a file; it is at {SCRIPT}")
    systems = [name for name in args.systems if name not in skipped]
    cells: dict[str, Any] = {}
    result = {
        "benchmark": "serving",
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "bench_multiturn": _file_facts(args.bench_multiturn),
        "systems": cells,
        "skipped": skipped,
        "machine": describe(args.dir),
    }
    skipped |= dict.fromkeys(systems, "the run ended before")
    with progress("SGLang's clients", len(systems)) as bar:
        for name in systems:
            with tempfile.TemporaryDirectory(prefix="tutti-serving-", dir=args.dir) as folder:
                try:
                    cells[name] = _system(name, args, Path(folder))
                except (ServerError, DeviceTimeout) as error:  # the others count
                    skipped[name] = str(error)
                else:
                    del skipped[name]
            if args.out:  # a server takes minutes, and those that were asked count
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            bar.advance(1)
    return result


def _file_facts(file: Path | None) -> dict[str, str]:
    return {} if file is None else {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _system(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One server, asked by each client."""
    data = folder / "texts.json"
    data.write_text(json.dumps(_texts(args.seed)))
    with _server(name, args, folder) as (port, facts):
        control = Control(Endpoint("127.0.0.1", port))
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "first": partial(_bench_serving, args, port, folder),
            "again": partial(_bench_serving, args, port, folder),
            "turns": partial(_turns, args, port, data),
        }
        if args.bench_multiturn is not None:
            steps["bench_multiturn"] = partial(_bench_multiturn, args, port, data, folder)
        found: dict[str, Any] = {}
        for step, ask in steps.items():
            control.flush()
            before = counters(control)
            answers = ask()
            time.sleep(_SETTLE_S)
            found[step] = answers | hits(before, counters(control))
        return {"server": facts, **found}


def _texts(seed: int) -> list[dict[str, Any]]:
    """Conversations in ShareGPT's format, of numbers as words."""
    rng = random.Random(seed)

    def words() -> str:
        return " ".join(str(rng.randrange(1, 1000)) for _ in range(_DATA_WORDS))

    says = [[{"from": who, "value": words()} for who in ("human", "gpt")] for _ in range(200)]
    return [{"id": str(number), "conversations": said} for number, said in enumerate(says)]


def counters(control: Control) -> dict[str, float]:
    """Prompt tokens, and cached ones by their source, as the server has counted them."""
    status, text = control.call("GET", "/metrics")
    if status != 200:
        raise ServerError(f"the server has no /metrics (status {status}); see its log")
    return read_counters(text)


def read_counters(text: str) -> dict[str, float]:
    """`counters`, from Prometheus's text."""
    found = dict.fromkeys(("prompt", *SOURCES), 0.0)
    for name, labels, value in _METRIC.findall(text):
        source = re.search(r'cache_source="(\w+)"', labels)
        key = source[1] if source else "prompt"
        if (name == "sglang:prompt_tokens_total") == (key == "prompt") and key in found:
            found[key] += float(value)
    return found


def hits(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Tokens of prompts in between, and where their KV came from."""
    tokens = {name: int(after[name] - before[name]) for name in after}
    cached = sum(tokens[name] for name in SOURCES)
    prompt = tokens.pop("prompt")
    return {
        "prompt_tokens": prompt,
        **{f"{name}_tokens": count for name, count in tokens.items()},
        "hit_rate": cached / prompt if prompt else 0.0,
    }


def _bench_serving(args: argparse.Namespace, port: int, folder: Path) -> dict[str, Any]:
    """`bench_serving` with its groups of shared prefixes, in an order of its own."""
    out = folder / "bench_serving.jsonl"
    out.unlink(missing_ok=True)
    shape = {
        "num-groups": args.groups,
        "prompts-per-group": args.prompts,
        "system-prompt-len": args.prefix_tokens,
        "question-len": args.question_tokens,
        "output-len": args.output_tokens,
    }
    words = ["-m", "sglang.bench_serving", "--backend", "sglang", "--model", args.model]
    words += ["--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "generated-shared-prefix"]
    words += [word for name, value in shape.items() for word in (f"--gsp-{name}", str(value))]
    words += ["--request-rate", str(args.rate), "--seed", str(args.seed)]
    words += ["--output-file", str(out), "--disable-tqdm", "--warmup-requests", "0"]
    done = _client(words, folder)
    if done.returncode or not out.exists():
        raise ServerError(f"bench_serving ended with {done.returncode}: {_last(done.stderr)}")
    row = json.loads(out.read_text().splitlines()[-1])
    return {
        "requests": args.groups * args.prompts,
        "completed": row["completed"],
        "median_ttft_ms": row["median_ttft_ms"],
        "request_throughput": row["request_throughput"],
    }


def _turns(args: argparse.Namespace, port: int, data: Path) -> dict[str, Any]:
    """SGLang's multi-turn test: whether every turn found all pages of the one before."""
    given = {
        "base_url": f"http://127.0.0.1:{port}",
        "model_path": args.model,
        "num_clients": args.clients,
        "num_rounds": args.rounds,
        "request_length": args.prefix_tokens // 2,
        "output_length": args.output_tokens,
        "dataset_path": str(data),
        "max_parallel": 2,
        "seed": args.seed,
    }
    done = _client(["-c", _KIT, json.dumps(given)], data.parent)
    told = done.stdout.strip().splitlines()
    requests = {"requests": args.clients * args.rounds}
    if done.returncode == 0 and told:
        rounds = json.loads(told[-1])["rounds"]
        completed = sum(one["request_count"] for one in rounds.values())
        ttfts = [1e3 * one["average_ttft"] for one in rounds.values()]
        return requests | {"completed": completed, "passed": True, "round_ttft_ms": ttfts}
    if "AssertionError" not in done.stderr:
        raise ServerError(f"SGLang's multi-turn test did not run: {_last(done.stderr)}")
    lost = [line for line in told if line.startswith("Round ")]
    return requests | {"passed": False, "lost": lost[-1] if lost else _last(done.stderr)}


def _bench_multiturn(
    args: argparse.Namespace, port: int, data: Path, folder: Path
) -> dict[str, Any]:
    log = folder / "bench_multiturn.jsonl"
    log.unlink(missing_ok=True)
    words = [str(args.bench_multiturn.resolve()), "--model-path", args.model]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dataset-path", str(data)]
    words += ["--num-clients", str(args.clients), "--num-rounds", str(args.rounds)]
    words += ["--request-length", str(args.prefix_tokens // 2), "--max-parallel", "2"]
    words += ["--output-length", str(args.output_tokens), "--request-rate", str(args.rate)]
    words += ["--disable-auto-run", "--seed", str(args.seed), "--log-file", str(log)]
    done = _client(words, folder)
    if done.returncode or not log.exists():
        raise ServerError(f"bench_multiturn ended with {done.returncode}: {_last(done.stderr)}")
    summary = json.loads(log.read_text().splitlines()[-1])["summary"]
    return {
        "requests": args.clients * args.rounds,
        "completed": summary["total_requests"],
        "median_ttft_ms": 1e3 * summary["median_ttft"],
        "request_throughput": summary["throughput"],
    }


def _client(words: Sequence[str], home: Path) -> subprocess.CompletedProcess[str]:
    """One of SGLang's clients; what it caches for itself goes with the folder."""
    try:
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=_STEP_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceTimeout(f"a client of SGLang took more than {_STEP_S:g} s") from error


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


@contextmanager
def _server(
    name: str, args: argparse.Namespace, folder: Path
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Port and facts of a server of `tutti bench serve`, which is ended afterwards."""
    info, log, port = folder / "info.json", folder / "log", _free_port()
    words = ["bench", "serve", name, "--model", args.model, "--dir", str(folder / "kv")]
    words += ["--capacity", args.capacity, "--dram", args.dram, "--page-size", str(args.page_size)]
    words += ["--port", str(port), "--info", str(info), "--json", f"--more={args.more}"]
    with log.open("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tutti.cli", *words], stdout=subprocess.DEVNULL, stderr=file
        )
        try:
            deadline = time.monotonic() + _UP_S
            while not info.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"{name} does not start: {_last(log.read_text())}")
                time.sleep(_POLL_S)
            server = json.loads(info.read_text())["server"]
            names = ("version", "model_path", "page_size", "max_total_num_tokens", "tp_size")
            yield port, {key: server[key] for key in names if key in server}
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            finally:
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HEAD = (
    *("system", "asked by", "completed", "prompt tokens", "device", "host", "storage", "hits"),
    *("median TTFT ms", "requests/s"),
)
_STEPS = {
    "first": "bench_serving",
    "again": "the same after a flush",
    "turns": "multi-turn test",
    "bench_multiturn": "bench_multiturn",
}


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD: tokens by where their KV was, as the server counted them."""
    rows = []
    for system, cell in result["systems"].items():
        for step, name in _STEPS.items():
            if one := cell.get(step):
                completed = f"{one['completed']} of {one['requests']}" if "completed" in one else ""
                ttft, rate = one.get("median_ttft_ms"), one.get("request_throughput")
                rows.append(
                    [
                        *(system, name, completed or "**fails**", str(one["prompt_tokens"])),
                        *(str(one[f"{source}_tokens"]) for source in SOURCES[:3]),
                        f"{one['hit_rate']:.1%}",
                        *("" if value is None else f"{value:.3g}" for value in (ttft, rate)),
                    ]
                )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """What the table does not say."""
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items() if value)
    lost = [
        f"{system} fails SGLang's multi-turn test: {cell['turns']['lost']}"
        for system, cell in result["systems"].items()
        if not cell["turns"]["passed"]
    ]
    return [settings, *lost, *(f"skipped {name}: {why}" for name, why in result["skipped"].items())]


def report(result: dict[str, Any]) -> str:
    """For people."""
    return "\n".join([table(HEAD, rows_of(result)), *notes_of(result)])


def main(argv: list[str] | None = None) -> int:
    """Runs it and prints the result."""
    from tutti.base.terminal import progress

    parser = argparse.ArgumentParser(prog="tutti.bench.yardsticks.serving", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if args.out:
            check_writable(args.out)
        print(report(run(args, progress)))
    except TuttiError as error:
        print(f"tutti.bench.yardsticks.serving: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

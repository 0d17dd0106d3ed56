"""SGLang's own clients against a server of each system: their hits, by source.

    python -m tutti.bench.yardsticks.serving --model FOLDER --dir /mnt/nvme --out serving.json

The Python that runs it has SGLang.  A server of each system is started as `tutti bench serve` does,
anew in each pass and with an empty folder.  Passes rotate the order of systems; numbers are medians
over passes.  After a discarded warm-up these clients follow: `bench_serving` with groups of shared
prefixes; the same prompts again after a flush of the server's own caches, so that hits come from
storage; SGLang's multi-turn test, which fails unless all pages of earlier turns hit; and
conversations of `tutti bench ttft`.  `--bench-multiturn` adds two runs of a copy of SGLang's
benchmark/hicache/bench_multiturn.py, which is not in its packages.  `--small-capacity` adds a run
with eviction for the systems that respect a capacity.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.bench.environment import describe
from tutti.bench.meter import in_turn
from tutti.bench.ttft.http import Endpoint, ServerError
from tutti.bench.ttft.recipes import RECIPES
from tutti.bench.ttft.server_control import Control
from tutti.bench.writable import check_writable, options
from tutti.bench.yardsticks.serving_steps import STEPS, Target, steps_of, warm_up
from tutti.bench.yardsticks.sglang_clients import Clients
from tutti.errors import ConfigError, DeviceTimeout, TuttiError, Unsupported

SOURCES = ("device", "host", "storage", "total")
SCRIPT = "https://github.com/sgl-project/sglang, benchmark/hicache/bench_multiturn.py"
_UP_S, _END_S, _POLL_S = 600.0, 120.0, 0.3
_SETTLE_S = 1.5  # for write-through
_GONE_S = 10.0  # wait for the exit of a server whose connection broke
_COUNTED_S = 11.0  # a linker publishes evictions every ten seconds
_DATA_WORDS = 4000
_LINES = 3  # last lines of a log, shown as the reason of a failure
_SETTINGS = (
    *("groups", "prompts", "prefix_tokens", "question_tokens", "clients", "rounds"),
    *("output_tokens", "rate", "seed", "passes", "page_size", "dram", "capacity"),
    *("small_capacity", "more", "note"),
)
_METRIC = re.compile(
    r"^(?:sglang|tutti):(cached_tokens|prompt_tokens|evicted_tokens|evicted_objects)_total"
    r"\{([^}]*)\} ([0-9.e+]+)$",
    re.MULTILINE,
)
#: Systems whose storage respects its capacity; docs/benchmarks.md lists the others.
_BOUNDED = ("hicache-file", "tutti-hicache", "tutti-linker")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--model", None, "folder or name of a model with tokenizer", required=True)
    option("--dir", ".", "folder on the drive (%(default)s)")
    option("--systems", list(RECIPES), "default: all", RECIPES)
    option("--capacity", "1GiB", "size of the storage (%(default)s)")
    what = f"also measure a storage that evicts, with {', '.join(_BOUNDED)}"
    option("--small-capacity SIZE", None, what)
    option("--passes", 3, "of all systems (%(default)s)")
    option("--dram", "1GB", "host memory for KV (%(default)s)")
    option("--page-size", 64, "tokens per page (%(default)s)")
    option("--groups", 12, "shared prefixes (%(default)s)")
    option("--prompts", 3, "prompts per group (%(default)s)")
    option("--prefix-tokens", 512, "shared part (%(default)s)")
    what = "tokens of a question that no other request has (%(default)s)"
    option("--question-tokens", 64, what)
    option("--clients", 6, "multi-turn clients (%(default)s)")
    option("--rounds", 4, "turns per client (%(default)s)")
    option("--output-tokens", 8, "per answer (%(default)s)")
    option("--rate", 4.0, "requests/s (%(default)s)")
    option("--seed", 1, "seed of the prompts (%(default)s)")
    option("--bench-multiturn", None, f"a copy of {SCRIPT}", Path)
    option("--note", "", "kept with the result")
    what = "more arguments for SGLang, in one word: --more='...'"
    option("--more ARGUMENTS", "", what)
    option("--out", None, "also write the result to this file (JSON)", Path)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures, and returns the result for JSON.  Raises TuttiError."""
    counts = (args.groups, args.prompts, args.clients, args.rounds, args.output_tokens, args.passes)
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
    measured: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    result = {
        "benchmark": "serving",
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "bench_multiturn": _file_facts(args.bench_multiturn),
        "systems": {},
        "skipped": skipped,
        "machine": describe(args.dir),
    }
    plan = plan_of(systems, args)
    with (
        tempfile.TemporaryDirectory(prefix="tutti-serving-", dir=args.dir) as home,
        closing(Clients(Path(home))) as clients,
        progress("SGLang's clients", len(plan)) as bar,
    ):
        texts = Path(home, "texts.json")
        texts.write_text(json.dumps(_texts(args.seed)))
        for cell in plan:
            try:
                measured.setdefault(cell.title, []).append(_life(cell, args, clients, texts))
            except (ServerError, DeviceTimeout, Unsupported) as error:  # the others count
                failed[cell.title] = str(error)
            done = {name: medians(passes) for name, passes in measured.items() if passes}
            to_do = {each.title: "the run ended before" for each in plan if each.title not in done}
            result |= {"systems": done, "skipped": {**skipped, **to_do, **failed}}
            if args.out:  # a server takes minutes, and those that were asked count
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            bar.advance(1)
    return result


@dataclass(frozen=True)
class Cell:
    """One start of a server.  small: its storage is so small that it evicts."""

    system: str
    capacity: str
    small: bool = False

    @property
    def title(self) -> str:
        """Its name in results."""
        return f"{self.system}, {self.capacity}" if self.small else self.system


def plan_of(systems: Sequence[str], args: argparse.Namespace) -> list[Cell]:
    """Passes over the systems in rotated order, and at the end once with small storages."""
    order = [name for turn in range(args.passes) for name in in_turn(systems, turn)]
    small = [name for name in systems if args.small_capacity and name in _BOUNDED]
    return [
        *(Cell(name, args.capacity) for name in order),
        *(Cell(name, args.small_capacity, small=True) for name in small),
    ]


def medians(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each step's numbers, and all passes.  Failed passes of a step count alone."""
    found: dict[str, Any] = {"server": passes[0]["server"], "passes": list(passes)}
    for step in (name for name in STEPS if name in passes[0]):
        runs = [one[step] for one in passes]
        lost = [run for run in runs if run.get("passed") is False]
        common = [key for key in (lost or runs)[0] if all(key in run for run in lost or runs)]
        found[step] = {key: _middle([run[key] for run in lost or runs]) for key in common}
    return found


def _middle(values: Sequence[Any]) -> Any:
    """The median, as one of the values, for counts too; for other types the first value."""
    is_number = not isinstance(values[0], bool | str)
    return sorted(values)[(len(values) - 1) // 2] if is_number else values[0]


def _file_facts(file: Path | None) -> dict[str, str]:
    return {} if file is None else {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _life(cell: Cell, args: argparse.Namespace, clients: Clients, texts: Path) -> dict[str, Any]:
    """Starts one server and runs each client."""
    with (
        tempfile.TemporaryDirectory(prefix="tutti-serving-", dir=args.dir) as made,
        _server(cell, args, Path(made)) as (port, facts),
    ):
        control = Control(Endpoint("127.0.0.1", port))
        target = Target(port, clients, Path(made), texts, args)
        warm_up(target)
        time.sleep(_SETTLE_S)
        found: dict[str, Any] = {}
        for step, ask in steps_of(target, small=cell.small).items():
            control.flush()
            before = counters(control)
            answers = ask()
            time.sleep(_SETTLE_S)
            found[step] = answers | hits(before, counters(control))
        if cell.small and cell.system.startswith("tutti"):
            time.sleep(_COUNTED_S)
            facts["evicted_objects"] = int(counters(control)["evicted_objects"])
        return {"server": facts, **found}


def _texts(seed: int) -> list[dict[str, Any]]:
    """Conversations in ShareGPT's format, with numbers as words."""
    rng = random.Random(seed)

    def words() -> str:
        return " ".join(str(rng.randrange(1, 1000)) for _ in range(_DATA_WORDS))

    says = [[{"from": who, "value": words()} for who in ("human", "gpt")] for _ in range(200)]
    return [{"id": str(number), "conversations": said} for number, said in enumerate(says)]


def counters(control: Control) -> dict[str, float]:
    """The server's counters of prompt tokens, and of cached ones by source."""
    status, text = control.call("GET", "/metrics")
    if status != 200:
        raise ServerError(f"the server has no /metrics (status {status}); see its log")
    return read_counters(text)


def read_counters(text: str) -> dict[str, float]:
    """Parses `counters` from Prometheus's text, and evicted tokens (of the first rank)."""
    found = dict.fromkeys(("prompt", *SOURCES, "evicted_tokens", "evicted_objects"), 0.0)
    for name, labels, value in _METRIC.findall(text):
        source = re.search(r'cache_source="(\w+)"', labels)
        key = {"prompt_tokens": "prompt", "cached_tokens": source and source[1]}.get(name, name)
        is_another_ranks = name == "evicted_tokens" and 'tp_rank="0"' not in labels
        if key in found and not is_another_ranks:
            found[key] += float(value)
    return found


def hits(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Prompt tokens between two readings, cached ones by source, and evicted ones."""
    tokens = {name: int(after[name] - before[name]) for name in after}
    cached, prompt = sum(tokens[name] for name in SOURCES), tokens["prompt"]
    return {
        "prompt_tokens": prompt,
        **{f"{name}_tokens": tokens[name] for name in SOURCES},
        "evicted_tokens": tokens["evicted_tokens"],
        "hit_rate": cached / prompt if prompt else 0.0,
    }


def _last(text: str) -> str:
    """Last lines of a log.  A daemon's failure comes before the server's own line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:]) or "it said nothing"


@contextmanager
def _server(
    cell: Cell, args: argparse.Namespace, folder: Path
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Starts `tutti bench serve`, gives (port, facts), and ends it afterwards."""
    info, log, port = folder / "info.json", folder / "log", _free_port()
    words = ["bench", "serve", cell.system, "--model", args.model, "--dir", str(folder / "kv")]
    words += ["--capacity", cell.capacity, "--dram", args.dram, "--page-size", str(args.page_size)]
    words += ["--port", str(port), "--info", str(info), "--json", f"--more={args.more}"]
    with log.open("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tutti.cli", *words], stdout=subprocess.DEVNULL, stderr=file
        )
        try:
            deadline = time.monotonic() + _UP_S
            while not info.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Unsupported(f"{cell.system} does not start: {_last(log.read_text())}")
                time.sleep(_POLL_S)
            server = json.loads(info.read_text())["server"]
            names = ("version", "model_path", "page_size", "max_total_num_tokens", "tp_size")
            yield port, {key: server[key] for key in names if key in server}
        except ServerError as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GONE_S)
                raise ServerError(f"the server ended: {_last(log.read_text())}") from error
            raise
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
    *("possible", "evicted", "median TTFT ms", "requests/s"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD: the server's counts of tokens by the source of their KV."""
    rows = []
    for system, cell in result["systems"].items():
        for step, name in STEPS.items():
            if one := cell.get(step):
                completed = f"{one['completed']} of {one['requests']}" if "completed" in one else ""
                possible = one.get("possible_tokens", 0) / one["prompt_tokens"]
                ttft, rate = one.get("median_ttft_ms"), one.get("request_throughput")
                rows.append(
                    [
                        *(system, name, completed or "**fails**", str(one["prompt_tokens"])),
                        *(str(one[f"{source}_tokens"]) for source in SOURCES[:3]),
                        *(f"{one['hit_rate']:.1%}", f"{possible:.1%}"),
                        str(one.get("evicted_tokens", "")),
                        *("" if value is None else f"{value:.3g}" for value in (ttft, rate)),
                    ]
                )
    return rows


def hit_notes(result: dict[str, Any]) -> list[str]:
    """Notes on systems whose hits differ from the possible ones in a step of any pass.

    In bench_serving's first run, where requests of a group overlap, and with small storage, fewer
    hits are expected, so only more are noted.
    """
    lines, good = [], []
    for title, cell in result["systems"].items():
        found: dict[str, str] = {}
        for one in cell.get("passes", [cell]):
            for step in (step for step in STEPS if "possible_tokens" in one.get(step, {})):
                tokens = sum(one[step][source + "_tokens"] for source in SOURCES)
                possible = one[step]["possible_tokens"]
                may_lose = step == "first" or title not in RECIPES
                if tokens > possible or (tokens < possible and not may_lose):
                    found[STEPS[step]] = f"{STEPS[step]} {tokens} of {possible}"
        has_none = title in RECIPES and not RECIPES[title].uses_storage
        name = f"{title} (no SSD tier)" if has_none else title
        if found:
            lines.append(f"{name} found, in tokens: {', '.join(found.values())}")
        elif title in RECIPES and "possible_tokens" in cell.get("again", {}):
            good.append(name)
    return [*([f"found all that is possible: {', '.join(good)}"] if good else []), *lines]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes below the table.  Its "evicted" are tokens of SGLang's own KV pool."""
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items() if value)
    ranks = {cell["server"].get("tp_size", 1) for cell in result["systems"].values()}
    passes = {name: len(cell.get("passes", [cell])) for name, cell in result["systems"].items()}
    usual = max(passes.values(), default=0)
    fewer = [f"{name} {count}" for name, count in passes.items() if count < usual]
    lost = [
        f"{system} fails SGLang's multi-turn test: {cell['turns']['lost']}"
        for system, cell in result["systems"].items()
        if not cell.get("turns", {"passed": True})["passed"]
    ]
    small = [
        f"{system}: the pool evicted {cell['server']['evicted_objects']} objects while it was asked"
        for system, cell in result["systems"].items()
        if "evicted_objects" in cell["server"]
    ]
    return [
        settings,
        f"ranks of a server: {', '.join(map(str, sorted(ranks)))}; medians of {usual} passes"
        + (f" (fewer: {'; '.join(fewer)})" if fewer else ""),
        *hit_notes(result),
        *small,
        *lost,
        *(
            f"{'a pass failed' if name in passes else 'skipped'}, {name}: {why}"
            for name, why in result["skipped"].items()
        ),
    ]


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(HEAD, rows_of(result)), *notes_of(result)])


def main(argv: list[str] | None = None) -> int:
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

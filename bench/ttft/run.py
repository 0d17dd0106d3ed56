"""`tutti bench ttft`: time to first token against request rate, on a running server.

Also the time between tokens (ITL, TPOT) and goodput. Every system gets the same prompts at the same
random (Poisson) times; latencies count from the time when a request is due. With --prefix-tokens,
sends one prompt at a time and measures against the length of the cached prefix. What a number means
is in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.bench.environment import describe
from tutti.bench.figures.data import RATE, rows_of
from tutti.bench.figures.run import write_figure
from tutti.bench.statistics import interval_text
from tutti.bench.ttft.compare import compare_results, comparison_report
from tutti.bench.ttft.http import ServerError
from tutti.bench.ttft.metrics import Slo, parse_slo
from tutti.bench.ttft.output import Output, read_result
from tutti.bench.ttft.prefix import add_prefix_arguments, prefix_report, run_prefix
from tutti.bench.ttft.session import (
    POISSON,
    POPULATED,
    TRACE,
    BenchSession,
    add_session_arguments,
    open_session,
)
from tutti.bench.ttft.sglang_client import ServingClient, bench_serving
from tutti.bench.ttft.sweep import (
    ATTAINMENT_MIN,
    Condition,
    Point,
    Stopped,
    Sweep,
    attained,
    by_rate,
    mean_ttft_within,
)
from tutti.bench.ttft.workloads.prompt import Prompt, salted
from tutti.bench.ttft.workloads.source import add_workload_arguments
from tutti.bench.writable import options
from tutti.errors import ConfigError

BUILTIN, SGLANG = "builtin", "sglang"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_arguments(parser)
    add_workload_arguments(parser)
    option = options(parser.add_argument_group("measurement"))
    option("--system", "server", "name of the server in the results")
    option("--note", "", "kept with the results, e.g. what is emulated")
    option("--rates REQUESTS_PER_S", [0.25, 0.5, 1.0, 1.5], "request rates to measure")
    option("--seeds", [1, 2, 3], "seeds of the arrivals")
    what = "trace: the trace's own times, stretched to each rate; --seeds then has no effect"
    option("--arrivals", POISSON, what, (POISSON, TRACE))
    option("--seconds", None, "send only requests due within this time, per rate", float)
    what = "latency limits that a request must meet; may be repeated; default ttft:1000"
    option("--slo ttft:MS,tpot:MS", None, what, _slo, action="append")
    what = "also search for the highest rate with a mean TTFT within --ttft-limit-ms, and the "
    what += f"highest rate at which a share of {ATTAINMENT_MIN:g} of the requests meets each SLO"
    option("--max-rate", False, what)
    option("--ttft-limit-ms", 1000.0, "mean TTFT that --max-rate allows")
    option("--tolerance", 0.05, "tolerance of the search (default 0.05)")
    option("--rate-limit", 64.0, "highest rate that --max-rate tries")
    what = "client that sends the requests: Tutti's own or sglang.bench_serving"
    option("--client", BUILTIN, what, (BUILTIN, SGLANG))
    option("--sglang-python", sys.executable, "interpreter that has sglang.bench_serving")
    option("--tokenizer", None, "folder or name for sglang.bench_serving's --model")
    option("--out", None, "new folder for result.json and all requests", Path)
    what = "do not measure; show earlier results with the same arrivals side by side, and write "
    what += "OUT.png, OUT.svg and OUT.csv"
    option("--compare RESULT", None, what, Path, nargs="+")
    add_prefix_arguments(parser)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures, or compares results.

    Raises ConfigError for arguments, ServerError for a server that cannot be measured.  A later end
    of the run (the server ends, Ctrl-C, a full disk) leaves a result marked "partial".
    """
    if args.compare:
        return _compare(args)
    slos = args.slo or [parse_slo("ttft:1000")]
    output = Output(args.out)
    _check(args)
    session = open_session(args, slos, progress)
    output.make_folder()
    if args.prefix_tokens:
        return run_prefix(session, output)
    session.listener = output.requests
    return _sweep(session, args, slos, output)


def report(result: dict[str, Any]) -> str:
    if result["benchmark"] == "ttft-compare":
        return comparison_report(result)
    if result["benchmark"] == "ttft-prefix":
        return prefix_report(result)
    headers = ["req/s", "sent", "failed", "TTFT ms, mean [95 %]", "TTFT p99", "ITL ms", "hits"]
    slos = list(result["slos"])
    rows = [_row(row, slos) for row in result["rates"]]
    lines = [table([*headers, *(f"{slo} met" for slo in slos), ""], rows)]
    for name, found in result["max_rate"].items():
        lines.append(f"highest rate with {name}: {_found(found)}")
    lines.append(
        f"{result['system']}, {result['start']} start, {result['client']} client, "
        f"{result['workload']['name']} {result['workload']['order']}"
    )
    if result["partial"]:
        why = [text for text in (result["stopped"], result["output"]) if text]
        lines.append("PARTIAL: " + "; ".join(why or ["requests are missing"]))
    return "\n".join(lines)


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    """Compares results in a table, and in a figure if --out is given."""
    files = [(path, read_result(path)) for path in args.compare]
    compared = compare_results(files)
    if args.out is not None:
        rows = [row for path, result in files for row in rows_of(result, RATE, str(path))]
        compared["files"] = write_figure(RATE, rows, args.out, slo_ms=args.ttft_limit_ms)
    return compared


def _check(args: argparse.Namespace) -> None:
    if not all(rate > 0 for rate in args.rates) or not args.seeds:
        raise ConfigError("--rates must be positive, and there must be a seed")
    if args.seconds is not None and args.seconds <= 0:
        raise ConfigError("--seconds must be positive")
    if args.client == SGLANG and args.arrivals == TRACE:
        raise ConfigError("--arrivals trace needs --client builtin")
    if args.client == SGLANG and args.prefix_tokens:
        raise ConfigError("--prefix-tokens needs --client builtin")


def _sweep(
    session: BenchSession, args: argparse.Namespace, slos: Sequence[Slo], output: Output
) -> dict[str, Any]:
    measure = session.measure if args.client == BUILTIN else _by_sglang(session, args, slos)
    sweep = Sweep(measure, args.seeds)
    stopped, interrupted = "", False
    found: dict[str, Point] = {}

    def result() -> dict[str, Any]:
        partial = bool(stopped or output.failed) or any(p["partial"] for p in sweep.points)
        return {
            "benchmark": "ttft",
            "source": "measured",
            "system": args.system,
            "note": args.note,
            "client": args.client,
            "start": args.start,
            "model": session.model,
            "workload": session.workload.facts(),
            "arrivals": args.arrivals,
            "seconds": args.seconds,
            "slos": [str(slo) for slo in slos],
            "rates": by_rate(sweep.points),
            "max_rate": found,
            "points": sweep.points,
            "partial": partial,
            "stopped": stopped,
            "interrupted": interrupted,
            "output": output.failed,
            "server": session.facts,
            "machine": describe(),
        }

    try:
        if args.start == POPULATED:
            session.populate()
        for rate in args.rates:
            sweep.at(rate)
            output.result(result())
        if args.max_rate:
            for name, condition in _conditions(args, slos).items():
                found[name] = sweep.max_rate(
                    condition, tolerance=args.tolerance, rate_max=args.rate_limit
                )
                output.result(result())
    except Stopped as stop:
        stopped, interrupted = str(stop), stop.interrupted
    except KeyboardInterrupt:
        stopped, interrupted = "interrupted", True
    except ServerError as error:
        if not sweep.points:
            raise
        stopped = str(error)
    output.result(result())
    return result()


def _by_sglang(session: BenchSession, args: argparse.Namespace, slos: Sequence[Slo]) -> Any:
    client = ServingClient(
        session.endpoint.url, args.timeout_s, args.api_key, args.sglang_python, args.tokenizer
    )

    def measure(rate: float, seed: int) -> Point:
        session.flush()
        prompts = session.prompts_at(rate)
        prompts = [_salted(prompt, session.salt(rate, seed)) for prompt in prompts]
        return bench_serving(client, prompts, rate=rate, seed=seed, slos=slos)

    return measure


def _salted(prompt: Prompt, salt: str) -> Prompt:
    return Prompt(prompt.task, prompt.document, salted(prompt, salt), prompt.output_tokens)


def _conditions(args: argparse.Namespace, slos: Sequence[Slo]) -> dict[str, Condition]:
    limit = args.ttft_limit_ms
    return {
        f"mean TTFT <= {limit:g} ms": mean_ttft_within(limit),
        **{f">= {ATTAINMENT_MIN:.0%} within {slo}": attained(str(slo)) for slo in slos},
    }


def _row(row: dict[str, Any], slos: Sequence[str]) -> list[object]:
    flags = [name for name in ("unstable", "partial") if row[name]]
    cells: list[object] = [row["rate"], row["requests"], row["failed"]]
    if "ttft_ms" not in row:
        return [*cells, "-", "-", "-", "-", *("-" for _ in slos), "nothing succeeded"]
    ttft, itl, hits = row["ttft_ms"], row["itl_ms"], row["hit_rate"]
    return [
        *cells,
        interval_text(ttft, 1),
        f"{row['ttft_p99_ms']['mean']:.1f}",
        "-" if itl is None else f"{itl['mean']:.2f}",
        "not told" if hits is None else f"{hits:.1%}",
        *(f"{row['slo'][slo]['attainment']['mean']:.1%}" for slo in slos),
        ", ".join(flags).upper(),
    ]


def _found(found: dict[str, Any]) -> str:
    if found["rate"] is None:
        return f"none; {found['fails_at']:g} req/s fails already"
    if found["at_least"]:
        return f"at least {found['rate']:g} req/s"
    return f"{found['rate']:g} req/s ({found['fails_at']:g} fails)"

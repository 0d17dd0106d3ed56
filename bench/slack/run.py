"""How much of the waiting for a drive the slack-aware scheduler takes away: simulated.

The same requests run through several policies on a simulated server: the scheduler's own code, real
commands to the memory controller on its virtual clock, and times of real drives and GPUs from
published parameters.  Nothing here is measured on such hardware.

Policies: `none` issues everything at once; `fixed` writes what a constant bandwidth moves in a
constant window; `slack`; `slack +30%` and `slack -30%` with a profile whose compute is off by so
much one way and whose transfers the other; `oracle` is slack that knows the time of every step;
`bound` has no writes at all: what it waits for, no order of writes can take away.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tutti.bench.environment import describe
from tutti.bench.simulate.hardware import Machine, drive_names, gpu_names, machine
from tutti.bench.slack import file as slack_file
from tutti.bench.slack.report import HALF, REACHABLE, report
from tutti.bench.slack.server import Measured, Noise, Server, TruthNow
from tutti.bench.slack.workload import KINDS, Request, generate, recorded
from tutti.bench.statistics import bootstrap_median, median, percentile
from tutti.errors import ConfigError
from tutti.scheduler.baselines import FixedWindow, ImmediatePolicy
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.request import Profile
from tutti.scheduler.state import Policy
from tutti.terminal import ProgressFactory

OFF = 0.3
POLICIES = ("none", "fixed", "slack", "slack +30%", "slack -30%", "oracle", "bound")
NEAR, NEAR_OFF = 1.05, 1.15
_METRICS = (
    *("bubble_s", "first_token_s", "first_token_p99_s", "between_tokens_p99_s", "decode_slowdown"),
    *("backlog_pages_max", "backlog_pages_mean", "dropped_pages", "stored_pages", "drained_s"),
    *("prediction_error", "forced_pages"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tutti bench slack`."""
    parser.add_argument("--drives", nargs="+", default=drive_names(), help="default: all known")
    parser.add_argument("--gpus", nargs="+", default=gpu_names(), help="default: all known")
    parser.add_argument(
        "--workloads", nargs="*", default=list(KINDS), help="default: all; none with only --dir"
    )
    parser.add_argument("--requests", type=int, default=30, help="of a run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each cell (%(default)s)")
    parser.add_argument(
        "--recorded", type=Path, help="a file of requests, a JSON object on each line, instead"
    )
    parser.add_argument(
        "--dir", type=Path, help="also measures a small case on a real file in this directory"
    )
    parser.add_argument("--rounds", type=int, default=20, help="on the file (%(default)s)")
    parser.add_argument(
        "--backlog-pages", type=int, default=512, help="locked, and as many staged (%(default)s)"
    )


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Runs every workload on every drive and GPU through all policies.

    Raises ConfigError for names that are not known and for unacceptable numbers.
    """
    if min(args.requests, args.seeds, args.rounds) < 1 or args.backlog_pages < 0:
        raise ConfigError("--requests, --seeds and --rounds count from 1, --backlog-pages from 0")
    limits = Limits(locked_pages=args.backlog_pages, staged_pages=args.backlog_pages)
    workloads = ["recorded"] if args.recorded else list(args.workloads)
    seeds = 1 if args.recorded else args.seeds
    cells = [(d, g, w) for d in args.drives for g in args.gpus for w in workloads]
    rows = []
    with progress("slack", len(cells) * seeds * len(POLICIES)) as bar:
        for drive, gpu, workload in cells:
            truth = machine(drive, gpu)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
            for seed in range(seeds):
                if args.recorded:
                    requests = recorded(args.recorded)
                else:
                    requests = generate(workload, truth, args.requests, seed)
                for name in POLICIES:
                    runs[name].append(run_once(name, truth, requests, limits, seed))
                    bar.advance(1)
            mixed = args.recorded is not None or KINDS[workload].mixed
            rows.append({"drive": drive, "gpu": gpu, "workload": workload, **_cell(runs, mixed)})
    measured = slack_file.run(args.dir, args.rounds, progress) if args.dir else None
    return {
        "benchmark": "slack",
        "simulated": bool(rows),  # the file alone is measured
        "rows": rows,
        "requests": args.requests,
        "seeds": seeds,
        "noise": asdict(Noise()),
        "limits": asdict(limits),
        "parameters": {name: asdict(machine(name, args.gpus[0]).drive) for name in args.drives}
        | {name: asdict(machine(args.drives[0], name).gpu) for name in args.gpus},
        "workloads": {} if args.recorded else {w: asdict(KINDS[w]) for w in workloads},
        "file": measured,
        "machine": describe(args.dir),
    }


def run_once(
    name: str, truth: Machine, requests: Sequence[Request], limits: Limits, seed: int
) -> dict[str, float]:
    """One policy over some requests: every number of ``_METRICS``."""
    policy, profile = policy_of(name, truth, limits)
    server = Server(truth, requests, policy, profile, noise=Noise(), seed=seed)
    return _numbers(server.run())


def policy_of(name: str, truth: Machine, limits: Limits) -> tuple[Policy, Profile]:
    """A policy by its name here, and the profile it believes in."""
    profile: Profile = truth
    if name == "none":
        return ImmediatePolicy(limits), profile
    if name == "fixed":
        return FixedWindow(limits), profile
    if name == "slack +30%":
        profile = truth.off_by(OFF)
    elif name == "slack -30%":
        profile = truth.off_by(-OFF)
    elif name == "oracle":
        profile = TruthNow(truth)
    elif name == "bound":
        limits = Limits(locked_pages=0, staged_pages=0)
    return SlackPolicy(limits), profile


def _numbers(measured: Measured) -> dict[str, float]:
    alone_s = measured.decode_alone_s
    return {
        "bubble_s": measured.bubble_s,
        "first_token_s": float(np.mean(measured.first_token_s)),
        "first_token_p99_s": percentile(measured.first_token_s, 99),
        "between_tokens_p99_s": percentile(measured.between_tokens_s, 99),
        "decode_slowdown": measured.decode_s / alone_s - 1 if alone_s else 0.0,
        "backlog_pages_max": measured.backlog_pages_max,
        "backlog_pages_mean": measured.backlog_page_s / measured.wall_s,
        "dropped_pages": measured.dropped_pages,
        "stored_pages": measured.stored_pages,
        "drained_s": measured.drained_s,
        "prediction_error": measured.prediction_error,
        "forced_pages": measured.forced_pages,
    }


def _cell(runs: dict[str, list[dict[str, float]]], mixed: bool) -> dict[str, Any]:
    pairs = [("slack", "none"), ("fixed", "none"), ("bound", "none"), ("slack", "oracle")]
    pairs += [("slack +30%", "oracle"), ("slack -30%", "oracle"), ("slack", "bound")]
    ratios = {
        f"{above} / {below}": {
            metric: _ratio([r[metric] for r in runs[above]], [r[metric] for r in runs[below]])
            for metric in ("bubble_s", "first_token_s")
        }
        for above, below in pairs
    }
    policies = {
        name: {metric: median([one[metric] for one in found]) for metric in _METRICS}
        for name, found in runs.items()
    }
    return {
        "mixed": mixed,
        "policies": policies,
        "ratios": ratios,
        "bars": _bars(runs, ratios, mixed),
    }


def _ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """Of paired runs; a time below a microsecond counts as one."""
    quotients = [max(a, 1e-6) / max(b, 1e-6) for a, b in zip(above, below, strict=True)]
    return bootstrap_median(quotients).to_dict()


def _bars(
    runs: dict[str, list[dict[str, float]]], ratios: dict[str, Any], mixed: bool
) -> dict[str, bool]:
    """What is to be reached.  Bubbles are compared where there are reads and writes."""

    def near(name: str, most: float) -> bool:
        return all(ratios[name][m]["median"] <= most for m in ("bubble_s", "first_token_s"))

    lost = {name: sum(one["dropped_pages"] for one in found) for name, found in runs.items()}
    bars = {"no more loss than none": lost["slack"] <= lost["none"]}
    if mixed:
        half = ratios["slack / none"]["bubble_s"]["median"] <= HALF
        bound = ratios["bound / none"]["bubble_s"]["median"]
        bars |= {
            "half of none": half,
            REACHABLE: half or bound > HALF,
            "within 5 % of the oracle": near("slack / oracle", NEAR),
            "within 15 % with a profile off by 30 %": near("slack +30% / oracle", NEAR_OFF)
            and near("slack -30% / oracle", NEAR_OFF),
        }
    return bars


__all__ = ["POLICIES", "add_arguments", "policy_of", "report", "run", "run_once"]

"""Simulates how much of the waiting for a drive the slack-aware scheduler removes.

The same requests run through several policies on a simulated server: the scheduler's own code, a
drive in virtual time, and published parameters of drives and GPUs.  Nothing here is measured on
such hardware.

Policies, which load layer by layer except `whole`: `none` issues everything at once; `whole` also
does, and waits for whole loads; `fixed` writes, per time window, what a constant bandwidth moves,
both tuned for each cell; `slack`; `oracle` is slack that knows the time of every step and the
interference at every moment; `bound` has no writes, so that no order of writes waits less.

The gap is the cost of writes: the bubble of `none` minus that of `bound`.  A policy is judged by
the share of the gap that it closes while it stores every page.  No schedule closes more than
`at_most`, which is proven; see `lower_bound.py`.  The result names the bars that each case misses;
a missed bar does not change the exit code.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.terminal import ProgressFactory
from tutti.bench.environment import describe
from tutti.bench.simulate.hardware import SimulatedMachine, drive_names, gpu_names, machine
from tutti.bench.slack import file as slack_file
from tutti.bench.slack import report as slack_report
from tutti.bench.slack.conditions import CONDITIONS, PROFILES, UNCORRECTED
from tutti.bench.slack.fixed_window import FixedWindow
from tutti.bench.slack.lower_bound import Rules, least_ns
from tutti.bench.slack.server import LayeredServer, Measured, Noise, TruthNow
from tutti.bench.slack.workload import KINDS, SlackRequest, generate, in_bursts, recorded
from tutti.bench.statistics import median, percentile
from tutti.errors import ConfigError
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Policy

report = slack_report.report
POLICIES = ("none", "whole", "fixed", "slack", "oracle", "bound")
#: Shares of the drive's write bandwidth, and windows, that `fixed` is tuned over, on requests of
#: its own.
SHARES, WINDOWS_MS = (1.0, 0.5, 0.25, 0.125, 0.0625), (50.0, 10.0, 2.0)
TUNING_SEED, TUNING_REQUESTS = 1000, 60
#: Least gap, as a share of the bubble of `none`, that is judged; and the share to close.
GAP_LEAST, GAP_CLOSED = 0.1, 0.5
#: Bar under drift: ratio to the oracle's bubble.
DRIFT_MOST = 1.1
#: Times that differ by less are equal.
EQUAL = 1.005
BARS = (
    "at least half of the gap",
    "at least half of the gap, drain counted",
    "p99 no worse than a tuned fixed",
    "stores as much as none",
    "at most 10 % lost under drift",
)
_METRICS = (
    *("bubble_s", "first_token_s", "first_token_p99_s", "between_tokens_p99_s", "decode_slowdown"),
    *("backlog_pages_max", "backlog_pages_mean", "dropped_pages", "stored_pages", "drained_s"),
    *("prediction_error", "forced_pages", "decode_rest_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tutti bench slack`."""
    drives, gpus = drive_names(), gpu_names()
    parser.add_argument("--drives", nargs="+", default=drives, help="drives to simulate")
    parser.add_argument("--gpus", nargs="+", default=gpus, help="GPUs to simulate")
    parser.add_argument(
        "--workloads", nargs="*", default=list(KINDS), help="kinds of requests; none: only --dir"
    )
    parser.add_argument("--requests", type=int, default=200, help="requests per run")
    parser.add_argument("--seeds", type=int, default=3, help="random repetitions of each case")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first of them")
    parser.add_argument(
        "--conditions",
        nargs="+",
        choices=tuple(CONDITIONS),
        default=list(CONDITIONS),
        metavar="NAME",
        help=f"how the drive and the arrivals behave: {', '.join(CONDITIONS)} (default: all)",
    )
    parser.add_argument(
        "--wrong",
        nargs="*",
        choices=tuple(PROFILES),
        default=[],
        metavar="PROFILE",
        help="also schedule with a profile that is wrong by a factor: " + ", ".join(PROFILES),
    )
    parser.add_argument(
        "--recorded", type=Path, help="file of requests to use instead, one JSON object per line"
    )
    parser.add_argument(
        "--dir", type=Path, help="also measure a small case on a real file in this folder"
    )
    parser.add_argument("--rounds", type=int, default=20, help="measurements on that file")
    parser.add_argument(
        "--backlog-pages", type=int, default=512, help="most pages that wait in memory to be stored"
    )


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Runs every workload on every drive and GPU through all policies.

    Raises ConfigError for names that are not known and for unacceptable numbers.
    """
    if min(args.requests, args.seeds, args.rounds) < 1:
        raise ConfigError("--requests, --seeds and --rounds count from 1")
    seeds = range(args.first_seed, args.first_seed + (1 if args.recorded else args.seeds))
    if TUNING_SEED in seeds:
        raise ConfigError(f"`fixed` is tuned on seed {TUNING_SEED}; choose seeds without it")
    limits = Limits(locked_pages=args.backlog_pages, staged_pages=args.backlog_pages)
    workloads = ["recorded"] if args.recorded else list(args.workloads)
    names = (*POLICIES, *args.wrong)
    cells = list(itertools.product(args.conditions, args.drives, args.gpus, workloads))
    rows = []
    with progress("slack", len(cells) * len(seeds) * len(names)) as bar:
        for condition, drive, gpu, workload in cells:
            cell = _Cell(machine(drive, gpu), workload, condition, limits, args.recorded)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for seed in seeds:
                requests = cell.requests(args.requests, seed)
                for name in names:
                    runs[name].append(cell.run(name, requests, seed))
                    bar.advance(1)
                runs["bound"][-1]["least_s"] = cell.least_s(requests, seed, runs["none"][-1])
            where = {"drive": drive, "gpu": gpu, "workload": workload, "condition": condition}
            fixed = {"fixed_share": cell.fixed[0], "fixed_window_ms": cell.fixed[1]}
            served = {**fixed, "limits": asdict(cell.limits)}
            rows.append({**where, **served, **_row(runs, condition)})
    measured = slack_file.run(args.dir, args.rounds, progress) if args.dir else None
    cost = slack_file.cost(args.dir, args.rounds, progress) if args.dir else None
    return {
        "benchmark": "slack",
        "simulated": bool(rows),  # the file alone is measured
        "rows": rows,
        "requests": args.requests,
        "seeds": len(seeds),
        "first_seed": args.first_seed,
        "wrong": list(args.wrong),
        "noise": asdict(Noise()),
        "limits": asdict(limits),
        "parameters": {name: asdict(machine(name, args.gpus[0]).drive) for name in args.drives}
        | {name: asdict(machine(args.drives[0], name).gpu) for name in args.gpus},
        "workloads": {} if args.recorded else {w: asdict(KINDS[w]) for w in workloads},
        "file": measured,
        "cost": cost,
        "machine": describe(args.dir),
    }


class _Cell:
    """A machine, a workload and a condition: everything but the policy."""

    def __init__(
        self,
        truth: SimulatedMachine,
        workload: str,
        condition: str,
        limits: Limits,
        recording: Path | None = None,
    ) -> None:
        self._truth, self._workload, self._recording = truth, workload, recording
        self._condition = CONDITIONS[condition]
        self.limits = self._condition.limits(limits, truth)
        self._space = self._condition.space(limits)
        self.fixed = SHARES[0], WINDOWS_MS[0]
        self.fixed = self._tuned()

    def requests(self, count: int, seed: int) -> list[SlackRequest]:
        """The requests, equal for all policies."""
        if self._recording is not None:
            return recorded(self._recording)
        requests = generate(self._workload, self._truth, count, seed)
        return in_bursts(requests) if self._condition.bursts else requests

    def _tuned(self) -> tuple[float, float]:
        """The share and the window of `fixed` that lose least, without fewer stored pages.

        The loss is what the bars count: the bubble, and the time by which the writes after the last
        token take longer than those of `none`.  The p99 of so few requests would be that of one.
        """
        requests = self.requests(TUNING_REQUESTS, TUNING_SEED)
        none = self.run("none", requests, TUNING_SEED)

        def loss(fixed: tuple[float, float]) -> tuple[float, float]:
            self.fixed = fixed
            run = self.run("fixed", requests, TUNING_SEED)
            fewer = max(0.0, none["stored_pages"] - run["stored_pages"])
            return fewer, run["bubble_s"] + max(0.0, run["drained_s"] - none["drained_s"])

        return min(itertools.product(SHARES, WINDOWS_MS), key=loss)

    def run(self, name: str, requests: Sequence[SlackRequest], seed: int) -> dict[str, float]:
        """One policy: every number of ``_METRICS``."""
        server = self._server(name, requests, seed)
        if self._space is not None and name != "bound":  # which drops everything
            server.has(self._space)
        if name in UNCORRECTED:
            server.state.estimates.both.learns = False
        return numbers(server.run())

    def least_s(self, requests: Sequence[SlackRequest], seed: int, none: dict[str, float]) -> float:
        """The least waiting of any schedule that stores as much as `none`."""
        truth, memory = self._truth, self._space or self.limits
        memories = (memory.locked_pages, memory.staged_pages)
        drive, drift = truth.drive, self._condition.drift
        rules = Rules(
            memories,
            truth.model.page_nbytes / drive.write_bytes_per_s * 1e9,
            min(drift) if drift else drive.interference,
            drive.latency_us * 1e3,
        )
        prefills = self._server("none", requests, seed).prefills()
        fit = sum(one.pages for one in prefills if one.pages <= max(memories))
        return least_ns(prefills, rules, max(0, fit - round(none["stored_pages"]))) / 1e9

    def _server(self, name: str, requests: Sequence[SlackRequest], seed: int) -> LayeredServer:
        policy, profile = policy_of(name, self._truth, self.limits, self.fixed)
        return LayeredServer(
            self._truth,
            requests,
            policy,
            profile,
            noise=Noise(),
            seed=seed,
            whole=name == "whole",
            conditions=self._condition.of(self._truth.drive),
        )


def policy_of(
    name: str, truth: SimulatedMachine, limits: Limits, fixed: tuple[float, float] = (1.0, 10.0)
) -> tuple[Policy, Profile]:
    """A policy by its name here, and the profile it believes in.

    fixed: the share of the drive's write bandwidth, and the window in ms.
    """
    if name in ("none", "whole"):
        return ImmediatePolicy(limits), truth
    if name == "fixed":
        share, window_ms = fixed
        bandwidth = share * truth.drive.write_bytes_per_s
        return FixedWindow(limits, window_us=1000 * window_ms, bytes_per_s=bandwidth), truth
    if name == "oracle":
        return SlackPolicy(limits), TruthNow(truth)
    if name == "bound":
        return SlackPolicy(replace(limits, locked_pages=0, staged_pages=0)), truth
    return SlackPolicy(limits), PROFILES[name](truth) if name in PROFILES else truth


def numbers(measured: Measured) -> dict[str, float]:
    """The numbers that judge a run, by name."""
    alone_s = measured.decode_alone_s
    computed = {
        "first_token_s": float(np.mean(measured.first_token_s)),
        "first_token_p99_s": percentile(measured.first_token_s, 99),
        "between_tokens_p99_s": percentile(measured.between_tokens_s, 99),
        "decode_slowdown": measured.decode_s / alone_s - 1 if alone_s else 0.0,
        "backlog_pages_mean": measured.backlog_page_s / measured.wall_s,
    }
    return {name: getattr(measured, name) for name in _METRICS if name not in computed} | computed


def _row(runs: dict[str, list[dict[str, float]]], condition: str) -> dict[str, Any]:
    policies = {
        name: {metric: median([one[metric] for one in found]) for metric in _METRICS}
        for name, found in runs.items()
    }
    gap, closed = gap_closed(policies, "slack")
    wrong = [name for name in policies if name not in POLICIES]
    return {
        "policies": policies,
        "gap": gap,
        "closed": closed,
        "closed_by_seed": _by_seed(runs, "slack"),
        "at_most_by_seed": [] if closed is None else _at_most(runs),
        "closed_by_wrong": {name: gap_closed(policies, name)[1] for name in wrong},
        "wrong_by_seed": {name: _by_seed(runs, name) for name in wrong},
        "missed_by_wrong": {
            name: [
                bar for bar, reached in bars_of(policies, condition, name).items() if not reached
            ]
            for name in wrong
        },
        "bars": bars_of(policies, condition),
    }


def _by_seed(runs: dict[str, list[dict[str, float]]], name: str) -> list[float | None]:
    """The part of the gap that a policy closes with each seed."""
    names = ("none", "bound", name)
    rows = zip(*(runs[one] for one in names), strict=True)
    return [gap_closed(dict(zip(names, row, strict=True)), name)[1] for row in rows]


def _at_most(runs: dict[str, list[dict[str, float]]]) -> list[float]:
    """The part of the gap that any schedule can close, with each seed.

    The bounded time includes the rest of a decode step that runs when a request arrives.
    """
    found = []
    for none, bound in zip(runs["none"], runs["bound"], strict=True):
        none_s, bound_s = (one["bubble_s"] + one["decode_rest_s"] for one in (none, bound))
        gap_s = none_s - bound_s
        found.append(min(1.0, (none_s - bound["least_s"]) / gap_s) if gap_s > 0 else 1.0)
    return found


def gap_closed(policies: dict[str, dict[str, float]], name: str) -> tuple[float, float | None]:
    """(gap as a share of the bubble of `none`, share of the gap that a policy closes).

    The latter is None if the gap is too small to be judged.
    """
    none_s, bound_s = (policies[one]["bubble_s"] for one in ("none", "bound"))
    gap_s = none_s - bound_s
    gap = gap_s / none_s if none_s > 0 else 0.0
    return gap, (none_s - policies[name]["bubble_s"]) / gap_s if gap > GAP_LEAST else None


def bars_of(
    policies: dict[str, dict[str, float]], condition: str, name: str = "slack"
) -> dict[str, bool]:
    """Whether each applicable bar is reached.  See BARS.

    A policy that stores less than `none` reaches no bar.  If its writes after the last token take
    longer than those of `none`, the difference is subtracted from what it closes.
    """
    mine, none, fixed = policies[name], policies["none"], policies["fixed"]
    half, drained, p99, stores, drift = BARS
    equal = mine["stored_pages"] >= none["stored_pages"]
    bars = {
        p99: equal and mine["first_token_p99_s"] <= EQUAL * fixed["first_token_p99_s"],
        stores: equal,
    }
    gap, closed = gap_closed(policies, name)
    if closed is not None:
        more_s = max(0.0, mine["drained_s"] - none["drained_s"])
        bars[half] = equal and closed >= GAP_CLOSED
        bars[drained] = equal and closed - more_s / (gap * none["bubble_s"]) >= GAP_CLOSED
    if condition == "drift":
        bars[drift] = equal and mine["bubble_s"] <= DRIFT_MOST * policies["oracle"]["bubble_s"]
    return bars

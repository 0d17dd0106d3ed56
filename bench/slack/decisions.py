"""Measures the cost of the scheduler's decisions, in a pool and a simulated server.

The pool's events are recorded while it loads and stores on a real file, and then replayed to a new
scheduler, whose decisions are the same and are timed.  On the simulated server every decision is
timed as it happens.  Times are CPU times of the deciding thread, minus the cost of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory
from tutti.bench.environment import describe
from tutti.bench.simulate.hardware import machine
from tutti.bench.slack import file as slack_file
from tutti.bench.slack.conditions import CONDITIONS
from tutti.bench.slack.server import LayeredServer, Noise
from tutti.bench.slack.workload import KINDS, generate
from tutti.bench.statistics import median
from tutti.bench.writable import options
from tutti.errors import ConfigError
from tutti.scheduler.event import Event
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, Policy, State
from tutti.scheduler.state_changes import Scheduler

#: Bars: microseconds per decision, and milliseconds per request in total.
DECISION_US, REQUEST_MS = 20.0, 0.3
_GPU, _BACKLOG_PAGES = "H100", 512
#: Simulated servers: workload, drive and condition.  The last two are under pressure of writes.
_SERVERS = {kind: (kind, "2x D7-PS1010", "steady") for kind in KINDS} | {
    "agents, D5-P5336, little memory": ("agents", "D5-P5336", "little memory"),
    "documents, D5-P5336, cache ends": ("documents", "D5-P5336", "cache ends"),
}
_CLOCKS = 1001


class Timed:
    """Counts events and those that the policy was asked about, and the CPU time of both, without
    that of the clock: it takes a system call.
    """

    def __init__(self, policy: Policy, profile: Profile) -> None:
        self._scheduler = Scheduler(self, profile)
        self._decide = policy.decide
        self.policy, self.state = policy, self._scheduler.state
        self.events = self.asked = self.took_ns = self.asked_ns = 0
        self._clock_ns = _clock_ns()

    def take(self, event: Event) -> Decision:
        """As Scheduler.take."""
        asked, began_ns = self.asked, time.thread_time_ns()
        decision = self._scheduler.take(event)
        took_ns = max(0, time.thread_time_ns() - began_ns - self._clock_ns)
        self.events += 1
        self.took_ns += took_ns
        if self.asked > asked:
            self.asked_ns += took_ns
        return decision

    def decide(self, state: State) -> Decision:
        """As Policy.decide."""
        self.asked += 1
        return self._decide(state)


def _clock_ns() -> int:
    """Measured time of an empty interval, which is the cost of the clock."""
    found = [-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(_CLOCKS)]
    return round(median(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    option = options(parser)
    option("--dir", ".", "folder for the pool's file", Path)
    option("--requests", 100, "requests to the simulated server", positive)
    option("--rounds", 6, "rounds of the pool", positive)
    option("--repeats", 3, "measurements of each", positive)
    option("--seed", 1, "seed of the requests")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures both.  Raises ConfigError for --dir."""
    if not args.dir.is_dir():
        raise ConfigError(f"{args.dir} is not a directory; make it, or name another with --dir")
    recorded: list[Event] = []
    # The profile that the pool is scheduled by is in the result, so that no second one is measured.
    on_file = slack_file.run(
        args.dir, args.rounds, progress, lambda event, decision: recorded.append(event)
    )
    profile = slack_file.FileProfile(**on_file["profile"])
    requests = (args.rounds + slack_file.WARM_ROUNDS) * slack_file.ROUNDS_A_TURN
    cells = {"a pool on a file": _cell(partial(_again, recorded, profile), requests, args.repeats)}
    with progress("decisions", len(_SERVERS)) as bar:
        for name, server in _SERVERS.items():
            measure = partial(_simulated, *server, args)
            cells[f"simulated server, {name}"] = _cell(measure, args.requests, args.repeats)
            bar.advance(1)
    return {
        "benchmark": "decisions",
        "bars": {"decision_us": DECISION_US, "request_ms": REQUEST_MS},
        "repeats": args.repeats,
        "cells": cells,
        "machine": describe(args.dir),
    }


def _again(events: list[Event], profile: Profile) -> Timed:
    limits = Limits(staged_pages=0)  # as a pool's
    timed = Timed(SlackPolicy(limits), profile)
    for event in events:
        timed.take(event)
    return timed


def _simulated(kind: str, drive: str, condition: str, args: argparse.Namespace) -> Timed:
    """Serves one cell of `bench slack` and times its decisions."""
    truth, cell, seed = machine(drive, _GPU), CONDITIONS[condition], args.seed
    limits = Limits(locked_pages=_BACKLOG_PAGES, staged_pages=_BACKLOG_PAGES)
    policy = SlackPolicy(cell.limits(limits, truth))
    requests = generate(kind, truth, args.requests, seed)
    conditions = cell.of(truth.drive)
    server = LayeredServer(
        truth, requests, policy, truth, noise=Noise(), seed=seed, conditions=conditions
    )
    timed = Timed(policy, truth)
    server.scheduler = cast(Scheduler, timed)
    server.run()
    return timed


def _cell(measure: Callable[[], Timed], requests: int, repeats: int) -> dict[str, Any]:
    runs = [measure() for _ in range(repeats)]
    decisions = runs[0].asked
    return {
        "requests": requests,
        "events_a_request": runs[0].events / requests,
        "decisions_a_request": decisions / requests,
        "decision_us": median([one.asked_ns / 1e3 / max(1, decisions) for one in runs]),
        "request_ms": median([one.took_ns / 1e6 / requests for one in runs]),
    }


HEAD = ("where", "events/request", "decisions/request", "us/decision", "ms/request", "")


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD; what misses a bar is marked."""
    bars = result["bars"]
    return [
        [
            name,
            *(f"{cell[key]:.1f}" for key in ("events_a_request", "decisions_a_request")),
            *(f"{cell[key]:.3g}" for key in bars),
            "; ".join(f"{key} **not reached**" for key, bar in bars.items() if cell[key] > bar),
        ]
        for name, cell in result["cells"].items()
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes below the table."""
    bars = result["bars"]
    return [
        f"bars: {bars['decision_us']:g} us a decision, {bars['request_ms']:g} ms a request; medians"
        f" of {result['repeats']} repeats, CPU time of the thread that decides, less what the clock"
        " itself takes"
    ]

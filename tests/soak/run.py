"""Runs episodes of the actors for as long as it is given, and writes what was done and found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from soak.processes import Child, Say

from tutti.bench.environment import describe

Actor = Callable[[int, Path, Counter[str]], None]

EPISODE_MAX_S = 400.0
WRITE_EVERY_S = 60.0
FINDINGS_MAX = 50  # with their last line; all of them are counted, and printed in full


@dataclass
class Runner:
    """Episodes one after another: each actor once, then by a draw from seed and number."""

    number: int
    rng: np.random.Generator
    names: Sequence[str]
    episodes: int = 0
    child: Child | None = None
    name: str = ""
    seed: int = 0
    folder: str = ""
    begun_s: float = 0.0

    def draw(self) -> None:
        """The next episode's actor and seed."""
        drawn = str(self.rng.choice(self.names))
        first = list(dict.fromkeys(self.names))
        self.name = first[self.episodes] if self.episodes < len(first) else drawn
        self.seed = int(self.rng.integers(2**53))
        self.episodes += 1


@dataclass
class Report:
    """What is written to the result."""

    seed: int
    seconds: float
    machine: dict[str, Any]
    begun_s: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    episodes: Counter[str] = field(default_factory=Counter)
    busy_s: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)
    found: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "soak",
            "source": "measured",
            "seed": self.seed,
            "seconds": self.seconds,
            "elapsed_s": round(time.monotonic() - self.begun_s, 1),
            "machine": self.machine,
            "episodes": dict(sorted(self.episodes.items())),
            "busy_s": {name: round(s, 1) for name, s in sorted(self.busy_s.items())},
            "counts": dict(sorted(self.counts.items())),
            "found": self.found,
            "findings": self.findings,
        }

    def write(self, path: Path | None) -> None:
        if path is not None:
            fresh = path.with_suffix(".part")
            fresh.write_text(json.dumps(self.as_json(), indent=1) + "\n")
            fresh.replace(path)


class Soak:
    """actors: by name.  runners: the names each one draws from; a name may occur twice."""

    def __init__(
        self,
        actors: Mapping[str, Actor],
        runners: Sequence[Sequence[str]],
        seed: int,
        folder: Path,
        out: Path | None,
    ) -> None:
        self._actors = actors
        self._folder = folder
        self._out = out
        self._runners = [
            Runner(number, np.random.default_rng([seed, number]), names)
            for number, names in enumerate(runners)
        ]
        self._seed = seed
        self.report = Report(seed, 0.0, describe(folder))

    def run(self, seconds: float) -> Report:
        """Begins episodes until the time is over, and waits for those that run."""
        report = self.report
        report.seconds = seconds
        written_s = end_s = time.monotonic()
        end_s += seconds
        try:
            while True:
                now_s = time.monotonic()
                for runner in self._runners:
                    if runner.child is None and now_s < end_s:
                        self._begin(runner)
                    self._serve(runner)
                if now_s - written_s > WRITE_EVERY_S:
                    report.write(self._out)
                    written_s = now_s
                if now_s >= end_s and not any(runner.child for runner in self._runners):
                    break
                time.sleep(0.01)
        finally:
            for runner in self._runners:
                if runner.child is not None:
                    self._stop(runner)
        report.write(self._out)
        return report

    def _begin(self, runner: Runner) -> None:
        runner.draw()
        runner.folder = tempfile.mkdtemp(prefix=f"{runner.name}-", dir=self._folder)
        runner.begun_s = time.monotonic()
        name, seed, folder = runner.name, runner.seed, Path(runner.folder)
        runner.child = Child(lambda say: episode(self._actors[name], seed, folder, say))

    def _serve(self, runner: Runner) -> None:
        if runner.child is None:
            return
        for report in runner.child.reports(0.0):
            self.report.counts.update(report[1])
        late = time.monotonic() - runner.begun_s > EPISODE_MAX_S
        if not runner.child.ended and not late:
            return
        failure = "" if runner.child.ended else f"hangs {EPISODE_MAX_S:g} s after its beginning"
        failure = runner.child.failure or failure
        status = self._stop(runner)
        if failure or status:
            self._found(runner, failure or f"ended with status {status}")

    def _stop(self, runner: Runner) -> int:
        """Ends the episode with every process that it started."""
        assert runner.child is not None
        kill_group(runner.child.pid)
        status = runner.child.wait()
        self.report.episodes[runner.name] += 1
        self.report.busy_s[runner.name] += time.monotonic() - runner.begun_s
        runner.child = None
        shutil.rmtree(runner.folder, ignore_errors=True)
        return status

    def _found(self, runner: Runner, what: str) -> None:
        self.report.found += 1
        if len(self.report.findings) < FINDINGS_MAX:
            finding = {
                "actor": runner.name,
                "seed": runner.seed,
                "what": what.strip().split("\n")[-1],
            }
            finding["after_s"] = round(time.monotonic() - self.report.begun_s, 1)
            finding["free_nbytes"] = shutil.disk_usage(self._folder).free
            self.report.findings.append(finding)
        print(f"{runner.name} with seed {runner.seed}: {what}", flush=True)
        self.report.write(self._out)


def episode(actor: Actor, seed: int, folder: Path, say: Say) -> None:
    """In a process of its own: one episode, and what it counted even where it failed."""
    os.setpgid(0, 0)
    tally: Counter[str] = Counter()
    try:
        actor(seed, folder, tally)
    finally:
        say(["tally", dict(tally)])


def kill_group(pid: int) -> None:
    """Ends an episode's processes; those that are gone already are gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

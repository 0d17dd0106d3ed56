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
class Lane:
    """Episodes one after another: each actor once, then as the seed and the lane's number draw."""

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
    """actors: by name.  lanes: which actors each lane draws from; a name may stand there twice."""

    def __init__(
        self,
        actors: Mapping[str, Actor],
        lanes: Sequence[Sequence[str]],
        seed: int,
        folder: Path,
        out: Path | None,
    ) -> None:
        self._actors = actors
        self._folder = folder
        self._out = out
        self._lanes = [
            Lane(number, np.random.default_rng([seed, number]), names)
            for number, names in enumerate(lanes)
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
                for lane in self._lanes:
                    if lane.child is None and now_s < end_s:
                        self._begin(lane)
                    self._serve(lane)
                if now_s - written_s > WRITE_EVERY_S:
                    report.write(self._out)
                    written_s = now_s
                if now_s >= end_s and not any(lane.child for lane in self._lanes):
                    break
                time.sleep(0.01)
        finally:
            for lane in self._lanes:
                if lane.child is not None:
                    self._stop(lane)
        report.write(self._out)
        return report

    def _begin(self, lane: Lane) -> None:
        lane.draw()
        lane.folder = tempfile.mkdtemp(prefix=f"{lane.name}-", dir=self._folder)
        lane.begun_s = time.monotonic()
        name, seed, folder = lane.name, lane.seed, Path(lane.folder)
        lane.child = Child(lambda say: episode(self._actors[name], seed, folder, say))

    def _serve(self, lane: Lane) -> None:
        if lane.child is None:
            return
        for report in lane.child.reports(0.0):
            self.report.counts.update(report[1])
        late = time.monotonic() - lane.begun_s > EPISODE_MAX_S
        if not lane.child.ended and not late:
            return
        failure = "" if lane.child.ended else f"hangs {EPISODE_MAX_S:g} s after its beginning"
        failure = lane.child.failure or failure
        status = self._stop(lane)
        if failure or status:
            self._found(lane, failure or f"ended with status {status}")

    def _stop(self, lane: Lane) -> int:
        """Ends the episode with every process that it started."""
        assert lane.child is not None
        kill_group(lane.child.pid)
        status = lane.child.wait()
        self.report.episodes[lane.name] += 1
        self.report.busy_s[lane.name] += time.monotonic() - lane.begun_s
        lane.child = None
        shutil.rmtree(lane.folder, ignore_errors=True)
        return status

    def _found(self, lane: Lane, what: str) -> None:
        self.report.found += 1
        if len(self.report.findings) < FINDINGS_MAX:
            finding = {"actor": lane.name, "seed": lane.seed, "what": what.strip().split("\n")[-1]}
            finding["after_s"] = round(time.monotonic() - self.report.begun_s, 1)
            finding["free_nbytes"] = shutil.disk_usage(self._folder).free
            self.report.findings.append(finding)
        print(f"{lane.name} with seed {lane.seed}: {what}", flush=True)
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

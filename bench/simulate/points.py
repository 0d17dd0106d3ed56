"""Published points, what the simulator says in their place, and the fit to some of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tutti.bench.simulate.calibration import Calibration, ServerTimes, drive_of, gpu_of
from tutti.bench.simulate.cluster import Cluster, Shape
from tutti.bench.simulate.engine import Job
from tutti.bench.traces import BLOCK_TOKENS, Request
from tutti.bench.ttft.arrivals import arrival_times_s
from tutti.bench.ttft.workloads.source import (
    Workload,
    add_workload_arguments,
    build_workload,
    mooncake_requests,
)
from tutti.errors import ConfigError

POINTS = Path(__file__).with_name("published.json")
_K = 1024
_CONTEXT = 128 * _K
_HITS = (0.5, 0.625, 0.75, 0.875, 0.9375, 1.0)
_RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_AT = {"leval": 1.5, "loogle": 0.6}
_LIMIT_MS = 1000.0


@dataclass(frozen=True)
class Effort:
    """Of the points that need a whole workload: requests of each run, from a cold start.

    Cold, because the published hit rates are those of a cold start; see docs/simulator.md.
    """

    leval: int = 3000
    loogle: int = 4000


def points() -> list[dict[str, Any]]:
    """All published points: name, use, value, unit, source."""
    found: list[dict[str, Any]] = json.loads(POINTS.read_text())["points"]
    return found


class PaperMachine:
    """The paper's machine, simulated: an H100 and two D7-PS1010 for each engine."""

    def __init__(self, calibration: Calibration, effort: Effort | None = None) -> None:
        self._calibration = calibration
        self._effort = effort or Effort()
        self._runs: dict[tuple[str, str, float], dict[str, float]] = {}

    def times(self, system: str) -> ServerTimes:
        """Of the paper's server with a system."""
        calibration = self._calibration
        return ServerTimes(
            calibration,
            calibration.server("paper"),
            calibration.system(system),
            gpu=gpu_of("H100"),
            drive=drive_of("2x D7-PS1010"),
        )

    def alone(self, system: str, total: int, cached: int) -> Job:
        """One request on an idle engine, with so many of its tokens in the store."""
        cluster = Cluster(self.times(system), Shape())
        ids = tuple(range(-(-total // BLOCK_TOKENS)))
        cluster.engines[0].store.add(ids[: cached // BLOCK_TOKENS])
        cluster.run([Request(0, total, 1, ids)])
        return cluster.job(0)

    def value(self, name: str) -> float:
        """What the simulator says in place of a published point.

        Raises ConfigError for a name that is not known.
        """
        kind, _, rest = name.partition(" ")
        makers: dict[str, Callable[[str], float]] = {
            "retrieve": lambda s: self._gb_per_s(s, write=False),
            "store": lambda s: self._gb_per_s(s, write=True),
            "prefix": self._prefix,
            "bubble": self._bubble,
            "crossing": self._crossing,
            "hits": self._hits,
            "ttft": lambda text: self._at_load(text, "ttft_ms"),
            "itl": lambda text: self._at_load(text, "itl_ms"),
            "rate": self._rate,
        }
        if kind not in makers:
            raise ConfigError(f"nothing is known of the point {name!r}; see {POINTS.name}")
        return makers[kind](rest)

    def _gb_per_s(self, system: str, *, write: bool) -> float:
        times = self.times(system)
        nbytes = _CONTEXT * self._calibration.model.kv_nbytes_per_token
        taken_us = times.write_us(nbytes) if write else times.read_us(nbytes)
        return nbytes / taken_us / 1e3

    def _prefix(self, text: str) -> float:
        systems, length = text.split()
        cached = int(length.removesuffix("K")) * _K
        found = [self.alone(s, _CONTEXT, cached).first_ns / 1e9 for s in systems.split("/")]
        return found[0] / found[1] if len(found) == 2 else found[0]

    def _bubble(self, text: str) -> float:
        if text.startswith("share "):
            _, system, length, hit = text.split()
            total = int(length.removesuffix("K")) * _K
            job = self.alone(system, total, round(total * float(hit.removesuffix("%")) / 100))
            return 100 * job.bubble_ns / job.first_ns
        system, _, hit = text.split()
        hits = _HITS if hit == "mean" else (float(hit.removesuffix("%")) / 100,)
        found = [self.alone(system, 32 * _K, round(32 * _K * h)).bubble_ns / 1e6 for h in hits]
        return sum(found) / len(found)

    def _crossing(self, text: str) -> float:
        """The share of 32K tokens that hits from which loading takes longer than computing."""
        system, reading = text.split()
        times, layers, total = self.times(system), self._calibration.model.layers, 32 * _K
        token_nbytes = self._calibration.model.kv_nbytes_per_token

        def excess_us(cached: int) -> float:
            load_us = layers * times.read_us(cached * token_nbytes // layers)
            compute_us = layers * times.layer_us(total - cached, cached)
            return load_us - compute_us * (2 if reading == "bubble=compute" else 1)

        low, high = 1, total - 1
        while low < high:  # bounded: halves each time
            middle = (low + high) // 2
            low, high = (low, middle) if excess_us(middle) > 0 else (middle + 1, high)
        return 100 * low / total

    def _hits(self, text: str) -> float:
        system, name = text.split()
        return 100 * self._loaded(name, system, _AT[name])["hit"]

    def _at_load(self, text: str, metric: str) -> float:
        systems, name = text.split()
        above, below = (self._loaded(name, s, _AT[name])[metric] for s in systems.split("/"))
        return above / below

    def _rate(self, text: str) -> float:
        systems, name = text.split()
        above, below = (self._rate_within(name, s) for s in systems.split("/"))
        return above / below

    def _rate_within(self, name: str, system: str) -> float:
        """The rate at which the mean TTFT reaches its limit; the last rate if it never does."""
        before_rate, before_ms = 0.0, 0.0
        for rate in _RATES:
            ttft_ms = self._loaded(name, system, rate)["ttft_ms"]
            if ttft_ms > _LIMIT_MS:
                share = (_LIMIT_MS - before_ms) / (ttft_ms - before_ms)
                return before_rate + share * (rate - before_rate)
            before_rate, before_ms = rate, ttft_ms
        return _RATES[-1]

    def _loaded(self, name: str, system: str, rate: float) -> dict[str, float]:
        """TTFT, ITL and hit rate of a workload at a rate."""
        key = (name, system, rate)
        if key not in self._runs:
            workload = _generated(name, getattr(self._effort, name), seed=1)
            run = Cluster(self.times(system), Shape(unit_layers=4)).run(
                arrivals(workload, rate, seed=1)
            )
            self._runs[key] = {
                "ttft_ms": run["ttft_ms"]["mean"],
                "itl_ms": run["itl_ms"]["mean"],
                "hit": run["hit_hbm"] + run["hit_store"],
            }
        return self._runs[key]


def arrivals(workload: Workload, rate: float, seed: int, first: int = 0) -> list[Request]:
    """The workload as a trace: requests from ``first`` on come at random, those before at once."""
    count = len(workload.prompts) - first
    times_ms = [round(1000 * at) for at in arrival_times_s(count, rate, seed)]
    return mooncake_requests(workload, [0] * first + times_ms)


@cache
def _generated(name: str, requests: int, seed: int) -> Workload:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    wanted = ["--workload", f"{name}-synthetic", "--requests", str(requests)]
    return build_workload(parser.parse_args([*wanted, "--workload-seed", str(seed)]))


def residuals(
    calibration: Calibration, effort: Effort | None = None, only: str = ""
) -> list[dict[str, Any]]:
    """Every published point next to the simulated one.  only: points with this use."""
    machine = PaperMachine(calibration, effort)
    found = []
    for point in points():
        if only in ("", point["use"]):
            says = machine.value(point["name"])
            found.append({**point, "simulated": says, "error": says / point["value"] - 1})
    return found


#: What is fitted, in this order: (kind of record, its name, value, least, most, points).
FITTED: tuple[tuple[str, str, str, float, float, tuple[str, ...]], ...] = (
    ("systems", "tutti-paper", "submit_read_us", 0.0, 1e3, ("retrieve tutti-paper",)),
    ("systems", "tutti-paper", "submit_write_us", 0.0, 1e3, ("store tutti-paper",)),
    ("systems", "gds", "submit_read_us", 0.0, 1e3, ("retrieve gds",)),
    ("systems", "gds", "submit_write_us", 0.0, 1e3, ("store gds",)),
    ("systems", "dram", "submit_write_us", 0.0, 1e3, ("store dram",)),
    ("servers", "paper", "gpu_scale", 0.1, 10.0, ("prefix tutti-paper 112K",)),
    ("systems", "ssd", "submit_read_us", 0.0, 1e4, ("prefix ssd 112K",)),
    ("systems", "dram", "submit_read_us", 0.0, 1e3, ("prefix tutti-paper/dram 128K",)),
    (
        *("systems", "gds", "fixed_us", 0.0, 2e6),
        ("prefix tutti-paper/gds 32K", "prefix tutti-paper/gds 128K"),
    ),
)
_ROUNDS = 40


def fit_loss(calibration: Calibration, names: Sequence[str]) -> float:
    """The sum of squared relative errors of some points."""
    published = {point["name"]: point["value"] for point in points()}
    machine = PaperMachine(calibration)
    return float(sum((machine.value(name) / published[name] - 1) ** 2 for name in names))


def fit(calibration: Calibration) -> Calibration:
    """A copy with the fitted values made anew: the least sum of squared relative errors.

    One value after another, by ternary search: each has points of its own, and the error of a
    point has one minimum over its value.
    """
    for kind, name, value, low, high, names in FITTED:
        place = (kind, name, value)
        for _ in range(_ROUNDS):
            third = (high - low) / 3
            below = fit_loss(calibration.with_value(*place, low + third), names)
            above = fit_loss(calibration.with_value(*place, high - third), names)
            low, high = (low, high - third) if below <= above else (low + third, high)
        calibration = calibration.with_value(*place, round((low + high) / 2, 4))
    for value in ("submit_read_us", "submit_write_us"):
        number = getattr(calibration.systems["tutti-paper"], value)
        calibration = calibration.with_value("systems", "tutti", value, number)
    return calibration

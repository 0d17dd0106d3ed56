"""Published points, and the simulator's values for them, with intervals.

An interval spans the settings that the papers do not publish.  This module fits nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.bench.simulate import settings
from tutti.bench.simulate.calibration import Calibration, ServerTimes
from tutti.bench.simulate.cluster import Cluster, ClusterShape
from tutti.bench.simulate.server import SimulatedRequest
from tutti.bench.traces import BLOCK_TOKENS, TraceRequest
from tutti.errors import ConfigError
from tutti.scheduler.roofline import ModelShape

POINTS = Path(__file__).with_name("published.json")
K = 1024
CONTEXT = 128 * K
HITS = (0.5, 0.625, 0.75, 0.875, 0.9375, 1.0)
_RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_AT = {"leval": 1.5, "loogle": 0.6}
_LIMIT_MS = 1000.0
#: GLM-4-9B-1M on one of two GPUs, each with half of its heads and parameters; their communication
#: takes no time here.
HALF_GLM = ModelShape("glm-4-9b-1m, one of two", 40, 4.74e9, 2048, 40 * 1024, 9.5e9)


def points() -> list[dict[str, Any]]:
    """All published points: name, use, by, server, value, unit, source.

    or: names of other readings of the source, part of the interval.  with: fitted value of the same
    figure that it contains.  accident: why its agreement is meaningless.
    """
    found: list[dict[str, Any]] = json.loads(POINTS.read_text())["points"]
    return found


class Saturated(Exception):
    """A queue grows at this point, so that its latencies cannot be compared."""


class PaperMachine:
    """The simulated machine of the paper.  effort: factor on the requests of whole workloads.

    Replays that only count hits, which are fast, have up to twice as many requests.
    """

    def __init__(self, calibration: Calibration, effort: float = 0.5) -> None:
        self._calibration = calibration
        self._effort = effort
        self._runs: dict[tuple[str, str, float, settings.Setting], settings.ServedWorkload] = {}
        self._server, self._setting = "", settings.ASSUMED

    def times(self, system: str) -> ServerTimes:
        """Times of a system below the current server."""
        return settings.paper_times(self._calibration, self._server, system, self._setting)

    def alone(
        self, system: str, total: int, cached: int, model: ModelShape | None = None
    ) -> SimulatedRequest:
        """One request on an idle server, with ``cached`` of its ``total`` tokens in the store."""
        calibration = replace(self._calibration, model=model or self._calibration.model)
        times = settings.paper_times(calibration, self._server, system, self._setting)
        cluster = Cluster(times, ClusterShape())
        ids = tuple(range(-(-total // BLOCK_TOKENS)))
        cluster.servers[0].store.add(ids[: cached // BLOCK_TOKENS])
        cluster.run([TraceRequest(0, total, 1, ids)])
        return cluster.req(0)

    def value(self, name: str, server: str, setting: settings.Setting = settings.ASSUMED) -> float:
        """The simulated value of a published point, on one server.

        Raises ConfigError for an unknown name, Saturated if a queue grows.
        """
        self._server, self._setting = server, setting
        kind, _, rest = name.partition(" ")
        makers: dict[str, Callable[[str], float]] = {
            "retrieve": lambda s: self._gb_per_s(s, write=False),
            "store": lambda s: self._gb_per_s(s, write=True),
            "prefix": lambda text: self._alone_s(text, CONTEXT),
            "tp2": lambda text: self._alone_s(text, 640 * K, HALF_GLM),
            "bubble": self._bubble,
            "recompute/ssd": self._recompute,
            "crossing": self._crossing,
            "hits": self._hits,
            "ttft": lambda text: self._at_load(text, "ttft_ms"),
            "itl": lambda text: self._at_load(text, "itl_ms"),
            "tpot": lambda text: self._at_load(text, "tpot_ms"),
            "rate": self._rate,
        }
        if kind not in makers:
            raise ConfigError(f"nothing is known of the point {name!r}; see {POINTS.name}")
        return makers[kind](rest)

    def _gb_per_s(self, system: str, *, write: bool) -> float:
        times = self.times(system)
        nbytes = CONTEXT * self._calibration.model.kv_nbytes_per_token
        taken_us = times.write_us(nbytes) if write else times.read_us(nbytes)
        return nbytes / taken_us / 1e3

    def _alone_s(self, text: str, total: int, model: ModelShape | None = None) -> float:
        """Seconds to the first token, or the ratio of two systems."""
        systems, length = text.split()
        found = [
            self.alone(one, total, tokens_of(length), model).first_ns / 1e9
            for one in systems.split("/")
        ]
        return found[0] / found[1] if len(found) == 2 else found[0]

    def _bubble(self, text: str) -> float:
        if text.startswith("share "):
            _, system, length, hit = text.split()
            return self.bubble_percent(system, tokens_of(length), _share(hit))
        system, _, hit = text.split()
        hits = HITS if hit == "mean" else [_share(one) for one in hit.split(",")]
        return sum(self.bubble_ms(system, h) for h in hits) / len(hits)

    def bubble_ms(self, system: str, hit: float) -> float:
        """Time that a request of 32K tokens waits for loads, in ms."""
        return self.alone(system, 32 * K, round(32 * K * hit)).bubble_ns / 1e6

    def bubble_percent(self, system: str, total: int, hit: float) -> float:
        """Share of the TTFT in which the server waits, for loads or otherwise, in percent."""
        req = self.alone(system, total, round(total * hit))
        base = self._calibration.server(self._server).base_share
        return 100 * (req.bubble_ns + base * (req.first_ns - req.bubble_ns)) / req.first_ns

    def _recompute(self, text: str) -> float:
        length, hit = text.split()
        total = tokens_of(length)
        reused = self.alone("ssd", total, round(total * _share(hit)))
        return self.alone("hbm", total, 0).first_ns / reused.first_ns

    def _crossing(self, text: str) -> float:
        """The hit share of 32K tokens above which loading takes longer than computing."""
        system, reading = text.split()
        times, layers, total = self.times(system), self._calibration.model.layers, 32 * K
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
        tier, name = text.split()
        effort = min(1.0, 2 * self._effort)
        return settings.replayed_hits(self._calibration, tier, name, self._setting, effort)

    def _at_load(self, text: str, metric: str) -> float:
        systems, name, *rate = text.split()
        at = float(rate[0]) if rate else _AT[name]
        runs = [self.loaded(name, s, at) for s in systems.split("/")]
        if any(run["unstable"] for run in runs):
            raise Saturated
        return float(runs[0][metric] / runs[1][metric])

    def _rate(self, text: str) -> float:
        systems, name = text.split()
        above, below = (self._rate_within(name, s) for s in systems.split("/"))
        return above / below

    def _rate_within(self, name: str, system: str) -> float:
        """The rate at which the mean TTFT reaches its limit; the last rate if it never does."""
        before_rate, before_ms = 0.0, 0.0
        for rate in _RATES:
            ttft_ms = float(self.loaded(name, system, rate)["ttft_ms"])
            if ttft_ms > _LIMIT_MS:
                share = (_LIMIT_MS - before_ms) / (ttft_ms - before_ms)
                return before_rate + share * (rate - before_rate)
            before_rate, before_ms = rate, ttft_ms
        return _RATES[-1]

    def loaded(self, name: str, system: str, rate: float) -> dict[str, Any]:
        """Results of a workload at a rate, with the server and setting of the last `use`."""
        setting = replace(self._setting, name="", warm=0.0)
        key = (name, f"{self._server} {system}", rate, setting)
        if key not in self._runs:
            sent = self._calibration.workloads[name]
            workload = settings.sent_workload(sent, name, setting, self._effort)
            self._runs[key] = settings.serve(self.times(system), workload, rate, setting)
        return self._runs[key].numbers(self._setting.warm)

    def use(self, server: str, setting: settings.Setting = settings.ASSUMED) -> None:
        """Sets server and setting for the next calls."""
        self._server, self._setting = server, setting


def settings_of(name: str, by: str) -> Sequence[settings.Setting]:
    """The settings that a point depends on."""
    if by == "formula":
        return (settings.ASSUMED,)
    if by == "replay":
        return (settings.ASSUMED, settings.ANOTHER_ORDER, settings.HALF_AS_LONG)
    whole = name.split()[0] in ("ttft", "itl", "tpot", "rate")
    return settings.SETTINGS if whole else (settings.ASSUMED, settings.LONGER_STEPS)


def residuals(
    calibration: Calibration, effort: float = 0.5, use: str = "", only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Every published point with the simulated value and its interval.

    use: only points of this use; empty for all.  only: prefixes of names.
    The simulated value is None if a queue grows: such a point is not compared.
    """
    machine = PaperMachine(calibration, effort)
    found = []
    for point in points():
        if use in ("", point["use"]) and (not only or point["name"].startswith(tuple(only))):
            values: list[float | None] = []
            asked = [(point["name"], one) for one in settings_of(point["name"], point["by"])]
            for name, setting in asked + [(n, settings.ASSUMED) for n in point.get("or", ())]:
                try:
                    values.append(machine.value(name, point["server"], setting))
                except Saturated:
                    values.append(None)
            found.append({**point, **_compared(values, point["value"])})
    return found


def _compared(values: Sequence[float | None], published: float) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    simulated = values[0]
    return {
        "simulated": simulated,
        "low": min(known, default=None),
        "high": max(known, default=None),
        "settings": len(values),
        "saturated": len(values) - len(known),
        "error": None if simulated is None else simulated / published - 1,
        "within": bool(known) and min(known) <= published <= max(known),
    }


def tokens_of(text: str) -> int:
    """Tokens from "64K"."""
    return int(text.removesuffix("K")) * K


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100

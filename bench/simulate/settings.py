"""Tries settings that the papers do not publish, and reports the workload under each of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from tutti.bench.belady import least_recently_used, unlimited
from tutti.bench.simulate.calibration import (
    Calibration,
    Sent,
    ServerParameters,
    ServerTimes,
    drive_of,
    gpu_of,
)
from tutti.bench.simulate.cluster import Cluster, ClusterShape
from tutti.bench.statistics import queue_grows
from tutti.bench.traces import BLOCK_TOKENS, TraceRequest
from tutti.bench.ttft.arrivals import arrival_times_s
from tutti.bench.ttft.workloads.orders import ROUND_ROBIN
from tutti.bench.ttft.workloads.source import (
    Workload,
    add_workload_arguments,
    build_workload,
    mooncake_requests,
)

PAPER_GPU, PAPER_DRIVE = "H100", "2x D7-PS1010"


@dataclass(frozen=True)
class Setting:
    """One setting that differs from the calibration's assumption.

    order: of requests; empty or 0: as assumed.  length: factor on the number of requests.  warm:
    share of first requests that are not counted.  answers: factor on the tokens of answers.
    arrivals: added to the seed of the arrival times.
    """

    name: str
    order: str = ""
    length: float = 1.0
    warm: float = 0.0
    answers: float = 1.0
    chunk_tokens: int = 0
    arrivals: int = 0

    def steps_of(self, server: ServerParameters) -> ServerParameters:
        """The server with this setting's steps."""
        return replace(server, chunk_tokens=self.chunk_tokens or server.chunk_tokens)


ASSUMED = Setting("as assumed")
WITHOUT_FIRST = Setting("without the first tenth", warm=0.1)
LONGER_STEPS = Setting("steps of 8192 tokens", chunk_tokens=8192)
ANOTHER_ORDER = Setting("one task in turn", order=ROUND_ROBIN)
HALF_AS_LONG = Setting("half as many requests", length=0.5)
#: Settings for a whole workload.
SETTINGS = (
    ASSUMED,
    WITHOUT_FIRST,
    LONGER_STEPS,
    ANOTHER_ORDER,
    HALF_AS_LONG,
    Setting("answers half as long", answers=0.5),
    Setting("answers twice as long", answers=2.0),
    *(Setting(f"arrivals drawn again ({n})", arrivals=n) for n in range(1, 5)),
)


def paper_times(
    calibration: Calibration, server: str, system: str, setting: Setting = ASSUMED
) -> ServerTimes:
    """Times of the paper's machine: an H100 and two D7-PS1010 for each server."""
    served = setting.steps_of(calibration.server(server))
    gpu, drive = gpu_of(PAPER_GPU), drive_of(PAPER_DRIVE)
    return ServerTimes(calibration, served, calibration.system(system), gpu=gpu, drive=drive)


def sent_workload(sent: Sent, name: str, setting: Setting, effort: float = 1.0) -> Workload:
    """The data set's lengths, in the order that is assumed.  effort: times the requests."""
    return _generated(*_what(sent, name, setting, effort))


def _what(
    sent: Sent, name: str, setting: Setting, effort: float
) -> tuple[str, str, int, tuple[str, ...], float]:
    requests = max(8, round(sent.requests * setting.length * effort))
    return name, setting.order or sent.order, requests, sent.tasks, sent.token_scale


@lru_cache(maxsize=8)
def _generated(
    name: str, order: str, requests: int, tasks: tuple[str, ...], scale: float
) -> Workload:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    wanted = ["--workload", f"{name}-synthetic", "--requests", str(requests), "--order", order]
    wanted += ["--scale", str(scale), "--tasks", *tasks]
    return build_workload(parser.parse_args(wanted))


def arrivals(workload: Workload, rate: float, seed: int, first: int = 0) -> list[TraceRequest]:
    """The workload as a trace: requests from ``first`` on come at random, those before at once."""
    count = len(workload.prompts) - first
    times_ms = [round(1000 * at) for at in arrival_times_s(count, rate, seed)]
    return mooncake_requests(workload, [0] * first + times_ms)


@dataclass(frozen=True)
class ServedWorkload:
    """Results of a workload: (arrival, first token, last token, tokens of the answer) in ns."""

    requests: tuple[tuple[int, int, int, int], ...]
    tokens_per_s: tuple[float, float]

    def numbers(self, warm: float = 0.0) -> dict[str, Any]:
        """Mean TTFT, ITL (over tokens), TPOT (over requests), tokens/s, and if the queue grows.

        warm: share of the first requests that is left out.
        """
        kept = self.requests[round(warm * len(self.requests)) :]
        gaps = [((last - first) / 1e6, n - 1) for _, first, last, n in kept if n > 1]
        came, first = [one[0] for one in kept], [one[1] for one in kept]
        return {
            "ttft_ms": fmean((f - c) / 1e6 for c, f in zip(came, first, strict=True)),
            "itl_ms": sum(ms for ms, _ in gaps) / max(1, sum(tokens for _, tokens in gaps)),
            "tpot_ms": fmean(ms / tokens for ms, tokens in gaps) if gaps else 0.0,
            "unstable": queue_grows(came, first),
            "input_tokens_per_s": self.tokens_per_s[0],
            "output_tokens_per_s": self.tokens_per_s[1],
        }


def serve(times: ServerTimes, workload: Workload, rate: float, setting: Setting) -> ServedWorkload:
    """Serves a workload from empty stores: full ones would give far more hits than published."""
    requests = [
        replace(one, output_tokens=max(1, round(one.output_tokens * setting.answers)))
        for one in arrivals(workload, rate, 1 + setting.arrivals)
    ]
    cluster = Cluster(times, ClusterShape(unit_layers=4))
    run = cluster.run(requests)
    reqs = [cluster.req(number) for number in range(len(requests))]
    return ServedWorkload(
        tuple((r.arrived_ns, r.first_ns, r.last_ns, r.request.output_tokens) for r in reqs),
        (run["input_tokens_per_s"], run["output_tokens_per_s"]),
    )


@lru_cache(maxsize=8)
def _blocks(*what: Any) -> list[tuple[int, ...]]:
    workload = _generated(*what)
    return [
        one.hash_ids[: one.input_tokens // BLOCK_TOKENS]
        for one in mooncake_requests(workload, [0] * len(workload.prompts))
    ]


def replayed_hits(
    calibration: Calibration, tier: str, name: str, setting: Setting, effort: float
) -> float:
    """Percentage of blocks that LRU serves as a prefix, without timing.  tier: hbm, dram or ssd.

    Tiers below HBM also contain HBM's blocks.
    """
    blocks = _blocks(*_what(calibration.workloads[name], name, setting, effort))
    if tier == "ssd":
        return 100 * unlimited(blocks).prefix_hit_rate
    in_dram = calibration.dram_nbytes / calibration.model.kv_nbytes_per_token
    tokens = calibration.hbm_tokens if tier == "hbm" else in_dram
    return 100 * least_recently_used(blocks, int(tokens // BLOCK_TOKENS)).prefix_hit_rate

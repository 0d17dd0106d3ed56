"""Intervals of `tutti simulate`: repeats each run with one unpublished setting changed.

A trace determines order, length and answers, and arrivals unless a rate is given; those of a
generated workload are assumptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tutti.bench.simulate.settings import ASSUMED, LONGER_STEPS, SETTINGS, WITHOUT_FIRST, Setting
from tutti.bench.ttft.workloads.chat import CHATS
from tutti.bench.ttft.workloads.orders import ROUND_ROBIN, SHUFFLED
from tutti.bench.ttft.workloads.source import MOONCAKE, Workload, build_workload
from tutti.errors import ConfigError

SHARES = ("hit_hbm", "hit_store", "bubble_share", "gpu_busy")
DRIVE_SHARES = ("medium_read_busy", "medium_write_busy")
_OF_RUNS = (*SHARES, *DRIVE_SHARES, "backlog_pages_max")


def settings_for(workload: str, chunk_tokens: int, *, drawn: bool) -> tuple[Setting, ...]:
    """The settings that need a run each, the assumed one first.

    chunk_tokens: of the assumed server's steps.  drawn: arrivals are random, not from a trace.
    """
    own = (ASSUMED, LONGER_STEPS) if workload == MOONCAKE else SETTINGS
    return tuple(
        one
        for one in SETTINGS
        if one != WITHOUT_FIRST and one.chunk_tokens != chunk_tokens
        if (drawn if one.arrivals else one in own)
    )


def workload_for(args: argparse.Namespace, setting: Setting, assumed: Workload) -> Workload:
    """The workload of the arguments with one setting changed.

    Raises ConfigError if half of it has no requests after those that fill the caches.
    """
    workload = assumed
    if setting.order:
        workload = build_workload(argparse.Namespace(**vars(args) | _another(args, assumed)))
    kept = round(setting.length * len(workload.prompts))
    if kept <= args.warm:
        raise ConfigError(f"--warm {args.warm} leaves nothing of {kept} requests; give --requests")
    prompts = [
        replace(one, output_tokens=max(1, round(one.output_tokens * setting.answers)))
        for one in workload.prompts[:kept]
    ]
    return replace(workload, prompts=prompts)


def _another(args: argparse.Namespace, assumed: Workload) -> dict[str, Any]:
    """Arguments for another order; conversations have a fixed one, and are drawn again."""
    if args.workload.removesuffix("-synthetic") in CHATS:
        return {"workload_seed": args.workload_seed + 1}
    return {"order": SHUFFLED if assumed.order == ROUND_ROBIN else ROUND_ROBIN}


def spans(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """(least, most) of each number over runs without a growing queue.

    The first run is as assumed.  Runs without a number are ignored for it.
    """
    stable = [_flat(run) for run in runs if not run["unstable"]]
    names = dict.fromkeys(name for run in stable for name in run)
    found = {name: [run[name] for run in stable if name in run] for name in names}
    return {
        "intervals": {name: [min(values), max(values)] for name, values in found.items()},
        "settings": len(runs),
        "settings_unstable": len(runs) - len(stable),
    }


def _flat(run: Mapping[str, Any]) -> dict[str, float]:
    times = {
        f"{name}_{part}": run[name][part]
        for name, parts in (("ttft_ms", ("mean", "p50", "p99")), ("tpot_ms", ("mean",)))
        if run[name]
        for part in parts
    }
    if run["itl_ms"]:
        times["itl_ms_mean"] = run["itl_ms"]["mean"]
    return times | {name: run[name] for name in _OF_RUNS if name in run}

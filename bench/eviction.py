"""Counts hits of the eviction policies on request traces, without bytes.

Index, allocator, policies and the history of reuse are the product's code; only the medium is left
out, so that a victim is free at once. A request looks up its blocks, loads the prefix that hits,
and puts the rest, as `tutti replay` does. For comparison: plain LRU over single blocks, which has
neither runs nor a reserve; Belady's MIN, which knows the future (tutti/bench/belady.py); and
"groups", an LRU that evicts whole groups and so has the longest runs. `--published` adds policies
from the literature, over single blocks like plain LRU, to show how close to MIN they come with a
pool's knowledge. Plain LRU, MQ and LIRS also run without the slots that a pool has free on average:
the difference is the cost of the reserve.

"2nd found" is the share of the blocks' second references that hit, which rates the treatment of new
objects. "whole puts", "by classes" and "and gaps" are bounds (tutti/bench/eviction_bounds.py); the
first is not one for requests larger than a window, nor for `mq` while it refuses blocks.

If runs are too short, `lru` and `mq` also run with parts of groups as victims: halves, quarters and
so on to single slots. This is an experiment; the store has no such setting. The default also runs
on traces on which its constants were not chosen: halves of each trace, two shuffled orders of a
trace of documents, and other seeds of the synthetic one.

A policy passes if it hits at least as often as plain LRU at every capacity, covers a third of the
distance from plain LRU to MIN at a trace's smallest capacity, and its runs have at least 0.9 times
the length of those of "groups".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory
from tutti.bench import belady, eviction_bounds
from tutti.bench.environment import describe
from tutti.bench.eviction_pool import GROUP_SLOTS, GROUPS, WINDOW, Pool, play
from tutti.bench.traces import SYNTHETIC, Synthetic, TraceRequest, generate, requests_of
from tutti.bench.writable import check_writable, options
from tutti.errors import ConfigError
from tutti.medium.geometry import GROUPS_LEAST
from tutti.placement.eviction import POLICIES, reserve_slots

_RESERVED = ("MQ", "LIRS")
_THIRD = 1 / 3
_RUN_SHARE = 0.9
_DEFAULT = "mq"  # of StoreConfig
_OTHER_SEEDS = range(2, 7)
_SHUFFLES = range(2)
_DOCUMENTS = ("leval", "loogle")  # traces without an order of requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    what = "Mooncake .jsonl files, or %(default)s; `tutti bench workload` writes others"
    option("--trace", [SYNTHETIC], what)
    what = "use the first N requests of each trace (default: all; synthetic: 400)"
    option("--requests", None, what, positive)
    option("--capacity", [0.084, 0.25, 0.75], "sizes of the pool, as fractions of a trace's blocks")
    option("--group-slots", GROUP_SLOTS, "most slots to evict at once", positive)
    what = "also play published policies over single blocks (pip install libcachesim)"
    option("--published", False, what)
    option("--out", None, "also write the JSON to this file", Path)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Replays each trace at each capacity with each policy.  Raises ConfigError."""
    if not all(0 < share <= 1 for share in args.capacity):
        raise ConfigError("--capacity is a share of a trace's blocks, above 0 and at most 1")
    if args.out is not None:
        check_writable(args.out)
    traces = [(_name(trace), requests_of(trace, args.requests)) for trace in args.trace]
    cells: list[dict[str, Any]] = []
    published: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with progress("eviction", len(traces) * len(args.capacity)) as bar:
        for name, requests in traces:
            for share in sorted(args.capacity):
                new = _cells(name, requests, share, args)
                cells += new
                if args.published:
                    published.append(_published(new[-2], requests))  # not "groups"
                    parts += _parts(new, requests)
                    others += _others(name, requests, share, args)
                bar.advance(1)
    result = {
        "benchmark": "eviction",
        "cells": cells,
        "missed": missed_bars(cells, published),
        "published": published,
        "parts": parts,
        "others": others,
        "group_slots": args.group_slots,
        "machine": describe("."),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


_BOUNDS = ("whole_puts_hit_rate", "classes_hit_rate", "classes_and_gaps_hit_rate")
HEAD = (
    *("trace", "blocks", "policy", "block hits", "plain LRU", "less reserve", "published"),
    *("a third", "MIN", "gained", "mean run", "2nd found"),
    *("whole puts", "by classes", "and gaps"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD.  "less reserve": plain LRU without the slots that were free; "a third":
    bar of the smallest pools; "published": best published policy; "gained": share of the distance
    from plain LRU to MIN.
    """
    best = _best(result["published"])
    return [
        [
            cell["trace"],
            str(cell["capacity_blocks"]),
            cell["policy"],
            f"{100 * cell['hit_rate']:.1f} %",
            f"{100 * cell['lru_hit_rate']:.1f} %",
            f"{100 * cell['lru_less_reserve']:.1f} %",
            f"{100 * best[_pool(cell)]['hit_rate']:.1f} %" if _pool(cell) in best else "",
            f"{100 * _third(cell):.1f} %" if _is_smallest(cell, result["cells"]) else "",
            f"{100 * cell['minimum_hit_rate']:.1f} %",
            f"{100 * gained(cell):.0f} %",
            f"{cell['mean_run_length']:.2f}",
            f"{100 * cell['second_found']:.1f} %",
            *(f"{100 * cell[bound]:.1f} %" if bound in cell else "" for bound in _BOUNDS),
        ]
        for cell in result["cells"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes: the bars that were missed, and the results of published policies."""
    found = missed_bars(result["cells"], result["published"])
    missed = [f"NOT REACHED: {text}" for text in found] or ["every bar is reached"]
    return (
        missed
        + _bound_notes(result["cells"])
        + _part_notes(result.get("parts", ()))
        + _other_notes(result.get("others", ()))
        + _limits(result["published"])
        + [
            f"best of {len(each['hit_rates'])} published policies, {each['trace']},"
            f" {each['capacity_blocks']} blocks: {each['policy']}, {100 * each['hit_rate']:.1f} %,"
            f" {gained(each):.2f} of the way to MIN; without {each['free_slots']} free slots"
            f" MQ {100 * each['less_reserve']['MQ']:.1f} %,"
            f" LIRS {100 * each['less_reserve']['LIRS']:.1f} %"
            for each in result["published"]
        ]
    )


def gained(cell: dict[str, Any]) -> float:
    """Share of the distance from plain LRU to MIN that a policy covers; 1 if there is none."""
    distance = cell["minimum_hit_rate"] - cell["lru_hit_rate"]
    return (cell["hit_rate"] - cell["lru_hit_rate"]) / distance if distance > 0 else 1.0


def _third(cell: dict[str, Any]) -> float:
    """The hit rate a third of the way from plain LRU to MIN."""
    lru = cell["lru_hit_rate"]
    return float(lru + _THIRD * (cell["minimum_hit_rate"] - lru))


def _pool(cell: dict[str, Any]) -> tuple[str, int]:
    return cell["trace"], cell["capacity_blocks"]


def _is_smallest(cell: dict[str, Any], cells: Sequence[dict[str, Any]]) -> bool:
    same = (each["capacity_blocks"] for each in cells if each["trace"] == cell["trace"])
    return bool(cell["capacity_blocks"] == min(same))


def _best(published: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The published policy with the most hits, by pool."""
    return {_pool(each): each for each in published}


def _limits(published: Sequence[dict[str, Any]]) -> list[str]:
    """The number of hit bars that single published policies reach; they keep no slots free."""
    if not published:
        return []
    smallest = [each for each in published if _is_smallest(each, published)]
    as_lru, thirds = {}, {}
    for name in published[0]["hit_rates"]:
        as_lru[name] = sum(e["hit_rates"][name] >= e["lru_hit_rate"] for e in published)
        thirds[name] = [e["hit_rates"][name] >= _third(e) for e in smallest].count(True)
    most, third = max(as_lru, key=lambda name: as_lru[name]), max(thirds.values())
    notes = [
        f"of {len(as_lru)} published policies none hits as often as plain LRU in more than"
        f" {as_lru[most]} of {len(published)} pools ({most}), and none gains a third in more than"
        f" {third} of the {len(smallest)} smallest"
    ]
    for name in (name for name in thirds if third and thirds[name] == third):
        worst = max(published, key=lambda e: e["lru_hit_rate"] - e["hit_rates"][name])
        lost = 100 * (worst["lru_hit_rate"] - worst["hit_rates"][name])
        if lost > 0:
            where = f"{worst['trace']}, {worst['capacity_blocks']} blocks"
            notes.append(f"{name}, which gains it there, hits {lost:.1f} points less at {where}")
    return notes


def _bound_notes(cells: Sequence[dict[str, Any]]) -> list[str]:
    """The bar of a third against the bounds, for each of the smallest pools."""
    pools = {_pool(cell): cell for cell in cells if _BOUNDS[0] in cell}
    notes = []
    for cell in (cell for cell in pools.values() if _is_smallest(cell, cells)):
        ways = [gained({**cell, "hit_rate": cell[bound]}) for bound in _BOUNDS]
        proven = "out of reach" if ways[1] < _THIRD else "not excluded"
        with_gaps = "out of reach" if ways[2] < _THIRD else "not excluded"
        notes.append(
            f"bounds, {cell['trace']}, {cell['capacity_blocks']} blocks: MIN with whole puts"
            f" {ways[0]:.2f} of the way; policies that know age, uses and depth at most"
            f" {ways[1]:.2f}, a third is {proven}; the gap before the last use, too,"
            f" {ways[2]:.2f}, {with_gaps}"
        )
    for cell in (cell for cell in cells if cell["hit_rate"] > cell.get(_BOUNDS[1], 1)):
        pair = f"{100 * cell['hit_rate']:.1f} % against {100 * cell[_BOUNDS[1]]:.1f} %"
        notes.append(
            f"{cell['policy']}, {cell['trace']}, {cell['capacity_blocks']} blocks, hits more than"
            f" age, uses and depth explain: {pair}"
        )
    return notes


def _part_notes(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Hits and runs by the size of evicted units, and whether one size reaches both bars."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for part in parts:
        rows.setdefault((*_pool(part), part["policy"]), []).append(part)
    notes = []
    for (trace, blocks, policy), row in rows.items():
        both = [str(p["part_slots"]) for p in row if p["has_hits"] and p["has_runs"]]
        points = (
            f"{p['part_slots']}: {100 * p['hit_rate']:.1f} %, {p['mean_run_length']:.2f}"
            for p in row
        )
        notes.append(
            f"parts of groups, {policy}, {trace}, {blocks} blocks; slots evicted as a whole, hits"
            f" and mean run: {'; '.join(points)}; both bars with "
            + (" and ".join(both) if both else "none")
        )
    return notes


def _other_notes(others: Sequence[dict[str, Any]]) -> list[str]:
    """Results of the default on traces that it was not tuned on."""
    if not others:
        return []
    less = [each for each in others if each["hit_rate"] < each["lru_hit_rate"]]
    mean = sum(each["hit_rate"] - each["lru_hit_rate"] for each in others) / len(others)
    notes = [
        f"other traces: {others[0]['policy']} hits at least as often as plain LRU in"
        f" {len(others) - len(less)} of {len(others)} pools, {100 * mean:+.2f} points on average"
    ]
    return notes + [
        f"other traces, less than plain LRU: {each['trace']}, {each['capacity_blocks']} blocks:"
        f" {100 * each['hit_rate']:.1f} %, plain LRU {100 * each['lru_hit_rate']:.1f} %"
        for each in less
    ]


def missed_bars(
    cells: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """The bars that each policy missed, and the best published policies there; see the head of this
    file.
    """
    missed = []
    best = _best(published)
    whole_groups = {_pool(cell): cell for cell in cells if cell["policy"] == GROUPS}
    for cell in cells:
        if cell["policy"] == GROUPS:
            continue
        pool, lru = _pool(cell), cell["lru_hit_rate"]
        where = f"{cell['policy']}, {pool[0]}, {pool[1]} blocks"
        other = best.get(pool)
        if cell["hit_rate"] < lru:
            most = (
                f"; published at most {other['hit_rate']:.4f} ({other['policy']})" if other else ""
            )
            missed.append(f"{where}: {cell['hit_rate']:.4f} hits, plain LRU {lru:.4f}{most}")
        if _is_smallest(cell, cells) and gained(cell) < _THIRD:
            most = f"; published at most {gained(other):.2f} ({other['policy']})" if other else ""
            missed.append(f"{where}: {gained(cell):.2f} of the way to MIN, a third is wanted{most}")
        whole = whole_groups.get(pool, cell)
        run, longer = cell["mean_run_length"], whole["mean_run_length"]
        if run < _RUN_SHARE * longer:
            hits = whole["hit_rate"]
            price = f", which hit {hits:.4f}, plain LRU {lru:.4f}" if hits < lru else ""
            missed.append(f"{where}: runs of {run:.2f}, with groups {longer:.2f}{price}")
    return missed


def _cells(
    name: str, requests: Sequence[TraceRequest], share: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    blocks = [request.hash_ids for request in requests]
    facts = _facts(name, blocks, share, args.group_slots)
    slots = facts["capacity_blocks"]
    facts["minimum_hit_rate"] = belady.minimum(blocks, slots).hit_rate
    facts["unlimited_hit_rate"] = belady.unlimited(blocks).prefix_hit_rate
    whole = eviction_bounds.whole_puts(blocks, slots, reserve_slots(slots), WINDOW)
    facts[_BOUNDS[0]] = whole.hit_rate
    for bound, gaps in zip(_BOUNDS[1:], (False, True), strict=True):
        facts[bound] = eviction_bounds.by_classes(blocks, slots, gaps)
    cells = []
    for policy in (*sorted(POLICIES), GROUPS):
        pool = Pool(slots, policy, facts["group_slots"])
        second_found = play(pool, blocks)
        less = belady.least_recently_used(blocks, slots - pool.free_slots)
        cells.append(
            {
                **facts,
                "free_slots": pool.free_slots,
                "policy": policy,
                "hit_rate": pool.hits / less.references,
                "lru_less_reserve": less.prefix_hit_rate,
                "mean_run_length": _mean_run(pool),
                "second_found": second_found,
                "evicted": pool.evicted,
                "evicted_too_early": pool.history.regretted,
            }
        )
    return cells


def _facts(
    name: str, blocks: Sequence[Sequence[int]], share: float, group_slots: int
) -> dict[str, Any]:
    """Facts that are the same for all policies: the pool, and plain LRU in it."""
    distinct = len({block for ids in blocks for block in ids})
    wanted = max(GROUPS_LEAST, int(share * distinct))
    group_slots = min(group_slots, wanted // GROUPS_LEAST)  # as in new pools
    slots = -(-wanted // group_slots) * group_slots
    return {
        "trace": name,
        "requests": len(blocks),
        "distinct_blocks": distinct,
        "capacity_blocks": slots,
        "group_slots": group_slots,
        "lru_hit_rate": belady.least_recently_used(blocks, slots).prefix_hit_rate,
    }


def _mean_run(pool: Pool) -> float:
    return pool.loaded / pool.runs if pool.runs else 0.0


def _parts(
    cells: Sequence[dict[str, Any]], requests: Sequence[TraceRequest]
) -> list[dict[str, Any]]:
    """The policies with parts of groups as victims, in a pool with too short runs."""
    blocks = [request.hash_ids for request in requests]
    runs = _RUN_SHARE * cells[-1]["mean_run_length"]  # of "groups"
    if all(cell["mean_run_length"] >= runs for cell in cells):
        return []
    parts = []
    for cell in cells[:-1]:
        part = cell["group_slots"]
        while part:
            pool = Pool(cell["capacity_blocks"], cell["policy"], cell["group_slots"], part)
            play(pool, blocks)
            hit_rate = pool.hits / sum(map(len, blocks))
            parts.append(
                {
                    **{key: cell[key] for key in ("trace", "capacity_blocks", "policy")},
                    "part_slots": part,
                    "hit_rate": hit_rate,
                    "mean_run_length": _mean_run(pool),
                    "has_hits": hit_rate >= cell["lru_hit_rate"],
                    "has_runs": _mean_run(pool) >= runs,
                }
            )
            part //= 2
    return parts


def _others(
    name: str, requests: Sequence[TraceRequest], share: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The default on traces that were not used to choose its constants."""
    others = []
    for other, played in _other_traces(name, requests):
        blocks = [request.hash_ids for request in played]
        facts = _facts(other, blocks, share, args.group_slots)
        pool = Pool(facts["capacity_blocks"], _DEFAULT, facts["group_slots"])
        play(pool, blocks)
        rate = pool.hits / sum(map(len, blocks))
        others.append({**facts, "policy": pool.policy, "hit_rate": rate})
    return others


def _other_traces(
    name: str, requests: Sequence[TraceRequest]
) -> Iterator[tuple[str, Sequence[TraceRequest]]]:
    half = len(requests) // 2
    yield f"{name}, first half", requests[:half]
    yield f"{name}, second half", requests[half:]
    if name in _DOCUMENTS:
        for seed in _SHUFFLES:
            order = np.random.default_rng(seed).permutation(len(requests))
            yield f"{name}, shuffled, seed {seed}", [requests[at] for at in order]
    if name == SYNTHETIC:
        for seed in _OTHER_SEEDS:
            yield f"{name}, seed {seed}", generate(Synthetic(requests=len(requests), seed=seed))


def _published(cell: dict[str, Any], requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """The best published policy in a pool of the size of a cell's, and the hit rates of all."""
    blocks = [request.hash_ids for request in requests]
    counts = belady.published(blocks, cell["capacity_blocks"])
    rates = {name: count.prefix_hit_rate for name, count in counts.items()}
    best = max(rates, key=lambda name: rates[name])
    less = belady.published(blocks, cell["capacity_blocks"] - cell["free_slots"], _RESERVED)
    keys = ("trace", "capacity_blocks", "free_slots", "lru_hit_rate", "minimum_hit_rate")
    return {
        **{key: cell[key] for key in keys},
        "policy": best,
        "hit_rate": rates[best],
        "hit_rates": rates,
        "less_reserve": {name: count.prefix_hit_rate for name, count in less.items()},
    }


def _name(trace: str) -> str:
    return trace if trace == SYNTHETIC else Path(trace).stem

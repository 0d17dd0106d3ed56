"""`tutti bench eviction`: hit rates of the eviction policies on request traces, without bytes.

Index, allocator, policies and the history of reuse are the product's; only the medium is left out,
and a victim is free at once. A request looks up its blocks, loads the prefix that hits, and puts
the rest, as `tutti replay` does. Three others are for comparison: plain LRU over single blocks,
which knows neither runs nor a reserve; Belady's MIN, which knows the future
(tutti/bench/belady.py); and "groups", LRU that takes whole groups and so keeps runs longest.
`--published` adds policies from the literature, over single blocks as plain LRU: how near to MIN
any of them comes that knows no more than a pool does. Plain LRU, MQ and LIRS also play without the
slots that a pool has free on average: what the reserve costs any policy.

"2nd found" is the share of the blocks' second references that hit: what new objects get.

A policy passes when at every capacity it hits at least as often as plain LRU, when at the smallest
capacity of a trace it covers a third of the distance from plain LRU to MIN, and when its runs are
at least 0.9 of those of "groups" in length.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti.arguments import positive
from tutti.base.arrays import Keys, Mask, Slots
from tutti.base.terminal import ProgressFactory, table
from tutti.bench import belady
from tutti.bench.environment import describe
from tutti.bench.traces import Synthetic, TraceRequest, block_keys, generate, read_trace
from tutti.bench.writable import check_writable
from tutti.errors import ConfigError
from tutti.medium.geometry import GROUPS_LEAST
from tutti.placement.allocator import Allocator
from tutti.placement.eviction import (
    POLICIES,
    EvictionPolicy,
    EvictionView,
    expected_slots,
    reserve_slots,
)
from tutti.placement.index import MISSING, Index, SlotState
from tutti.placement.reuse import ReuseHistory

SYNTHETIC = "synthetic"
GROUPS = "groups"
GROUP_SLOTS = 128
_WINDOW = 256  # pages of one load or put
_RESERVED = ("MQ", "LIRS")
_THIRD = 1 / 3
_RUN_SHARE = 0.9
_FINGERPRINT = bytes(16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        nargs="+",
        default=[SYNTHETIC],
        help="Mooncake .jsonl files, or %(default)s; `tutti bench workload` writes others",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        help="use the first N requests of each trace (default: all; synthetic: 400)",
    )
    parser.add_argument(
        "--capacity",
        nargs="+",
        type=float,
        default=[0.084, 0.25, 0.75],
        help="sizes of the pool, as fractions of a trace's blocks",
    )
    parser.add_argument(
        "--group-slots", type=positive, default=GROUP_SLOTS, help="most slots to evict at once"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=sorted(POLICIES),
        default=sorted(POLICIES),
        help="policies to compare (default: all)",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="also play published policies over single blocks (pip install libcachesim)",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Replays each trace at each capacity with each policy.  Raises ConfigError."""
    if not all(0 < share <= 1 for share in args.capacity):
        raise ConfigError("--capacity is a share of a trace's blocks, above 0 and at most 1")
    if args.out is not None:
        check_writable(args.out)
    traces = [(_name(trace), _requests(trace, args.requests)) for trace in args.trace]
    cells: list[dict[str, Any]] = []
    published: list[dict[str, Any]] = []
    with progress("eviction", len(traces) * len(args.capacity)) as bar:
        for name, requests in traces:
            for share in sorted(args.capacity):
                cells += _cells(name, requests, share, args)
                if args.published:
                    published.append(_published(cells[-2], requests))  # not "groups"
                bar.advance(1)
    result = {
        "benchmark": "eviction",
        "cells": cells,
        "missed": missed_bars(cells, published),
        "published": published,
        "group_slots": args.group_slots,
        "machine": describe("."),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


HEAD = (
    *("trace", "blocks", "policy", "block hits", "plain LRU", "less reserve", "published"),
    *("a third", "MIN", "gained", "mean run", "2nd found"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD; "less reserve" is plain LRU without the slots that were free, "a third"
    the bar of the smallest pools, "published" the most that a published policy hits, and "gained"
    the part of the distance from plain LRU to MIN.
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
        ]
        for cell in result["cells"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """The bars that were missed, and how far published policies come."""
    found = missed_bars(result["cells"], result["published"])
    missed = [f"NOT REACHED: {text}" for text in found] or ["every bar is reached"]
    return (
        missed
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


def report(result: dict[str, Any]) -> str:
    """A table for people, and the bars that were missed."""
    return "\n".join([table(HEAD, rows_of(result)), *notes_of(result)])


def gained(cell: dict[str, Any]) -> float:
    """Which part of the distance from plain LRU to MIN a policy covers; 1 where there is none."""
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
    """By pool, the published policy that hits most there."""
    return {_pool(each): each for each in published}


def _limits(published: Sequence[dict[str, Any]]) -> list[str]:
    """How many bars of hits any one published policy reaches, which keeps no slots free."""
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


def missed_bars(
    cells: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """What each policy lacks, and the most that published policies reach there; see the head of
    this file.
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


class _LeastRecentGroups:
    """The groups that were not looked up for longest; of those the ends of chains first."""

    def victims(self, view: EvictionView, n: int) -> Slots:
        rows = (-1, view.group_slots)
        resident, busy = view.resident.reshape(rows), view.busy.reshape(rows)
        access = np.where(resident, view.access.reshape(rows), 0).max(axis=1)
        depth = np.where(resident, view.depth.reshape(rows), 0).max(axis=1).astype(np.int64)
        evictable = resident & ~busy
        groups = np.lexsort((-depth, access, busy.any(axis=1)))
        enough = int(np.searchsorted(np.cumsum(evictable.sum(axis=1)[groups]), n)) + 1
        row, column = np.nonzero(evictable[groups[:enough]])
        slots: Slots = groups[row] * view.group_slots + column
        return slots


_POLICIES: dict[str, EvictionPolicy] = {**POLICIES, GROUPS: _LeastRecentGroups()}


@dataclass
class Pool:
    """A pool without a medium, of at least `blocks` slots in whole groups."""

    blocks: int
    policy: str
    group_slots: int = GROUP_SLOTS

    def __post_init__(self) -> None:
        groups = max(1, -(-self.blocks // self.group_slots))
        slots = groups * self.group_slots
        self.index = Index(slots, seed=1)
        self.allocator = Allocator(1, groups, self.group_slots)
        self.history = ReuseHistory(slots)
        self.reserve = reserve_slots(slots)
        self._kept: Mask = np.zeros(slots, np.bool_)
        self.hits = self.loaded = self.runs = self.evicted = 0
        self._free_sum = self._puts = 0  # since the pool was full

    @property
    def free_slots(self) -> int:
        """Slots free behind a put, on average since the pool was full."""
        return self._free_sum // self._puts if self._puts else 0

    def play(self, keys: Keys) -> int:
        """One request: look-up, load of what hits, put of the rest; returns how many hit."""
        found = self.index.match(keys)
        self._kept[:] = False
        self._kept[found] = True
        self.hits += found.size
        self._top_up(expected_slots(self.index.slots, len(keys) - found.size))
        for start in range(0, found.size, _WINDOW):
            self._load(found[start : start + _WINDOW])
        for start in range(found.size, len(keys), _WINDOW):
            self._put(keys, start, min(len(keys), start + _WINDOW))
        return found.size

    def _load(self, slots: Slots) -> None:
        self.index.begin_use()
        self.index.access[slots] = self.index.uses
        self.history.loaded(slots, self.index.uses)
        self.loaded += slots.size
        self.runs += 1 + int(np.count_nonzero(_breaks(slots, self.group_slots)))

    def _put(self, keys: Keys, start: int, end: int) -> None:
        index = self.index
        if start == 0:
            index.begin_use()
        rows = start + index.absent(keys[start:end])
        if rows.size == 0:
            return
        self._top_up(rows.size)
        after = int(index.find(keys[start - 1 : start])[0]) if start else MISSING
        slots = self.allocator.allocate(rows.size, after=None if after == MISSING else after)
        self._top_up(0)
        rows = rows[: slots.size]
        fresh = np.ascontiguousarray(keys[rows])
        index.insert(slots, fresh, 0, rows.astype(np.uint32))
        index.set_state(slots, SlotState.READY)
        self.history.stored(slots, fresh, index.uses)
        if self.evicted:
            self._free_sum += self.allocator.free_slots
            self._puts += 1

    def _top_up(self, extra: int) -> None:
        index, free = self.index, self.allocator.free_slots
        if free >= self.reserve + extra:
            return
        history = self.history
        view = EvictionView(
            index.resident(),
            self._kept,
            index.access,
            index.depth,
            self.group_slots,
            history.uses,
            index.uses,
            history.lifetime_bits,
        )
        victims = _POLICIES[self.policy].victims(view, 2 * self.reserve + extra - free)
        if victims.size == 0:
            return
        history.evicted(victims, index.key[victims])
        victims = np.sort(victims)
        index.remove(victims)
        index.set_state(victims, SlotState.VOIDED)
        self.allocator.free(victims)
        self.evicted += victims.size


def _breaks(slots: Slots, group_slots: int) -> Mask:
    breaks: Mask = (np.diff(slots) != 1) | (slots[1:] % group_slots == 0)
    return breaks


def _cells(
    name: str, requests: Sequence[TraceRequest], share: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    blocks = [request.hash_ids for request in requests]
    distinct = len({block for ids in blocks for block in ids})
    wanted = max(GROUPS_LEAST, int(share * distinct))
    group_slots = min(args.group_slots, wanted // GROUPS_LEAST)  # as a new pool is cut
    cells = []
    for policy in (*args.policies, GROUPS):
        pool = Pool(wanted, policy, group_slots)
        second_found = _play(pool, blocks)
        slots, less = pool.index.slots, pool.index.slots - pool.free_slots
        lru = belady.least_recently_used(blocks, slots)
        cells.append(
            {
                "trace": name,
                "requests": len(requests),
                "distinct_blocks": distinct,
                "capacity_blocks": slots,
                "free_slots": pool.free_slots,
                "policy": policy,
                "hit_rate": pool.hits / lru.references,
                "lru_hit_rate": lru.prefix_hit_rate,
                "lru_less_reserve": belady.least_recently_used(blocks, less).prefix_hit_rate,
                "minimum_hit_rate": belady.minimum(blocks, slots).hit_rate,
                "unlimited_hit_rate": belady.unlimited(blocks).prefix_hit_rate,
                "mean_run_length": pool.loaded / pool.runs if pool.runs else 0.0,
                "second_found": second_found,
                "evicted": pool.evicted,
                "evicted_too_early": pool.history.regretted,
            }
        )
    return cells


def _play(pool: Pool, blocks: Sequence[Sequence[int]]) -> float:
    """Plays all requests; returns the share of the blocks' second references that hit."""
    references: Counter[int] = Counter()
    second = found = 0
    for ids in blocks:
        hits = pool.play(block_keys(_FINGERPRINT, ids))
        for place, block in enumerate(ids):
            references[block] += 1
            second += references[block] == 2
            found += references[block] == 2 and place < hits
    return found / second if second else 0.0


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


def _requests(trace: str, limit: int | None) -> list[TraceRequest]:
    if trace != SYNTHETIC:
        return read_trace(trace, limit)
    config = Synthetic()
    return generate(replace(config, requests=limit or config.requests))

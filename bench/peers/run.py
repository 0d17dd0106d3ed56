"""Compares ways to keep pages on an SSD: SGLang's backends, Tutti's, plain files and fio.

Every peer is a process, and is compared in rounds with `hicache-tutti`: in each round both store a
batch of 128 pages of Llama-3-8B's shape and load one that they stored earlier.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tutti.base.terminal import Advance, ProgressFactory, table
from tutti.base.units import MiB, format_nbytes
from tutti.bench.environment import describe
from tutti.bench.fio import FioUnavailable
from tutti.bench.goals import NOT_REACHED, REACHED, verdict
from tutti.bench.peers import fio_peers, same_memory
from tutti.bench.peers import hicache as peer_hicache
from tutti.bench.peers import lmcache as peer_lmcache
from tutti.bench.peers.fio_peers import FIO, FioPeer
from tutti.bench.peers.peer import BATCH_PAGES, PeerPlan
from tutti.bench.peers.process import PEERS
from tutti.bench.peers.same_memory import WAYS
from tutti.bench.statistics import bootstrap_median, interval_text, median, percentile, ratios
from tutti.bench.writable import options
from tutti.errors import ConfigError, DeviceTimeout, MediumError

#: SGLang 0.5.23 then allocates private memory, with madvise before the first touch.
PARALLEL_ALLOCATION = "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS"
HOST_PAGES = ("advise", "collapse", "thp")
LAYOUTS = ("page_first", "page_first_direct", "layer_first")
PHASES = ("store", "load")
_BASE = "hicache-tutti"
_BACKENDS = ("hicache-file", "hicache-nixl", "lmcache-fs-native")
_TIMEOUT_S = 300.0
_PREFIX = "tutti-peers-"
_TURNS = 2  # of all ways to use the same memory, for each other peer of a launch
_EXISTS_PAGES = 1024


class PeerClient:
    """Starts the process of one peer, and sends it commands."""

    def __init__(self, name: str, plan: PeerPlan) -> None:
        self.name = name
        environment = os.environ | {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": plan.directory}
        if plan.host_pages == "thp":
            environment[PARALLEL_ALLOCATION] = "2"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tutti.bench.peers.process", plan.to_json(), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
        )
        self._answer()

    def ask(self, command: str, *batches: int) -> dict[str, Any]:
        """Executes a command; returns its result.  Raises MediumError if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([command, *map(str, batches)]) + "\n")
        return self._answer()

    def end(self) -> None:
        """Ends the process, by force when it does not end by itself."""
        try:
            self._process.communicate("quit\n", timeout=60)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(60)
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            if not selector.select(_TIMEOUT_S):
                raise DeviceTimeout(f"{self.name} did not answer within {_TIMEOUT_S:g} s")
        line = output.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise MediumError(f"{self.name} failed: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else "its process ended without a word"


@dataclass(frozen=True)
class Sample:
    """One batch, in one direction.  digest_cpu_s: see same_memory.HASHED."""

    wall_s: float
    cpu_s: float
    nbytes: int
    extra_memory_nbytes: int
    digest_cpu_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    what = "folders: Tutti's pools have a file in each, the files of all others are in the first"
    option("--dir", ["."], what)
    what = f"what to compare: {', '.join([*PEERS, *FIO])} (default: all but fio on hugepages)"
    option("--peers PEER", [*PEERS, "fio"], what, [*PEERS, *FIO])
    option("--page-tokens", [64, 16], "tokens per page (default: 64 16)")
    option("--layout", "page_first", "SGLang's layout of host memory", LAYOUTS)
    option("--rounds", 3, "batches that a launch of a peer stores and loads")
    what = "times that each peer starts anew: where memory and files lie changes its speed"
    option("--launches", 3, what)
    what = "give the memory of all peers large pages in the same way: advise (madvise after the"
    what += " first touch), collapse (MADV_COLLAPSE before the rounds), or thp (madvise before the"
    what += f" first touch, SGLang's {PARALLEL_ALLOCATION}). Default: each peer's own way"
    option("--host-pages", None, what, HOST_PAGES)
    option("--batches", 2, "batches that a peer keeps stored")
    what = "reserve the hugepages that fio needs (vm.nr_hugepages), and release them"
    option("--allow-sysctl", False, what)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures; the result for JSON.  Raises TuttiError."""
    if args.rounds < 1 or args.launches < 1 or args.batches < 2:
        raise ConfigError("give at least one round, one launch and two batches")
    for folder in args.dir:
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is not a directory; make it, or name another with --dir")
    skipped = {
        name: why
        for name in args.peers
        if (why := _missing(name, args))  # named, so that it is not taken for a result
    }
    names = [name for name in args.peers if name not in skipped]
    if not names:
        raise ConfigError(f"no peer can run here: {skipped}")
    return {
        "benchmark": "peers",
        "layout": args.layout,
        "members": len(args.dir),
        "host_pages": args.host_pages or "each as it does by itself",
        "batch_pages": BATCH_PAGES,
        "rounds": args.rounds,
        "launches": args.launches,
        "skipped": skipped,
        "cells": {
            f"pages of {tokens} tokens": _measure(args, names, tokens, progress, skipped)
            for tokens in args.page_tokens
        },
        "versions": _versions(),
        "machine": describe(args.dir[0]),
    }


def _missing(name: str, args: argparse.Namespace) -> str:
    if name in FIO:
        plan = PeerPlan("", max(args.page_tokens), args.layout, args.batches)
        return fio_peers.missing(name, plan, allow_sysctl=args.allow_sysctl)
    if PEERS[name] == "lmcache":
        return peer_lmcache.missing()
    return peer_hicache.missing(PEERS[name]) if PEERS[name] else ""


def _versions() -> dict[str, str]:
    return {
        name: next((found.version for found in metadata.distributions(name=name)), "not installed")
        for name in ("sglang", "torch", "nixl", "lmcache")
    }


#: In turn, `hicache-tutti` is the first, second and third system that a launch starts.
_FIRSTS = 3


@dataclass
class _Measured:
    """Measurements of one peer.  base: of `hicache-tutti` in the same rounds, by batch.
    pages: kind of pages at the end of each launch.  ways: of `hicache-tutti`, see same_memory.py.
    failed: reason why later measurements are missing.
    """

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {p: [] for p in PHASES})
    base: dict[str, list[Sample]] = field(default_factory=lambda: {p: [] for p in PHASES})
    exists: list[dict[str, Any]] = field(default_factory=list)
    pages: list[dict[str, Any]] = field(default_factory=list)
    ways: list[dict[str, Sample]] = field(default_factory=list)
    failed: str = ""


class _Worker:
    """One running peer with a folder of its own, which is removed with it."""

    def __init__(self, name: str, plan: PeerPlan, stack: ExitStack, *, allow_sysctl: bool) -> None:
        self.name, self._batches, self._next = name, plan.batches, 0
        directories = [Path(folder) / name for folder in (plan.directory, *plan.others)]
        for directory in directories:
            directory.mkdir()
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        first, *others = map(str, directories)
        own = replace(plan, directory=first, others=tuple(others))
        self._asker: Any = (
            FioPeer(name, own, stack, allow_sysctl=allow_sysctl)
            if name in FIO
            else PeerClient(name, own)
        )
        stack.callback(self._asker.end)

    def round(self) -> dict[str, Sample]:
        """Stores a batch, and loads the oldest one that is kept."""
        batch = self._next
        self._next += 1
        stored = Sample(**self._asker.ask("store", batch))
        loaded = Sample(**self._asker.ask("load", max(0, batch - self._batches + 1)))
        return {"store": stored, "load": loaded}

    def try_ways(self, found: _Measured) -> None:
        """Loads the batch that was stored last, and stores others, in every way."""
        turns = range(len(found.ways), len(found.ways) + _TURNS)
        for turn in self._asker.ask("ways", self._next - 1, *turns)["turns"]:
            found.ways.append({name: Sample(**of) for name, of in turn.items()})
        # Stores of rounds evict; this one takes the slots that were left free.
        self._asker.ask("store", self._next)
        self._next += 1

    def look_up(self, times: int, found: _Measured) -> None:
        """Looks up a long prompt, made of repeated stored batches; reads the kind of pages."""
        if self.name in FIO:
            return
        kept = [self._next - 1 - i % self._batches for i in range(_EXISTS_PAGES // BATCH_PAGES)]
        found.exists += [self._asker.ask("exists", *kept) for _ in range(times)]
        found.pages.append(self._asker.ask("pages"))


def _measure(
    args: argparse.Namespace,
    names: list[str],
    tokens: int,
    progress: ProgressFactory,
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Measures each peer in separate rounds with `hicache-tutti`, so that few bytes are on disk.

    fio as a peer is added to `skipped` if it fails.

    Rounds with all peers would exceed the cache of a virtual disk's host, and speeds would depend
    on whose bytes that cache keeps.
    """
    plan = PeerPlan("", tokens, args.layout, args.batches, args.host_pages or "")
    found = {name: _Measured() for name in names}
    others = [name for name in names if name != _BASE]
    steps = args.launches * (_warming(plan) * len(names) + args.rounds * 2 * len(others))
    with progress(f"pages of {tokens} tokens", steps) as bar:
        for number in range(args.launches):
            with ExitStack() as stack:
                first, *more = (
                    stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=where))
                    for where in args.dir
                )
                ordered = others if number % 2 == 0 else others[::-1]
                placed = replace(plan, directory=first, others=tuple(more))
                _launch(args, placed, ordered, number % _FIRSTS, found, bar)
    skipped |= {name: f"{tokens} tokens: {of.failed}" for name, of in found.items() if of.failed}
    turns = _TURNS * len(others)
    return _cell({n: of for n, of in found.items() if not of.failed}, plan, args.rounds, turns)


def _warming(plan: PeerPlan) -> int:
    """Number of rounds until every pool was written completely once."""
    return 2 * plan.batches + 2


def _launch(
    args: argparse.Namespace,
    plan: PeerPlan,
    others: list[str],
    earlier: int,
    found: dict[str, _Measured],
    bar: Advance,
) -> None:
    """Starts every peer once, and measures it.

    earlier: number of others that allocate memory before `hicache-tutti`.  Physical pages differ in
    speed, and a system that always starts first could always get the same ones.
    """
    rounds = args.rounds

    def start(name: str, stack: ExitStack) -> _Worker:
        return _Worker(name, plan, stack, allow_sysctl=args.allow_sysctl)

    def warm(worker: _Worker) -> _Worker:
        for _ in range(_warming(plan)):
            worker.round()
            bar.advance(1)
        return worker

    with ExitStack() as stack:
        own = {name: stack.enter_context(ExitStack()) for name in found}
        first = [name for name in others if name not in FIO][:earlier]
        workers = {name: start(name, own[name]) for name in first}
        base = warm(start(_BASE, stack)) if _BASE in found else None
        if base is not None and not others:
            _rounds(rounds, [base], found)
        for name in others:
            if base is not None:
                base.try_ways(found[_BASE])
            if found[name].failed:
                continue
            try:
                worker = warm(workers.get(name) or start(name, own[name]))
                _rounds(rounds, [worker] if base is None else [base, worker], found)
                worker.look_up(rounds, found[name])
            except FioUnavailable as error:
                found[name].failed = str(error)
            own[name].close()
            bar.advance(2 * rounds)
        if base is not None:
            base.look_up(rounds, found[_BASE])


def _rounds(count: int, workers: list[_Worker], found: dict[str, _Measured]) -> None:
    for number in range(count):
        seen = {
            worker.name: worker.round()
            for worker in (workers if number % 2 == 0 else workers[::-1])
        }
        for name, samples in seen.items():
            for phase in PHASES:
                found[name].samples[phase].append(samples[phase])
                if _BASE in seen:
                    found[name].base[phase].append(seen[_BASE][phase])


def _cell(found: dict[str, _Measured], plan: PeerPlan, rounds: int, turns: int) -> dict[str, Any]:
    """rounds, turns: of a launch."""
    peers: dict[str, Any] = {}
    for name, of in found.items():
        peers[name] = {
            phase: _phase(of.samples[phase], of.base[phase] if name != _BASE else [], rounds)
            for phase in PHASES
        }
        if of.exists:
            times = [answer["wall_s"] for answer in of.exists]
            peers[name]["exists"] = {
                "pages": of.exists[-1]["pages"],
                "median_ms": median(times) * 1e3,
                "max_ms": max(times) * 1e3,
            }
            peers[name]["host_pages"] = of.pages
    return {"page_nbytes": plan.page_nbytes, "stored_nbytes": plan.batches * plan.batch_nbytes} | {
        "peers": peers,
        "same_memory": _ways(found[_BASE].ways, turns) if _BASE in found else {},
    }


def _ways(turns: list[dict[str, Sample]], of_a_launch: int) -> dict[str, Any]:
    samples = {name: [turn[name] for turn in turns] for name in WAYS if turns}
    return {
        name: _phase(of, samples[WAYS[name]] if WAYS[name] != name else [], of_a_launch)
        for name, of in samples.items()
    }


def _phase(found: list[Sample], base: list[Sample], rounds: int) -> dict[str, Any]:
    speeds = [s.nbytes / s.wall_s / 1e9 for s in found]
    cpus = [s.cpu_s / (s.nbytes / 1e9) for s in found]
    facts: dict[str, Any] = {
        "median_gb_per_s": median(speeds),
        "median_cpu_s_per_gb": median(cpus),
        "p99_batch_ms": percentile([s.wall_s * 1e3 for s in found], 99),
        "extra_memory_nbytes": max(s.extra_memory_nbytes for s in found),
        "gb_per_s": speeds,
        "cpu_s_per_gb": cpus,
    }
    if digests := [s.digest_cpu_s / (s.nbytes / 1e9) for s in found if s.digest_cpu_s is not None]:
        facts["digest_cpu_s_per_gb"] = digests
    if base:
        against = [s.nbytes / s.wall_s / 1e9 for s in base]
        cpu_base = [s.cpu_s / (s.nbytes / 1e9) for s in base]
        difference = [b - a for a, b in zip(cpus, cpu_base, strict=True)]
        over = ratios(against, speeds)
        facts["base_over_this_speed"] = bootstrap_median(over).to_dict()
        facts["base_over_this_speed_of_launches"] = [
            median(over[i : i + rounds]) for i in range(0, len(over), rounds)
        ]
        facts["base_minus_this_cpu_s_per_gb"] = bootstrap_median(difference).to_dict()
    return facts


def report(result: dict[str, Any]) -> str:
    parts = []
    for title, cell in result["cells"].items():
        parts.append(f"{title}, {format_nbytes(cell['page_nbytes'])} each, {result['layout']}")
        parts.append(table(HEAD, rows_of(cell)))
        parts += notes_of(cell)
    parts += [f"skipped: {name} ({why})" for name, why in result["skipped"].items()]
    parts += members_note(result)
    return "\n".join(parts)


def members_note(result: dict[str, Any]) -> list[str]:
    """Notes if Tutti's pools had several members and the others one folder."""
    members = result.get("members", 1)
    return [f"Tutti's pools: {members} members; all else in the first folder."] * (members > 1)


HEAD = [
    *("peer", "direction", "GB/s", "CPU-s/GB", "p99 of a batch, ms", "memory, MiB"),
    *(f"{_BASE}/this speed", "of each launch", f"{_BASE}-this CPU-s/GB"),
    *("look-up", "large pages"),
]


def rows_of(cell: dict[str, Any]) -> list[list[str]]:
    """A line for each peer and direction, and for each way to use `hicache-tutti`'s memory."""
    rows = []
    for name, facts in cell["peers"].items():
        exists = facts.get("exists")
        looked_up = f"{exists['pages']} pages {exists['median_ms']:.2f} ms" if exists else ""
        for phase in PHASES:
            last = [looked_up if phase == "load" else "", _large_pages(name, facts)]
            rows.append([name, phase, *_figures(facts[phase]), *last])
    for name, found in cell.get("same_memory", {}).items():
        last = ["", _large_pages(_BASE, cell["peers"][_BASE])]
        phase = "store" if WAYS[name] == same_memory.STORE else "load"
        rows.append([f"same memory: {name}", phase, *_figures(found), *last])
    return rows


def _figures(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['median_gb_per_s']:.2f}",
        f"{found['median_cpu_s_per_gb']:.3f}",
        f"{found['p99_batch_ms']:.0f}",
        f"{found['extra_memory_nbytes'] / MiB:.0f}",
        interval_text(found.get("base_over_this_speed"), 2),
        " ".join(f"{r:.2f}" for r in found.get("base_over_this_speed_of_launches", ())),
        interval_text(found.get("base_minus_this_cpu_s_per_gb"), 2),
    ]


def _large_pages(name: str, facts: dict[str, Any]) -> str:
    """Page kind of the memory of both directions; fio's is unknown."""
    if name in FIO:
        return "hugetlbfs" if FIO[name].hugepages else "not read: fio's own process"
    pages = facts.get("host_pages", ())
    return " ".join(f"{of['hugepage_nbytes'] / of['nbytes']:.0%}" for of in pages)


def bar_notes_of(cell: dict[str, Any]) -> list[str]:
    """Whether Tutti reaches its goals against the other backends."""
    backends = {name: of for name, of in cell["peers"].items() if name in _BACKENDS}
    notes = []
    for phase in ("load", "store") if backends else ():
        over = {name: of[phase]["base_over_this_speed"] for name, of in backends.items()}
        more = {name: of[phase]["base_minus_this_cpu_s_per_gb"] for name, of in backends.items()}
        best = min(over, key=lambda name: float(over[name]["median"]))
        least = max(more, key=lambda name: float(more[name]["median"]))
        is_above = over[best]["median"] >= same_memory.LOAD_BAR and over[best]["low"] >= 1
        notes.append(
            f"{phase}s have {interval_text(over[best], 2)} of the speed of {best}, the best other"
            f" backend (bar {same_memory.LOAD_BAR}, and no interval below 1:"
            f" {REACHED if is_above else NOT_REACHED}), and cost {interval_text(more[least], 2)}"
            f" CPU-s/GB more than {least}, the cheapest (bar {same_memory.CPU_BAR}:"
            f" {verdict(more[least], same_memory.CPU_BAR)})"
        )
    return notes


def notes_of(cell: dict[str, Any]) -> list[str]:
    """Goals, and what the ways to use the same memory show; older results lack these."""
    ways, notes = cell.get("same_memory"), bar_notes_of(cell)
    if not ways:
        return notes
    others = {name: of for name, of in cell["peers"].items() if not name.startswith(_BASE)}
    fio = {name: others.pop(name) for name in FIO if name in others}
    over = [of["load"]["base_over_this_speed"]["median"] for of in others.values()]
    notes += same_memory.notes_of(ways, min(over, default=None))
    for base, phase in ((same_memory.LOAD, "load"), (same_memory.STORE, "store")):
        peers = [{name: of[phase] for name, of in part.items()} for part in (others, fio)]
        notes += same_memory.cpu_notes_of(base, ways, *peers)
    return notes

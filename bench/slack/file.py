"""Puts during layer-wise loads on a real file, with and without a scheduler, measured.

A round is a prefill whose prefix is loaded layer by layer while the pages of the round before are
stored, followed by a pause in place of decode steps.  Computing is emulated by sleeping: no model
runs.  Registered memory, file, scheduler and time are real.  Measured calls are not made on the
main thread, as in a server; see `bench/short.py`.

Two equal pools differ by more than the cost of a scheduler, because the locations of their files
and memory differ.  So all compared systems open the same pool in turn, with the same memory.
Stores are opened as users open them, with digests.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import tutti
from tutti.base.terminal import ProgressFactory
from tutti.bench.statistics import RESAMPLES, Interval, bootstrap_median, median, ratios
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.profiles.at_open import AUTO, OFF
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import DecisionHook, Dispatcher, Schedule
from tutti.scheduler.event import Event, LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase, Profile
from tutti.scheduler.step_reports import StepReports
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

_LAYOUT = KVLayout.mha(
    layers=16, kv_heads=8, head_dim=128, page_size=64, dtype="bfloat16", model="bench"
)
_LOADED = 32  # pages
_STORED = 16
_PREFIX_TOKENS, _NEW_TOKENS = _LOADED * _LAYOUT.page_size, _STORED * _LAYOUT.page_size
_PAGES = 128  # of registered memory
#: Pages that each system stores per round.
_SYSTEMS = {"none": _STORED, "slack": _STORED, "as opened": _STORED, "no puts": 0}
_DECODE_S = 0.06
WARM_ROUNDS = 2
#: Rounds per opening: the first warms up, and only the last one counts.
ROUNDS_A_TURN = 2
#: Pages per transfer, and transfers per opening after the first, which warms up.  The bar of a
#: short one is 50 us, a hundredth of its time on a disk.
_SHAPES = {"long": (_LOADED, 3), "short": (1, 16)}
_PAUSE_S = 0.005  # before a put, so that its code is not in the CPU's caches
_WAIT_S, _ROUND_S = 60.0, 600.0  # for a transfer, and for all of a round
#: Pairs that `cost` compares.  The cost of the queue is "at once" minus "off", that of the policy
#: is "auto" minus "at once".  "off" is the mean of two turns of a round, and "control / off"
#: compares these two.
_COMPARED = (("auto", "off"), ("at once", "off"), ("auto", "at once"), ("control", "off"))

_System = TypeVar("_System")


@dataclass(frozen=True)
class FileProfile:
    """Bandwidths measured on the file, alone and both at once, and the sleep per layer."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    interference: float
    layer_s: float

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        """See Profile; every layer is the same."""
        return self.layer_s * 1e6

    def decode_us(self, batch: int, context_tokens: int) -> float:
        """See Profile; the pause of a round."""
        return _DECODE_S * 1e6

    def read_us(self, nbytes: int) -> float:
        """See Profile."""
        return nbytes / self.read_bytes_per_s * 1e6

    def write_us(self, nbytes: int) -> float:
        """See Profile."""
        return nbytes / self.write_bytes_per_s * 1e6


class _AtOnce(ImmediatePolicy):
    """Issues at once, but through SlackPolicy's queue, even if there is no other transfer."""

    def goes_at_once(self, *_: object) -> bool:
        """See SlackPolicy."""
        return True


def cost(directory: Path, rounds: int, progress: ProgressFactory) -> dict[str, Any]:
    """The cost of scheduling without competition: one put or load at a time.  The pool is opened in
    turn with ``profile="auto"``, with a queue that issues everything at once, and twice with None,
    for the noise.  Gives ratios of times, and additional microseconds, of paired turns.
    """
    times: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        _kept(Path(folder) / "auto") as auto,
        _kept(Path(folder) / "at-once", _at_once(auto)) as at_once,
        ThreadPoolExecutor(1) as thread,
        progress("cost", rounds) as bar,
    ):
        file, source = _File(Path(folder) / "pool"), auto.stats()["profile"]
        schedules = {"auto": _schedule_of(auto), "at once": _schedule_of(at_once)}
        orders = _orders({**schedules, "off": None, "control": None})

        def turn(name: str, schedule: Schedule | None, number: int) -> None:
            rng = np.random.default_rng(number)  # the same keys in all turns of a round
            with file.opened(schedule) as store:
                for shape, (pages, count) in _SHAPES.items():
                    took_s = [_alone(store, pages, rng) for _ in range(count + 1)][1:]
                    for what in ("put", "load"):
                        times[shape, what, name].append(median([one[what] for one in took_s]))

        for number in range(rounds + WARM_ROUNDS):
            for name, schedule in orders[number % len(orders)]:
                thread.submit(turn, name, schedule, number).result(_ROUND_S)
            bar.advance(1 if number >= WARM_ROUNDS else 0)
    cells = {
        f"{shape} {what}": {
            "transfers": rounds * count,
            **_cell({name: times[shape, what, name][WARM_ROUNDS:] for name, _ in orders[0]}),
        }
        for shape, (_, count) in _SHAPES.items()
        for what in ("put", "load")
    }
    return {"rounds": rounds, "profile": source, "one file": True, "cells": cells}


def _at_once(store: ObjectStore) -> Schedule:
    """A store's schedule, changed to its own queue that issues everything at once."""
    return replace(_schedule_of(store), policy=_AtOnce, media=())


def _schedule_of(store: ObjectStore) -> Schedule:
    assert store.config.schedule is not None, "it was opened with a profile"
    return store.config.schedule


def _orders(systems: dict[str, _System]) -> list[list[tuple[str, _System]]]:
    """Four orders of four systems: each is once at every place, and once after every other one
    (Williams 1949).
    """
    items = list(systems.items())
    return [[items[(first + more) % 4] for more in (0, 1, 3, 2)] for first in range(4)]


def _cell(took_s: dict[str, list[float]]) -> dict[str, Any]:
    """Results of one kind of transfer: medians over rounds, with intervals."""
    off_s = [(a + b) / 2 for a, b in zip(took_s["off"], took_s["control"], strict=True)]
    found: dict[str, Any] = {"off_us": median(off_s) * 1e6}
    for name, other in _COMPARED:
        mine_s = took_s[name]
        other_s = off_s if other == "off" and name != "control" else took_s[other]
        more_us = [(a - b) * 1e6 for a, b in zip(mine_s, other_s, strict=True)]
        found[f"{name} / {other}"] = bootstrap_median(ratios(mine_s, other_s)).to_dict()
        found[f"{name} - {other}, us"] = bootstrap_median(more_us).to_dict()
    return found


def _alone(store: ObjectStore, pages: int, rng: np.random.Generator) -> dict[str, float]:
    keys, numbers = rng.integers(0, 256, (pages, 16), np.uint8), np.arange(pages)
    time.sleep(_PAUSE_S)
    took_s = {"put": _timed(lambda: store.put(keys, numbers).wait(_WAIT_S))}
    took_s["load"] = _timed(lambda: store.load(keys, numbers).wait(_WAIT_S))
    store.catalogue.delete(keys)
    return took_s


def run(
    directory: Path, rounds: int, progress: ProgressFactory, record: DecisionHook | None = None
) -> dict[str, Any]:
    """Alternates rounds with `slack`, which has a measured profile of the file and the layers; with
    a store as `tutti.open` opens it, which measures the medium and learns the rest; with `none`;
    and without puts.

    record: gets every event of `slack`, with the decision that followed.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=directory) as folder, ThreadPoolExecutor(1) as thread:
        file = _File(Path(folder) / "pool")
        prefix = rng.integers(0, 256, (_LOADED, 16), np.uint8)
        with file.opened(None) as store:
            profile = thread.submit(_measure, store, rng).result(_ROUND_S)
            store.clear(deallocate=False)
            store.put(prefix, np.arange(_LOADED)).wait(_WAIT_S)
        with (
            _kept(Path(folder) / "slack", Schedule(profile, record=record)) as slack,
            _kept(Path(folder) / "opened") as opened,
            progress("slack on a file", 4 * rounds) as bar,
        ):
            scheduled = {"slack": slack, "as opened": opened}
            schedules = {name: _schedule_of(store) for name, store in scheduled.items()}
            orders = _orders(
                {
                    name: _Rounds(file, schedules.get(name), profile, rng, prefix, stored)
                    for name, stored in _SYSTEMS.items()
                }
            )
            waits: dict[str, list[float]] = {name: [] for name in _SYSTEMS}
            stored: dict[str, list[float]] = {name: [] for name in _SYSTEMS}
            for number in range(rounds + WARM_ROUNDS):
                for name, system in orders[number % len(orders)]:
                    waited_s, stored_s = thread.submit(system.turn).result(_ROUND_S)
                    if number >= WARM_ROUNDS:
                        waits[name].append(waited_s)
                        stored[name].append(stored_s)
                        bar.advance(1)
            counters = {name: store.stats()["scheduler"] for name, store in scheduled.items()}
            found = schedules["as opened"]
            as_opened = {
                "profile": found.source,
                "limits": asdict(found.limits),
                "found": vars(_what_it_says(found.profile)),
            }
    return {
        "rounds": rounds,
        "profile": vars(profile),
        "as opened": as_opened,
        "waits_s": waits,
        "stored_s": {name: stored[name] for name in ("none", *scheduled)},
        "bubble_s": {name: median(found) for name, found in waits.items()},
        **{
            f"{name} / none": bootstrap_median(ratios(waits[name], waits["none"])).to_dict()
            for name in ("slack", "as opened", "no puts")
        },
        "none - no puts, s": bootstrap_median(
            [a - b for a, b in zip(waits["none"], waits["no puts"], strict=True)]
        ).to_dict(),
        "closed": {name: _closed(waits, name).to_dict() for name in scheduled},
        "mean_stored_s": {name: sum(stored[name]) / rounds for name in ("none", *scheduled)},
        "stored / none": {
            name: bootstrap_median(ratios(stored[name], stored["none"])).to_dict()
            for name in scheduled
        },
        "counters": counters,
    }


def _closed(waits_s: dict[str, list[float]], name: str) -> Interval:
    """The share of the additional waits due to puts that a scheduler removes.  It is a quotient of
    medians over rounds, resampled together, because the divisor of a single round may be 0.
    """
    none, mine, least = (np.asarray(waits_s[one]) for one in ("none", name, "no puts"))
    pairs = np.stack([none - mine, none - least])
    chosen = np.random.default_rng(0).integers(0, len(none), (RESAMPLES, len(none)))
    with np.errstate(divide="ignore", invalid="ignore"):
        over, under = np.median(pairs[:, chosen], axis=2)
        low, high = np.nanpercentile(over / under, (2.5, 97.5), method="nearest")
        middle = np.divide(*np.median(pairs, axis=1))
    return Interval(float(middle), float(low), float(high))


class _File:
    """A pool on a file, and memory, which the configurations use in turn."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._memory = HostMemory.allocate(_LAYOUT, _PAGES)

    @contextmanager
    def opened(self, schedule: Schedule | None) -> Iterator[ObjectStore]:
        """Opens the pool as users do, and registers the memory."""
        config, profile = StoreConfig(schedule=schedule), AUTO if schedule else OFF
        with tutti.open(self._path, _LAYOUT, "1GiB", config=config, profile=profile) as store:
            store.register(self._memory)
            yield store


@contextmanager
def _kept(path: Path, schedule: Schedule | None = None) -> Iterator[ObjectStore]:
    """A small pool with this schedule, or the one of ``profile="auto"``.  It keeps the queue alive,
    with what it has learned, while other pools with this schedule are opened and closed.
    """
    with tutti.open(str(path), _LAYOUT, "64MiB", config=StoreConfig(schedule=schedule)) as store:
        yield store


class _Rounds:
    """Rounds of one system, with its schedule, the prefix to load, and pages to store."""

    def __init__(
        self,
        file: _File,
        schedule: Schedule | None,
        profile: FileProfile,
        rng: np.random.Generator,
        prefix: npt.NDArray[np.uint8],
        stored: int,
    ) -> None:
        self._file = file
        self._schedule = schedule
        self._stored = stored  # pages
        self._profile = profile
        self._rng = rng
        self._number = 0
        self._reports = StepReports()
        self._prefix = prefix

    def turn(self) -> tuple[float, float]:
        """Opens the file and runs ROUNDS_A_TURN rounds; returns the times of the last one."""
        with self._file.opened(self._schedule) as store:
            return [self.round(store) for _ in range(ROUNDS_A_TURN)][-1]

    def round(self, store: ObjectStore) -> tuple[float, float]:
        """One prefill and its decode steps: (seconds that layers waited for loads, seconds of the
        put of the round's pages).  These pages are deleted again, so that the next ones get their
        place.
        """
        scheduler = store.scheduler
        self._number += 1
        batch = str(self._number)
        ended_s: SimpleQueue[float] = SimpleQueue()
        stored = self._rng.integers(0, 256, (self._stored, 16), np.uint8)
        put_s = time.perf_counter()
        put = store.put(stored, np.arange(_LOADED, _LOADED + self._stored))
        put.on_done(lambda _: ended_s.put(time.perf_counter()))
        began_s = time.perf_counter()
        layers, ends = _LAYOUT.layers, _PREFIX_TOKENS + _NEW_TOKENS
        self._step(scheduler, Phase.PREFILL, _NEW_TOKENS, _PREFIX_TOKENS, layers, (batch,))
        ticket = store.load(self._prefix, np.arange(_LOADED), batch=batch)
        waited_s = 0.0
        for layer in range(layers):
            ticket.wait_layer(layer, _WAIT_S)
            layer_waited_s = time.perf_counter() - began_s
            waited_s += layer_waited_s
            if scheduler is not None:
                waited_ns = round(layer_waited_s * 1e9)
                began = LayerBegan(scheduler.now_ns(), layer, waited_ns)
                _post(scheduler, self._reports.layer_began(began))
            time.sleep(self._profile.layer_s)
            began_s = time.perf_counter()
        self._ends(scheduler)
        self._step(scheduler, Phase.DECODE, 1, ends)
        time.sleep(_DECODE_S)
        self._ends(scheduler)
        put.wait(_WAIT_S)
        store.catalogue.delete(stored)
        return waited_s, ended_s.get(timeout=_WAIT_S) - put_s  # waiters are woken first

    def _step(
        self,
        scheduler: Dispatcher | None,
        phase: Phase,
        new: int,
        context: int,
        layers: int = 0,
        loads: tuple[str, ...] = (),
    ) -> None:
        """Posts a step's start.  new, context: tokens, from which a profile computes its time."""
        if scheduler is not None:
            began = StepBegan(scheduler.now_ns(), phase, layers, new, context, loads)
            _post(scheduler, self._reports.began(began, scheduler.state.waits))

    def _ends(self, scheduler: Dispatcher | None) -> None:
        if scheduler is not None:
            _post(scheduler, self._reports.ended(StepEnded(scheduler.now_ns())))


def _post(scheduler: Dispatcher, event: Event | None) -> None:
    if event is not None:
        scheduler.post(event)


def _what_it_says(profile: Profile) -> FileProfile:
    """The values of a profile for the parameters that are measured here."""
    loaded, stored = (pages * _LAYOUT.object_nbytes for pages in (_LOADED, _STORED))
    return FileProfile(
        loaded / profile.read_us(loaded) * 1e6,
        stored / profile.write_us(stored) * 1e6,
        profile.interference,
        profile.layer_us(_NEW_TOKENS, _PREFIX_TOKENS) / 1e6,
    )


def _measure(store: ObjectStore, rng: np.random.Generator) -> FileProfile:
    """Measures both bandwidths alone, and the slow-down of a load during a put."""
    keys = rng.integers(0, 256, (2, 64, 16), np.uint8)
    nbytes = 64 * _LAYOUT.object_nbytes
    write_s, read_s, both_s = [], [], []

    def load() -> None:
        store.load(keys[0], np.arange(64)).wait(_WAIT_S)

    for _ in range(3):
        store.clear(deallocate=False)
        write_s.append(_timed(lambda: store.put(keys[0], np.arange(64)).wait(_WAIT_S)))
        read_s.append(_timed(load))
        put = store.put(keys[1], np.arange(64, 128))
        both_s.append(_timed(load))
        put.wait(_WAIT_S)
    read = nbytes / median(read_s)
    # A layer computes as long as it loads, so that there is little slack.
    layer_s = _LOADED * _LAYOUT.object_nbytes / read / _LAYOUT.layers
    interference = max(1.0, median(both_s) / median(read_s))
    return FileProfile(read, nbytes / median(write_s), interference, layer_s)


def _timed(what: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    what()
    return time.perf_counter() - began_s

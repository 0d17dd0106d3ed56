"""Puts during layer-wise loads on a real file, with and without a scheduler, measured.

A round is a prefill whose prefix is loaded layer by layer, while the pages of the round before are
stored, and then a pause that stands for decode steps.  Computing is sleeping: no model runs.
The registered memory, the pool's file and scheduler are real, and so is the time.  What is measured
is called from another thread than the main one, as in a server; see `bench/short.py`.
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

import tutti
from tutti.base.terminal import ProgressFactory
from tutti.bench.statistics import bootstrap_median, median, ratios
from tutti.medium.layout import KVLayout
from tutti.profiles.at_open import AUTO
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import DecisionHook, Schedule
from tutti.scheduler.event import Event, LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase
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
_DECODE_S = 0.06
WARM_ROUNDS = 2
#: Pages of a transfer, and transfers a round.  The bar of a short one is 50 us, a hundredth of what
#: it takes on a disk.
_SHAPES = {"long": (_LOADED, 1), "short": (1, 16)}
_WAIT_S, _ROUND_S = 60.0, 600.0  # for a transfer, and for all of a round
#: Of `cost`: what is compared with what.  The queue is what "at once" takes more than "off", the
#: policy what "auto" takes more than "at once".
_COMPARED = (("auto", "off"), ("at once", "off"), ("auto", "at once"), ("control", "off"))

_System = TypeVar("_System")


@dataclass(frozen=True)
class FileProfile:
    """What was measured on the file, alone and both at once, and how long a layer is slept for."""

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
    """Passes the same queue as SlackPolicy, also with a transfer that meets no other."""

    def goes_at_once(self, *_: object) -> bool:
        """See SlackPolicy."""
        return True


def cost(directory: Path, rounds: int, progress: ProgressFactory) -> dict[str, Any]:
    """What scheduling costs where nothing competes: one put or load at a time, in turns by a pool
    with ``profile="auto"``, one whose queue issues everything at once, and two with None, one of
    which is a control of the noise.  Ratios of times, and microseconds more.
    """
    rng = np.random.default_rng(0)
    times: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        _opened(Path(folder) / "auto", AUTO) as auto,
        _opened(Path(folder) / "at-once", AUTO, _at_once(auto)) as at_once,
        _opened(Path(folder) / "off") as off,
        _opened(Path(folder) / "control") as control,
        ThreadPoolExecutor(1) as thread,
        progress("cost", rounds) as bar,
    ):
        source = auto.stats()["profile"]
        orders = _orders({"auto": auto, "at once": at_once, "off": off, "control": control})

        def all_shapes(number: int) -> None:
            for shape, (pages, count) in _SHAPES.items():
                for one in range(count):
                    for name, store in orders[(number + one) % len(orders)]:
                        for what, took_s in _alone(store, pages, rng).items():
                            times[shape, what, name].append(took_s)

        for number in range(rounds + WARM_ROUNDS):
            thread.submit(all_shapes, number).result(_ROUND_S)
            bar.advance(1 if number >= WARM_ROUNDS else 0)
    cells = {
        f"{shape} {what}": _cell(
            {name: times[shape, what, name][WARM_ROUNDS * count :] for name, _ in orders[0]}
        )
        for shape, (_, count) in _SHAPES.items()
        for what in ("put", "load")
    }
    return {"rounds": rounds, "profile": source, "cells": cells}


def _at_once(store: ObjectStore) -> Schedule:
    """The schedule of a store, but everything is issued at once, by a queue of its own."""
    return replace(_schedule_of(store), policy=_AtOnce, media=())


def _schedule_of(store: ObjectStore) -> Schedule:
    assert store.config.schedule is not None, "it was opened with a profile"
    return store.config.schedule


def _orders(systems: dict[str, _System]) -> list[list[tuple[str, _System]]]:
    """Four orders of four systems: each is once at every place, and once behind every other one
    (Williams 1949).
    """
    items = list(systems.items())
    return [[items[(first + more) % 4] for more in (0, 1, 3, 2)] for first in range(4)]


def _cell(took_s: dict[str, list[float]]) -> dict[str, Any]:
    """Of one kind of transfer: medians over rounds, with intervals."""
    found: dict[str, Any] = {"count": len(took_s["off"]), "off_us": median(took_s["off"]) * 1e6}
    for name, other in _COMPARED:
        pairs = zip(took_s[name], took_s[other], strict=True)
        more_us = [(a - b) * 1e6 for a, b in pairs]
        ratio = bootstrap_median(ratios(took_s[name], took_s[other]))
        found[f"{name} / {other}"] = ratio.to_dict()
        found[f"{name} - {other}, us"] = bootstrap_median(more_us).to_dict()
    return found


def _alone(store: ObjectStore, pages: int, rng: np.random.Generator) -> dict[str, float]:
    keys, numbers = rng.integers(0, 256, (pages, 16), np.uint8), np.arange(pages)
    took_s = {"put": _timed(lambda: store.put(keys, numbers).wait(_WAIT_S))}
    took_s["load"] = _timed(lambda: store.load(keys, numbers).wait(_WAIT_S))
    store.catalogue.delete(keys)
    return took_s


def run(
    directory: Path, rounds: int, progress: ProgressFactory, record: DecisionHook | None = None
) -> dict[str, Any]:
    """Rounds in turns: with `slack`, which has a profile of the file and of the layers that was
    measured before; with a store as `tutti.open` opens it, which has measured the medium and learns
    the rest; with `none`, and without puts.  No digests are made, so that only schedules differ.

    record: gets every event of `slack`, with the decision that followed.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        with _opened(Path(folder) / "profile") as store, ThreadPoolExecutor(1) as thread:
            profile = thread.submit(_measure, store, rng).result(_ROUND_S)
        with (
            _opened(Path(folder) / "none") as none,
            _opened(Path(folder) / "slack", AUTO, Schedule(profile, record=record)) as slack,
            _opened(Path(folder) / "opened", AUTO) as opened,
            ThreadPoolExecutor(1) as thread,
            progress("slack on a file", 4 * rounds) as bar,
        ):
            systems = {
                "none": _Rounds(none, profile, rng, _STORED),
                "slack": _Rounds(slack, profile, rng, _STORED),
                "as opened": _Rounds(opened, profile, rng, _STORED),
                "no puts": _Rounds(none, profile, rng, 0),
            }
            waits: dict[str, list[float]] = {name: [] for name in systems}
            stored: dict[str, list[float]] = {name: [] for name in systems}
            orders = _orders(systems)
            for number in range(rounds + WARM_ROUNDS):
                for name, system in orders[number % len(orders)]:
                    waited_s, stored_s = thread.submit(system.round).result(_ROUND_S)
                    if number >= WARM_ROUNDS:
                        waits[name].append(waited_s)
                        stored[name].append(stored_s)
                        bar.advance(1)
            scheduled = {"slack": slack, "as opened": opened}
            counters = {name: store.stats()["scheduler"] for name, store in scheduled.items()}
            source, limits = opened.stats()["profile"], asdict(_schedule_of(opened).limits)
    return {
        "rounds": rounds,
        "profile": vars(profile),
        "as opened": {"profile": source, "limits": limits},
        "bubble_s": {name: median(found) for name, found in waits.items()},
        **{
            f"{name} / none": bootstrap_median(ratios(waits[name], waits["none"])).to_dict()
            for name in ("slack", "as opened", "no puts")
        },
        "mean_stored_s": {name: sum(stored[name]) / rounds for name in ("none", *scheduled)},
        "stored / none": {
            name: bootstrap_median(ratios(stored[name], stored["none"])).to_dict()
            for name in scheduled
        },
        "counters": counters,
    }


@contextmanager
def _opened(
    path: Path, profile: str | None = None, schedule: Schedule | None = None
) -> Iterator[ObjectStore]:
    """An open pool with 128 pages of registered memory."""
    config = StoreConfig(verify="off", schedule=schedule)
    with tutti.open(str(path), _LAYOUT, "1GiB", config=config, profile=profile) as store:
        store.allocate_memory(_PAGES)
        yield store


class _Rounds:
    """One system: its pool, the prefix it loads, and what it stores next."""

    def __init__(
        self, store: ObjectStore, profile: FileProfile, rng: np.random.Generator, stored: int
    ) -> None:
        self._store = store
        self._stored = stored  # pages
        self._profile = profile
        self._rng = rng
        self._number = 0
        self._reports = StepReports()
        self._prefix = rng.integers(0, 256, (_LOADED, 16), np.uint8)
        store.put(self._prefix, np.arange(_LOADED)).wait(_WAIT_S)

    def round(self) -> tuple[float, float]:
        """One prefill and its decode steps: seconds that layers waited for their loads, and from
        the put of the pages that are to be stored to their end.
        """
        store, scheduler = self._store, self._store.scheduler
        self._number += 1
        batch = str(self._number)
        ended_s: SimpleQueue[float] = SimpleQueue()
        stored = self._rng.integers(0, 256, (self._stored, 16), np.uint8)
        put_s = time.perf_counter()
        put = store.put(stored, np.arange(_LOADED, _LOADED + self._stored))
        put.on_done(lambda _: ended_s.put(time.perf_counter()))
        began_s = time.perf_counter()
        self._step(Phase.PREFILL, _NEW_TOKENS, _PREFIX_TOKENS, _LAYOUT.layers, (batch,))
        ticket = store.load(self._prefix, np.arange(_LOADED), batch=batch)
        waited_s = 0.0
        for layer in range(_LAYOUT.layers):
            ticket.wait_layer(layer, _WAIT_S)
            layer_waited_s = time.perf_counter() - began_s
            waited_s += layer_waited_s
            if scheduler is not None:
                waited_ns = round(layer_waited_s * 1e9)
                began = LayerBegan(scheduler.now_ns(), layer, waited_ns)
                self._post(self._reports.layer_began(began))
            time.sleep(self._profile.layer_s)
            began_s = time.perf_counter()
        self._ends()
        self._step(Phase.DECODE, 1, _PREFIX_TOKENS + _NEW_TOKENS)
        time.sleep(_DECODE_S)
        self._ends()
        put.wait(_WAIT_S)
        return waited_s, ended_s.get(timeout=_WAIT_S) - put_s  # waiters are woken first

    def _step(
        self, phase: Phase, new: int, context: int, layers: int = 0, loads: tuple[str, ...] = ()
    ) -> None:
        """new, context: tokens, by which a profile knows how long it takes."""
        scheduler = self._store.scheduler
        if scheduler is not None:
            began = StepBegan(scheduler.now_ns(), phase, layers, new, context, loads)
            self._post(self._reports.began(began, scheduler.state.waits))

    def _ends(self) -> None:
        scheduler = self._store.scheduler
        if scheduler is not None:
            self._post(self._reports.ended(StepEnded(scheduler.now_ns())))

    def _post(self, event: Event | None) -> None:
        scheduler = self._store.scheduler
        if event is not None and scheduler is not None:
            scheduler.post(event)


def _measure(store: ObjectStore, rng: np.random.Generator) -> FileProfile:
    """Bandwidths alone, and how much longer a load takes during a put."""
    keys = rng.integers(0, 256, (64, 16), np.uint8)
    nbytes = 64 * _LAYOUT.object_nbytes
    write_s, read_s = [], []
    for _ in range(3):
        store.clear(deallocate=False)
        write_s.append(_timed(lambda: store.put(keys, np.arange(64)).wait(_WAIT_S)))
        read_s.append(_timed(lambda: store.load(keys, np.arange(64)).wait(_WAIT_S)))
    more = rng.integers(0, 256, (64, 16), np.uint8)
    put = store.put(more, np.arange(64, 128))
    both_s = _timed(lambda: store.load(keys, np.arange(64)).wait(_WAIT_S))
    put.wait(_WAIT_S)
    read = nbytes / median(read_s)
    # A layer computes for as long as it loads: there is slack, but not much of it.
    layer_s = _LOADED * _LAYOUT.object_nbytes / read / _LAYOUT.layers
    interference = max(1.0, both_s / median(read_s))
    return FileProfile(read, nbytes / median(write_s), interference, layer_s)


def _timed(what: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    what()
    return time.perf_counter() - began_s

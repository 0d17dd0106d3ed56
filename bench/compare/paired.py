"""Compares two systems by rounds in the order A B B A, so that drift affects both equally."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.base.terminal import ProgressFactory
from tutti.bench.statistics import bootstrap_median, median, ratios
from tutti.errors import ConfigError, Unsupported

PAIRS_MIN = 7


@dataclass(frozen=True)
class Round:
    """One round of one system: speed in 10^9 bytes a second, CPU seconds for 10^9 bytes."""

    gb_per_s: float
    cpu_s_per_gb: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedSystem:
    """A name, and the function that runs one round."""

    name: str
    round: Callable[[], Round]


def compare(
    a: ComparedSystem,
    b: ComparedSystem,
    *,
    pairs: int,
    progress: ProgressFactory,
    twin: bool = True,
    bound: ComparedSystem | None = None,
    move: Callable[[], object] = lambda: None,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs `pairs` pairs after a warm-up of each system, which is not counted.

    move: is called after half of the pairs, to give files another place on the disk.
    twin: run B a second time in each pair; B against itself is the noise floor.
    bound: a third system in each pair, which shows the medium's limit; its ratios are over B.  If
    it raises Unsupported, the pairs continue without it, and the result has the reason instead.
    Ratios are A over B: medians over the pairs with 95 % bootstrap intervals.
    """
    if pairs < 1:
        raise ConfigError(f"{pairs} pairs; give at least one, and {PAIRS_MIN} for a result")
    order = [a, b, *([b] if twin else []), *([bound] if bound else [])]
    found: list[list[Round]] = [[] for _ in order]
    lost = ""
    with progress(f"{a.name} against {b.name}", (pairs + 1) * len(order)) as bar:
        for pair in range(-1, pairs):
            if pair == pairs // 2 > 0:
                move()
            places = range(len(order)) if pair % 2 == 0 else reversed(range(len(order)))
            for place in places:
                bar.advance(1)
                if lost and order[place] is bound:
                    continue
                try:
                    measured = order[place].round()
                except Unsupported as error:
                    if order[place] is not bound:
                        raise
                    lost = str(error)
                    continue
                if pair >= 0:
                    found[place].append(measured)
    result = {
        "pairs": pairs,
        "a": _summary(a, found[0]),
        "b": _summary(b, found[1]),
        **_ratios(found[0], found[1], seed),
    }
    if twin:
        again = [r.gb_per_s for r in found[2]]
        result["noise"] = {"gb_per_s": again, **_ratios(found[2], found[1], seed)}
    if bound and lost:
        result["bound"] = {"name": bound.name, "not_measured": lost}
    elif bound:
        result["bound"] = _summary(bound, found[-1]) | _ratios(found[-1], found[1], seed)
    return result


def _summary(system: ComparedSystem, rounds: list[Round]) -> dict[str, Any]:
    speeds = [r.gb_per_s for r in rounds]
    cpus = [r.cpu_s_per_gb for r in rounds]
    return {
        "name": system.name,
        "median_gb_per_s": median(speeds),
        "median_cpu_s_per_gb": median(cpus),
        "gb_per_s": speeds,
        "cpu_s_per_gb": cpus,
        "facts": rounds[-1].facts,
    }


def _ratios(above: list[Round], below: list[Round], seed: int) -> dict[str, Any]:
    speed = ratios([r.gb_per_s for r in above], [r.gb_per_s for r in below])
    cpu = ratios([r.cpu_s_per_gb for r in above], [r.cpu_s_per_gb for r in below])
    pairs = zip(above, below, strict=True)
    difference = [x.cpu_s_per_gb - y.cpu_s_per_gb for x, y in pairs]
    summary: dict[str, Any] = {
        "speed_ratio": bootstrap_median(speed, seed=seed).to_dict(),
        "cpu_difference_s_per_gb": bootstrap_median(difference, seed=seed).to_dict(),
    }
    # fio reports CPU time as thousandths of the run time, which may be 0 for a short job.
    summary["cpu_ratio"] = bootstrap_median(cpu, seed=seed).to_dict() if cpu else None
    return summary

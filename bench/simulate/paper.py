"""CSVs of the Tutti paper's figures, simulated: `tutti bench figures paper` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tutti.bench.environment import commit_of
from tutti.bench.figures.data import (
    BANDWIDTH,
    BUBBLE,
    COLUMNS,
    COST,
    FITTED,
    PREFIX,
    PUBLISHED,
    RATE,
    SHARE,
    STARS,
    Row,
    write_csv,
)
from tutti.bench.simulate.calibration import Calibration
from tutti.bench.simulate.points import HALF_GLM, HITS, K, PaperMachine, points
from tutti.bench.simulate.settings import ASSUMED, LONGER_STEPS, SETTINGS
from tutti.scheduler.roofline import ModelShape

SIMULATED = "simulated"
_OLD, _NEW = "vllm-0.12", "vllm-0.17"
NAMES = {
    "hbm": "HBM alone",
    "dram": "DRAM, layer by layer",
    "dram-whole": "DRAM",
    "ssd": "SSD",
    "ssd-layers": "SSD, layer by layer",
    "gds": "GDS",
    "tutti-paper": "Tutti as published",
    "tutti": "Tutti with read-ahead",
}
_RATES = {"leval": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5), "loogle": (0.2, 0.3, 0.4, 0.5, 0.6)}
_STORES = ("dram", "ssd", "gds", "tutti-paper")
_DRAM_GB, _SSD_GB = 256, 14_000


def write_paper(
    calibration: Calibration, folder: Path, only: Iterable[str] = (), effort: float = 0.5
) -> list[str]:
    """Writes the CSV of each figure; returns their names.  only: names; empty for all.

    Raises CapacityError if files cannot be written.
    """
    machine = PaperMachine(calibration, effort)
    makers: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
        "tutti-fig02": (SHARE, lambda: _fig02(machine)),
        "tutti-fig08-leval": (RATE, lambda: _fig08(machine, "leval")),
        "tutti-fig08-loogle": (RATE, lambda: _fig08(machine, "loogle")),
        "tutti-fig09": (BANDWIDTH, lambda: _fig09(machine, calibration)),
        "tutti-fig11": (PREFIX, lambda: _prefixes(machine, 128, range(16, 129, 16), None)),
        "tutti-fig12": (PREFIX, lambda: _prefixes(machine, 640, range(128, 641, 128), HALF_GLM)),
        "tutti-fig13": (BUBBLE, lambda: _fig13(machine)),
        "tutti-fig14": (COST, lambda: _fig14(machine)),
    }
    chosen = [name for name in makers if not only or name in only]
    made = {"source": SIMULATED, "commit": commit_of(Path(__file__).parent)}
    for name in chosen:
        kind, make = makers[name]
        write_csv(folder / f"{name}.csv", [_row(kind, made | values) for values in make()], kind)
    return [f"{name}.csv" for name in chosen]


def _row(kind: str, values: dict[str, Any]) -> Row:
    shown = values | ({"commit": ""} if values["source"] in STARS else {})
    shown["system"] = NAMES.get(shown["system"], shown["system"])
    return {c: "" if shown.get(c) is None else _text(shown[c]) for c in COLUMNS[kind]}


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _span(
    name: str, unit: str, machine: PaperMachine, server: str, ask: Callable[[], float]
) -> dict[str, float]:
    """The value with the assumed settings, and the least and the most including longer steps."""
    found = []
    for setting in (ASSUMED, LONGER_STEPS):
        machine.use(server, setting)
        found.append(ask())
    ends = {"": found[0], "_low": min(found), "_high": max(found)}
    return {f"{name}{end}_{unit}": value for end, value in ends.items()}


def _published(kind: str, name: str, server: str = "") -> list[tuple[list[str], dict[str, Any]]]:
    """(words of the name after its kind, source and value by column) of points, without ratios."""
    return [
        (one["name"].split()[1:], {"source": source, name: one["value"]})
        for one in points()
        if one["name"].split()[0] == kind
        and server in ("", one["server"])
        and "/" not in one["name"]
        for source in [FITTED if one["use"] == "fit" else PUBLISHED]
    ]


def _fig02(machine: PaperMachine) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for system in ("hbm", "dram-whole", "ssd", "ssd-layers", "gds", "tutti-paper"):
        cached = 0.0 if system == "hbm" else 0.75
        ask = partial(machine.bubble_percent, system, 64 * K, cached)
        rows.append({"system": system, **_span("bubble", "percent", machine, _NEW, ask)})
    rows += [
        {"system": words[1], **point}
        for words, point in _published("bubble", "bubble_percent", _NEW)
    ]
    return rows


def _fig08(machine: PaperMachine, name: str) -> list[dict[str, Any]]:
    """Intervals over settings; none where the queue grows."""
    rows = []
    for row, run, stable in _loaded(machine, name, ("hbm", "dram", "gds", "tutti-paper", "tutti")):
        for metric in ("ttft", "itl"):
            values = [one[f"{metric}_ms"] for one in stable] or [None]
            row[f"{metric}_ms"] = run[f"{metric}_ms"]
            row[f"{metric}_low_ms"] = min(values) if len(values) > 1 else None
            row[f"{metric}_high_ms"] = max(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def _loaded(
    machine: PaperMachine, name: str, systems: Iterable[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """(row, run with the assumed settings, all runs without a growing queue) per system and rate.

    There is a run for each setting, unless the queue grows with the assumed ones.
    """
    for system, rate in product(systems, _RATES[name]):
        machine.use(_NEW)
        runs = [machine.loaded(name, system, rate)]
        unstable = runs[0]["unstable"]
        for setting in () if unstable else SETTINGS[1:]:
            machine.use(_NEW, setting)
            runs.append(machine.loaded(name, system, rate))
        row = {"system": system, "rate": rate, "partial": "no"}
        row["unstable"] = "yes" if unstable else "no"
        yield row, runs[0], [run for run in runs if not run["unstable"]]


def _fig09(machine: PaperMachine, calibration: Calibration) -> list[dict[str, Any]]:
    machine.use(_OLD)
    rows: list[dict[str, Any]] = []
    for system in _STORES:
        times = machine.times(system)
        for tokens in (2**power * K for power in range(8)):
            nbytes = tokens * calibration.model.kv_nbytes_per_token
            taken = {"retrieve": times.read_us(nbytes), "store": times.write_us(nbytes)}
            rows += [
                {"system": system, "phase": phase, "tokens": tokens, "gb_per_s": nbytes / us / 1e3}
                for phase, us in taken.items()
            ]
    for phase in ("retrieve", "store"):
        rows += [
            {"system": words[0], "phase": phase, "tokens": 128 * K, **point}
            for words, point in _published(phase, "gb_per_s")
        ]
    return rows


def _prefixes(
    machine: PaperMachine, total: int, prefixes: Iterable[int], model: ModelShape | None
) -> list[dict[str, Any]]:
    """One request; lengths in units of 1024 tokens."""
    systems = _STORES if model is None else ("gds", "tutti-paper")
    rows: list[dict[str, Any]] = []

    def ttft_ms(system: str, prefix: int) -> float:
        return machine.alone(system, total * K, prefix * K, model).first_ns / 1e6

    for system, prefix in product(systems, prefixes):
        span = _span("ttft", "ms", machine, _OLD, partial(ttft_ms, system, prefix))
        lengths = {"prefix_tokens": prefix * K, "total_tokens": total * K}
        rows.append({"system": system, **lengths, **span})
    for words, point in _published("prefix" if model is None else "tp2", "ttft_ms"):
        lengths = {"prefix_tokens": int(words[1][:-1]) * K, "total_tokens": total * K}
        rows.append({"system": words[0], **lengths, **point, "ttft_ms": 1e3 * point["ttft_ms"]})
    return rows


def _fig13(machine: PaperMachine) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for system, hit in product(_STORES, HITS):
        span = _span("bubble", "ms", machine, _OLD, partial(machine.bubble_ms, system, hit))
        lengths = {"prefix_tokens": round(32 * K * hit), "total_tokens": 32 * K}
        rows.append({"system": system, **lengths, **span})
    lengths = {"prefix_tokens": round(32 * K * 0.9375), "total_tokens": 32 * K}
    rows += [
        {"system": words[0], **point, **lengths}
        for words, point in _published("bubble", "bubble_ms")
        if words[-1] == "93.75%"
    ]
    return rows


def _fig14(machine: PaperMachine) -> list[dict[str, Any]]:
    rows = []
    names = ("input_tokens_per_s", "output_tokens_per_s")
    for row, run, stable in _loaded(machine, "loogle", _STORES):
        tokens = {name: run[name] for name in names}
        if stable:
            served = [sum(one[name] for name in names) for one in stable]
            tokens |= {"tokens_low_per_s": min(served), "tokens_high_per_s": max(served)}
        on_ssd = row["system"] != "dram"
        sizes = {"dram_gb": 0 if on_ssd else _DRAM_GB, "ssd_gb": _SSD_GB if on_ssd else 0}
        rows.append({**row, **tokens, **sizes, "gpus": 1})
    return rows

"""Fits the values of a calibration to the published points that are used for fitting."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.bench.simulate.calibration import Calibration
from tutti.bench.simulate.points import PaperMachine, points

#: What is fitted, in this order: (kind of record, its name, value, least, most, points).
FITTED: tuple[tuple[str, str, str, float, float, tuple[str, ...]], ...] = (
    ("systems", "tutti-paper", "submit_read_us", 0.0, 1e3, ("retrieve tutti-paper",)),
    ("systems", "tutti-paper", "submit_write_us", 0.0, 1e3, ("store tutti-paper",)),
    ("systems", "gds", "submit_read_us", 0.0, 1e3, ("retrieve gds",)),
    ("systems", "gds", "submit_write_us", 0.0, 1e3, ("store gds",)),
    ("systems", "dram", "submit_write_us", 0.0, 1e3, ("store dram",)),
    *(
        ("servers", name, "base_share", 0.0, 0.5, ("bubble share hbm 64K 0%",))
        for name in ("vllm-0.12", "vllm-0.17")
    ),
    ("servers", "vllm-0.12", "gpu_scale", 0.1, 10.0, ("prefix tutti-paper 112K",)),
    ("systems", "ssd", "submit_read_us", 0.0, 1e4, ("prefix ssd 112K",)),
    ("systems", "dram", "submit_read_us", 0.0, 1e3, ("prefix tutti-paper/dram 128K",)),
    (
        *("systems", "gds", "fixed_us", 0.0, 2e6),
        ("prefix tutti-paper/gds 32K", "prefix tutti-paper/gds 128K"),
    ),
    *(
        (
            *("workloads", name, "token_scale", 0.6, 1.3),
            tuple(f"hits {tier} {name}" for tier in ("hbm", "dram", "ssd")),
        )
        for name in ("leval", "loogle")
    ),
)
_ROUNDS = {"token_scale": 10}
_ROUNDS_ELSE = 40


def fit_loss(calibration: Calibration, names: Sequence[str], server: str = "") -> float:
    """The sum of squared errors of some points: relative, or in seconds for GDS.

    server: selects points if several have the same name.

    A ratio to GDS is near 1 if both compute for long, and then says little about GDS; the
    corresponding seconds do.
    """
    machine, total = PaperMachine(calibration), 0.0
    for point in points():
        name, value, of = point["name"], point["value"], point["server"]
        if name not in names or point["use"] != "fit" or server not in ("", of):
            continue
        if "/gds " in name:
            kind, systems, length = name.split()
            one_s, other_s = (machine.value(f"{kind} {s} {length}", of) for s in systems.split("/"))
            total += (other_s - one_s / value) ** 2
        else:
            total += (machine.value(name, of) / value - 1) ** 2
    return total


def fit(calibration: Calibration) -> Calibration:
    """A copy with newly fitted values, which minimize `fit_loss`.

    One value after another, by ternary search: each has points of its own, whose error has a single
    minimum over the value.
    """
    for kind, name, value, low, high, names in FITTED:
        place, server = (kind, name, value), name if kind == "servers" else ""
        for _ in range(_ROUNDS.get(value, _ROUNDS_ELSE)):
            third = (high - low) / 3
            below = fit_loss(calibration.with_value(*place, low + third), names, server)
            above = fit_loss(calibration.with_value(*place, high - third), names, server)
            low, high = (low, high - third) if below <= above else (low + third, high)
        digits = 2 if value == "token_scale" else 4
        calibration = calibration.with_value(*place, round((low + high) / 2, digits))
    for value in ("submit_read_us", "submit_write_us"):
        number = getattr(calibration.systems["tutti-paper"], value)
        calibration = calibration.with_value("systems", "tutti", value, number)
    return calibration

"""The figures themselves, with matplotlib: one function per kind, from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from tutti.bench.figures.cost import Prices, crossings, per_million_tokens
from tutti.bench.figures.data import (
    BANDWIDTH,
    COST,
    HIT_RATE,
    PREFIX,
    RATE,
    Row,
    number_of,
    value,
)
from tutti.bench.plots import blank_figure

TITLES = {
    RATE: "TTFT and ITL against request rate",
    BANDWIDTH: "Retrieve and store against context length",
    PREFIX: "TTFT against the cached prefix",
    HIT_RATE: "TTFT against hit rate",
    COST: "Cost of tokens against request rate",
}
_MARKERS = "osD^vP*X"


def draw(
    kind: str,
    rows: Sequence[Row],
    stem: Path,
    *,
    title: str,
    slo_ms: float,
    prices: Prices,
) -> list[Path]:
    """Draws <stem>.png and <stem>.svg; returns them, or nothing without matplotlib.

    slo_ms: where the TTFT's limit is drawn.
    """
    canvas = blank_figure(2 if kind == RATE else 1)
    if canvas is None:
        return []
    figure, axes = canvas
    drawers: dict[str, Callable[[], None]] = {
        RATE: lambda: _rate(axes, rows, slo_ms),
        BANDWIDTH: lambda: _bandwidth(axes[0], rows),
        PREFIX: lambda: _prefix(axes[0], rows),
        HIT_RATE: lambda: _hit_rate(axes[0], rows),
        COST: lambda: _cost(axes[0], rows, prices),
    }
    drawers[kind]()
    figure.suptitle(f"{title}{_label(rows)}", fontsize=11)
    figure.tight_layout()
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        # No date, so that the same rows give the same bytes.
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=metadata)
    return paths


def _label(rows: Sequence[Row]) -> str:
    """Results that were not measured are labelled so in the title."""
    made = sorted({row["source"] for row in rows} - {"measured"})
    if not made:
        return ""
    all_made = all(row["source"] != "measured" for row in rows)
    return f" ({', '.join(made)})" if all_made else f" (partly {', '.join(made)}: see the legend)"


def _systems(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each system, in the order of the file; the source joins the name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        name = row["system"]
        name += "" if row["source"] == "measured" else f" ({row['source']})"
        found.setdefault(name, []).append(row)
    return found


def _rate(axes: Sequence[Any], rows: Sequence[Row], slo_ms: float) -> None:
    axes[0].axhline(slo_ms, color="black", linewidth=0.8, linestyle="--", label=f"{slo_ms:g} ms")
    for axis, name in zip(axes, ("ttft", "itl"), strict=True):
        for number, (system, found) in enumerate(_systems(rows).items()):
            _line(axis, system, number, found, "rate", name)
        axis.set_xlabel("requests/s")
        axis.set_ylabel(f"mean {name.upper()}, ms")
        axis.set_ylim(bottom=0)
        if _hollow(rows):
            axis.plot([], [], "o", color="grey", mfc="none", label="unstable or partial")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)


def _hollow(rows: Sequence[Row]) -> bool:
    return any("yes" in (row["unstable"], row["partial"]) for row in rows)


def _line(axis: Any, system: str, number: int, rows: Sequence[Row], x: str, name: str) -> None:
    """A curve with its 95 % band; points that mean little are hollow."""
    there = sorted(
        (row for row in rows if number_of(row, f"{name}_ms") is not None),
        key=lambda row: value(row, x),
    )
    if not there:
        return
    places = [value(row, x) for row in there]
    means = [value(row, f"{name}_ms") for row in there]
    low = [_or(row, f"{name}_low_ms", mean) for row, mean in zip(there, means, strict=True)]
    high = [_or(row, f"{name}_high_ms", mean) for row, mean in zip(there, means, strict=True)]
    colour = f"C{number % 10}"
    axis.plot(places, means, color=colour, label=system)
    axis.fill_between(places, [max(0.0, v) for v in low], high, color=colour, alpha=0.15)
    for place, mean, row in zip(places, means, there, strict=True):
        hollow = "yes" in (row.get("unstable"), row.get("partial"))
        marker = _MARKERS[number % len(_MARKERS)]
        axis.plot([place], [mean], marker, color=colour, mfc="none" if hollow else colour)


def _or(row: Row, column: str, default: float) -> float:
    found = number_of(row, column)
    return default if found is None else found


def _bandwidth(axis: Any, rows: Sequence[Row]) -> None:
    styles = {"retrieve": "-", "store": "--"}
    for number, (system, found) in enumerate(_systems(rows).items()):
        for phase, style in styles.items():
            points = sorted(
                (value(row, "tokens"), value(row, "gb_per_s"))
                for row in found
                if row["phase"] == phase
            )
            if points:
                places, speeds = zip(*points, strict=True)
                label = f"{system}, {phase}"
                axis.plot(places, speeds, style, marker="o", color=f"C{number % 10}", label=label)
    axis.set_xscale("log", base=2)
    ticks = sorted({value(row, "tokens") for row in rows})
    axis.set_xticks(ticks, [_short(tokens) for tokens in ticks])
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("GB/s (10^9 bytes)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _short(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def _prefix(axis: Any, rows: Sequence[Row]) -> None:
    for number, (system, found) in enumerate(_systems(rows).items()):
        _line(axis, system, number, found, "prefix_tokens", "ttft")
    axis.set_xlabel("cached prefix, tokens")
    axis.set_ylabel("TTFT, ms")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _hit_rate(axis: Any, rows: Sequence[Row]) -> None:
    """TTFT against the share of the prompt that hits, and where systems change places."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for number, (system, found) in enumerate(_systems(rows).items()):
        shares = [{**row, "share": str(hit_share(row))} for row in found]
        _line(axis, system, number, shares, "share", "ttft")
        curves[system] = [
            (value(row, "share"), value(row, "ttft_ms")) for row in shares if row["ttft_ms"]
        ]
    for (one, a), (other, b) in combinations(curves.items(), 2):
        for place in crossings(a, b) if a and b else []:
            axis.axvline(place, color="grey", linewidth=0.8, linestyle=":")
            label = f"{one} = {other}: {place:.1f} %"
            axis.annotate(label, (place, axis.get_ylim()[1]), rotation=90, fontsize=7, va="top")
    axis.set_xlabel("hit rate, % of the prompt's tokens")
    axis.set_ylabel("TTFT, ms")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def hit_share(row: Row) -> float:
    """Percent of a prompt's tokens that its cached prefix holds."""
    return 100 * value(row, "prefix_tokens") / value(row, "total_tokens")


def _cost(axis: Any, rows: Sequence[Row], prices: Prices) -> None:
    for number, (system, found) in enumerate(_systems(rows).items()):
        costs = [(value(row, "rate"), per_million_tokens(row, prices), row) for row in found]
        points = sorted((rate, cost, _hollow([row])) for rate, cost, row in costs if cost)
        if points:
            colour = f"C{number % 10}"
            axis.plot([p[0] for p in points], [p[1] for p in points], color=colour, label=system)
            for rate, cost, hollow in points:
                axis.plot([rate], [cost], "o", color=colour, mfc="none" if hollow else colour)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("$ for 10^6 tokens, prompts and answers")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)

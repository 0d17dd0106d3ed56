"""Draws the figures from rows, with matplotlib: one function per kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from tutti.bench.figures.cost import Prices, crossings, interval_per_million, per_million_tokens
from tutti.bench.figures.data import (
    BANDWIDTH,
    BUBBLE,
    COST,
    FITTED,
    HIT_RATE,
    PREFIX,
    PUBLISHED,
    RATE,
    RESIDENCY,
    SHARE,
    STARS,
    Row,
    number_of,
    value,
)
from tutti.bench.plots import COLOURS, blank_figure

TITLES = {
    RATE: "TTFT and ITL against request rate",
    BANDWIDTH: "Retrieve and store against context length",
    PREFIX: "TTFT against the cached prefix",
    HIT_RATE: "TTFT against hit rate",
    COST: "Cost of tokens against request rate",
    SHARE: "Share of the first token's time that the GPU waits",
    BUBBLE: "Time that the GPU waits against hit rate",
    RESIDENCY: "Reading under a memory limit",
}
_COLUMNS = {RATE: 2, RESIDENCY: 3}
_MARKERS = "osD^vP*X"
_DASHES = ("-", "-", "--", ":", "-.", "-", "--", ":")
_STAR_LABELS = {PUBLISHED: "published, not used to fit", FITTED: "published, used to fit"}
#: x, y, length of the error bar (down, up), and the row.
_Point = tuple[float, float, tuple[float, float] | None, Row]


def draw(
    kind: str, rows: Sequence[Row], stem: Path, *, title: str, slo_ms: float, prices: Prices
) -> list[Path]:
    """Draws <stem>.png and <stem>.svg; returns them, or nothing without matplotlib.

    slo_ms: TTFT at which a limit is drawn.
    """
    canvas = blank_figure(_COLUMNS.get(kind, 1))
    if canvas is None:
        return []
    figure, axes = canvas
    drawers: dict[str, Callable[[], None]] = {
        RATE: lambda: _rate(axes, rows, slo_ms),
        BANDWIDTH: lambda: _bandwidth(axes[0], rows),
        PREFIX: lambda: _prefix(axes[0], rows),
        HIT_RATE: lambda: _hit_rate(axes[0], rows),
        COST: lambda: _cost(axes[0], rows, prices),
        SHARE: lambda: _share(axes[0], rows),
        BUBBLE: lambda: _bubble(axes[0], rows),
        RESIDENCY: lambda: _residency(axes, rows),
    }
    drawers[kind]()
    if _hollow(rows):
        axes[-1].plot([], [], "o", color="grey", mfc="none", label="queue grows, or partial")
    for source in sorted({row["source"] for row in rows} & set(STARS)):
        axes[-1].plot([], [], label=_STAR_LABELS[source], **_star(source, "grey"))
    if axes[-1].get_legend_handles_labels()[1]:  # right of all axes, so that it hides no point
        place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0.0}
        axes[-1].legend(fontsize=8, handlelength=3, **place)
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.set_axisbelow(True)
    figure.suptitle(f"{title} ({_label(rows)})", fontsize=11)
    if commits := sorted({row["commit"] for row in rows} - {""}):
        figure.text(0.0, -0.02, f"commit {', '.join(commits)}", fontsize=6, color="grey")
    figure.tight_layout()
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path in paths:
        # No date, so that the same rows give the same bytes.
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=110, metadata=metadata, bbox_inches="tight")
    return paths


def _label(rows: Sequence[Row]) -> str:
    """The source of the curves; published points are stars, which the legend explains."""
    made = sorted({row["source"] for row in rows} - set(STARS)) or [PUBLISHED]
    if made == ["measured"] or "measured" not in made:
        return ", ".join(made)
    return f"partly {', '.join(s for s in made if s != 'measured')}: see the legend"


def _systems(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by curve, in the order of the file; names include the source if there are several."""
    sources = {row["source"] for row in rows} - set(STARS)
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["source"] not in STARS:
            name = row["system"] + (f" ({row['source']})" if len(sources) > 1 else "")
            found.setdefault(name, []).append(row)
    return found


def _stars(axis: Any, rows: Sequence[Row], x: Callable[[Row], float], column: str) -> None:
    """Published points, in the colours of their systems; hollow if they were used to fit."""
    colours = {found[0]["system"]: i for i, found in enumerate(_systems(rows).values())}
    for row in rows:
        if row["source"] in STARS and number_of(row, column) is not None:
            colour = COLOURS[colours.get(row["system"], 7) % len(COLOURS)]
            axis.plot([x(row)], [value(row, column)], zorder=5, **_star(row["source"], colour))


def _star(source: str, colour: str) -> dict[str, Any]:
    fill, edge = ("white", colour) if source == FITTED else (colour, "black")
    return {"marker": "*", "linestyle": "", "ms": 12, "mfc": fill, "mec": edge, "mew": 1.2}


def _rate(axes: Sequence[Any], rows: Sequence[Row], slo_ms: float) -> None:
    for axis, name in zip(axes, ("ttft", "itl"), strict=True):
        _lines(axis, rows, "rate", name)
        axis.set(xlabel="requests/s", ylabel=f"mean {name.upper()}, ms")
        if any((number_of(row, f"{name}_ms") or 0.0) > 0 for row in rows):
            axis.set_yscale("log")
    axes[0].axhline(slo_ms, color="black", linewidth=0.8, linestyle="--")
    place = {"va": "bottom", "xycoords": ("axes fraction", "data")}
    axes[0].annotate(f"limit, {slo_ms:g} ms", (0.01, slo_ms), fontsize=8, **place)


def _hollow(rows: Sequence[Row]) -> bool:
    return any("yes" in (row.get("unstable"), row.get("partial")) for row in rows)


def _lines(axis: Any, rows: Sequence[Row], x: str, name: str) -> None:
    """A curve of each system with its intervals as bars.  x: a column, or empty for hit rates."""
    for number, (system, found) in enumerate(_systems(rows).items()):
        points: list[_Point] = []
        for row in found:
            mean = number_of(row, f"{name}_ms")
            if mean is not None:
                low, high = (_or(row, f"{name}_{end}_ms", mean) for end in ("low", "high"))
                # A logarithmic axis ends above 0; the interval of few runs may not.
                bar = None if low == high else (min(mean * 0.9, mean - low), high - mean)
                points.append((value(row, x) if x else hit_share(row), mean, bar, row))
        _curve(axis, system, number, points)


def _curve(axis: Any, system: str, number: int, points: list[_Point]) -> None:
    """Draws a curve; unreliable points are hollow, without bars.  Also in the legend if empty."""
    style = _style(number)
    points = sorted(points, key=lambda point: point[0])
    axis.plot([p[0] for p in points], [p[1] for p in points], **style | {"marker": ""})
    axis.plot([], [], label=system, **style)
    for place, middle, bar, row in points:
        hollow = _hollow([row])
        axis.errorbar(
            [place],
            [middle],
            yerr=None if hollow or bar is None else [[bar[0]], [bar[1]]],
            fmt=style["marker"],
            color=style["color"],
            mfc="none" if hollow else style["color"],
            capsize=2,
            elinewidth=0.8,
            markersize=style["markersize"],
        )


def _style(number: int) -> dict[str, Any]:
    """Style of a curve: thinner than those below it and dashed, so that coinciding curves show."""
    place = number % len(COLOURS)
    width = max(1.2, 3.6 - 0.6 * place)
    style = {"linewidth": width, "markersize": 3.5 + 1.5 * width, "linestyle": _DASHES[place]}
    return style | {"color": COLOURS[place], "marker": _MARKERS[place]}


def _or(row: Row, column: str, default: float) -> float:
    found = number_of(row, column)
    return default if found is None else found


def _bandwidth(axis: Any, rows: Sequence[Row]) -> None:
    styles = {"retrieve": "-", "store": "--"}
    for number, (system, found) in enumerate(_systems(rows).items()):
        for phase, style in styles.items():
            points = by_length([row for row in found if row["phase"] == phase])
            if points:
                places, speeds = zip(*points, strict=True)
                label = f"{system}, {phase}"
                axis.plot(places, speeds, label=label, **_style(number) | {"linestyle": style})
    _stars(axis, rows, lambda row: value(row, "tokens"), "gb_per_s")
    axis.set_xscale("log", base=2)
    ticks = sorted({value(row, "tokens") for row in rows})
    axis.set_xticks(ticks, [_short(tokens) for tokens in ticks])
    axis.set(xlabel="context, tokens", ylabel="GB/s (10^9 bytes)", ylim=(0, None))


def by_length(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(tokens, GB/s), one per length: batches below one object all move one object."""
    speeds: dict[float, list[float]] = {}
    for row in rows:
        speeds.setdefault(value(row, "tokens"), []).append(value(row, "gb_per_s"))
    return sorted((tokens, fmean(found)) for tokens, found in speeds.items())


def _short(tokens: float) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def _prefix(axis: Any, rows: Sequence[Row]) -> None:
    _lines(axis, rows, "prefix_tokens", "ttft")
    _stars(axis, rows, lambda row: value(row, "prefix_tokens"), "ttft_ms")
    ticks = sorted({value(row, "prefix_tokens") for row in rows})
    axis.set_xticks(ticks, [_short(tokens) for tokens in ticks], rotation=45)
    total = _short(value(rows[0], "total_tokens"))
    axis.set(xlabel=f"cached prefix, of {total} tokens", ylabel="TTFT, ms", yscale="log")


def _hit_rate(axis: Any, rows: Sequence[Row]) -> None:
    _lines(axis, rows, "", "ttft")
    for found in crossings_of(rows):
        for place in found["hit_rates_percent"]:
            axis.axvline(place, color="grey", linewidth=0.8, linestyle=":")
            label = f"{found['a']} = {found['b']}: {place:.1f} %"
            axis.annotate(label, (place, axis.get_ylim()[1]), rotation=90, fontsize=7, va="top")
    axis.set(xlabel="hit rate, % of the prompt's tokens", ylabel="TTFT, ms", ylim=(0, None))


def crossings_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Pairs of systems, and the hit rates at which their TTFTs are equal."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for system, found in _systems(rows).items():
        known = [row for row in found if number_of(row, "ttft_ms") is not None]
        curves[system] = [(hit_share(row), value(row, "ttft_ms")) for row in known]
    pairs = combinations([pair for pair in curves.items() if pair[1]], 2)
    return [{"a": a, "b": b, "hit_rates_percent": crossings(x, y)} for (a, x), (b, y) in pairs]


def hit_share(row: Row) -> float:
    """Percentage of a prompt's tokens that are in its cached prefix."""
    return 100 * value(row, "prefix_tokens") / value(row, "total_tokens")


def _cost(axis: Any, rows: Sequence[Row], prices: Prices) -> None:
    for number, (system, found) in enumerate(_systems(rows).items()):
        points: list[_Point] = []
        for row in found:
            if cost := per_million_tokens(row, prices):
                ends = interval_per_million(row, prices)
                bar = ends and (max(0.0, cost - ends[0]), max(0.0, ends[1] - cost))
                points.append((value(row, "rate"), cost, bar, row))
        _curve(axis, system, number, points)
    axis.set(xlabel="requests/s", ylabel="$ for 10^6 tokens, prompts and answers", ylim=(0, None))


def _share(axis: Any, rows: Sequence[Row]) -> None:
    systems = _systems(rows)
    for number, (row, *_) in enumerate(systems.values()):
        middle = value(row, "bubble_percent")
        ends = [_or(row, f"bubble_{end}_percent", middle) for end in ("low", "high")]
        error = [[max(0.0, middle - ends[0])], [max(0.0, ends[1] - middle)]]
        colour = COLOURS[number % len(COLOURS)]
        axis.bar([number], [middle], yerr=error, color=colour, capsize=4, width=0.6)
        axis.annotate(f"{middle:.1f}", (number, middle), fontsize=8, ha="right", va="bottom")
    places = {found[0]["system"]: i for i, found in enumerate(systems.values())}
    known = [row for row in rows if row["system"] in places]
    _stars(axis, known, lambda row: float(places[row["system"]]), "bubble_percent")
    axis.set_xticks(range(len(systems)), systems, fontsize=8)
    axis.set(ylabel="waiting, % of the first token's time", ylim=(0, 100))


def _bubble(axis: Any, rows: Sequence[Row]) -> None:
    _lines(axis, rows, "", "bubble")
    _stars(axis, rows, hit_share, "bubble_ms")
    axis.set(xlabel="hit rate, % of the prompt's tokens", ylabel="waiting of the GPU, ms")
    if any(value(row, "bubble_ms") > 0 for row in rows):
        axis.set_yscale("log")


def _residency(axes: Sequence[Any], rows: Sequence[Row]) -> None:
    columns = {
        "hit_ratio": "hit ratio",
        "read_gb_per_s": "read GB/s, median and range",
        "read_p99_ms": "p99 of a batch, ms",
    }
    for axis, (column, label) in zip(axes, columns.items(), strict=True):
        for number, (system, found) in enumerate(_systems(rows).items()):
            points = sorted(found, key=lambda row: value(row, "limit"))
            middles = [value(row, column) for row in points]
            axis.errorbar(
                [value(row, "limit") for row in points],
                middles,
                yerr=_ranges(points) if column == "read_gb_per_s" else None,
                fmt=f"{_MARKERS[number % len(_MARKERS)]}-",
                color=COLOURS[number % len(COLOURS)],
                capsize=3,
                label=system,
            )
        axis.set(xlabel="memory limit / working set", ylabel=label, ylim=(0, None))
    limits = sorted({value(row, "limit") for row in rows})
    for axis, ideal in ((axes[0], [min(1.0, x) for x in limits]), (axes[-1], [])):
        style = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
        axis.plot(limits[: len(ideal)], ideal, label="limit / W", **style)


def _ranges(rows: Sequence[Row]) -> list[list[float]]:
    """Distances of the slowest and the fastest round from the median."""
    middle = [value(row, "read_gb_per_s") for row in rows]
    ends = [[value(row, f"read_gb_per_s_{end}") for row in rows] for end in ("low", "high")]
    return [[abs(e - m) for e, m in zip(end, middle, strict=True)] for end in ends]

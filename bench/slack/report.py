"""Tables of `tutti bench slack`, for the terminal and for the page of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tutti.base.terminal import table
from tutti.bench.statistics import interval_text, median

#: Bars for the cost of scheduling without competition: microseconds per transfer, ratio of times.
SHORT_BAR_US, LONG_BAR = 50.0, 1.03
#: Bars on a file, relative to `none`: the waits of layers, and the time until a put is stored.
WAIT_BAR, STORED_BAR = 0.5, 1.0

_FILE_SYSTEMS = {
    "none": "with `none`",
    "slack": "with `slack`",
    "as opened": "with a store as `tutti.open` opens it",
    "no puts": "with no puts at all",
}
#: Compared pairs of the cost without competition.
_PARTS = {"queue": "at once / off", "policy": "auto / at once"}

_P99, _P99_S = "p99 no worse than a tuned fixed", "first_token_p99_s"
HEAD = (
    *("condition", "drive", "GPU", "workload", "bubble s: none", "whole", "fixed", "slack"),
    *("oracle", "bound (no writes)", "gap", "closed by slack", "at most"),
    *("fixed: share, ms", "first token p99 s: none, fixed, slack, bound"),
    "stored pages: none, fixed, slack",
    *("drain s: none, slack", "missed"),
)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """A line for each cell; see HEAD.  All of it is simulated."""
    names = ("none", "whole", "fixed", "slack", "oracle", "bound")
    rows: list[list[object]] = []
    for row in result["rows"]:
        policies, closed = row["policies"], row["closed"]
        missed = [name for name, reached in row["bars"].items() if not reached]
        limits = row["at_most_by_seed"]
        rows.append(
            [
                *(row["condition"], row["drive"], row["gpu"], row["workload"]),
                *(f"{policies[name]['bubble_s']:.2f}" for name in names),
                f"{row['gap']:.0%}",
                "" if closed is None else f"{closed:.0%}{_by_seed(row['closed_by_seed'])}",
                f"{median(limits):.0%}{_by_seed(limits)}" if limits else "",
                f"{row['fixed_share']:.2g}, {row['fixed_window_ms']:g}",
                _each(policies, _P99_S, 3, ("none", "fixed", "slack", "bound")),
                _each(policies, "stored_pages", 0, ("none", "fixed", "slack")),
                _each(policies, "drained_s", 1, ("none", "slack")),
                "; ".join(missed),
            ]
        )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes: cells that reach each bar, wrong profiles, and measurements on a file."""
    notes = [f"{name}: {count}" for name, count in counts(result).items()]
    if notes:
        runs = f"medians of {result['seeds']} runs of {result['requests']} requests"
        notes.insert(0, f"simulated; {runs} (seeds from {result.get('first_seed', 0)} on)")
        notes.append(_edges(result["rows"]))
    if any(row["at_most_by_seed"] for row in result["rows"]):
        notes.append(
            "at most: proven, no schedule that stores as many pages as none closes more of the gap,"
            " the rest of a decode step counted as waiting too"
        )
    judged = [row for row in result["rows"] if _P99 in row["bars"]]
    if judged:
        pairs = [[row["policies"][name][_P99_S] for name in ("slack", "fixed")] for row in judged]
        kept = sum(row["bars"][_P99] and a <= b for row, (a, b) in zip(judged, pairs, strict=True))
        notes.append(f"{_P99}: up to 0.5 % more counts as that; without it {kept} of {len(judged)}")
    notes += [_wrong(result, name) for name in result.get("wrong", ())]
    if result.get("file"):
        notes += _file(result["file"])
    if result.get("cost"):
        notes += _cost(result["cost"])
    return notes


def counts(result: dict[str, Any]) -> dict[str, str]:
    """Number of cells that reach each bar, of those to which it applies; and of distinct ones.

    A condition that does not affect `none`, `slack` and `bound` repeats another cell.
    """
    bars: dict[str, list[tuple[str, bool]]] = {}
    for row in result["rows"]:
        names = (row["drive"], row["gpu"], row["workload"])
        cell = str((*names, *map(row["policies"].get, ("none", "slack", "bound"))))
        for name, reached in row["bars"].items():
            bars.setdefault(name, []).append((cell, reached))
    found = {}
    for name, cells in bars.items():
        distinct = dict(cells)
        found[name] = f"{sum(reached for _, reached in cells)} of {len(cells)} cells"
        found[name] += f", {sum(distinct.values())} of {len(distinct)} distinct ones"
    return found


def report(result: dict[str, Any]) -> str:
    """For people."""
    text = table(HEAD, rows_of(result)) if result["rows"] else ""
    return "\n".join([text, *notes_of(result)])


def _edges(rows: Sequence[dict[str, Any]]) -> str:
    """Cells in which the best `fixed` is at the edge of the tried parameters."""
    shares, windows = ([row[f"fixed_{name}"] for row in rows] for name in ("share", "window_ms"))
    pairs = [(row["policies"]["fixed"], row["policies"]["none"]) for row in rows]
    fewer = sum(fixed["stored_pages"] < none["stored_pages"] for fixed, none in pairs)
    late = sum(fixed[_P99_S] > 1.005 * none[_P99_S] for fixed, none in pairs)
    drained_s = max(fixed["drained_s"] for fixed, _ in pairs)
    return (
        f"fixed: of {len(rows)} cells the best share is the smallest (1/16) in"
        f" {shares.count(0.0625)} and the largest (1) in {shares.count(1.0)}, the best window"
        f" the shortest (2 ms) in {windows.count(2.0)} and the longest (50 ms) in"
        f" {windows.count(50.0)}; it stores fewer pages than none in {fewer}, its p99 is more than"
        f" 0.5 % above that of none in {late}, and after the last token it stores for up to"
        f" {drained_s:.0f} s"
    )


def _each(policies: dict[str, Any], metric: str, digits: int, names: Sequence[str]) -> str:
    return ", ".join(f"{policies[name][metric]:.{digits}f}" for name in names)


def _by_seed(parts: Sequence[float | None]) -> str:
    """Percent with each of several seeds; "-" where the gap is too small to be judged."""
    shown = ("-" if part is None else f"{100 * part:.0f}" for part in parts)
    return f" ({' '.join(shown)})" if len(parts) > 1 else ""


def _wrong(result: dict[str, Any], name: str) -> str:
    """The largest loss by a wrong profile against the true one, with the same seed of a cell."""
    losses = []
    for row in result["rows"]:
        where = ", ".join(row[key] for key in ("condition", "drive", "gpu", "workload"))
        for true, part in zip(row["closed_by_seed"], row["wrong_by_seed"][name], strict=True):
            if part is not None:
                losses.append((true - part, f" ({where}: {part:.1%} instead of {true:.1%})"))
    loss, worst = max(losses, default=(0.0, ""))
    missed = sum(bool(row["missed_by_wrong"][name]) for row in result["rows"])
    error, true = (
        max((row["policies"][each]["prediction_error"] for row in result["rows"]), default=0.0)
        for each in (name, "slack")
    )
    return (
        f"slack with a wrong profile ({name}) closes up to {100 * loss:.1f} points less of the gap"
        f"{worst if loss >= 5e-4 else ''}; misses a bar in {missed} of {len(result['rows'])} cells;"
        f" prediction error up to {error:.1%}, {true:.1%} with the true one"
    )


def _cost(found: dict[str, Any]) -> list[str]:
    """Lines about the cost of scheduling, and of the control without it."""
    head = "measured on one file, one at a time, time with scheduling over time without"
    return [
        f"{head}: {name} {_more(cell, 'auto / off')}, {_verdict(name, cell)}"
        for name, cell in found["cells"].items()
    ]


def _more(cell: dict[str, Any], pair: str) -> str:
    us = cell[f"{pair.replace('/', '-')}, us"]
    more_us = f"{us['median']:+.0f} [{us['low']:+.0f}, {us['high']:+.0f}] us"
    return f"{interval_text(cell[pair])} ({more_us})"


def _verdict(name: str, cell: dict[str, Any]) -> str:
    """Whether the bar is reached, also by the queue and the policy alone, and the control."""
    is_short = name.startswith("short")
    bar, unit = (SHORT_BAR_US, " us") if is_short else (LONG_BAR, "")

    def value(pair: str) -> dict[str, float]:
        found: dict[str, float] = cell[f"{pair.replace('/', '-')}, us" if is_short else pair]
        return found

    control = value("control / off")
    none, least = (0.0, -bar) if is_short else (1.0, 1 / bar)
    differs = not control["low"] <= none <= control["high"]
    biased = differs and not least <= control["low"] <= control["high"] <= bar

    def state(pair: str) -> str:
        return _state(value(pair), bar, control["high"], biased=biased)

    parts = ", ".join(
        f"{part} {_more(cell, pair)} {state(pair)}" for part, pair in _PARTS.items() if pair in cell
    )
    beyond = "**differs beyond the bar**" if biased else "no difference beyond the bar"
    return (
        f"bar {bar:g}{unit} {state('auto / off')} ({parts};"
        f" control {_more(cell, 'control / off')}, {beyond})"
    )


def _state(
    value: dict[str, float], bar: float, noise: float = -math.inf, *, biased: bool = False
) -> str:
    """Judges an interval: undecided if it contains the bar, or is within the noise.

    biased: the measured difference of equal systems may exceed the bar.
    """
    if value["high"] <= bar and not biased:
        return "reached"
    return "**not reached**" if value["low"] > max(bar, noise) else "**not resolved**"


def _file(found: dict[str, Any]) -> list[str]:
    """Lines about layers' waits, the removable share of them, and the profiles used."""
    later = found.get("stored / none", {})  # missing in older results
    waited = ", ".join(
        _beside(name, f"{1e3 * bubble_s:.1f} ms", found.get(f"{name} / none"), WAIT_BAR)
        for name, bubble_s in found["bubble_s"].items()
    )
    stored = ", ".join(
        _beside(name, f"{mean_s:.3f} s", later.get(name), STORED_BAR)
        for name, mean_s in found["mean_stored_s"].items()
    )
    notes = [
        f"measured on a file, {found['rounds']} rounds of each in turns (parts are medians over"
        f" rounds): layers waited {waited} a round; a load takes"
        f" {found['profile']['interference']:.2f} times as long during a put there; a put is stored"
        f" in the mean after {stored}"
    ]
    if "waits_s" in found:  # missing in older results
        notes += [_floor(found), _profiles(found)]
    return notes


def _floor(found: dict[str, Any]) -> str:
    """Text: whether the goal for waits is reachable, and the closed share of the gap."""
    floor, waits_s = found["no puts / none"], found["waits_s"]
    pairs = zip(waits_s["no puts"], waits_s["none"], strict=True)
    above = sum(least > WAIT_BAR * none for least, none in pairs)
    can = {"reached": "this does not exclude the goal", "**not reached**": "this excludes the goal"}
    state = can.get(_state(floor, WAIT_BAR), "whether this excludes the goal is **not resolved**")
    gap = found["none - no puts, s"]
    closed = " (**not resolved**)"
    if gap["low"] > 0:
        closed = ": " + "; ".join(
            f"{interval_text(part)} of it is closed {_FILE_SYSTEMS[name]}"
            for name, part in found["closed"].items()
        )
    return (
        f"no scheduler waits less than without puts, {interval_text(floor)} of `none`, and more"
        f" than {WAIT_BAR:g} of it in {above} of {found['rounds']} rounds: {state};"
        f" puts cost {interval_text({k: 1e3 * s for k, s in gap.items()}, 1)} ms a round{closed}"
    )


def _profiles(found: dict[str, Any]) -> str:
    """Text: each scheduler's profile, its corrections, and its writes during loads."""
    told = {"slack": found["profile"], "as opened": found["as opened"]["found"]}
    texts = []
    for name, says in told.items():
        by = found["counters"][name]
        read, write = (says[f"{way}_bytes_per_s"] for way in ("read", "write"))
        bound = ", the bound of the correction" if by["layer_factor"] in (1 / 8, 8.0) else ""
        layer_ms, both = 1e3 * says["layer_s"], says["interference"]
        texts.append(
            f"{_FILE_SYSTEMS[name]} {read / 1e9:.2f} GB/s read (in the end"
            f" {read / by['read_factor'] / 1e9:.2f}), {write / 1e9:.2f} written"
            f" ({write / by['write_factor'] / 1e9:.2f}), interference {both:.2f}"
            f" ({both * by['both_factor']:.2f}), a layer {layer_ms:.2f} ms"
            f" ({layer_ms * by['layer_factor']:.2f}{bound}),"
            f" {by['slack_ns'] / 1e6:.0f} ms of writes during loads"
        )
    return f"profiles, and what was learned: {'; '.join(texts)}"


def _beside(name: str, text: str, part: dict[str, float] | None, bar: float) -> str:
    """A number of a system, and its ratio to that of `none`."""
    text = f"{text} {_FILE_SYSTEMS[name]}"
    if part is None:
        return text
    text += f", {interval_text(part)} of that"
    return text if name == "no puts" else f"{text} (goal {bar:g} {_state(part, bar)})"

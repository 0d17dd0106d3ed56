"""Tables of `tutti bench slack`, for the terminal and for the page of results."""

from __future__ import annotations

from typing import Any

from tutti.bench.statistics import interval_text
from tutti.terminal import table

HALF = 0.5
#: A bar that stands only where `bound`, which has no writes, reaches it.
REACHABLE = "half of none, where reads alone take less than half"
HEAD = (
    *("drive", "GPU", "workload", "bubble s: none", "fixed", "slack", "bound (no writes)"),
    *("slack/none", "slack/oracle", "+30 %/oracle", "-30 %/oracle", "first token slack/none"),
    *("decode slower: none, slack", "backlog pages: none, slack", "dropped: none, slack"),
)


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    """A line for each cell; see HEAD.  All of it is simulated."""
    names = ("none", "fixed", "slack", "bound")
    compared = ("slack / none", "slack / oracle", "slack +30% / oracle", "slack -30% / oracle")
    rows: list[list[object]] = []
    for row in result["rows"]:
        policies, ratios = row["policies"], row["ratios"]
        both = [policies[name] for name in ("none", "slack")]
        rows.append(
            [
                *(row["drive"], row["gpu"], row["workload"]),
                *(f"{policies[name]['bubble_s']:.2f}" for name in names),
                *(f"{ratios[name]['bubble_s']['median']:.3f}" for name in compared),
                f"{ratios['slack / none']['first_token_s']['median']:.3f}",
                ", ".join(f"{one['decode_slowdown']:.2%}" for one in both),
                ", ".join(f"{one['backlog_pages_max']:.0f}" for one in both),
                ", ".join(f"{one['dropped_pages']:.0f}" for one in both),
            ]
        )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """How many cells reach each bar, and what was measured on a file."""
    notes = [f"{name}: {count} cells" for name, count in counts(result).items()]
    if notes:
        notes.insert(0, f"simulated; medians of {result['seeds']} runs")
    if result.get("file"):
        notes.append(_file(result["file"]))
    return notes


def counts(result: dict[str, Any]) -> dict[str, str]:
    """How many cells reach each bar, of those in which it can be reached."""
    bars: dict[str, list[bool]] = {}
    for row in result["rows"]:
        for name, reached in row["bars"].items():
            bound = row["ratios"]["bound / none"]["bubble_s"]["median"]
            if name != REACHABLE or bound <= HALF:
                bars.setdefault(name, []).append(reached)
    return {name: f"{sum(reached)} of {len(reached)}" for name, reached in bars.items()}


def report(result: dict[str, Any]) -> str:
    """For people."""
    short = (0, 1, 2, 3, 5, 6, 7, 8, 11)
    rows = [[row[column] for column in short] for row in rows_of(result)]
    text = table([HEAD[column] for column in short], rows) if rows else ""
    return "\n".join([text, *notes_of(result)])


def _file(found: dict[str, Any]) -> str:
    profile, bubble, ratio = found["profile"], found["bubble_s"], found["slack / none"]
    return (
        f"measured on a file, {found['rounds']} pairs of rounds: layers waited "
        f"{bubble['none'] * 1e3:.1f} ms a round with `none`, {bubble['slack'] * 1e3:.1f} ms with "
        f"`slack`, ratio {interval_text(ratio)}; a load "
        f"takes {profile['interference']:.2f} times as long beside a put there"
    )

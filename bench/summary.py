"""Writes the tables of docs/results.md from the raw results, so that no number there is typed.

    python -m tutti.bench.summary docs/results.md bench/results

Marks in the pages (the given one, those in its folder, and the README above it), each up to the
next `<!-- end -->`:
`<!-- result: NAME -->`: the table of NAME.json, below the picture NAME.png if `make bench` draws
one.  It is marked as stale if the measured code has changed since, or as missing.
`<!-- state: NAME -->`: only that state, for a link; of a figure as `figures/NAME`.
`<!-- value: NAME PATH -->`: a number, or a median with its interval.  PATH is the keys of the
result from the outermost, joined by "/"; in a list, the content of the entry, joined by ", ", or by
"; " where it has a comma itself.  With `*` a key is a pattern, and of a list all such entries are
meant: of several numbers the least and the largest are shown.  Its paragraph needs a state, too.
`<!-- bar: NAME PATH at least NUMBER -->` or `at most`: whether a goal is reached
(`goals.verdict`); of several numbers how often.
`<!-- model: many drives -->`: tables of several results (`many_drives`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.base.terminal import WIDTH_MAX, fitting
from tutti.base.units import format_nbytes
from tutti.bench import (
    agent,
    bandwidth,
    eviction,
    freshness,
    many_drives,
    paths,
    replay,
    ring,
    second_tier,
    short,
    soak_report,
    store_results,
    submit,
    threads,
    window,
)
from tutti.bench.charts import Bars, bars_svg
from tutti.bench.compare import run as compare
from tutti.bench.goals import REACHED, exactly, verdict
from tutti.bench.gpu import report as gpu_report
from tutti.bench.peers import run as peers
from tutti.bench.profile import run as profile
from tutti.bench.residency import moving
from tutti.bench.residency import run as residency
from tutti.bench.simulate import report as simulate
from tutti.bench.slack import decisions
from tutti.bench.slack import report as slack_report
from tutti.bench.statistics import median
from tutti.bench.yardsticks import run as yardsticks
from tutti.bench.yardsticks import serving
from tutti.errors import ConfigError

STALE = "; **stale**: "
STATE = " (**stale**)"
NOT_MEASURED = "Not measured yet: `make bench` does."
_BLOCK = re.compile(r"(<!-- result: ([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_VALUE = re.compile(r"(<!-- value: ([\w/-]+) ([^>]+?) -->).*?(<!-- end -->)")
_BAR = re.compile(r"(<!-- bar: ([\w/-]+) ([^>]+?) at (least|most) ([\d.]+) -->).*?(<!-- end -->)")
_MODEL = re.compile(r"(<!-- model: many drives -->\n).*?(<!-- end -->)", re.DOTALL)
_STATE = re.compile(r"(<!-- state: ([\w/-]+) -->).*?(<!-- end -->)")


def render(text: str, results: Path) -> str:
    """Returns the page with every table rendered again.

    Raises ConfigError for a missing result that `make bench` does not measure.

    Outside of a checkout with its history no table is marked as stale.
    """
    history = freshness.has_history(results)
    pictures = {step.name: step.picture for step in store_results.STEPS}

    def read(name: str) -> tuple[dict[str, Any], str]:
        path = results / f"{name}.json"
        if not path.exists():
            raise ConfigError(f"{path} does not exist; run the benchmark or take the table out")
        result = json.loads(path.read_text())
        root = results.resolve().parents[1]
        return result, freshness.why_stale(name, result, root) if history else ""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name in pictures and not (results / f"{name}.json").exists():
            return f"{match[1]}\n{NOT_MEASURED}\n\n{match[3]}"
        result, why = read(name)
        shown = f"{_tables(result)}{STALE + why if why else ''}"
        if pictures.get(name) and (results / f"{name}.png").exists():
            shown = f"![{pictures[name]}](../bench/results/{name}.png)\n\n{shown}"
        return f"{match[1]}\n{shown}\n\n{match[3]}"

    def state(match: re.Match[str]) -> str:
        root, name = results.resolve().parents[1], match[2]
        if name.startswith("figures/"):
            stale = history and freshness.figure_is_stale(root / "docs" / f"{name}.csv", root)
        else:
            stale = bool(read(name)[1])
        return f"{match[1]}{STATE if stale else ''}{match[3]}"

    def found(match: re.Match[str]) -> list[Any]:
        if numbers := _numbers(read(match[2])[0], match[3].split("/")):
            return numbers
        raise ConfigError(f"{match[2]}.json has no {match[3]}; correct the page")

    def value(match: re.Match[str]) -> str:
        return f"{match[1]}{_shown(found(match))}{match[4]}"

    def bar(match: re.Match[str]) -> str:
        words = _verdicts(found(match), float(match[5]), is_least=match[4] == "least")
        return f"{match[1]}{words}{match[6]}"

    def model(match: re.Match[str]) -> str:
        states: list[str] = []

        def result(name: str) -> dict[str, Any]:
            found, words = read(name)
            states.append(words)
            return found

        tables = many_drives.tables(result)
        stale = f"\n{STATE.strip()}" if any(states) else ""
        return f"{match[1]}\n{tables}{stale}\n\n{match[2]}"

    text = _MODEL.sub(model, text)
    text = _STATE.sub(state, _BLOCK.sub(table, text))
    return _BAR.sub(bar, _VALUE.sub(value, text))


def _numbers(result: Any, path: Sequence[str]) -> list[Any]:
    """What is at a path: numbers, lists of rounds, intervals; of a `*` all that have the rest."""
    if not path:
        return [result]
    key, *rest = path
    if isinstance(result, list):
        words = set(key.split("; " if "; " in key else ", "))
        texts = [(row, set(map(str, row.values()))) for row in result]
        under = [row for row, text in texts if key in text or words - {"*"} <= text]
        under = under if "*" in words else under[:1]
    else:
        under = [one for name, one in result.items() if fnmatchcase(name, key)]
    return [number for one in under for number in _numbers(one, rest)]


def _shown(found: Sequence[Any]) -> str:
    middles = [_median_of(one) for one in found]
    if len(found) > 1:
        return f"{_figure(min(middles))} to {_figure(max(middles))}"
    one, text = found[0], _figure(middles[0])
    if not isinstance(one, dict):
        return text
    decimals = len(text.partition(".")[2])
    return f"{text} [{one['low']:,.{decimals}f}, {one['high']:,.{decimals}f}]"


def _median_of(one: Any) -> Any:
    """The median of an interval, of a list of rounds, or of a single number."""
    if isinstance(one, dict):
        return one["median"]
    return median(one) if isinstance(one, list) else one


def _figure(number: float) -> str:
    """Counts in full, others with three digits."""
    if isinstance(number, int):
        return f"{number:,}"
    digits = 2 - math.floor(math.log10(abs(number))) if number else 0
    return f"{round(number, digits):,.{max(0, digits)}f}"


def _verdicts(found: Sequence[Any], bar: float, *, is_least: bool) -> str:
    """Whether a number reaches the bar; of several how many do, and how many do not."""
    whole = [one if isinstance(one, dict) else exactly(_median_of(one)) for one in found]
    words = [verdict(one, bar, is_least=is_least) for one in whole]
    kinds = list(dict.fromkeys([REACHED, *words]))
    if len(set(words)) == 1:
        return words[0] + ("", " in both", f" in all {len(words)}")[min(len(words), 3) - 1]
    return ", ".join(f"{kind} in {words.count(kind)}" for kind in kinds) + f" of {len(words)}"


def pages_of(page: Path) -> list[Path]:
    """The page, those beside it, and the README above: all that may show or link to results."""
    folder = page.resolve().parent
    return [
        file
        for file in (*sorted(folder.glob("*.md")), folder.parent / "README.md")
        if file.exists()
    ]


def _tables(result: dict[str, Any]) -> str:
    return f"{_KINDS[result['benchmark']](result)}\n\n{_machine(result['machine'])}"


def _machine(machine: dict[str, Any]) -> str:
    names = ("cpu", "cores", "memory", "kernel", "disk", "filesystem", "python", "commit")
    facts = ", ".join(f"{name} {machine[name]}" for name in names if name in machine)
    return f"{facts}; `{machine['command']}`"


def _compare(result: dict[str, Any]) -> str:
    rows, facts = compare.rows_of(result), [f"* {note}" for note in compare.notes_of(result)]
    tables = _markdown(compare.HEAD, rows) if rows else []
    return "\n".join([*tables, *facts, *_runs(result["cells"])])


def _runs(cells: dict[str, Any]) -> list[str]:
    """Mean run lengths, if both systems report them."""
    lines = []
    for name, cell in cells.items():
        found = [cell.get(side, {}).get("facts", {}).get("mean_run_length") for side in "ab"]
        if all(found):
            lines.append(f"\nMean run length, {name}: a {found[0]:.1f}, b {found[1]:.1f} slots.")
    return lines


def _replay(result: dict[str, Any]) -> str:
    hits = _markdown(replay.HITS, replay.hit_rows(result))
    speeds = _markdown(replay.SPEEDS, replay.speed_rows(result))
    notes = [line for note in replay.notes_of(result) for line in ("", note)]
    return "\n".join([*hits, "", *speeds, *notes])


def _peers(result: dict[str, Any]) -> str:
    lines = []
    for title, cell in result["cells"].items():
        size = format_nbytes(cell["page_nbytes"])
        lines += [f"{title}, {size} each, host pool {result['layout']}:", ""]
        lines += [*_markdown(peers.HEAD, peers.rows_of(cell)), ""]
        lines += [line for note in peers.notes_of(cell) for line in (f"* {note}", "")]
    lines += [f"Skipped: {name} ({why})." for name, why in result["skipped"].items()]
    lines += peers.members_note(result)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}."])


def _peers_picture(result: dict[str, Any]) -> str:
    """The README's picture: an SVG of the largest pages."""
    cell, machine = next(iter(result["cells"].values())), result["machine"]
    charts = [
        Bars(f"{phase}, GB/s", [(n, p[phase]["median_gb_per_s"]) for n, p in cell["peers"].items()])
        for phase in ("load", "store")
    ]
    where = f"on a {machine['cores']}-core machine (measured, commit {machine['commit']})"
    return bars_svg(f"Pages of {format_nbytes(cell['page_nbytes'])} {where}", charts)


def _fuzz(result: dict[str, Any]) -> str:
    targets = result["targets"].items()
    rows = [
        [name, one["cases"], f"{one['seconds']:.0f}", len(one["findings"])] for name, one in targets
    ]
    rows.append(["all", result["cases"], "", result["findings"]])
    return "\n".join(_markdown(["reader of", "cases", "seconds", "findings"], rows))


def _failures(result: dict[str, Any]) -> str:
    head = list(result["rows"][0])
    rows = [row | {"ended": "yes" if row["ended"] else "no"} for row in result["rows"]]
    return "\n".join(_markdown(head, [[row[name] for name in head] for row in rows]))


def _table_of(bench: ModuleType) -> Callable[[dict[str, Any]], str]:
    """Table function of a bench module with HEAD, rows_of and notes_of."""

    def render_table(result: dict[str, Any]) -> str:
        rows = bench.rows_of(result)
        used = [i for i in range(len(bench.HEAD)) if any(row[i] != "" for row in rows)]
        head = [bench.HEAD[i] for i in used]
        lines = _markdown(head, [[row[i] for i in used] for row in rows]) if rows else []
        return "\n".join([*lines, "", *(f"* {note}" for note in bench.notes_of(result))])

    return render_table


def _simulate(result: dict[str, Any]) -> str:
    lines = _markdown(simulate.HEAD, simulate.rows_of(result)) if result["rows"] else []
    if result.get("points"):
        lines += _markdown(simulate.POINTS_HEAD, simulate.point_rows(result))
    return "\n".join([*lines, "", *(f"* {note}" for note in simulate.notes_of(result))])


_KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "agent": _table_of(agent),
    "bandwidth": _table_of(bandwidth),
    "compare": _compare,
    "decisions": _table_of(decisions),
    "eviction": _table_of(eviction),
    "failures": _failures,
    "fuzz": _fuzz,
    "gpu": _table_of(gpu_report),
    "kv_cache": _table_of(yardsticks),
    "paths": _table_of(paths),
    "peers": _peers,
    "profile": _table_of(profile),
    "replay": _replay,
    "residency": _table_of(residency),
    "residency-moving": _table_of(moving),
    "ring": lambda result: "\n".join(_markdown(ring.HEAD, ring.rows_of(result))),
    "second_tier": _table_of(second_tier),
    "serving": _table_of(serving),
    "simulate": _simulate,
    "slack": _table_of(slack_report),
    "short": _table_of(short),
    "soak": _table_of(soak_report),
    "submit": _table_of(submit),
    "threads": _table_of(threads),
    "window": _table_of(window),
}


def _markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table, or of several if one would be too wide."""
    lines: list[str] = []
    for names, cells in fitting(head, rows, gap=len(" | "), width=WIDTH_MAX - len("|  |")):
        table: list[Sequence[object]] = [names, ["---"] * len(names), *cells]
        lines += ["", *("| " + " | ".join(str(cell) for cell in line) + " |" for line in table)]
    return lines[1:]


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites the pages and the digests of measured code, and draws the README's picture."""
    parser = argparse.ArgumentParser(prog="tutti.bench.summary", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    try:
        freshness.write_lock(args.results.resolve().parents[1])
        for page in pages_of(args.page):
            page.write_text(render(page.read_text(), args.results))
        if (compared := args.results / "peers.json").exists():
            picture = _peers_picture(json.loads(compared.read_text()))
            compared.with_suffix(".svg").write_text(picture)
    except ConfigError as error:
        print(f"tutti.bench.summary: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

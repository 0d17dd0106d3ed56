"""Rows of figures: made from results, read from and written to CSV.  Figures need only rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.base.checks import open_regular
from tutti.bench.writable import check_writable
from tutti.errors import CapacityError, ConfigError, system_message

#: A line of a CSV: column -> text.  Empty text is a missing value.
Row = dict[str, str]

#: Name of the file with a result, in a folder of results.
RESULT = "result.json"

RATE, BANDWIDTH, PREFIX, HIT_RATE, COST = "rate", "bandwidth", "prefix", "hit-rate", "cost"
SHARE, BUBBLE, RESIDENCY = "share", "bubble", "residency"
PUBLISHED, FITTED = "published", "published (fitted)"
#: Sources that are drawn as stars; FITTED: points that the simulator was fitted to.
STARS = (PUBLISHED, FITTED)

#: Columns of each figure.  All have source (one of SOURCES) and commit (of the code that simulated
#: or measured the row).
COLUMNS = {
    RATE: (
        *("system", "source", "rate", "ttft_ms", "ttft_low_ms", "ttft_high_ms"),
        *("itl_ms", "itl_low_ms", "itl_high_ms", "unstable", "partial"),
    ),
    BANDWIDTH: ("system", "source", "phase", "tokens", "gb_per_s"),
    PREFIX: (
        *("system", "source", "prefix_tokens", "total_tokens"),
        *("ttft_ms", "ttft_low_ms", "ttft_high_ms"),
    ),
    SHARE: (*("system", "source", "bubble_percent", "bubble_low_percent", "bubble_high_percent"),),
    BUBBLE: (
        *("system", "source", "prefix_tokens", "total_tokens"),
        *("bubble_ms", "bubble_low_ms", "bubble_high_ms"),
    ),
    RESIDENCY: (
        *("system", "source", "limit", "hit_ratio", "read_gb_per_s"),
        *("read_gb_per_s_low", "read_gb_per_s_high", "read_p99_ms"),
    ),
    COST: (
        *("system", "source", "rate", "input_tokens_per_s", "output_tokens_per_s"),
        *("tokens_low_per_s", "tokens_high_per_s"),
        *("gpus", "dram_gb", "ssd_gb", "unstable", "partial"),
    ),
}
COLUMNS[HIT_RATE] = COLUMNS[PREFIX]
COLUMNS = {kind: (*columns, "commit") for kind, columns in COLUMNS.items()}
KINDS = tuple(COLUMNS)
SOURCES = ("measured", "simulated", "emulated", *STARS)
_TEXT = ("system", "source", "phase", "unstable", "partial", "commit")


def read_csv(path: Path, kind: str) -> list[Row]:
    """Rows of one figure.  Raises ConfigError for other columns or cells that are not numbers."""
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError(f"cannot read {path}: {why}; give a CSV of this figure") from error
    return checked(rows, kind, path.name)


def read_result(path: Path, wanted: str) -> dict[str, Any]:
    """Reads a result; `path`: its file or folder.  Raises ConfigError."""
    path = path / RESULT if path.is_dir() else path
    try:
        with open_regular(path) as file:
            result = json.loads(file.read())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError(f"cannot read {path}: {why}; give {wanted}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path.name} is not a result of a benchmark")
    return result


def checked(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[Row]:
    """The rows with the columns of the figure.  Raises ConfigError."""
    found = []
    for number, row in enumerate(rows, 2):
        missing = [column for column in COLUMNS[kind] if row.get(column) is None]
        if missing:
            raise ConfigError(
                f"{name} lacks {', '.join(missing)} in line {number}; a figure of {kind} needs "
                f"{', '.join(COLUMNS[kind])}"
            )
        if more := [column for column in row if column not in COLUMNS[kind]]:
            names = ", ".join("a cell without a column" if c is None else str(c) for c in more)
            raise ConfigError(
                f"{name} has {names} in line {number}, which no figure of {kind} has: it is of"
                " another version; take that out, or draw it with its own version"
            )
        for column in COLUMNS[kind]:
            if column not in _TEXT and number_of(row, column) is None and row[column] != "":
                raise ConfigError(f"{name}, line {number}: {column} is {row[column]!r}, no number")
        if row["source"] not in SOURCES:
            raise ConfigError(f"{name}, line {number}: source is one of {', '.join(SOURCES)}")
        found.append({column: str(row[column]) for column in COLUMNS[kind]})
    if not found:
        raise ConfigError(f"{name} has no row to draw")
    return found


def write_csv(path: Path, rows: Sequence[Row], kind: str) -> None:
    """Writes the rows.  Raises CapacityError when the disk is full, ConfigError for a pipe."""
    check_writable(path)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS[kind], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    try:
        path.write_text(text.getvalue())
    except OSError as error:
        raise CapacityError(f"cannot write {path}: {system_message(error)}") from error


def number_of(row: Mapping[str, Any], column: str) -> float | None:
    """A cell as a finite number; None if it is empty or not a finite number."""
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None


def value(row: Row, column: str) -> float:
    """A required cell.  Raises ConfigError if it is missing."""
    found = number_of(row, column)
    if found is None:
        raise ConfigError(f"a row of {row['system']} has no {column}; leave the row out")
    return found


def rows_of(result: dict[str, Any], kind: str, name: str, **extra: float) -> list[Row]:
    """Rows of a figure from a benchmark's result.

    extra: gpus, dram_gb and ssd_gb of the system, for its cost; page_tokens, for bandwidth.
    Raises ConfigError for a result of another benchmark.
    """
    benchmark = result.get("benchmark")
    makers: dict[tuple[str, Any], Callable[[], list[dict[str, Any]]]] = {
        (RATE, "ttft"): lambda: _rates(result),
        (COST, "ttft"): lambda: _costs(result, extra),
        (PREFIX, "ttft-prefix"): lambda: _prefixes(result),
        (HIT_RATE, "ttft-prefix"): lambda: _prefixes(result),
        (BANDWIDTH, "bandwidth"): lambda: _bandwidths(result, extra["page_tokens"]),
        (RESIDENCY, "residency"): lambda: _residencies(result),
    }
    make = makers.get((kind, benchmark))
    if make is None:
        raise ConfigError(f"{name} is a result of {benchmark!r}, which has no figure of {kind}")
    try:
        rows = make()
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{name} is not a whole result ({error!r}); measure it again") from error
    commit = {"commit": result.get("machine", {}).get("commit", "")}
    lines = [{**row, **commit} for row in rows]
    shown = [{c: "" if row[c] is None else str(row[c]) for c in COLUMNS[kind]} for row in lines]
    return checked(shown, kind, name)


def _of(result: dict[str, Any]) -> dict[str, Any]:
    return {"system": result["system"], "source": result.get("source", "measured")}


def _flags(row: dict[str, Any]) -> dict[str, str]:
    return {name: "yes" if row[name] else "no" for name in ("unstable", "partial")}


def _rates(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **_of(result),
            "rate": row["rate"],
            **_interval("ttft", row.get("ttft_ms")),
            **_interval("itl", row.get("itl_ms")),
            **_flags(row),
        }
        for row in result["rates"]
    ]


def _costs(result: dict[str, Any], extra: dict[str, float]) -> list[dict[str, Any]]:
    names = ("input_tokens_per_s", "output_tokens_per_s", "tokens_low_per_s", "tokens_high_per_s")
    return [
        {
            **_of(result),
            "rate": row["rate"],
            **{n: row.get(n) for n in names},
            **extra,
            **_flags(row),
        }
        for row in result["rates"]
    ]


def _prefixes(result: dict[str, Any]) -> list[dict[str, Any]]:
    total = {**_of(result), "total_tokens": result["total_tokens"]}
    return [
        {**total, "prefix_tokens": row["prefix_tokens"], **_interval("ttft", row["ttft_ms"])}
        for row in result["rows"]
    ]


def _bandwidths(result: dict[str, Any], page_tokens: float) -> list[dict[str, Any]]:
    """Batches of `tutti bench bandwidth` as context lengths: pages times tokens of a page."""
    return [
        {
            "system": f"{result['controller']} {row['shape']}",
            "source": "measured" if result["controller"] == "file" else "emulated",
            "phase": row["phase"],
            "tokens": round(row["batch_pages"] * page_tokens),
            "gb_per_s": row["gb_per_s"],
        }
        for row in result["rows"]
        if row["phase"] in ("store", "retrieve")
    ]


def _residencies(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "system": cell["configuration"],
            "source": "measured",
            **{name: cell[name] for name in ("limit", "hit_ratio", "read_gb_per_s", "read_p99_ms")},
            "read_gb_per_s_low": cell["read_gb_per_s_range"][0],
            "read_gb_per_s_high": cell["read_gb_per_s_range"][1],
        }
        for cell in result["cells"]
    ]


def _interval(name: str, interval: dict[str, float] | None) -> dict[str, float | None]:
    ends = {"": "mean", "_low": "low", "_high": "high"}
    return {f"{name}{part}_ms": (interval or {}).get(key) for part, key in ends.items()}

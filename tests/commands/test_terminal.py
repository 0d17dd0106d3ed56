"""Tables and progress, as a terminal and as a log shows them."""

from __future__ import annotations

import io

import pytest
from manual_clock import ManualClock

from tutti.base.terminal import Progress, facts, table
from tutti.base.units import MiB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_line_every_five_seconds() -> None:
    stream, clock = io.StringIO(), ManualClock()
    with Progress("scan", 100, stream=stream, clock=clock) as bar:
        for _ in range(10):
            clock.advance(1.0)
            bar.advance(10)
    assert stream.getvalue().splitlines() == [
        "scan:  50% 50 of 100, 5 s left",
        "scan: 100% 100 of 100",
    ]


def test_progress_on_a_terminal_is_redrawn_ten_times_a_second() -> None:
    stream, clock = Terminal(), ManualClock()
    with Progress("scan", 1000, stream=stream, clock=clock) as bar:
        for _ in range(100):
            clock.advance(0.01)
            bar.advance(10)
    pictures = stream.getvalue().split("\r")[1:]
    assert len(pictures) == 11
    assert pictures[4].startswith("scan [############............]  50% 500 of 1000")
    assert stream.getvalue().endswith("\n")


def test_output_is_not_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = Terminal(), ManualClock()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", stream)
    with Progress("pages of 16 tokens", 1000, stream=stream, clock=clock) as bar:
        clock.advance(100.0)
        bar.advance(300)
    drawn = stream.getvalue().split("\r")[1].removesuffix("\x1b[K")
    assert drawn == "pages of 16 tokens [#######.................]  30% 300 of 1"
    rows = [["path", "a text that is " + "long " * 20], ["disk", "short"]]
    assert max(map(len, table(["what", "why"], rows).splitlines())) <= 60


def test_short_work_shows_no_progress() -> None:
    stream = Terminal()
    with Progress("scan", 3, stream=stream, clock=ManualClock()) as bar:
        bar.advance(3)
    assert stream.getvalue() == ""


def test_progress_of_unknown_length() -> None:
    stream, clock = io.StringIO(), ManualClock()
    with Progress("copy", 0, in_bytes=True, stream=stream, clock=clock) as bar:
        clock.advance(6.0)
        bar.update(3 * MiB)
        clock.advance(6.0)
        bar.update(9 * MiB, 12 * MiB)
    assert stream.getvalue().splitlines() == [
        "copy: 3 MiB, 6 s",
        "copy:  75% 9 MiB of 12 MiB, 4 s left",
    ]


def test_wide_tables_are_split() -> None:
    headers = [f"column {n}" for n in range(9)]
    rows = [
        ["same", f"row {n}", *(f"{n} of {column} items" for column in range(7))] for n in range(3)
    ]
    rows[1][8] = "long " * 50
    parts = table(headers, rows).split("\n\n")
    assert len(parts) > 1
    lines = [line for part in parts for line in part.splitlines()]
    assert max(map(len, lines)) <= 120
    for part in parts:
        assert part.splitlines()[0].startswith("column 0  column 1  ")
        assert [f"same      row {n} " in part for n in range(3)] == [True] * 3
    shown = " ".join(lines)
    assert all(f"{n} of {column} items" in shown for n in (0, 2) for column in range(7))
    assert shown.count("long") == 50
    assert table(headers[:2], [row[:2] for row in rows]).count("\n") == 4


def test_tables() -> None:
    assert table(("name", "n"), [("a", 1), ("bcdef", 200)]).splitlines() == [
        "name     n",
        "-----  ---",
        "a        1",
        "bcdef  200",
    ]
    assert facts([("a", 1), ("bcd", "x")]).splitlines() == ["a    1", "bcd  x"]

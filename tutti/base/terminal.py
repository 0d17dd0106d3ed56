"""Formats terminal output: tables of text and progress bars."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TextIO

from tutti.base.clock import Clock, SystemClock
from tutti.base.units import format_duration, format_nbytes

#: The widest table, in characters.
WIDTH_MAX = 120
_WIDTH_MIN = 40

_BAR_WIDTH = 24
_REDRAW_NS = 100_000_000  # a person sees ten pictures a second
_LINE_NS = 5_000_000_000  # a log wants few lines


class Advance(Protocol):
    """What long work reports to; a context manager."""

    def advance(self, n: int) -> None:
        """``n`` more units are done."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


#: Makes a progress report: ``progress(label, total)``.
ProgressFactory = Callable[[str, int], Advance]


class Progress:
    """How far some work is, on stderr: a bar on a terminal, else a line every five seconds.

    total: units of the whole work; 0 when unknown.  in_bytes: the units are bytes.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        in_bytes: bool = False,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._label = label
        self._total = total
        self._format = format_nbytes if in_bytes else str
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock or SystemClock()
        self._is_tty = self._stream.isatty()
        self._begin_ns = self._shown_ns = self._clock.now_ns()
        self._is_drawn = False
        self.done = 0

    def advance(self, n: int) -> None:
        """``n`` more units are done."""
        self.update(self.done + n)

    def update(self, done: int, total: int | None = None) -> None:
        """``done`` units are done, of ``total`` if that became known."""
        self.done = done
        self._total = self._total if total is None else total
        now_ns = self._clock.now_ns()
        if now_ns - self._shown_ns >= (_REDRAW_NS if self._is_tty else _LINE_NS):
            self._shown_ns = now_ns
            self._show(now_ns)

    def _show(self, now_ns: int) -> None:
        self._is_drawn = True
        text = self._text((now_ns - self._begin_ns) / 1e9)
        if self._is_tty:  # a line that the terminal wraps is never overwritten
            text = text[: _terminal_width() - 1]
        # "\x1b[K" clears what a longer line left (ECMA-48, EL).
        self._write(f"\r{text}\x1b[K" if self._is_tty else f"{text}\n")

    def _write(self, text: str) -> None:
        """Ignores output errors (a closed pipe, a full disk): the work continues without a bar."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def _text(self, elapsed_s: float) -> str:
        if self._total <= 0:
            return f"{self._label}: {self._format(self.done)}, {format_duration(elapsed_s)}"
        share = min(1.0, self.done / self._total)
        filled = round(share * _BAR_WIDTH)
        bar = f" [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]" if self._is_tty else ":"
        amount = f"{self._format(self.done)} of {self._format(self._total)}"
        left = ""
        if 0 < share < 1:
            left = f", {format_duration(elapsed_s / share - elapsed_s)} left"
        return f"{self._label}{bar} {share:4.0%} {amount}{left}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves the last picture on a terminal, and nothing where nothing was shown."""
        if self._is_tty and self._is_drawn:
            self._show(self._clock.now_ns())
            self._write("\n")


def progress(label: str, total: int) -> Progress:
    """A progress report on stderr."""
    return Progress(label, total)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under headers; a column of numbers is aligned to the right.

    A table wider than ``WIDTH_MAX``, or than the terminal, is printed as several, one below the
    other.
    """
    width = min(WIDTH_MAX, _terminal_width()) if sys.stdout.isatty() else WIDTH_MAX
    return "\n\n".join(_table(*part) for part in fitting(headers, rows, width=width))


def _terminal_width() -> int:
    return max(_WIDTH_MIN, shutil.get_terminal_size().columns)


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [
        bool(rows) and all(isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(headers))
    ]
    widths = _widths(headers, rows)
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def fitting(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    gap: int = 2,
    width: int = WIDTH_MAX,
) -> list[tuple[list[str], list[list[object]]]]:
    """The table as parts of at most ``width`` columns of text, as (headers, rows).

    Every part begins with the columns that tell the rows apart.  A text that no part has room for
    goes on in further rows.  gap: characters between two columns.
    """
    widths = _widths(headers, rows)
    if sum(widths) + gap * (len(widths) - 1) <= width:
        return [(list(headers), [list(row) for row in rows])]
    beside_last = width - sum(widths[:-1]) - gap * (len(widths) - 1)
    if beside_last >= width // 2:  # only the last column is long: a text
        return [(list(headers), _wrapped([list(row) for row in rows], beside_last))]
    named = _name_columns(rows)
    room = max(width // 3, width - sum(widths[:named]) - gap * named)
    parts: list[list[int]] = []
    left = 0
    for column in range(named, len(headers)):
        need = min(widths[column], room)
        if not parts or need > left:
            parts.append(list(range(named)))
            left = room
        parts[-1].append(column)
        left -= need + gap
    return [
        ([headers[c] for c in part], _wrapped([[row[c] for c in part] for row in rows], room))
        for part in parts
    ]


def _widths(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[int]:
    return [max(len(str(line[i])) for line in (headers, *rows)) for i in range(len(headers))]


def _name_columns(rows: Sequence[Sequence[object]]) -> int:
    """The least number of first columns in which no two rows are equal; 1 if all are."""
    for n in range(1, len(rows[0]) if rows else 1):
        if len({tuple(map(str, row[:n])) for row in rows}) == len(rows):
            return n
    return 1


def _wrapped(rows: Sequence[Sequence[object]], width: int) -> list[list[object]]:
    """Rows whose texts are at most ``width`` long; the rest of one goes to rows below."""
    found: list[list[object]] = []
    for row in rows:
        texts = [
            textwrap.wrap(str(cell), width) if len(str(cell)) > width else [cell] for cell in row
        ]
        for line in range(max(map(len, texts))):
            found.append([text[line] if line < len(text) else "" for text in texts])
    return found


def facts(rows: Sequence[tuple[str, object]]) -> str:
    """Names and values, one pair per line."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

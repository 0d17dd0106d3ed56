"""A limit that moves while everything is read again and again, and what follows from it.

Every configuration meets the same course of the limit from its first byte on, so that a moment of
one is compared with the same moment of another.  One of them is there twice: its ratio to itself is
what chance alone makes of the least ratio of so many moments, to one path.  Chance lowers a ratio
to the better of two paths further, so a miss that is judged by it may be one by chance.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.terminal import table
from tutti.base.units import format_nbytes
from tutti.bench.statistics import RESAMPLES, Interval, interval_text, median

PURE = ("page cache only", "direct only")
_DIRECT, AGAIN = PURE[1], "direct again"
CONFIGURATIONS = (*PURE, AGAIN, "static", "dynamic")
#: Of the better pure path, at any moment of so many seconds.
LEAST, WINDOW_S = 0.95, 1.0
REACHED, NOT_REACHED, NOT_RESOLVED = "reached", "NOT REACHED", "not resolved"
LOW, HIGH = 0.2, 1.0  #: of W
_STEP_S, _LOOK_S, _JOIN_S = 0.25, 0.02, 10.0

HEAD = ("limit", "configuration", "GB/s", "least of the better pure path", "switches", "bound")

_Speeds = npt.NDArray[np.float64]


def swing(at_s: float, seconds: float) -> float:
    """Half of each second 0.2 W, half of it 1.0 W."""
    return LOW if at_s % 1 < 0.5 else HIGH


def ramp(at_s: float, seconds: float) -> float:
    """Slowly from 0.2 W to 1.0 W and back, once in all."""
    return LOW + (HIGH - LOW) * max(0.0, 1 - abs(2 * at_s / seconds - 1))


def steps(at_s: float, seconds: float) -> float:
    """Four seconds of 0.2 W, four of 1.0 W: long enough that a plan that stays is wrong."""
    return LOW if at_s % 8 < 4 else HIGH


COURSES: dict[str, Callable[[float, float], float]] = {"swing": swing, "ramp": ramp, "steps": steps}
#: Steps go up once and down once.
_SECONDS_MIN = {"steps": 12.0}


def seconds_of(course: str, seconds: float) -> float:
    """How long a course takes where so many seconds are asked for."""
    return max(seconds, _SECONDS_MIN.get(course, 0.0))


class MovingLimit:
    """Sets a limit along its course: a thread, from ``start`` to ``stop``.

    file: of a control group; or a folder, and then the limit is only pretended to the monitor, as
    what a machine has available, in a proc(5) of its own.
    """

    def __init__(self, file: Path, course: str, working_set_nbytes: int, seconds: float) -> None:
        self._file, self._course = file, COURSES[course]
        self._whole_nbytes, self._seconds = working_set_nbytes, seconds
        self._over = threading.Event()
        self._begin_s = 0.0
        self._thread = threading.Thread(target=self._run, name="limit", daemon=True)
        self.set(0.0)

    @property
    def root(self) -> Path:
        """Where the monitor looks for proc and sys."""
        return self._file if self._file.is_dir() else Path("/")

    def set(self, at_s: float) -> int:
        """The limit of a moment, in bytes."""
        nbytes = int(self._course(at_s, self._seconds) * self._whole_nbytes)
        if self._file.is_dir():
            (self._file / "proc").mkdir(exist_ok=True)
            new = self._file / "proc/meminfo.new"
            new.write_text(f"MemAvailable: {nbytes // 1024} kB\n")
            new.replace(self._file / "proc/meminfo")
            return nbytes
        with suppress(OSError):  # the kernel did not get so much back; the next turn tries again
            self._file.write_text(str(nbytes))
        return nbytes

    def start(self) -> None:
        self._begin_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Leaves the limit where it is."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.set(time.monotonic() - self._begin_s)


def read_on(read: Callable[[int], int], batches: int, seconds: float) -> list[list[float]]:
    """Reads batch after batch; [second, bytes so far] at the end of each.

    read: a batch by its number; its bytes.
    """
    begin_s, nbytes, batch = time.monotonic(), 0, 0
    points = [[0.0, 0.0]]
    while points[-1][0] < seconds:
        nbytes += read(batch % batches)
        batch += 1
        points.append([time.monotonic() - begin_s, float(nbytes)])
    return points


def speeds(points: list[list[float]], seconds: float) -> _Speeds:
    """GB/s of each window of a second, one beginning each quarter of one."""
    at_s, nbytes = np.array(points).T
    starts = np.arange(0.0, max(seconds - WINDOW_S, 0.0) + 1e-9, _STEP_S)
    moved = np.interp(starts + WINDOW_S, at_s, nbytes) - np.interp(starts, at_s, nbytes)
    found: _Speeds = moved / WINDOW_S / 1e9
    return found


def switches_max(groups: int, seconds: float) -> int:
    """How often groups may change path: a growth that was wrong doubles the pause to the next."""
    return 2 * groups * math.ceil(math.log2(seconds + 1))


def judge(cells: list[dict[str, Any]], asked_s: float) -> list[dict[str, Any]]:
    """A row for each course and configuration, with the medians over the rounds of each moment."""
    rows = []
    for course in dict.fromkeys(cell["course"] for cell in cells):
        seconds = seconds_of(course, asked_s)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONFIGURATIONS}
        for cell in cells:
            if cell["course"] == course:
                found[cell["configuration"]].append(cell)
        at = {
            name: np.array([speeds(cell["points"], seconds) for cell in of])
            for name, of in found.items()
        }
        null = _least(at[AGAIN], [at[_DIRECT]])
        for name, of in found.items():
            least = null if name == AGAIN else _least(at[name], [at[pure] for pure in PURE])
            row = {
                "course": course,
                "configuration": name,
                "gb_per_s": median([c["points"][-1][1] / c["points"][-1][0] / 1e9 for c in of]),
                "least_ratio": least.to_dict(),
                "switches": max(cell["switches"] for cell in of),
                "switches_max": switches_max(of[0]["groups"], seconds),
            }
            few = row["switches"] <= row["switches_max"]
            rows.append({**row, "verdict": verdict(least, null) if few else NOT_REACHED})
    return rows


def _least(ours: _Speeds, others: list[_Speeds]) -> Interval:
    """Of the better other path, in the worst moment; the interval resamples rounds of all paths.

    Speeds are rows of rounds, with a column for each moment.
    """

    def of(draw: npt.NDArray[np.int64]) -> _Speeds:
        better = np.maximum.reduce([np.median(other[draw], axis=-2) for other in others])
        least: _Speeds = (np.median(ours[draw], axis=-2) / better).min(axis=-1)
        return least

    rounds = len(ours)
    draws = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
    low, high = np.percentile(of(draws), (2.5, 97.5))
    return Interval(float(of(np.arange(rounds))), float(low), float(high))


def verdict(least: Interval, null: Interval) -> str:
    """Chance lowers the least of many moments, so a miss is also below what it makes of a path.

    null: the least ratio of a path to itself.
    """
    if least.low >= LEAST:
        return REACHED
    return NOT_REACHED if least.high < min(LEAST, null.low) else NOT_RESOLVED


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            *(row["course"], row["configuration"], f"{row['gb_per_s']:.2f}"),
            interval_text(row["least_ratio"], 2),
            *(str(row["switches"]), str(row["switches_max"])),
        ]
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """What the table does not say, and whether the bar is reached."""
    return [
        f"W {format_nbytes(result['working_set_nbytes'])}; {result['rounds']} rounds of"
        f" {result['seconds']:g} s in turns; the limit is {result['limit']}",
        *(
            f"{row['course']}, {AGAIN} over {_DIRECT}: {interval_text(row['least_ratio'], 2)},"
            " by chance"
            for row in result["rows"]
            if row["configuration"] == AGAIN
        ),
        *(
            f"{row['course']}, dynamic: never below {LEAST:g} of the better pure path for longer"
            f" than a second, switches bounded: {row['verdict']}"
            + ("" if row["switches"] else ", without a switch: the plan of the opening stayed")
            for row in result["rows"]
            if row["configuration"] == "dynamic"
        ),
    ]


def report(result: dict[str, Any]) -> str:
    lines = [table(HEAD, rows_of(result)), *notes_of(result)]
    if result["wrong"]:
        lines.append(f"WRONG BYTES in {result['wrong']} pages")
    return "\n".join(lines)

"""Changes the memory limit while everything is read repeatedly, and evaluates the result.

Every configuration gets the same course of the limit from its first byte on, so that the same
moments are compared.  One configuration runs twice: its least ratio to itself, over all moments, is
the effect of chance against one path.  Against the better of two paths chance lowers the least
ratio further, so a miss that is judged by it may still be due to chance.
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

from tutti.base.units import format_nbytes
from tutti.bench.statistics import RESAMPLES, Interval, interval_text, median

PURE = ("page cache only", "direct only")
_DIRECT, AGAIN = PURE[1], "direct again"
CONFIGURATIONS = (*PURE, AGAIN, "static", "dynamic")
#: The bar: share of the better pure path's speed, in every window of this many seconds.
LEAST, WINDOW_S = 0.95, 1.0
REACHED, NOT_REACHED, NOT_RESOLVED = "reached", "NOT REACHED", "not resolved"
LOW, HIGH = 0.2, 1.0  #: of W
_STEP_S, _LOOK_S, _JOIN_S = 0.25, 0.02, 10.0

HEAD = ("limit", "configuration", "GB/s", "least of the better pure path", "switches", "bound")

_Speeds = npt.NDArray[np.float64]


def swing(at_s: float, seconds: float) -> float:
    """0.2 W in one half of each second, 1.0 W in the other."""
    return LOW if at_s % 1 < 0.5 else HIGH


def ramp(at_s: float, seconds: float) -> float:
    """Slowly from 0.2 W to 1.0 W and back, once."""
    return LOW + (HIGH - LOW) * max(0.0, 1 - abs(2 * at_s / seconds - 1))


def steps(at_s: float, seconds: float) -> float:
    """Four seconds of 0.2 W, four of 1.0 W: long enough that a constant plan is wrong."""
    return LOW if at_s % 8 < 4 else HIGH


COURSES: dict[str, Callable[[float, float], float]] = {"swing": swing, "ramp": ramp, "steps": steps}
#: Steps go up once and down once.
_SECONDS_MIN = {"steps": 12.0}


def seconds_of(course: str, seconds: float) -> float:
    """Duration of a course if ``seconds`` are requested."""
    return max(seconds, _SECONDS_MIN.get(course, 0.0))


class MovingLimit:
    """Sets a limit along its course, on a thread, from ``start`` to ``stop``.

    file: of a control group; or a folder: then the limit is only simulated for the monitor, as the
    available memory in a fake proc(5).
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
        """The folder in which the monitor finds proc and sys."""
        return self._file if self._file.is_dir() else Path("/")

    def set(self, at_s: float) -> int:
        """Sets the limit of a moment; returns it in bytes."""
        nbytes = int(self._course(at_s, self._seconds) * self._whole_nbytes)
        if self._file.is_dir():
            (self._file / "proc").mkdir(exist_ok=True)
            new = self._file / "proc/meminfo.new"
            new.write_text(f"MemAvailable: {nbytes // 1024} kB\n")
            new.replace(self._file / "proc/meminfo")
            return nbytes
        with suppress(OSError):  # the kernel could not reclaim enough; the next turn retries
            self._file.write_text(str(nbytes))
        return nbytes

    def start(self) -> None:
        self._begin_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread; the limit stays as it is."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.set(time.monotonic() - self._begin_s)


def read_on(read: Callable[[int], int], batches: int, seconds: float) -> list[list[float]]:
    """Reads batch after batch; returns [seconds, total bytes] at the end of each.

    read: reads the batch of a number, and returns its bytes.
    """
    begin_s, nbytes, batch = time.monotonic(), 0, 0
    points = [[0.0, 0.0]]
    while points[-1][0] < seconds:
        nbytes += read(batch % batches)
        batch += 1
        points.append([time.monotonic() - begin_s, float(nbytes)])
    return points


def speeds(points: list[list[float]], seconds: float) -> _Speeds:
    """GB/s in windows of a second, which begin every quarter of a second."""
    at_s, nbytes = np.array(points).T
    starts = np.arange(0.0, max(seconds - WINDOW_S, 0.0) + 1e-9, _STEP_S)
    moved = np.interp(starts + WINDOW_S, at_s, nbytes) - np.interp(starts, at_s, nbytes)
    found: _Speeds = moved / WINDOW_S / 1e9
    return found


def switches_max(groups: int, seconds: float) -> int:
    """Most path changes of groups: each wrong growth doubles the pause before the next one."""
    return 2 * groups * math.ceil(math.log2(seconds + 1))


def judge(cells: list[dict[str, Any]], asked_s: float) -> list[dict[str, Any]]:
    """A row per course and configuration, with medians over the rounds at each moment."""
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
    """The least ratio to the better other path over all moments; the interval resamples rounds.

    Speeds have a row per round and a column per moment.
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
    """The verdict on a least ratio: a miss must also be below the effect of chance.

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
    """Notes below the table, and whether the bar is reached."""
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

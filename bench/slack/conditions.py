"""Conditions that `tutti bench slack` varies: drive, arrivals, limits, and wrong profiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from tutti.bench.simulate.device import WRITE, Device, Timeline
from tutti.bench.simulate.hardware import SimulatedDrive, SimulatedMachine
from tutti.profiles.at_open import store_limits
from tutti.scheduler.event import SpaceKnown
from tutti.scheduler.policy import UNBOUNDED, Limits

_STEP_NS = 20_000_000


@dataclass(frozen=True)
class Conditions:
    """drift: the interference goes from the first value to the second and back in ``period_s``.

    cache_nbytes: size of the drive's write cache.  When it is full, writes are ``exhausted`` times
    as fast; it is emptied at that speed while nothing is written.  0: unlimited.
    """

    drive: SimulatedDrive
    drift: tuple[float, float] | None = None
    period_s: float = 8.0
    cache_nbytes: float = 0.0
    exhausted: float = 0.25

    def interference(self, now_ns: int) -> float:
        """The interference at this time."""
        if self.drift is None:
            return self.drive.interference
        low, high = self.drift
        phase = 2 * math.pi * now_ns / 1e9 / self.period_s
        return low + (high - low) * (1 - math.cos(phase)) / 2

    def follow(self, timeline: Timeline, device: Device, is_busy: Callable[[], bool]) -> None:
        """Changes a device as time passes, while there is work."""
        filled = moved = 0.0

        def step() -> None:
            nonlocal filled, moved
            write = self.drive.write_bytes_per_s
            more = device.moved_nbytes(WRITE) - moved
            moved += more
            filled = max(0.0, filled + more - self.exhausted * write * _STEP_NS / 1e9)
            if self.cache_nbytes and filled >= self.cache_nbytes:
                write *= self.exhausted
            device.change(write, self.interference(timeline.now_ns))
            if is_busy():
                timeline.at(timeline.now_ns + _STEP_NS, step)

        step()


@dataclass(frozen=True)
class Condition:
    """drift, cache_s: see Conditions; the cache in seconds of writing at full speed.

    bursts: requests arrive in groups.  backlog: factor on the pages that may wait.  opened: limits
    of a store that `tutti.open` opens with the true profile, like HiCache's.  linker: limits of
    SGLang's linker: none overall, and SpaceKnown for its pool.
    """

    drift: tuple[float, float] | None = None
    cache_s: float = 0.0
    bursts: bool = False
    backlog: float = 1.0
    opened: bool = False
    linker: bool = False

    def of(self, drive: SimulatedDrive) -> Conditions | None:
        """The conditions of a drive; None if they do not change."""
        if self.drift is None and not self.cache_s:
            return None
        return Conditions(drive, self.drift, cache_nbytes=self.cache_s * drive.write_bytes_per_s)

    def limits(self, limits: Limits, truth: SimulatedMachine) -> Limits:
        """Limits of a run."""
        if self.opened:
            return store_limits(truth, truth.model.page_nbytes)
        if self.linker:
            return replace(limits, locked_pages=UNBOUNDED, staged_pages=0)
        locked, staged = limits.locked_pages * self.backlog, limits.staged_pages * self.backlog
        return replace(limits, locked_pages=round(locked), staged_pages=round(staged))

    def space(self, limits: Limits) -> SpaceKnown | None:
        """The event that the server posts at its start, if any."""
        if not self.linker:
            return None
        return SpaceKnown(0, "kv", limits.locked_pages, limits.staged_pages)


CONDITIONS = {
    "steady": Condition(),
    "drift": Condition(drift=(1.2, 4.0)),
    "bursts": Condition(bursts=True),
    "cache ends": Condition(cache_s=0.1),
    "little memory": Condition(backlog=0.125),
    "as opened": Condition(opened=True),
    "linker limits": Condition(linker=True),
}


def _parts(**factors: float) -> Callable[[SimulatedMachine], SimulatedMachine]:
    def wrong(truth: SimulatedMachine) -> SimulatedMachine:
        interference = max(1.0, truth.drive.interference * factors.get("interference", 1.0))
        return replace(
            truth,
            drive=replace(truth.drive, interference=interference),
            compute=factors.get("compute", 1.0),
            read=factors.get("read", 1.0),
            write=factors.get("write", 1.0),
        )

    return wrong


def _never_corrected(truth: SimulatedMachine) -> SimulatedMachine:
    return replace(truth, drive=replace(truth.drive, interference=1.2))


#: PROFILES that measurements do not correct.
UNCORRECTED = ("interference 1.2, never corrected",)
#: Wrong profiles: each part alone, all in the harmful direction, and mixed.
PROFILES: dict[str, Callable[[SimulatedMachine], SimulatedMachine]] = {
    **{
        f"{part} x{factor:g}": _parts(**{part: factor})
        for part in ("compute", "read", "write", "interference")
        for factor in (4.0, 2.0, 0.5, 0.25)
    },
    **{
        f"all x{factor:g}": _parts(compute=factor, read=1 / factor, write=1 / factor)
        for factor in (1.3, 2.0, 4.0, 8.0, 12.0, 16.0)
    },
    "uneven": _parts(compute=0.5, read=2.0, write=0.25, interference=0.5),
    UNCORRECTED[0]: _never_corrected,
}

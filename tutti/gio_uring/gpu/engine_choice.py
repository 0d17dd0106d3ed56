"""Chooses the engine for pages in GPU memory if the caller names none, and gives the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tutti.base.units import MiB
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu.driver import Driver

AUTO, HOST = "auto", "host"
#: Reason given for an engine that the program passed.
REASON = "the program attached it"
#: A kernel's time must be below this fraction of the host's: it uses multiprocessors, too.
_GAIN = 0.9
#: Size of the load for which a profile has each engine's time.
LOAD_NBYTES = 128 * MiB


class EngineTimes(Protocol):
    """The part of a profile that the choice needs."""

    def engine_us(self, tier: str) -> Mapping[str, float]:
        """Time of a load of LOAD_NBYTES by each engine on a tier, from a medium that moves nothing;
        empty if it was not measured.
        """

    def read_us(self, nbytes: int) -> float:
        """Time of a read by the drive, in microseconds."""


@dataclass(frozen=True)
class Choice:
    """An engine and the reason for it."""

    kind: str
    reason: str


def choose_engine(
    asked: str, driver: Driver, controller: NativeController, profile: EngineTimes | None
) -> Choice:
    """The engine ``asked`` for; for "auto" the one that the profile shows to be fastest on this
    tier, if the drive is faster than the host engine.
    """
    if asked != AUTO:
        return Choice(asked, "the option gpu_engine names it")
    tier = "T1" if controller.doorbell_registers else "T0"  # of a drive, or words in memory
    rule = (
        "the CPU executes the commands anyway"
        if tier == "T0"
        else "kernels would take multiprocessors from the model"
    )
    usable = {} if profile is None else dict(profile.engine_us(tier))
    if driver.limits_kernels:
        usable.pop("persistent", None)
    if profile is None or HOST not in usable or len(usable) == 1:
        return Choice(HOST, f"tier {tier}, the profile has no times of engines for it, and {rule}")
    drive_us = profile.read_us(LOAD_NBYTES)
    if usable[HOST] <= drive_us:
        why = f"the drive takes {drive_us:.0f} us for what host moves in {usable[HOST]:.0f}"
        return Choice(HOST, f"tier {tier}, {why}, and {rule}")
    best = min(usable, key=lambda kind: usable[kind])
    times = ", ".join(f"{kind} {us:.0f} us" for kind, us in sorted(usable.items()))
    if best != HOST and usable[best] <= _GAIN * usable[HOST]:
        return Choice(best, f"tier {tier}, the fastest by the profile ({times})")
    return Choice(
        HOST, f"tier {tier}, no engine is a tenth faster by the profile ({times}), and {rule}"
    )

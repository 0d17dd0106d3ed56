"""The scheduler's view of the work: loads, writes, the running step, and the profile.

Times are nanoseconds of one monotonic clock, durations of a profile microseconds.  The objects
belong to one `State` and change with it; policies only read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Profile(Protocol):
    """How long things take on this machine, for one model.  Measured, or estimated by a roofline.

    All durations are finite, in microseconds, and not negative.
    """

    @property
    def interference(self) -> float:
        """How many times as long a transfer takes while the other direction is busy; 1 = same."""

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        """One layer of a prefill of so many new tokens behind so many that are there already."""

    def decode_us(self, batch: int, context_tokens: int) -> float:
        """One whole decode step; ``context_tokens`` is the sum over the batch."""

    def read_us(self, nbytes: int) -> float:
        """A read from the medium into its place, alone on the device."""

    def write_us(self, nbytes: int) -> float:
        """A write to the medium, alone on the device."""


class Phase(Enum):
    """What the model computes now."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class LoadKind(Enum):
    """The class of a load.

    READ_AHEAD is read into staging, for a request that still waits; the others have their pages.
    Nothing waits for BACKGROUND, such as proofs and copies to a remote store.
    """

    LOAD = "load"
    READ_AHEAD = "read_ahead"
    BACKGROUND = "background"


#: Arrivals are reported when one in so many of a load's layers in flight is still missing.
_UNTOLD = 4


@dataclass(slots=True)
class Step:
    """The running step, as far as it is known.

    number: counts steps.  layer: the layer that computes, or waits for its load.
    layer_ns: when that layer began to compute, or the step if it did not yet.
    tokens, context_tokens: new tokens and their prefix of a prefill; batch and sum of the contexts
    of a decode step.  loads: the loads it needs, by name or batch.
    expected_ns: of one layer of a prefill, or of a whole decode step, by the profile.
    """

    number: int = 0
    phase: Phase = Phase.IDLE
    began_ns: int = 0
    layers: int = 0
    layer: int = 0
    layer_ns: int = 0
    tokens: int = 0
    context_tokens: int = 0
    loads: tuple[str, ...] = ()
    expected_ns: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """A prefix on the medium that is to be read, layer by layer.

    number: order of arrival, or of turns.  layer_nbytes: bytes of each layer.  unit_layers: an
    issue is a multiple of it, or the rest.  issued, ready: layers issued and arrived, from 0 on.
    tokens, prefix_tokens: of the prefill that will use it.  running: its step has begun; else it
    may be read ahead.  batch: by which a step may call for it; empty for none.
    read_ns, compute_ns: of one layer, by the profile.  ahead_nbytes: staging for each layer that is
    issued before the step begins; 0 where the pages are there.  background: see LoadKind; not once
    something waits for it.  offer: of a piece of read-ahead that waits for its turn, its entry in
    State.offered.  asked_ns, alone: see LoadKnown.  blocks: threads that need a layer wait until it
    is issued, so all are issued at once while there is no other transfer.
    """

    name: str
    number: int
    arrived_ns: int
    layers: int
    layer_nbytes: int
    tokens: int
    prefix_tokens: int
    unit_layers: int
    batch: str
    read_ns: int
    compute_ns: int
    ahead_nbytes: int
    background: bool = False
    blocks: bool = False
    issued: int = 0
    ready: int = 0
    running: bool = False
    asked_ns: int = 0
    alone: bool = False
    offer: tuple[int, int, str] | None = None

    def is_for(self, loads: tuple[str, ...]) -> bool:
        """Whether a step that needs ``loads`` needs it."""
        return self.name in loads or bool(self.batch and self.batch in loads)

    def in_units(self, layers: int) -> int:
        """So many layers as an issue: in whole units, or all that are left."""
        left = self.layers - self.issued
        unit = self.unit_layers
        if unit > 1:
            layers = -(-layers // unit) * unit
        return layers if layers < left else left

    @property
    def unit_nbytes(self) -> int:
        """Bytes of staging that the shortest issue takes."""
        left = self.layers - self.issued
        return (left if left < self.unit_layers else self.unit_layers) * self.ahead_nbytes


def report_at(ready: int, issued: int) -> int:
    """The number of arrived layers at which the scheduler is told next: before the last of those in
    flight, so that it can issue more in time, but not for each, as a report costs a decision.
    """
    flying = issued - ready
    return ready + max(1, flying - max(1, flying // _UNTOLD))


class PageLocation(Enum):
    """Where pages wait to be written."""

    SOURCE = "source"  # locked: the server cannot reuse them
    COPYING = "copying"  # on their way to staging; still locked
    STAGED = "staged"  # in pinned staging; the server may reuse its pages


@dataclass(slots=True, eq=False)
class Write:
    """Pages to store.  unit_pages: an issue is a multiple of it, or the rest.

    number: order of arrival.  issued, written: pages issued and stored, from 0 on.
    write_ns: of one page, by the profile.  space: whose memory has the pages; see Space.
    can_stop: what was issued and not begun can be given back.  began: some of it was issued once.
    """

    name: str
    number: int
    arrived_ns: int
    pages: int
    page_nbytes: int
    unit_pages: int
    write_ns: int
    space: str = ""
    can_stop: bool = False
    issued: int = 0
    written: int = 0
    began: bool = False
    place: PageLocation = PageLocation.SOURCE

    @property
    def may_be_written(self) -> int:
        """Pages whose end may be reported: also those given back, which may have been under way."""
        return self.pages if self.can_stop and self.began else self.issued

    @property
    def unit(self) -> int:
        """Pages of the shortest issue."""
        left = self.pages - self.issued
        return left if left < self.unit_pages else self.unit_pages

    def whole_units(self, pages: int) -> int:
        """The most pages, up to so many, that are an issue; 0 when none is."""
        left = self.pages - self.issued
        if pages >= left:
            return left
        return max(0, pages - pages % self.unit_pages)

"""What the scheduler knows of the work: loads, writes, the step that computes, and a profile.

Times are nanoseconds of one monotonic clock, durations of a profile microseconds.  Nothing here
changes: a new state is a new object.
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


@dataclass(frozen=True, slots=True)
class Step:
    """The step that computes now, as far as it is known.

    number: counts steps.  layer: the layer that computes, or waits for its load.
    layer_ns: when that layer began to compute, or the step if it did not yet.
    tokens, context_tokens: new tokens and their prefix of a prefill; batch and sum of the contexts
    of a decode step.  loads: what it needs, by name or batch.
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


@dataclass(frozen=True, slots=True)
class Load:
    """A request whose prefix is on the medium.

    number: order of arrival.  layer_nbytes: to read for each layer.  unit_layers: a launch reads
    this many layers, or what is left.  issued, ready: layers launched and arrived, from 0 on.
    tokens, prefix_tokens: of the prefill that will use it.  step: the step that waits for it, or
    None while the load is read ahead.  batch: by which a step may call for it; empty for none.
    """

    name: str
    number: int
    arrived_ns: int
    layers: int
    layer_nbytes: int
    tokens: int
    prefix_tokens: int
    unit_layers: int = 1
    issued: int = 0
    ready: int = 0
    step: int | None = None
    batch: str = ""

    def is_for(self, loads: tuple[str, ...]) -> bool:
        """Whether a step that needs ``loads`` needs it."""
        return self.name in loads or bool(self.batch and self.batch in loads)

    @property
    def unit_end(self) -> int:
        """The layer behind the next launch."""
        return min(self.layers, self.issued + self.unit_layers)

    @property
    def flying_nbytes(self) -> int:
        """Launched and not arrived."""
        return (self.issued - self.ready) * self.layer_nbytes


class PageLocation(Enum):
    """Where pages wait to be written."""

    SOURCE = "engine"  # locked: the engine cannot reuse them
    COPYING = "copying"  # on their way out; still locked
    STAGED = "staged"  # in pinned staging; the engine has its pages back


@dataclass(frozen=True, slots=True)
class Write:
    """Pages to store.  unit_pages: a launch writes a multiple of it, or what is left.

    number: order of arrival.  issued, written: pages launched and stored, from 0 on.
    """

    name: str
    number: int
    arrived_ns: int
    pages: int
    page_nbytes: int
    unit_pages: int = 1
    issued: int = 0
    written: int = 0
    place: PageLocation = PageLocation.SOURCE

    @property
    def flying_nbytes(self) -> int:
        """Launched and not stored."""
        return (self.issued - self.written) * self.page_nbytes

    @property
    def waits(self) -> bool:
        """Whether something of it may be launched."""
        return self.issued < self.pages and self.place is not PageLocation.COPYING

    @property
    def unit(self) -> int:
        """Pages of the shortest launch."""
        return min(self.unit_pages, self.pages - self.issued)

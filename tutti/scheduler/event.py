"""Events of the scheduler, and their form as JSON.

Every event carries the moment at which it happened, so that a recorded trace replays exactly.
Events are not changed once made; they are not frozen because that makes them four times as slow.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tutti.errors import ConfigError
from tutti.scheduler.loads_and_writes import LoadKind, Phase


@dataclass(slots=True)
class Tick:
    """Time passes."""

    at_ns: int


@dataclass(slots=True, init=False)
class LoadKnown:
    """There is something to read, layer by layer; see Load.

    at_once: it was issued whole as it came, since nothing else was under way.
    asked_ns: when the request asked for which this is a piece of read-ahead; pieces take turns, see
    read_order.begin_turn.  0 for all other loads.
    alone: this piece is not read beside another, because its path is not faster then.
    blocks: see Load.
    """

    at_ns: int
    name: str
    layers: int
    layer_nbytes: int
    tokens: int
    prefix_tokens: int
    unit_layers: int
    batch: str
    kind: LoadKind
    at_once: bool
    asked_ns: int
    alone: bool
    blocks: bool

    # Compiled, unlike that of a dataclass, which takes twice as long; every load makes one.
    def __init__(  # noqa: PLR0913 - one for each field
        self,
        at_ns: int,
        name: str,
        layers: int,
        layer_nbytes: int,
        tokens: int,
        prefix_tokens: int,
        unit_layers: int = 1,
        batch: str = "",
        kind: LoadKind = LoadKind.LOAD,
        at_once: bool = False,
        asked_ns: int = 0,
        alone: bool = False,
        blocks: bool = False,
    ) -> None:
        self.at_ns, self.name, self.layers, self.layer_nbytes = at_ns, name, layers, layer_nbytes
        self.tokens, self.prefix_tokens, self.unit_layers = tokens, prefix_tokens, unit_layers
        self.batch, self.kind, self.at_once = batch, kind, at_once
        self.asked_ns, self.alone = asked_ns, alone
        self.blocks = blocks


@dataclass(slots=True)
class LoadGone:
    """The load has ended or failed, or is not wanted any more.  layers: how many have arrived in
    all; 0 if that is not reported.
    """

    at_ns: int
    name: str
    layers: int = 0


@dataclass(slots=True)
class BatchJoined:
    """The remaining loads of ``batch`` belong to the batch ``into`` from now on: it takes what was
    read ahead.
    """

    at_ns: int
    batch: str
    into: str


@dataclass(slots=True)
class LayersReady:
    """The first ``layers`` layers of a load have arrived."""

    at_ns: int
    name: str
    layers: int


@dataclass(slots=True)
class SpaceKnown:
    """Writes of this space may lock so many pages, and have so many pages of staging."""

    at_ns: int
    name: str
    locked_pages: int
    staged_pages: int


@dataclass(slots=True)
class WriteKnown:
    """Pages are to be stored; see Write.  at_once: as of LoadKnown."""

    at_ns: int
    name: str
    pages: int
    page_nbytes: int
    unit_pages: int = 1
    space: str = ""
    can_stop: bool = False
    at_once: bool = False


@dataclass(slots=True)
class PagesWritten:
    """The first ``pages`` pages of a write have ended.

    failed: how many of them could not be stored, and were not reported so before.  there: how many
    were not written, as they were stored before; likewise.
    """

    at_ns: int
    name: str
    pages: int
    failed: int = 0
    there: int = 0


@dataclass(slots=True)
class WriteStopped:
    """A write that was to stop has: of its pages the first ``pages`` are written or under way."""

    at_ns: int
    name: str
    pages: int


@dataclass(slots=True)
class WriteGone:
    """A write failed, or was withdrawn: then it is written without the scheduler."""

    at_ns: int
    name: str
    withdrawn: bool = False


@dataclass(slots=True)
class PagesCopied:
    """All pages of a write are in staging: the server may reuse its own."""

    at_ns: int
    name: str


@dataclass(slots=True)
class StepBegan:
    """The model begins a step that needs ``loads``: names of loads or of their batches, whether
    they are known by now or come later.  tokens, context_tokens: see Step.
    """

    at_ns: int
    phase: Phase
    layers: int = 0
    tokens: int = 0
    context_tokens: int = 0
    loads: tuple[str, ...] = ()


@dataclass(slots=True)
class LayerBegan:
    """A layer begins to compute, after it waited for its load.  Optional: without it the profile
    determines which layer computes.  waited_ns: how long this layer, and those before it that were
    not reported, waited.
    """

    at_ns: int
    layer: int
    waited_ns: int = 0


@dataclass(slots=True)
class StepEnded:
    """The model is idle, until another step begins.  waited_ns: how long layers waited for their
    loads since the last ``LayerBegan``.
    """

    at_ns: int
    waited_ns: int = 0


Event = (
    Tick
    | LoadKnown
    | LoadGone
    | BatchJoined
    | LayersReady
    | SpaceKnown
    | WriteKnown
    | PagesWritten
    | WriteStopped
    | WriteGone
    | PagesCopied
    | StepBegan
    | LayerBegan
    | StepEnded
)

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Tick,
        LoadKnown,
        LoadGone,
        BatchJoined,
        LayersReady,
        SpaceKnown,
        WriteKnown,
        PagesWritten,
        WriteStopped,
        WriteGone,
        PagesCopied,
        StepBegan,
        LayerBegan,
        StepEnded,
    )
}


def to_json(event: Event) -> str:
    """One line, always the same for the same event."""
    values = {"event": type(event).__name__, **asdict(event)}
    return json.dumps(values, separators=(",", ":"), default=lambda one: one.value)


def from_json(line: str) -> Event:
    """The event of a line.  Raises ConfigError for other lines."""
    try:
        values = json.loads(line)
        kind = _KINDS[values.pop("event")]
        if "phase" in values:
            values["phase"] = Phase(values["phase"])
        if "kind" in values:
            values["kind"] = LoadKind(values["kind"])
        if "loads" in values:
            values["loads"] = tuple(str(name) for name in values["loads"])
        numbers = [f.name for f in fields(kind) if f.type in ("int", int)]  # compiled: int
        if any(not isinstance(values.get(n, 0), int) or values.get(n, 0) < 0 for n in numbers):
            raise ValueError("a number is negative or no integer")
        event: Event = kind(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{line[:80]!r} is not an event of the scheduler ({error}); record the trace again"
        ) from error
    return event

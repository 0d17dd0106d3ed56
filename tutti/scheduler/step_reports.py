"""Chooses the steps and layers of a model that are reported to its scheduler.

Each event costs CPU time, most of all one that may be followed by a decision.  Between two reports
the scheduler relies on the profile, which is nearly as good.
"""

from __future__ import annotations

from tutti.scheduler.event import LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase

#: A prefill is reported in about so many parts.
_PARTS = 4
#: Of consecutive decode steps while nothing waits, one in so many is reported; it only corrects the
#: profile.
_STEPS = 16


class StepReports:
    """For one model and one scheduler: takes all events, and returns those to be posted."""

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self._untold = 0  # decode steps since the last report
        self._every = 1  # layers
        self._layer = -1  # the last that was reported
        self._waited_ns = 0  # since then

    def began(self, event: StepBegan, waits: bool) -> StepBegan | None:
        """A step begins.  waits: whether a transfer waits; see State.waits."""
        goes_on = event.phase is Phase.DECODE and self._phase is Phase.DECODE and not waits
        self._untold = (self._untold + 1) % _STEPS if goes_on else 0
        self._phase, self._every = event.phase, max(1, event.layers // _PARTS)
        self._layer, self._waited_ns = -1, 0
        return None if self._untold else event

    def layer_began(self, event: LayerBegan) -> LayerBegan | None:
        """A layer begins.  The next report includes the waits of layers that are not reported."""
        self._waited_ns += event.waited_ns
        if event.layer - self._layer < self._every:
            return None
        event.waited_ns, self._waited_ns, self._layer = self._waited_ns, 0, event.layer
        return event

    def ended(self, event: StepEnded) -> StepEnded | None:
        """The step ends."""
        event.waited_ns, self._waited_ns = self._waited_ns, 0
        return None if self._untold else event

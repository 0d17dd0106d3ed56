"""Which steps and layers of a model its scheduler is told of.

Each event costs CPU time, most of all one that may be followed by a decision.  Between two reports
the scheduler goes by the profile, which is nearly as good.
"""

from __future__ import annotations

from tutti.scheduler.event import LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase

#: A prefill is reported in about so many parts.
_PARTS = 4
#: Of decode steps that follow each other while nothing waits, one in so many is reported: it only
#: corrects the profile.
_STEPS = 16


class StepReports:
    """Of one model, for one scheduler: what happens goes in, what is to be posted comes out."""

    def __init__(self) -> None:
        self._phase = Phase.IDLE
        self._untold = 0  # decode steps since the last report
        self._every = 1  # layers
        self._layer = -1  # the last that was reported
        self._waited_ns = 0  # since then

    def began(self, event: StepBegan, waits: bool) -> StepBegan | None:
        """A step.  waits: whether a transfer does; see State."""
        goes_on = event.phase is Phase.DECODE and self._phase is Phase.DECODE and not waits
        self._untold = (self._untold + 1) % _STEPS if goes_on else 0
        self._phase, self._every = event.phase, max(1, event.layers // _PARTS)
        self._layer, self._waited_ns = -1, 0
        return None if self._untold else event

    def layer_began(self, event: LayerBegan) -> LayerBegan | None:
        """A layer of the step.  Those that are not reported have waited by the next report."""
        self._waited_ns += event.waited_ns
        if event.layer - self._layer < self._every:
            return None
        event.waited_ns, self._waited_ns, self._layer = self._waited_ns, 0, event.layer
        return event

    def ended(self, event: StepEnded) -> StepEnded | None:
        """The step."""
        event.waited_ns, self._waited_ns = self._waited_ns, 0
        return None if self._untold else event

"""Tells the schedulers of the pools what the model computes, as far as SGLang's scheduler knows.

A step begins when its batch is launched and the one before is over, and ends when its results were
processed: with overlap scheduling the next batch is launched meanwhile. Without the plugin nobody
calls this, and writes yield to reads alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tutti.scheduler.dispatcher import Dispatcher
from tutti.scheduler.event import StepBegan, StepEnded
from tutti.scheduler.request import Phase

_log = logging.getLogger(__name__)

#: SGLang launches one batch while another computes; more were never processed, and are forgotten.
_STEPS_MAX = 2
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


@dataclass(frozen=True)
class ModelStep:
    """tokens, context_tokens: as in StepBegan."""

    phase: Phase
    tokens: int
    context_tokens: int


class StepsWatch:
    """The batches of this process's scheduler that were launched and not processed.

    Called on the scheduler's thread alone.
    """

    def __init__(self) -> None:
        self._followers: list[tuple[Dispatcher, int]] = []
        self._steps: deque[ModelStep] = deque()
        self._is_broken = False

    def follow(self, dispatcher: Dispatcher, layers: int) -> None:
        """Posts the steps of a model of so many layers to a pool's scheduler from now on."""
        self._followers.append((dispatcher, layers))

    def leave(self, dispatcher: Dispatcher) -> None:
        """Posts nothing more to it."""
        self._followers = [one for one in self._followers if one[0] is not dispatcher]

    def launched(self, batch: Any) -> None:
        """SGLang launches a batch."""
        if not self._followers or self._is_broken:
            return
        try:
            step = step_of(batch)
        except Exception:
            # The server must run on, whatever a batch looks like.
            self._is_broken = True
            _log.exception("steps are not understood; writes yield to reads alone from now on")
            return
        self._steps.append(step)
        if len(self._steps) > _STEPS_MAX:
            self._steps.popleft()
        if len(self._steps) == 1:
            self._begin(step)

    def processed(self) -> None:
        """The results of the oldest batch were processed."""
        if not self._steps:
            return
        self._steps.popleft()
        for dispatcher, _ in self._followers:
            dispatcher.post(StepEnded(dispatcher.now_ns()))
        if self._steps:
            self._begin(self._steps[0])

    def _begin(self, step: ModelStep) -> None:
        for dispatcher, layers in self._followers:
            dispatcher.post(
                StepBegan(
                    dispatcher.now_ns(),
                    step.phase,
                    layers=layers,
                    tokens=step.tokens,
                    context_tokens=step.context_tokens,
                )
            )


STEPS = StepsWatch()


def step_of(batch: Any) -> ModelStep:
    """A ScheduleBatch as the scheduler's profile knows steps; mixed batches count as prefills."""
    mode = batch.forward_mode
    if mode.is_decode():
        # SGLang's own sum is not known yet when it overlaps batches.
        context_tokens = sum(request.seqlen for request in batch.reqs)
        return ModelStep(Phase.DECODE, len(batch.reqs), int(context_tokens))
    if mode.is_extend():
        prefix = sum(batch.prefix_lens or ())
        return ModelStep(Phase.PREFILL, int(batch.extend_num_tokens or 0), int(prefix))
    return ModelStep(Phase.IDLE, 0, 0)


def activate() -> None:
    """Hooks the launch of batches and the processing of their results; for SGLang's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SCHEDULER + "run_batch", _around_run, HookType.AROUND)
    HookRegistry.register(_SCHEDULER + "process_batch_result", _around_result, HookType.AROUND)


def _around_run(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    STEPS.launched(batch)
    return original(scheduler, batch, *args, **kwargs)


def _around_result(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    done = original(*args, **kwargs)  # waits for the device
    STEPS.processed()
    return done

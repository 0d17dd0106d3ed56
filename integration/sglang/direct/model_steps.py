"""Reports the model's steps to the pools' schedulers, as far as SGLang's scheduler knows them.

A step begins when its batch was launched and the step before has ended. It ends when its results
were processed; with overlap scheduling, the next batch is launched before that. It names the
batch's loads.

On a CPU the launch itself computes, layer by layer, and the step ends with it. A GPU computes
later: its stream marks the layers that it has waited for, and these are reported when seen.

Without the plugin nothing is reported, and writes yield only to reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.scheduler.dispatcher import Dispatcher
from tutti.scheduler.event import Event, LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.step_reports import StepReports

_log = logging.getLogger(__name__)

#: SGLang launches one batch while another computes; older steps were never processed: forgotten.
_STEPS_MAX = 2
#: Shorter prefills are dominated by their launch; number of longer ones that are kept.
_PREFILL_TOKENS_MIN, _PREFILLS_MAX = 1024, 15
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


@dataclass(frozen=True)
class ModelStep:
    """tokens, context_tokens, loads: as in StepBegan."""

    phase: Phase
    tokens: int
    context_tokens: int
    loads: tuple[str, ...] = ()


@dataclass
class _Launched:
    """A step that was launched and has not been processed."""

    step: ModelStep
    begun: bool = False
    began_s: float = 0.0
    over: bool = False


@dataclass
class _Follower:
    """A queue to which steps are reported.  layers: number of the model's layers."""

    layers: int
    reports: StepReports = field(default_factory=StepReports)


class StepsWatch:
    """The launched batches of this process's scheduler that have not been processed.

    Called only on the scheduler's thread, except ``stream_began``.

    prefills: (tokens, context tokens, seconds) of the last long prefills that waited for no load.
    prefills_seen: number of such prefills so far.
    """

    def __init__(self) -> None:
        self.prefills: deque[tuple[int, int, float]] = deque(maxlen=_PREFILLS_MAX)
        self.prefills_seen = 0
        self._followers: dict[Dispatcher, _Follower] = {}
        self._telling = threading.Lock()
        self._users: list[Dispatcher] = []
        self._steps: deque[_Launched] = deque()
        self._layer = -1  # the last one that the forward asked for since the launch
        self._is_broken = False

    def follow(self, dispatcher: Dispatcher, layers: int) -> None:
        """Posts steps to a queue from now on.  layers: number of the model's layers.

        Pools that share a queue call this once each; the queue gets every step once.
        """
        self._users.append(dispatcher)
        follower = self._followers.setdefault(dispatcher, _Follower(layers))
        follower.layers = max(layers, follower.layers)

    def leave(self, dispatcher: Dispatcher) -> None:
        """Stops posting to a queue, once every pool that called ``follow`` has called this."""
        if dispatcher in self._users:
            self._users.remove(dispatcher)
        if dispatcher not in self._users:
            self._followers.pop(dispatcher, None)
        if not self._followers:  # otherwise a step in progress would block later ones
            self._steps.clear()

    def launched(self, batch: Any) -> None:
        """Called when SGLang launches a batch."""
        if not self._followers or self._is_broken:
            return
        try:
            step = step_of(batch)
        except Exception:
            # The server must survive, whatever a batch looks like.
            self._is_broken = True
            _log.exception("cannot interpret SGLang's batches; writes now yield to reads only")
            return
        self._layer = -1
        self._steps.append(_Launched(step))
        if len(self._steps) > _STEPS_MAX:
            self._steps.popleft()
        self._begin_next()

    def layer_began(self, layer: int, waited_s: float) -> None:
        """Called on the forward's thread after its wait for a layer, any number of times per layer,
        also if there was nothing to wait for.
        """
        if layer <= self._layer or not self._steps:
            return
        self._layer = layer
        newest = self._steps[-1]
        if newest.begun and not newest.over and newest.step.phase is Phase.PREFILL:
            self._post_layer(layer, waited_s)

    def stream_began(self, batch: str, layer: int, waited_s: float) -> None:
        """Called after a GPU forward's stream has waited for a layer of a batch.  On any thread."""
        now = next((one for one in tuple(self._steps) if not one.over), None)
        if now is not None and now.begun and batch in now.step.loads:
            self._post_layer(layer, waited_s)

    def returned(self) -> None:
        """Called when the newest launch returns; if its layers were asked for, it is computed."""
        if self._steps and self._layer >= 0:
            self._end(self._steps[-1])

    def processed(self) -> None:
        """Called when the results of the oldest batch were processed."""
        if self._steps:
            self._end(self._steps.popleft())
            self._begin_next()

    def _begin_next(self) -> None:
        """Begins the oldest step that has not ended."""
        launched = next((one for one in self._steps if not one.over), None)
        if launched is None or launched.begun:
            return
        launched.begun, launched.began_s, step = True, time.monotonic(), launched.step

        def began(dispatcher: Dispatcher, follower: _Follower) -> Event | None:
            event = StepBegan(
                dispatcher.now_ns(),
                step.phase,
                layers=follower.layers,
                tokens=step.tokens,
                context_tokens=step.context_tokens,
                loads=step.loads,
            )
            return follower.reports.began(event, dispatcher.state.waits)

        self._post(began)

    def _end(self, launched: _Launched) -> None:
        if launched.begun and not launched.over:
            self._remember(launched.step, time.monotonic() - launched.began_s)
            self._post(lambda to, follower: follower.reports.ended(StepEnded(to.now_ns())))
        launched.over = True

    def _remember(self, step: ModelStep, took_s: float) -> None:
        is_long = step.phase is Phase.PREFILL and step.tokens >= _PREFILL_TOKENS_MIN
        if is_long and not step.loads:
            self.prefills.append((step.tokens, step.context_tokens, took_s))
            self.prefills_seen += 1

    def _post_layer(self, layer: int, waited_s: float) -> None:
        waited_ns = round(waited_s * 1e9)
        self._post(
            lambda to, follower: follower.reports.layer_began(
                LayerBegan(to.now_ns(), layer, waited_ns)
            )
        )

    def _post(self, report: Callable[[Dispatcher, _Follower], Event | None]) -> None:
        for dispatcher, follower in tuple(self._followers.items()):
            with self._telling:  # layers of a stream are reported by another thread
                event = report(dispatcher, follower)
            if event is not None:
                dispatcher.note(event)


STEPS = StepsWatch()


def step_of(batch: Any) -> ModelStep:
    """Converts a ScheduleBatch to a step of the scheduler's profile; mixed batches are prefills."""
    mode = batch.forward_mode
    if mode.is_decode():
        # SGLang's own sum is not known yet with overlap scheduling.
        context_tokens = sum(request.seqlen for request in batch.reqs)
        return ModelStep(Phase.DECODE, len(batch.reqs), int(context_tokens))
    if mode.is_extend():
        prefix = sum(batch.prefix_lens or ())
        index = batch.hicache_consumer_index  # the result of start_layer_wise_loading
        loads = (str(index),) if index >= 0 else ()
        return ModelStep(Phase.PREFILL, int(batch.extend_num_tokens or 0), int(prefix), loads)
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
    done = original(scheduler, batch, *args, **kwargs)
    STEPS.returned()
    return done


def _around_result(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    done = original(*args, **kwargs)  # waits for the device
    STEPS.processed()
    return done

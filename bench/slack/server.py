"""A simulated server for `tutti bench slack`: one GPU that prefills and decodes, the real scheduler
code, and a drive in virtual time.

Prefills go first, one request at a time; a layer waits until its load has arrived.  Decode steps
have all requests with a first token.  Computed pages are stored after their prefill.  Loads arrive
layer by layer under every policy, except with ``whole``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tutti.bench.simulate.device import READ, Device, Timeline, Writes
from tutti.bench.simulate.hardware import SimulatedMachine, copy_bytes_per_s
from tutti.bench.slack.conditions import Conditions
from tutti.bench.slack.lower_bound import Prefill
from tutti.bench.slack.workload import SlackRequest
from tutti.scheduler.event import (
    Event,
    LayerBegan,
    LayersReady,
    LoadKnown,
    PagesCopied,
    PagesWritten,
    SpaceKnown,
    StepBegan,
    StepEnded,
    Tick,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import LoadKind, Phase, Profile, report_at
from tutti.scheduler.state import NOTHING, Issue, Policy, State
from tutti.scheduler.state_changes import Scheduler
from tutti.scheduler.step_reports import StepReports

_EVENTS_MAX = 50_000_000


@dataclass(frozen=True)
class Noise:
    """Deviation of real times from a perfect profile: log-normal, per step and per layer."""

    step: float = 0.05
    layer: float = 0.02


@dataclass
class Measured:
    """Results of a run.  Times are in seconds."""

    bubble_s: float = 0.0
    decode_rest_s: float = 0.0  # first prefills of a queue waited for the end of a decode step
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0
    decode_alone_s: float = 0.0
    backlog_pages_max: int = 0
    backlog_page_s: float = 0.0  # pages waiting, integrated over time
    wall_s: float = 0.0
    drained_s: float = 0.0  # from the last token to the last page stored
    dropped_pages: int = 0
    stored_pages: int = 0
    forced_pages: int = 0
    prediction_error: float = 0.0


class TruthNow:
    """The oracle's profile: the actual times, including the noise of steps."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.prefill_factors: dict[tuple[int, int], float] = {}
        self.decode_factor = 1.0
        self.interference_now: Callable[[], float] = partial(getattr, machine, "interference")

    @property
    def interference(self) -> float:
        """See Profile; that of the moment."""
        return float(self.interference_now())

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        """See Profile; the factor of the prefill that has this shape."""
        factor = self.prefill_factors.get((new_tokens, prefix_tokens), 1.0)
        return self._machine.layer_us(new_tokens, prefix_tokens) * factor

    def decode_us(self, batch: int, context_tokens: int) -> float:
        """See Profile; the factor of the step that runs."""
        return self._machine.decode_us(batch, context_tokens) * self.decode_factor

    def read_us(self, nbytes: int) -> float:
        """See Profile."""
        return self._machine.read_us(nbytes)

    def write_us(self, nbytes: int) -> float:
        """See Profile."""
        return self._machine.write_us(nbytes)


@dataclass
class _Running:
    """A request that has its first token."""

    request: SlackRequest
    left: int
    context: int
    last_ns: int


class LayeredServer:
    """One run, in virtual time.

    whole: a load arrives as a whole, as in a system without layers.  conditions: how the drive
    changes during the run.
    """

    def __init__(
        self,
        machine: SimulatedMachine,
        requests: Sequence[SlackRequest],
        policy: Policy,
        profile: Profile,
        *,
        noise: Noise,
        seed: int,
        whole: bool = False,
        conditions: Conditions | None = None,
    ) -> None:
        self._machine = machine
        self._timeline = Timeline()
        drive = machine.drive
        rates = (drive.read_bytes_per_s, drive.write_bytes_per_s)
        self._device = Device(self._timeline, *rates, drive.interference)
        self._writes = Writes(self._device, self._moved)
        self._latency_ns = round(drive.latency_us * 1000)
        self._requests = requests
        self._whole = whole
        self._truth = profile if isinstance(profile, TruthNow) else None
        self._noise = noise
        # Drawn per request, so that every policy gets the same noise.
        rng = np.random.default_rng(seed)
        layers = machine.model.layers
        steps = np.exp(rng.normal(0, noise.step, len(requests)))
        self._layer_factors = np.exp(rng.normal(0, noise.layer, (len(requests), layers)))
        self._layer_factors *= steps[:, None]
        self._decode_rng = np.random.default_rng([seed, 1])
        if self._truth is not None:
            shapes = [(r.new_tokens, r.hit_tokens) for r in requests]
            self._truth.prefill_factors = dict(zip(shapes, steps.tolist(), strict=True))
        self.scheduler = Scheduler(policy, profile)
        if self._truth is not None and conditions is not None:
            self._truth.interference_now = lambda: conditions.interference(self._timeline.now_ns)
            self.state.estimates.both.learns = False
        self._space = ""
        self._reports = StepReports()
        self._wake_ns: int | None = None
        self._ready: dict[str, int] = {}  # layers of a load that arrived
        self._queue: deque[int] = deque()  # requests that wait for their prefill
        self._running: list[_Running] = []
        self._computes = False
        self._left = len(requests)
        self._wait: Callable[[], None] | None = None  # goes on when a layer arrives
        self.measured = Measured()
        self._last_ns = 0
        self._last_token_ns = 0
        self._stored_ns = 0  # the last page
        self._issued_nbytes = 0
        if conditions is not None:
            conditions.follow(self._timeline, self._device, lambda: self._is_busy)

    @property
    def state(self) -> State:
        """The scheduler's state."""
        return self.scheduler.state

    @property
    def _is_busy(self) -> bool:
        return self._left > 0 or bool(self.state.writes)

    def prefills(self) -> list[Prefill]:
        """The prefills, equal for all policies, as input of the lower bound."""
        model, found = self._machine.model, []
        for request, factors in zip(self._requests, self._layer_factors.tolist(), strict=True):
            layer_ns = self._machine.layer_us(request.new_tokens, request.hit_tokens) * 1000
            nbytes = request.hit_tokens * model.token_nbytes // model.layers
            found.append(
                Prefill(
                    request.arrival_ns,
                    tuple(round(layer_ns * factor) for factor in factors),
                    nbytes / self._machine.drive.read_bytes_per_s * 1e9,
                    request.new_tokens // model.page_tokens,
                )
            )
        return found

    def has(self, space: SpaceKnown) -> None:
        """Announces how many pages may wait in its memory, as SGLang's linker does at its start."""
        self._space = space.name
        self._post(space)

    def run(self) -> Measured:
        """Runs until every request has its last token and every page is stored or dropped."""
        for number, request in enumerate(self._requests):
            self._timeline.at(request.arrival_ns, partial(self._arrive, number))
        self._timeline.run(_EVENTS_MAX)
        assert not self._is_busy, "everything ends"
        measured, totals = self.measured, self.state.totals
        measured.wall_s = self._last_ns / 1e9
        measured.drained_s = max(0, self._stored_ns - self._last_token_ns) / 1e9
        measured.dropped_pages, measured.stored_pages = totals.dropped_pages, totals.written_pages
        measured.forced_pages = totals.forced_pages
        expected_ns = totals.expected_ns
        measured.prediction_error = totals.error_ns / expected_ns if expected_ns else 0.0
        return measured

    def _post(self, event: Event | None) -> None:
        """Passes an event to the scheduler and executes its decision.  None: no event."""
        if event is None:
            return
        decision = self.scheduler.take(event)
        self._watch()
        self._wake_ns = decision.wake_ns  # the last decision's, as in the dispatcher
        if decision is NOTHING:
            return
        timeline = self._timeline
        for name in decision.stops:
            pages = self._writes.stop(self.state.writes[name])
            self._post(WriteStopped(timeline.now_ns, name, pages))
        for name in decision.copy_outs:
            write = self.state.writes[name]
            nbytes = write.pages * write.page_nbytes
            copied_ns = timeline.now_ns + round(nbytes / copy_bytes_per_s() * 1e9)
            timeline.at(copied_ns, partial(self._copied, name))
        for issue in decision.reads:
            self._read(issue)
        for issue in decision.writes:
            page_nbytes = self._machine.model.page_nbytes
            self._issued_nbytes += issue.count * page_nbytes
            self._writes.start(issue.name, issue.first, issue.count, page_nbytes)
        if decision.wake_ns is not None:
            timeline.at(decision.wake_ns, partial(self._tick, decision.wake_ns))

    def _tick(self, when_ns: int) -> None:
        if self._wake_ns == when_ns:
            self._post(Tick(when_ns))

    def _copied(self, name: str) -> None:
        self._post(PagesCopied(self._timeline.now_ns, name))

    def _read(self, issue: Issue) -> None:
        nbytes = self.state.loads[issue.name].layer_nbytes
        for layer in range(issue.first, issue.first + issue.count):
            self._issued_nbytes += nbytes
            arrived = partial(self._layers_arrived, issue.name, layer + 1)
            self._device.start(READ, nbytes, partial(self._after_latency, arrived))

    def _after_latency(self, done: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.now_ns + self._latency_ns, done)

    def _moved(self, name: str, pages: int) -> None:
        self._after_latency(partial(self._written, name, pages))

    def _written(self, name: str, pages: int) -> None:
        self._stored_ns = self._timeline.now_ns
        self._post(PagesWritten(self._stored_ns, name, pages))

    def _layers_arrived(self, name: str, layers: int) -> None:
        self._ready[name] = layers
        load = self.state.loads.get(name)
        if load is not None and layers >= report_at(load.ready, load.issued):
            self._post(LayersReady(self._timeline.now_ns, name, layers))
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def _watch(self) -> None:
        """Counts the pages that wait to be stored."""
        state, measured, now_ns = self.state, self.measured, self._timeline.now_ns
        waiting = sum(s.source + s.staged for s in state.spaces.values())
        measured.backlog_pages_max = max(measured.backlog_pages_max, waiting)
        measured.backlog_page_s += waiting * (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns

    def _arrive(self, number: int) -> None:
        request, model = self._requests[number], self._machine.model
        if request.hit_tokens:
            layers = 1 if self._whole else model.layers
            load = LoadKnown(
                self._timeline.now_ns,
                str(number),
                layers=layers,
                layer_nbytes=request.hit_tokens * model.token_nbytes // layers,
                tokens=request.new_tokens,
                prefix_tokens=request.hit_tokens,
                kind=LoadKind.READ_AHEAD,
            )
            self._post(load)
            self._ready[str(number)] = 0
        self._queue.append(number)
        if not self._computes:
            self._next_step()

    def _next_step(self) -> None:
        """Prefills first, then decode steps, else nothing."""
        self._last_token_ns = self._timeline.now_ns
        self._computes = bool(self._queue or self._running)
        if self._queue:
            self._prefill(self._queue.popleft())
        elif self._running:
            self._decode()

    def _prefill(self, number: int) -> None:
        request, name = self._requests[number], str(number)
        loads = (name,) if request.hit_tokens else ()
        begun = StepBegan(
            self._timeline.now_ns,
            Phase.PREFILL,
            layers=self._machine.model.layers,
            tokens=request.new_tokens,
            context_tokens=request.hit_tokens,
            loads=loads,
        )
        self._post(self._reports.began(begun, self.state.waits))
        self._layer(number, 0, self._timeline.now_ns)

    def _layer(self, number: int, layer: int, waits_ns: int) -> None:
        """Begins a layer, or waits for its load."""
        request, name = self._requests[number], str(number)
        now_ns = self._timeline.now_ns
        needed = 1 if self._whole else layer + 1
        if request.hit_tokens and self._ready[name] < needed:
            self._wait = lambda: self._layer(number, layer, waits_ns)
            return
        self.measured.bubble_s += (now_ns - waits_ns) / 1e9
        self._post(self._reports.layer_began(LayerBegan(now_ns, layer, now_ns - waits_ns)))
        layer_us = self._machine.layer_us(request.new_tokens, request.hit_tokens)
        ends_ns = now_ns + round(layer_us * 1000 * float(self._layer_factors[number, layer]))
        if layer + 1 < self._machine.model.layers:
            self._timeline.at(ends_ns, lambda: self._layer(number, layer + 1, ends_ns))
        else:
            self._timeline.at(ends_ns, lambda: self._first_token(number))

    def _first_token(self, number: int) -> None:
        request, now_ns = self._requests[number], self._timeline.now_ns
        measured = self.measured
        measured.first_token_s.append((now_ns - request.arrival_ns) / 1e9)
        self._post(self._reports.ended(StepEnded(now_ns)))
        model = self._machine.model
        pages = request.new_tokens // model.page_tokens
        if pages:
            name, nbytes = f"w{number}", model.page_nbytes
            self._post(WriteKnown(now_ns, name, pages, nbytes, 1, self._space, can_stop=True))
        if request.out_tokens > 1:
            context = request.hit_tokens + request.new_tokens
            self._running.append(_Running(request, request.out_tokens - 1, context, now_ns))
        else:
            self._left -= 1
        self._next_step()

    def _decode(self) -> None:
        context = sum(one.context for one in self._running)
        factor = float(np.exp(self._decode_rng.normal(0, self._noise.step)))
        if self._truth is not None:
            self._truth.decode_factor = factor
        now_ns, batch = self._timeline.now_ns, len(self._running)
        begun = StepBegan(now_ns, Phase.DECODE, tokens=batch, context_tokens=context)
        self._post(self._reports.began(begun, self.state.waits))
        took_ns = round(self._machine.decode_us(batch, context) * 1000 * factor)
        moved = self._issued_nbytes
        self._timeline.at(now_ns + took_ns, lambda: self._slowed(now_ns, took_ns, moved))

    def _slowed(self, began_ns: int, took_ns: int, moved_before: int) -> None:
        """Extends the step by the memory bandwidth that transfers used during it."""
        moved = self._issued_nbytes - moved_before
        more_ns = round(moved / self._machine.gpu.memory_bytes_per_s * 1e9)
        self._timeline.at(self._timeline.now_ns + more_ns, lambda: self._decoded(began_ns, took_ns))

    def _decoded(self, began_ns: int, alone_ns: int) -> None:
        now_ns, measured = self._timeline.now_ns, self.measured
        measured.decode_s += (now_ns - began_ns) / 1e9
        measured.decode_alone_s += alone_ns / 1e9
        self._post(self._reports.ended(StepEnded(now_ns)))
        for one in self._running:
            measured.between_tokens_s.append((now_ns - one.last_ns) / 1e9)
            one.last_ns, one.left, one.context = now_ns, one.left - 1, one.context + 1
        before = len(self._running)
        self._running = [one for one in self._running if one.left > 0]
        self._left -= before - len(self._running)
        if self._queue:
            measured.decode_rest_s += (now_ns - self._requests[self._queue[0]].arrival_ns) / 1e9
        self._next_step()

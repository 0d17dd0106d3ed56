"""A simulated server for `tutti bench slack`: one GPU that prefills and decodes, the real scheduler
code, and a drive on a virtual clock.

Prefills go first, one request at a time; a layer waits until its load has arrived.  Decode steps
take all requests that have their first token.  What is computed is stored, once its prefill ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.bench.slack.drive import READ, WRITE, VirtualDrive
from tutti.bench.slack.hardware import Machine, copy_bytes_per_s
from tutti.bench.slack.workload import Request
from tutti.scheduler.dispatcher import Dispatcher
from tutti.scheduler.event import (
    Event,
    LayerBegan,
    LayersReady,
    LoadKnown,
    PagesCopied,
    PagesWritten,
    StepBegan,
    StepEnded,
    WriteKnown,
)
from tutti.scheduler.policy import Policy
from tutti.scheduler.request import Phase, Profile
from tutti.scheduler.state import ReadLaunch, WriteLaunch

_FOREVER_NS = 1 << 62
_EVENTS_MAX = 5_000_000


@dataclass(frozen=True)
class Noise:
    """How much the real times differ from a perfect profile: log-normal, by step and by layer."""

    step: float = 0.05
    layer: float = 0.02


@dataclass
class Measured:
    """What a run is judged by.  Times in seconds."""

    bubble_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    bubbles_s: list[float] = field(default_factory=list)  # of each request that hit
    between_tokens_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0
    decode_alone_s: float = 0.0
    backlog_pages_max: int = 0
    backlog_page_s: float = 0.0  # pages waiting, integrated over time
    wall_s: float = 0.0
    drained_s: float = 0.0  # from the last token to the last page stored
    dropped_pages: int = 0
    stored_pages: int = 0
    offered_pages: int = 0


class TruthNow:
    """The profile of an oracle: how long things will take this time, noise of steps included."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.prefill_factors: dict[tuple[int, int], float] = {}
        self.decode_factor = 1.0

    @property
    def interference(self) -> float:
        """See Profile."""
        return self._machine.interference

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

    request: Request
    left: int
    context: int
    last_ns: int


class Server:
    """One run.  ``clock`` is the drive's, so everything happens in virtual time."""

    def __init__(
        self,
        machine: Machine,
        drive: VirtualDrive,
        requests: Sequence[Request],
        policy: Policy,
        profile: Profile,
        *,
        noise: Noise,
        seed: int,
    ) -> None:
        self._machine = machine
        self._drive = drive
        self._requests = requests
        self._truth = profile if isinstance(profile, TruthNow) else None
        self._noise = noise
        # Drawn by request, so that every policy meets the same noise.
        rng = np.random.default_rng(seed)
        layers = machine.model.layers
        steps = np.exp(rng.normal(0, noise.step, len(requests)))
        self._layer_factors = np.exp(rng.normal(0, noise.layer, (len(requests), layers)))
        self._layer_factors *= steps[:, None]
        self._decode_rng = np.random.default_rng([seed, 1])
        if self._truth is not None:
            shapes = [(r.new_tokens, r.hit_tokens) for r in requests]
            self._truth.prefill_factors = dict(zip(shapes, steps.tolist(), strict=True))
        self._dispatcher = Dispatcher(policy, profile, self, clock=_DriveClock(drive))
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._ready: dict[str, int] = {}  # layers of a load that arrived
        self._queue: deque[int] = deque()  # requests that wait for their prefill
        self._running: list[_Running] = []
        self._computes = False
        self._left = len(requests)
        self._wait: Callable[[], None] | None = None  # goes on when a layer arrives
        self._pages: dict[str, int] = {}
        self.measured = Measured()
        self._last_ns = 0
        self._last_token_ns = 0

    def run(self) -> Measured:
        """Until every request has its last token and every page is stored or dropped."""
        for number, request in enumerate(self._requests):
            self._at(request.arrival_ns, lambda number=number: self._arrive(number))  # type: ignore[misc]
        for _ in range(_EVENTS_MAX):
            wake_ns = self._dispatcher.run_due()
            self._watch()
            if not self._left and not self._dispatcher.state.writes:
                break
            timer_ns = self._timers[0][0] if self._timers else _FOREVER_NS
            until_ns = min(timer_ns, _FOREVER_NS if wake_ns is None else wake_ns)
            ended = self._drive.run(max(until_ns, self._drive.now_ns))
            assert ended or until_ns < _FOREVER_NS, "something is always about to happen"
            for tag in ended:
                self._landed(tag)
            if not ended and self._timers and self._timers[0][0] <= self._drive.now_ns:
                heapq.heappop(self._timers)[2]()
        measured, totals = self.measured, self._dispatcher.state.totals
        measured.wall_s = self._drive.now_ns / 1e9
        measured.drained_s = (self._drive.now_ns - self._last_token_ns) / 1e9
        measured.dropped_pages, measured.stored_pages = totals.dropped_pages, totals.written_pages
        return measured

    def counters(self) -> dict[str, float]:
        """The dispatcher's counters."""
        return self._dispatcher.counters()

    def read(self, launch: ReadLaunch) -> None:
        """See TransferIssuer."""
        nbytes = launch.layers * self._layer_nbytes(self._requests[int(launch.name)])
        self._drive.start(READ, launch, nbytes)

    def write(self, launch: WriteLaunch) -> None:
        """See TransferIssuer."""
        self._drive.start(WRITE, launch, launch.pages * self._machine.model.page_nbytes)

    def copy_out(self, name: str) -> None:
        """See TransferIssuer."""
        nbytes = self._pages[name] * self._machine.model.page_nbytes
        copied_ns = self._drive.now_ns + round(nbytes / copy_bytes_per_s() * 1e9)
        self._at(copied_ns, lambda: self._post(PagesCopied(self._drive.now_ns, name)))

    def drop(self, name: str) -> None:
        """See TransferIssuer."""

    def _layer_nbytes(self, request: Request) -> int:
        return request.hit_tokens * self._machine.model.token_nbytes // self._machine.model.layers

    def _at(self, when_ns: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when_ns, self._count, what))

    def _post(self, event: Event) -> None:
        self._dispatcher.post(event)

    def _watch(self) -> None:
        """Counts what waits to be stored."""
        waiting = sum(w.pages for w in self._dispatcher.state.writes)
        measured, now_ns = self.measured, self._drive.now_ns
        measured.backlog_pages_max = max(measured.backlog_pages_max, waiting)
        measured.backlog_page_s += waiting * (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns

    def _landed(self, tag: object) -> None:
        now_ns = self._drive.now_ns
        if isinstance(tag, WriteLaunch):
            self._post(PagesWritten(now_ns, tag.name, tag.first + tag.pages))
            return
        assert isinstance(tag, ReadLaunch), "nothing else was started"
        self._ready[tag.name] = tag.first + tag.layers
        self._post(LayersReady(now_ns, tag.name, self._ready[tag.name]))
        if self._wait is not None:
            wait, self._wait = self._wait, None
            wait()

    def _arrive(self, number: int) -> None:
        request, model = self._requests[number], self._machine.model
        if request.hit_tokens:
            load = LoadKnown(
                self._drive.now_ns,
                str(number),
                layers=model.layers,
                layer_nbytes=self._layer_nbytes(request),
                tokens=request.new_tokens,
                prefix_tokens=request.hit_tokens,
            )
            self._post(load)
            self._ready[str(number)] = 0
        self._queue.append(number)
        if not self._computes:
            self._next_step()

    def _next_step(self) -> None:
        """Prefills first, then decode steps, else nothing."""
        self._last_token_ns = self._drive.now_ns
        self._computes = bool(self._queue or self._running)
        if self._queue:
            self._prefill(self._queue.popleft())
        elif self._running:
            self._decode()

    def _prefill(self, number: int) -> None:
        request, name = self._requests[number], str(number)
        loads = (name,) if request.hit_tokens else ()
        begun = StepBegan(
            self._drive.now_ns,
            Phase.PREFILL,
            layers=self._machine.model.layers,
            tokens=request.new_tokens,
            context_tokens=request.hit_tokens,
            loads=loads,
        )
        self._post(begun)
        self._layer(number, 0, self._drive.now_ns, self.measured.bubble_s)

    def _layer(self, number: int, layer: int, waits_ns: int, bubble_before_s: float) -> None:
        """Begins a layer, or waits for its load."""
        request, name = self._requests[number], str(number)
        now_ns = self._drive.now_ns
        if request.hit_tokens and self._ready[name] <= layer:
            self._wait = lambda: self._layer(number, layer, waits_ns, bubble_before_s)
            return
        self.measured.bubble_s += (now_ns - waits_ns) / 1e9
        self._post(LayerBegan(now_ns, layer, now_ns - waits_ns))
        layer_us = self._machine.layer_us(request.new_tokens, request.hit_tokens)
        ends_ns = now_ns + round(layer_us * 1000 * float(self._layer_factors[number, layer]))
        if layer + 1 < self._machine.model.layers:
            self._at(ends_ns, lambda: self._layer(number, layer + 1, ends_ns, bubble_before_s))
        else:
            self._at(ends_ns, lambda: self._first_token(number, bubble_before_s))

    def _first_token(self, number: int, bubble_before_s: float) -> None:
        request, now_ns = self._requests[number], self._drive.now_ns
        measured = self.measured
        measured.first_token_s.append((now_ns - request.arrival_ns) / 1e9)
        if request.hit_tokens:
            measured.bubbles_s.append(measured.bubble_s - bubble_before_s)
        self._post(StepEnded(now_ns))
        model = self._machine.model
        pages = request.new_tokens // model.page_tokens
        if pages:
            self._pages[str(number)] = pages
            measured.offered_pages += pages
            self._post(WriteKnown(now_ns, str(number), pages, model.page_nbytes))
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
        now_ns, batch = self._drive.now_ns, len(self._running)
        self._post(StepBegan(now_ns, Phase.DECODE, tokens=batch, context_tokens=context))
        took_ns = round(self._machine.decode_us(batch, context) * 1000 * factor)
        moved = sum(self._drive.moved_nbytes.values())
        self._at(now_ns + took_ns, lambda: self._slowed(now_ns, took_ns, moved))

    def _slowed(self, began_ns: int, took_ns: int, moved_before: int) -> None:
        """What was moved meanwhile took memory bandwidth from the step."""
        moved = sum(self._drive.moved_nbytes.values()) - moved_before
        more_ns = round(moved / self._machine.gpu.memory_bytes_per_s * 1e9)
        self._at(self._drive.now_ns + more_ns, lambda: self._decoded(began_ns, took_ns))

    def _decoded(self, began_ns: int, alone_ns: int) -> None:
        now_ns, measured = self._drive.now_ns, self.measured
        measured.decode_s += (now_ns - began_ns) / 1e9
        measured.decode_alone_s += alone_ns / 1e9
        self._post(StepEnded(now_ns))
        for one in self._running:
            measured.between_tokens_s.append((now_ns - one.last_ns) / 1e9)
            one.last_ns, one.left, one.context = now_ns, one.left - 1, one.context + 1
        before = len(self._running)
        self._running = [one for one in self._running if one.left > 0]
        self._left -= before - len(self._running)
        self._next_step()


class _DriveClock:
    """The drive's clock, for the dispatcher."""

    def __init__(self, drive: VirtualDrive) -> None:
        self._drive = drive

    def now_ns(self) -> int:
        return self._drive.now_ns

    def unix_ns(self) -> int:
        return self._drive.now_ns

    def sleep(self, duration_s: float) -> None:
        raise NotImplementedError("virtual time passes in the drive")

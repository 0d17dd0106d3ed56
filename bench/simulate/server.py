"""One simulated server: a queue, prefill in chunks, decode, and a cache in its own memory.

Events are steps, not layers, except that a step that waits for its load advances by units of
layers.  Decode steps without changes are one event: their times grow linearly with the contexts, so
the end of each is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tutti.bench.simulate.cached_blocks import Blocks
from tutti.bench.simulate.calibration import ServerTimes
from tutti.bench.simulate.device import Device, Timeline
from tutti.bench.simulate.remote import FIRST, SECOND, RemoteLink
from tutti.bench.simulate.server_io import ServerIo
from tutti.bench.traces import BLOCK_TOKENS, TraceRequest
from tutti.scheduler.event import LayerBegan, LoadKnown, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import LoadKind, Phase


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in a server.  Tokens of the prompt hit in HBM, are loaded, or computed.

    ids: whole blocks of the prompt.  loadable: those that may be loaded: at least one token is
    always computed.
    """

    number: int
    request: TraceRequest
    arrived_ns: int
    ids: tuple[int, ...]
    loadable: tuple[int, ...]
    hit_tokens: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    load: str = ""  # name of its load, if any
    loads: int = 0  # that were announced so far
    load_end: int = 0  # blocks that are there once it has arrived
    began_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    bubble_ns: int = 0
    left: int = 0  # tokens to generate

    @property
    def cached_tokens(self) -> int:
        """Not computed."""
        return self.hit_tokens + self.loaded_tokens


@dataclass
class ServerWork:
    """Totals of a server's work, in nanoseconds and tokens."""

    prefill_ns: int = 0
    decode_ns: int = 0
    bubble_ns: int = 0
    steps: int = 0
    done: list[SimulatedRequest] = field(default_factory=list)


@dataclass
class _Stretch:
    """Decode steps without a change: step i takes first_ns + i * more_ns."""

    began_ns: int
    first_ns: float
    more_ns: float
    steps: int
    version: int

    def until_ns(self, steps: int) -> int:
        """Time at which this number of steps has ended."""
        took = steps * self.first_ns + self.more_ns * steps * (steps - 1) / 2
        return self.began_ns + round(took)

    def steps_by(self, now_ns: int) -> int:
        """The steps up to the one that runs now, that one included."""
        low, high = 1, self.steps
        while low < high:  # bounded: halves each time
            middle = (low + high) // 2
            low, high = (low, middle) if self.until_ns(middle) >= now_ns else (middle + 1, high)
        return low


class SimulatedServer:
    """store: the tier below, perhaps shared.  medium: its drives.  remote: the tier below that, or
    None.
    """

    def __init__(
        self,
        timeline: Timeline,
        times: ServerTimes,
        store: Blocks,
        medium: Device | None,
        *,
        unit_layers: int,
        finished: Callable[[SimulatedRequest], None],
        remote: RemoteLink | None = None,
    ) -> None:
        self._timeline, self._times, self.store = timeline, times, store
        self.calibration = times.calibration
        self.hbm = Blocks(self.calibration.hbm_tokens // BLOCK_TOKENS)
        self.io = ServerIo(timeline, times, medium, self._arrived_more)
        self._unit = unit_layers if times.system.layerwise else self.calibration.model.layers
        self._finished = finished
        self._remote = remote
        self.work = ServerWork()
        self._queue: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._computes = False
        self._current: SimulatedRequest | None = None  # in prefill
        self._stretch: _Stretch | None = None
        self._version = 0
        self._waits: tuple[str, Callable[[], None]] | None = None
        self._pending: set[int] = set()  # blocks on their way to the store

    @property
    def waiting_tokens(self) -> int:
        """Tokens of prompts that were not computed yet, including the running one."""
        waiting = sum(req.request.input_tokens - req.cached_tokens for req in self._queue)
        current = self._current
        return waiting + (self._missing(current) if current is not None else 0)

    def cached_blocks(self, ids: tuple[int, ...]) -> int:
        """Leading blocks that would not have to be computed."""
        return self.store.match(ids, self.hbm.match(ids))

    def arrive(self, number: int, request: TraceRequest) -> None:
        ids = request.hash_ids[: request.input_tokens // BLOCK_TOKENS]
        loadable = ids[: max(0, (request.input_tokens - 1) // BLOCK_TOKENS)]
        req = SimulatedRequest(number, request, self._timeline.now_ns, ids, loadable)
        self._queue.append(req)
        if self._remote is not None:
            self._remote.missed(loadable[self.cached_blocks(loadable) :])
        if self._times.system.read_ahead_nbytes:
            self._know_load(req, LoadKind.READ_AHEAD)
        if not self._computes:
            self._next()
        elif self._stretch is not None:
            self._interrupt()

    def _next(self) -> None:
        """A prefill step if a request may begin, else decode steps, else nothing."""
        if self._queue and self._fits(self._queue[0]):
            self._computes = True
            self._begin(self._queue.popleft())
        elif self._running:
            self._computes = True
            self._decode()
        else:
            if self._computes:
                self.io.post(StepBegan(self._timeline.now_ns, Phase.IDLE))
            self._computes = False

    def _fits(self, req: SimulatedRequest) -> bool:
        """Whether it fits into HBM with the running requests; a single request is always taken."""
        wanted = req.request.input_tokens + req.request.output_tokens
        used = sum(r.request.input_tokens + r.request.output_tokens for r in self._running)
        return not self._running or used + wanted <= self.calibration.hbm_tokens

    def _know_load(self, req: SimulatedRequest, kind: LoadKind) -> None:
        """Announces what the store has beyond HBM."""
        ids = req.loadable
        hit = self.hbm.match(ids)
        req.load_end = self.store.match(ids, hit)
        req.hit_tokens = hit * BLOCK_TOKENS
        req.loaded_tokens = (req.load_end - hit) * BLOCK_TOKENS
        if req.load_end == hit:
            return
        req.loads += 1
        req.load = f"{req.number}.{req.loads}"  # what an earlier one launched may still arrive
        model = self.calibration.model
        nbytes = req.loaded_tokens * model.kv_nbytes_per_token
        layers = model.layers if self._times.system.layerwise else 1
        self.store.touch(ids[: req.load_end])
        if self._remote is not None:
            self._remote.used(ids[hit : req.load_end], SECOND)
        known = LoadKnown(
            self._timeline.now_ns,
            req.load,
            layers=layers,
            layer_nbytes=nbytes // layers,
            tokens=min(self._times.server.chunk_tokens, req.request.input_tokens - self._cut(req)),
            prefix_tokens=self._cut(req),
            unit_layers=min(self._unit, layers),
            kind=kind,
        )
        self.io.load(known)

    def _cut(self, req: SimulatedRequest) -> int:
        return min(req.load_end * BLOCK_TOKENS, req.request.input_tokens - 1)

    def _plan(self, req: SimulatedRequest) -> None:
        """Decides, when its step starts, what is loaded: caches may have changed since arrival."""
        ids = req.loadable
        hit = self.hbm.match(ids)
        if req.load:
            more = self.store.match(ids, hit) > req.load_end and not self.io.is_issued(req.load)
            lost = hit * BLOCK_TOKENS < req.hit_tokens
            if lost or more or hit >= req.load_end:
                self.io.forget(req.load)
                req.load = ""
        if not req.load:
            self._know_load(req, LoadKind.LOAD)
        self.hbm.touch(ids[:hit])

    def _begin(self, req: SimulatedRequest) -> None:
        self._current = req
        self._plan(req)
        req.began_ns = self._timeline.now_ns
        tokens = min(self._times.server.chunk_tokens, self._missing(req))
        layers = self.calibration.model.layers
        loads = (req.load,) if req.load else ()
        self._prefill_began(req, tokens, loads)
        layer_ns = self._layer_ns(req, tokens)
        if req.load:
            self._group(req, tokens, layer_ns, 0, self._timeline.now_ns)
        else:
            self._compute(layer_ns * layers, lambda: self._chunk_done(req, tokens))

    def _missing(self, req: SimulatedRequest) -> int:
        return req.request.input_tokens - req.cached_tokens - req.computed_tokens

    def _prefill_began(self, req: SimulatedRequest, tokens: int, loads: tuple[str, ...]) -> None:
        begun = StepBegan(
            self._timeline.now_ns,
            Phase.PREFILL,
            layers=self.calibration.model.layers,
            tokens=tokens,
            context_tokens=req.cached_tokens + req.computed_tokens,
            loads=loads,
        )
        self.work.steps += 1
        self.io.post(begun)

    def _layer_ns(self, req: SimulatedRequest, tokens: int) -> int:
        """Time of a layer of the step, including the decode in it."""
        prefix = req.cached_tokens + req.computed_tokens
        layer_ns = self._times.layer_us(tokens, prefix) * 1000
        server = self._times.server
        if server.mixed and self._running:
            more_us = self._decode_us(0) + server.mixed_ms * 1000
            layer_ns += more_us * 1000 / self.calibration.model.layers
        return round(layer_ns)

    def _decode_us(self, more_tokens: int) -> float:
        """Time of a decode step of all running requests, with additional tokens of context."""
        for req in self._running:
            more_tokens += req.request.input_tokens + req.request.output_tokens - req.left
        return self._times.decode_us(len(self._running), more_tokens)

    def _compute(self, duration_ns: int, then: Callable[[], None]) -> None:
        self.work.prefill_ns += duration_ns
        self._timeline.at(self._timeline.now_ns + duration_ns, then)

    def _group(
        self, req: SimulatedRequest, tokens: int, layer_ns: int, layer: int, since_ns: int
    ) -> None:
        """Begins the layers of one unit, or waits until they are there."""
        layers, now_ns = self.calibration.model.layers, self._timeline.now_ns
        end = min(layers, layer + self._unit)
        if self.io.ready_layers(req.load) < (end if self._times.system.layerwise else 1):
            again = partial(self._group, req, tokens, layer_ns, layer, since_ns)
            self._waits = (req.load, again)
            return
        waited_ns = now_ns - since_ns
        if waited_ns:  # else the profile tells
            req.bubble_ns += waited_ns
            self.work.bubble_ns += waited_ns
            self.io.post(LayerBegan(now_ns, layer, waited_ns))
        duration_ns = layer_ns * (end - layer)
        if end < layers:
            ends_ns = now_ns + duration_ns
            self._compute(duration_ns, partial(self._group, req, tokens, layer_ns, end, ends_ns))
        else:
            self._compute(duration_ns, lambda: self._loaded_chunk_done(req, tokens))

    def _arrived_more(self, name: str) -> None:
        if self._waits is not None and self._waits[0] == name:
            _, wait = self._waits
            self._waits = None
            wait()

    def _loaded_chunk_done(self, req: SimulatedRequest, tokens: int) -> None:
        load, req.load = req.load, ""
        self._chunk_done(req, tokens)
        self.io.forget(load)

    def _chunk_done(self, req: SimulatedRequest, tokens: int) -> None:
        now_ns = self._timeline.now_ns
        req.computed_tokens += tokens
        self.io.post(StepEnded(now_ns))
        if self._times.server.mixed and self._running:
            self._decoded(1)
        missing = self._missing(req)
        if missing:
            more = min(self._times.server.chunk_tokens, missing)
            self._prefill_began(req, more, ())
            step_ns = self._layer_ns(req, more) * self.calibration.model.layers
            self._compute(step_ns, lambda: self._chunk_done(req, more))
            return
        self._first_token(req)
        self._next()

    def _first_token(self, req: SimulatedRequest) -> None:
        self._current = None
        req.first_ns = req.last_ns = self._timeline.now_ns
        req.left = max(1, req.request.output_tokens) - 1
        self.hbm.add(req.ids)
        self._store(req)
        if req.left:
            self._running.append(req)
        else:
            self._end(req)

    def _store(self, req: SimulatedRequest) -> None:
        """Offers the blocks that are neither stored nor on their way."""
        if self._times.system.tier == "none":
            return
        new = self.store.absent(req.ids, self._pending)
        if not new:
            return
        self._pending.update(new)
        pages = len(new) * BLOCK_TOKENS // self.calibration.page_tokens

        def stored() -> None:
            self._pending.difference_update(new)
            self.store.add(new)
            if self._remote is not None:
                self._remote.used(new, FIRST)

        self.io.store(f"w{req.number}", pages, stored)

    def _end(self, req: SimulatedRequest) -> None:
        self.work.done.append(req)
        self._finished(req)

    def _decode(self) -> None:
        """Steps until the first of the running requests ends."""
        now_ns = self._timeline.now_ns
        steps = min(req.left for req in self._running)
        batch = len(self._running)
        first_ns = self._decode_us(0) * 1000
        last_ns = self._decode_us(batch * (steps - 1)) * 1000
        more_ns = (last_ns - first_ns) / (steps - 1) if steps > 1 else 0.0
        context = sum(req.request.input_tokens for req in self._running)
        self._version += 1
        self._stretch = _Stretch(now_ns, first_ns, more_ns, steps, self._version)
        self.io.post(StepBegan(now_ns, Phase.DECODE, tokens=batch, context_tokens=context))
        self._end_stretch_at(steps)

    def _interrupt(self) -> None:
        """Stops decoding at the end of the current step, for a new request."""
        stretch = self._stretch
        assert stretch is not None, "a request decodes"
        if not self._fits(self._queue[0]):
            return
        steps = stretch.steps_by(self._timeline.now_ns)
        if steps < stretch.steps:
            self._version += 1
            stretch.version = self._version
            stretch.steps = steps
            self._end_stretch_at(steps)

    def _end_stretch_at(self, steps: int) -> None:
        stretch = self._stretch
        assert stretch is not None, "it has just begun"
        version = stretch.version
        self._timeline.at(stretch.until_ns(steps), lambda: self._stretch_done(version, steps))

    def _stretch_done(self, version: int, steps: int) -> None:
        stretch = self._stretch
        if stretch is None or stretch.version != version:
            return
        self.work.decode_ns += self._timeline.now_ns - stretch.began_ns
        self._stretch = None
        self._decoded(steps)
        self._next()

    def _decoded(self, steps: int) -> None:
        """Adds generated tokens to every running request."""
        now_ns, left = self._timeline.now_ns, []
        for req in self._running:
            req.left -= steps
            req.last_ns = now_ns
            if req.left:
                left.append(req)
            else:
                self._end(req)
        self._running = left

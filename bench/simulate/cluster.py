"""Servers, their nodes and a router on one virtual clock, and the results of a run.

Servers of a node share its drives and what is stored there.  A router sends each request to a
server when it arrives and never moves it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tutti.bench.simulate.cached_blocks import Blocks
from tutti.bench.simulate.calibration import ServerTimes
from tutti.bench.simulate.device import READ, WRITE, Device, Timeline
from tutti.bench.simulate.remote import Remote, RemoteLink
from tutti.bench.simulate.server import SimulatedRequest, SimulatedServer
from tutti.bench.statistics import queue_grows
from tutti.bench.traces import BLOCK_TOKENS, TraceRequest
from tutti.bench.ttft.metrics import spread
from tutti.errors import ConfigError

ROUND_ROBIN, PREFIX = "round-robin", "prefix"
ROUTERS = (ROUND_ROBIN, PREFIX)
_EVENTS_PER_REQUEST_MAX = 100_000


@dataclass(frozen=True)
class ClusterShape:
    """The size of a cluster.  media: per node, number of the drives (or sets) that the times name.

    unit_layers: layers per issue; more make the simulation faster and coarser.
    remote: the tier below the drives, shared by all nodes.
    """

    servers: int = 1
    servers_per_node: int = 1
    media: int = 1
    router: str = ROUND_ROBIN
    unit_layers: int = 1
    remote: Remote | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        counts = (self.servers, self.servers_per_node, self.media, self.unit_layers)
        if min(counts) < 1 or self.router not in ROUTERS:
            raise ConfigError(
                "servers, servers per node, media and layers per unit are at least 1; the router "
                f"is one of {', '.join(ROUTERS)}"
            )


class Cluster:
    """One run."""

    def __init__(self, times: ServerTimes, shape: ClusterShape) -> None:
        self.times, self.shape = times, shape
        self.timeline = Timeline()
        self.media: list[Device] = []
        self.servers: list[SimulatedServer] = []
        self.links: list[RemoteLink] = []
        self._turn = 0
        self._reqs: dict[int, SimulatedRequest] = {}
        calibration, tier = times.calibration, times.system.tier
        block_nbytes = BLOCK_TOKENS * calibration.model.kv_nbytes_per_token
        nodes = -(-shape.servers // shape.servers_per_node)
        copies = Blocks(int(shape.remote.nbytes // block_nbytes) if shape.remote else 0)
        for node in range(nodes):
            servers = min(shape.servers_per_node, shape.servers - node * shape.servers_per_node)
            drive, medium = times.drive, None
            if tier == "ssd":
                rates = (drive.read_bytes_per_s, drive.write_bytes_per_s)
                read, write = (rate * shape.media for rate in rates)
                medium = Device(self.timeline, read, write, drive.interference)
                self.media.append(medium)
            shared = Blocks(int(calibration.ssd_nbytes * shape.media // block_nbytes))
            link = None
            if shape.remote is not None and medium is not None:
                link = RemoteLink(self.timeline, shape.remote, copies, shared, medium, block_nbytes)
                self.links.append(link)
            for _ in range(servers):
                own = Blocks(int(calibration.dram_nbytes // block_nbytes) if tier == "dram" else 0)
                store = shared if tier == "ssd" else own
                server = SimulatedServer(
                    self.timeline,
                    times,
                    store,
                    medium,
                    unit_layers=shape.unit_layers,
                    finished=self._finished,
                    remote=link,
                )
                self.servers.append(server)

    def warm(self, requests: Sequence[TraceRequest]) -> None:
        """Fills the tiers as if these requests had been served; takes no simulated time."""
        for number, request in enumerate(requests):
            server = self.servers[number % len(self.servers)]
            ids = request.hash_ids[: request.input_tokens // BLOCK_TOKENS]
            server.hbm.add(ids)
            if self.times.system.tier != "none":
                server.store.add(ids)

    def run(self, requests: Sequence[TraceRequest]) -> dict[str, Any]:
        """Serves the requests at their timestamps, until the last token and the last stored page.

        Raises ConfigError without requests.
        """
        if not requests:
            raise ConfigError("no requests to simulate; give a workload")
        began_s = time.perf_counter()
        first_ms = min(request.timestamp_ms for request in requests)
        for number, request in enumerate(requests):
            at_ns = (request.timestamp_ms - first_ms) * 1_000_000
            self.timeline.at(at_ns, partial(self._arrive, number, request))
        gc.freeze()  # otherwise the collector scans the requests repeatedly: a third of the time
        try:
            self.timeline.run(_EVENTS_PER_REQUEST_MAX * len(requests))
        finally:
            gc.unfreeze()
        wall_s = time.perf_counter() - began_s
        self._check(requests)
        return self._numbers(requests, wall_s)

    def req(self, number: int) -> SimulatedRequest:
        """A request that was served."""
        return self._reqs[number]

    def _arrive(self, number: int, request: TraceRequest) -> None:
        self._route(request).arrive(number, request)

    def _route(self, request: TraceRequest) -> SimulatedServer:
        """Round robin, or the server with the fewest tokens to compute before the first token.

        These are queued tokens and tokens that are not cached there.  Ties are broken cyclically.
        """
        self._turn += 1
        count = len(self.servers)
        if self.shape.router == ROUND_ROBIN or count == 1:
            return self.servers[(self._turn - 1) % count]
        ids = request.hash_ids[: request.input_tokens // BLOCK_TOKENS]

        def cost(place: int) -> int:
            server = self.servers[(self._turn + place) % count]
            cached = server.cached_blocks(ids) * BLOCK_TOKENS
            return server.waiting_tokens + request.input_tokens - cached

        return self.servers[(self._turn + min(range(count), key=cost)) % count]

    def _finished(self, req: SimulatedRequest) -> None:
        self._reqs[req.number] = req

    def _check(self, requests: Sequence[TraceRequest]) -> None:
        """Checks that all requests were served; a difference is a defect of the simulator."""
        assert len(self._reqs) == len(requests), "every request ends"
        for req in self._reqs.values():
            tokens = req.cached_tokens + req.computed_tokens
            assert tokens == req.request.input_tokens, "every token is cached or computed"
        for server in self.servers:
            assert server.io.offered_pages == server.io.totals.written_pages
        moved = sum(medium.moved_nbytes(WRITE) for medium in self.media)
        written = sum(server.io.totals.written_pages for server in self.servers)
        fetched = sum(link.fetched_blocks for link in self.links)
        written += fetched * BLOCK_TOKENS // self.times.calibration.page_tokens
        nbytes = written * self.times.calibration.page_nbytes
        assert not self.media or moved == nbytes, "every byte is written once"

    def after(self, share: float) -> dict[str, Any]:
        """Results without the first requests of a run; share: of requests that are left out."""
        reqs = [self._reqs[number] for number in range(len(self._reqs))]
        return _request_numbers(reqs[round(share * len(reqs)) :])

    def _numbers(self, requests: Sequence[TraceRequest], wall_s: float) -> dict[str, Any]:
        reqs = [self._reqs[number] for number in range(len(requests))]
        span_s = max(req.last_ns for req in reqs) / 1e9
        tokens = sum(req.request.input_tokens for req in reqs)
        works = [server.work for server in self.servers]
        totals = [server.io.totals for server in self.servers]
        gpu_s = sum(work.prefill_ns + work.decode_ns + work.bubble_ns for work in works) / 1e9
        bubble_s = sum(work.bubble_ns for work in works) / 1e9
        return {
            "requests": len(reqs),
            "span_s": span_s,
            "rate": (len(reqs) - 1) / max(1e-9, max(req.arrived_ns for req in reqs) / 1e9),
            **_request_numbers(reqs),
            "input_tokens_per_s": tokens / span_s,
            "output_tokens_per_s": sum(req.request.output_tokens for req in reqs) / span_s,
            **self._remote_numbers(tokens),
            "bubble_s": bubble_s,
            "bubble_share": bubble_s / gpu_s if gpu_s else 0.0,
            "gpu_busy": gpu_s / span_s / len(works),
            "medium_read_busy": _mean([m.busy_s(READ) / span_s for m in self.media]),
            "medium_write_busy": _mean([m.busy_s(WRITE) / span_s for m in self.media]),
            "thread_busy": _mean([s.io.thread.busy_ns / 1e9 / span_s for s in self.servers]),
            "offered_pages": sum(server.io.offered_pages for server in self.servers),
            "written_pages": sum(one.written_pages for one in totals),
            "backlog_pages_max": max(server.io.backlog_pages_max for server in self.servers),
            "speed": {
                "wall_s": wall_s,
                "requests_per_s": len(reqs) / wall_s,
                "events_per_s": self.timeline.events / wall_s,
                "decisions": sum(server.io.decisions for server in self.servers),
                "times_real_time": span_s / wall_s,
            },
        }

    def _remote_numbers(self, tokens: int) -> dict[str, float]:
        """Tokens fetched, copied and late, per token of the prompts."""
        if not self.links:
            return {}
        return {
            f"remote_{name}": sum(getattr(link, f"{name}_blocks") for link in self.links)
            * BLOCK_TOKENS
            / tokens
            for name in ("fetched", "copied", "late")
        }


def _request_numbers(reqs: Sequence[SimulatedRequest]) -> dict[str, Any]:
    """Numbers of served requests."""
    ttft_ms = [(req.first_ns - req.arrived_ns) / 1e6 for req in reqs]
    gaps = [r for r in reqs if r.request.output_tokens > 1]
    tpot_ms = [(r.last_ns - r.first_ns) / 1e6 / (r.request.output_tokens - 1) for r in gaps]
    gaps_ms = sum(r.last_ns - r.first_ns for r in gaps) / 1e6
    pooled = sum(r.request.output_tokens - 1 for r in gaps)
    tokens = sum(req.request.input_tokens for req in reqs)
    return {
        "ttft_ms": spread(ttft_ms),
        # TPOT is a mean over requests, ITL over tokens.
        "tpot_ms": spread(tpot_ms),
        "itl_ms": {"mean": gaps_ms / pooled} if pooled else None,
        "hit_hbm": sum(req.hit_tokens for req in reqs) / tokens,
        "hit_store": sum(req.loaded_tokens for req in reqs) / tokens,
        "unstable": queue_grows([r.arrived_ns for r in reqs], [r.first_ns for r in reqs]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Requests for `tutti bench slack`: generated from a seed, or recorded in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti.base.checks import open_regular
from tutti.bench.simulate.hardware import SimulatedMachine
from tutti.errors import ConfigError


@dataclass(frozen=True)
class SlackRequest:
    """A hit of ``hit_tokens``, ``new_tokens`` to compute and store, ``out_tokens`` to decode."""

    arrival_ns: int
    hit_tokens: int
    new_tokens: int
    out_tokens: int


@dataclass(frozen=True)
class WorkloadKind:
    """How requests of a workload are drawn.

    hit, new, out: log-normal tokens as (median, sigma).  miss_share: share of requests without a
    hit, which compute their whole prompt.  load: offered work over the machine's capacity.
    stores: whether computed pages are written.
    """

    hit: tuple[float, float]
    new: tuple[float, float]
    out: tuple[float, float]
    miss_share: float
    load: float
    mixed: bool = True


KINDS = {
    # long chats: most of a prompt hits
    "chat": WorkloadKind((24_000, 0.7), (1_500, 0.7), (48, 0.5), 0.1, 0.7),
    # questions about documents, half of them new
    "documents": WorkloadKind((48_000, 0.4), (600, 0.6), (32, 0.5), 0.4, 0.7),
    # many short turns on long prefixes
    "agents": WorkloadKind((32_000, 0.5), (3_000, 0.4), (24, 0.4), 0.0, 0.8),
    # long answers: mostly decode steps
    "decode": WorkloadKind((12_000, 0.6), (1_500, 0.6), (300, 0.4), 0.1, 0.6),
    # nothing hits: only writes
    "cold": WorkloadKind((8_000, 0.6), (4_000, 0.6), (48, 0.5), 1.0, 0.7, False),
}

_TOKENS_MAX = 128_000


def generate(name: str, machine: SimulatedMachine, requests: int, seed: int) -> list[SlackRequest]:
    """Poisson arrivals of one kind.  Whole pages; the first request comes at 0.

    Raises ConfigError for a kind that does not exist.
    """
    if name not in KINDS:
        raise ConfigError(f"the workload {name!r} does not exist; use one of {', '.join(KINDS)}")
    kind, rng = KINDS[name], np.random.default_rng([seed, *name.encode()])
    page = machine.model.page_tokens

    def draw(tokens: tuple[float, float], unit: int) -> npt.NDArray[np.int64]:
        drawn = np.exp(rng.normal(np.log(tokens[0]), tokens[1], requests)).astype(np.int64)
        return np.clip(drawn // unit * unit, unit, _TOKENS_MAX)

    hit, new, out = draw(kind.hit, page), draw(kind.new, page), draw(kind.out, 1)
    miss = rng.random(requests) < kind.miss_share
    new = np.where(miss, np.minimum(hit + new, 16_384), new)
    hit = np.where(miss, 0, hit)
    busy_us = [
        _busy_us(machine, int(h), int(n), int(o)) for h, n, o in zip(hit, new, out, strict=True)
    ]
    gap_ns = np.mean(busy_us) / kind.load * 1e3
    arrivals = np.concatenate([[0.0], np.cumsum(rng.exponential(gap_ns, requests - 1))])
    rows = zip(arrivals.tolist(), hit.tolist(), new.tolist(), out.tolist(), strict=True)
    return [SlackRequest(round(a), h, n, o) for a, h, n, o in rows]


def _busy_us(machine: SimulatedMachine, hit: int, new: int, out: int) -> float:
    """GPU time of a request: its prefill or its load, and its part of decode steps of eight."""
    model = machine.model
    compute_us = model.layers * machine.layer_us(new, hit)
    load_us = machine.read_us(hit * model.token_nbytes) if hit else 0.0
    return max(compute_us, load_us) + out * machine.decode_us(8, 8 * (hit + new)) / 8


def in_bursts(requests: Sequence[SlackRequest], size: int = 8) -> list[SlackRequest]:
    """The same requests in groups of `size`, each at the arrival of its last request."""
    found = []
    for first in range(0, len(requests), size):
        group = requests[first : first + size]
        found += [replace(one, arrival_ns=group[-1].arrival_ns) for one in group]
    return found


def write_requests(requests: Sequence[SlackRequest], path: Path) -> None:
    """One JSON line for each request."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))


def recorded(path: Path) -> list[SlackRequest]:
    """Requests of a file as `write_requests` makes it, in order of arrival.  Raises ConfigError."""
    requests = []
    try:
        with open_regular(path) as file:
            lines = file.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name a file of requests") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            request = SlackRequest(**{name: int(value) for name, value in values.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}:{number} is not a request ({error}); each line is an object with "
                "arrival_ns, hit_tokens, new_tokens and out_tokens"
            ) from error
        if (
            min(request.arrival_ns, request.hit_tokens) < 0
            or min(request.new_tokens, request.out_tokens) < 1
        ):
            raise ConfigError(f"{path}:{number}: a request has a new and an output token at least")
        requests.append(request)
    if not requests:
        raise ConfigError(f"{path} holds no requests; name another file")
    return sorted(requests, key=lambda request: request.arrival_ns)

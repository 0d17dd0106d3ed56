"""Computes the numbers of one point from its requests: latencies, goodput, stability, hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.bench.statistics import queue_grows
from tutti.bench.ttft.client import Record
from tutti.errors import ConfigError

#: Limits that an SLO may name, in milliseconds.
LIMITS = ("ttft", "tpot", "e2e")
PERCENTS = (50, 90, 95, 99)
PLACES = ("device", "host", "storage", "unknown")

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T95_MANY = 1.96


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds; a request has to meet all of them."""

    limits: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return ",".join(f"{name}:{limit:g}" for name, limit in self.limits)

    def is_met(self, values: dict[str, float]) -> bool:
        """Whether a successful request with these latencies met all limits."""
        return all(values[name] <= limit for name, limit in self.limits)


def parse_slo(text: str) -> Slo:
    """An SLO from "ttft:1000,tpot:50".  Raises ConfigError."""
    limits = []
    for pair in text.split(","):
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in LIMITS or not 0 < limit < float("inf"):
            raise ConfigError(
                f"{text!r} is not an SLO; write e.g. ttft:1000,tpot:50 in milliseconds"
            )
        limits.append((name, limit))
    return Slo(tuple(limits))


def latencies_ms(record: Record) -> dict[str, float]:
    """Latencies of a successful request since its due time; ttft_sent since it was sent.

    tpot: mean time of the tokens after the first, 0 where there are none.
    """
    first, last = record.tokens[0], record.tokens[-1]
    after = last[1] - first[1]
    return {
        "ttft": 1e3 * (first[0] - record.due_s),
        "ttft_sent": 1e3 * (first[0] - record.sent_s),
        "tpot": 1e3 * (last[0] - first[0]) / after if after else 0.0,
        "e2e": 1e3 * (last[0] - record.due_s),
    }


def inter_token_ms(record: Record) -> list[float]:
    """Gaps between tokens.  An event with n tokens counts as n gaps of 1/n of the time."""
    gaps: list[float] = []
    for (before_s, before), (at_s, count) in zip(record.tokens, record.tokens[1:], strict=False):
        new = count - before
        gaps += [1e3 * (at_s - before_s) / new] * new
    return gaps


def summarise(
    records: Sequence[Record], slos: Sequence[Slo], *, warmup: int = 0, planned: int | None = None
) -> dict[str, Any]:
    """Numbers of one point.  Failed requests have no latency and miss every SLO.

    warmup: number of first requests to leave out.  planned: number of requests to be sent; with
    fewer records the point is partial, and the missing ones do not count as sent.
    """
    ordered = sorted(records, key=lambda record: record.due_s)
    kept = [record for record in ordered if record.number >= warmup]
    good = [record for record in kept if not record.error]
    values = [latencies_ms(record) for record in good]
    span_s = _span_s(kept)
    point: dict[str, Any] = {
        "requests": len(kept),
        "failed": len(kept) - len(good),
        "errors": _errors(kept),
        "warmup_requests": warmup,
        "partial": planned is not None and len(ordered) < planned,
        "duration_s": span_s,
        "request_throughput": len(good) / span_s if span_s else 0.0,
        "input_tokens_per_s": sum(r.input_tokens for r in good) / span_s if span_s else 0.0,
        "output_tokens_per_s": sum(r.tokens[-1][1] for r in good) / span_s if span_s else 0.0,
    }
    for name in ("ttft", "ttft_sent", "tpot", "e2e"):
        point[f"{name}_ms"] = spread([value[name] for value in values])
    point["itl_ms"] = spread([gap for record in good for gap in inter_token_ms(record)])
    point["late_ms"] = spread([1e3 * (r.sent_s - r.due_s) for r in kept])
    point["slo"] = {str(slo): _slo(slo, values, len(kept), span_s) for slo in slos}
    point["cached"] = _cached(good)
    point["unstable"] = is_unstable(kept)
    return point


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None for no values."""
    if not values:
        return None
    array = np.asarray(values, float)
    found = {"mean": float(array.mean()), "max": float(array.max())}
    return found | {f"p{p}": float(np.percentile(array, p)) for p in PERCENTS}


def is_unstable(records: Sequence[Record]) -> bool:
    """Whether the queue for a first token grew during all arrivals; latencies mean nothing then."""
    served = [record.tokens[0][0] if record.tokens else record.done_s for record in records]
    return queue_grows([record.due_s for record in records], served)


def mean_interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95 % interval (Student's t); for a single value both limits are that value."""
    n = len(values)
    if n == 0:
        raise ConfigError("no run to take the mean of; give at least one seed")
    mean = sum(values) / n
    if n == 1:
        return {"mean": mean, "low": mean, "high": mean, "n": 1}
    deviation = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
    quantile = _T95[n - 2] if n - 2 < len(_T95) else _T95_MANY
    half = quantile * deviation / n**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def _span_s(records: Sequence[Record]) -> float:
    """Seconds from the first due time to the last answer."""
    if not records:
        return 0.0
    return max(r.done_s for r in records) - min(r.due_s for r in records)


def _slo(
    slo: Slo, values: Sequence[dict[str, float]], sent: int, span_s: float
) -> dict[str, float]:
    met = sum(slo.is_met(value) for value in values)
    return {"goodput": met / span_s if span_s else 0.0, "attainment": met / sent if sent else 0.0}


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """Counts of the ten most frequent errors, grouped by their first words."""
    counts = Counter(record.error[:120] for record in records if record.error)
    return dict(counts.most_common(10))


def _cached(records: Sequence[Record]) -> dict[str, Any]:
    """Cached prompt tokens by source."""
    prompt = sum(record.input_tokens for record in records)
    found = {place: sum(r.cached.get(place, 0) for r in records) for place in PLACES}
    told = any(record.cached for record in records)
    return {
        "prompt_tokens": prompt,
        **{f"{place}_tokens": tokens for place, tokens in found.items()},
        "hit_rate": sum(found.values()) / prompt if prompt and told else None,
    }

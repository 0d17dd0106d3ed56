"""Makes the schedule of requests: absolute due times, the same for every system."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.errors import ConfigError

#: Limits of requests per second: beyond them, times in ns are all 0 or exceed 64 bits.
RATE_MIN, RATE_MAX = 1e-6, 1e6


def arrival_times_s(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is due, the first one at 0.

    Gaps are exponential with mean 1 / rate.  The draws depend only on the seed and are scaled, so
    that two rates differ only in speed.  Raises ConfigError for a rate that is not positive.
    """
    if not RATE_MIN <= rate <= RATE_MAX:
        raise ConfigError(
            f"{rate:g} requests a second; give a positive rate from {RATE_MIN:g} to {RATE_MAX:g}"
        )
    gaps = np.random.default_rng([seed, 3]).exponential(1.0, max(0, requests - 1))
    return [0.0, *(np.cumsum(gaps) / rate).tolist()][:requests]


def traced_times_s(arrivals_ms: Sequence[int | None], rate: float) -> list[float]:
    """The arrivals of a trace in seconds from 0, scaled to a mean of `rate` requests per second.

    Raises ConfigError for requests without a time, out of order or all at once.
    """
    known = [at for at in arrivals_ms if at is not None]
    if len(known) < len(arrivals_ms) or known != sorted(known):
        raise ConfigError("not every request has a time, in order; use --arrivals poisson")
    span_ms = known[-1] - known[0]
    if len(known) > 1 and not span_ms:
        raise ConfigError("the trace's requests all come at once; use --arrivals poisson")
    scale = (len(known) - 1) / rate / span_ms if span_ms else 0.0
    return [(at - known[0]) * scale for at in known]

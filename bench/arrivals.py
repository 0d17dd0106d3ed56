"""When requests are due: an absolute Poisson schedule, the same for every system."""

from __future__ import annotations

import numpy as np

from tutti.errors import ConfigError


def arrival_times_s(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is due, the first one at 0.

    Gaps are exponential with mean 1 / rate.  The draws depend on the seed alone and are scaled, so
    that two rates differ in nothing but speed.  Raises ConfigError for a rate that is not positive.
    """
    if not rate > 0 or not np.isfinite(rate):
        raise ConfigError(f"{rate} requests a second; give a positive rate")
    gaps = np.random.default_rng([seed, 3]).exponential(1.0, max(0, requests - 1))
    return [0.0, *(np.cumsum(gaps) / rate).tolist()][:requests]

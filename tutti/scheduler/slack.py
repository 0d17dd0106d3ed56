"""Expected times: a profile, corrected by what was measured since.

A profile is a table of the past.  Each kind of work has a factor that follows the ratio of measured
to expected time (an exponentially weighted mean within bounds).  When several measurements in a row
contradict the factor, it starts anew from the last of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tutti.errors import ConfigError
from tutti.scheduler.request import Profile

_WEIGHT = 0.2
_FACTOR_MAX = 4.0
#: A measurement this many times off contradicts the factor ...
_CONTRADICTION = 1.5
#: ... and so many in a row replace it.
_CONTRADICTIONS_MAX = 4
#: No layer, step or launch takes longer: the clock jumped.
_ABSURD_NS = 600 * 10**9


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over expected time of one kind of work."""

    factor: float = 1.0
    contradictions: int = 0

    def after(self, expected_ns: int, measured_ns: int) -> Correction:
        """The correction after one more measurement.  Absurd ones are left out.

        expected_ns: what the profile says, without this correction.
        """
        if not 0 < measured_ns < _ABSURD_NS or expected_ns <= 0:
            return self
        ratio = min(_FACTOR_MAX, max(1 / _FACTOR_MAX, measured_ns / expected_ns))
        if max(ratio / self.factor, self.factor / ratio) < _CONTRADICTION:
            return Correction(self.factor + _WEIGHT * (ratio - self.factor))
        if self.contradictions + 1 >= _CONTRADICTIONS_MAX:
            return Correction(ratio)
        factor = self.factor + _WEIGHT * (ratio - self.factor)
        return Correction(factor, self.contradictions + 1)


@dataclass(frozen=True, slots=True)
class Corrections:
    """One for each kind of work."""

    layer: Correction = field(default_factory=Correction)
    decode: Correction = field(default_factory=Correction)
    read: Correction = field(default_factory=Correction)
    write: Correction = field(default_factory=Correction)

    def measured(self, kind: str, expected_ns: int, measured_ns: int) -> Corrections:
        """After a measurement of "layer", "decode", "read" or "write"; see Correction.after."""
        after: Correction = getattr(self, kind).after(expected_ns, measured_ns)
        return replace(self, **{kind: after})


NONE = Corrections()


class Estimates:
    """Expected times in nanoseconds.

    Raises ConfigError where the profile says something absurd: negative, not a number, infinite.
    """

    def __init__(self, profile: Profile, corrections: Corrections = NONE) -> None:
        self._profile = profile
        self._corrections = corrections

    @property
    def interference(self) -> float:
        """How many times as long a transfer takes beside the other direction; 1 at least."""
        factor = self._profile.interference
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"the profile's interference is {factor}; measure it again")
        return max(1.0, factor)

    def layer_ns(self, tokens: int, prefix_tokens: int) -> int:
        """Computing one layer of a prefill."""
        return _ns(self._profile.layer_us(tokens, prefix_tokens), self._corrections.layer, "layer")

    def decode_ns(self, batch: int, context_tokens: int) -> int:
        """A decode step."""
        us = self._profile.decode_us(batch, context_tokens)
        return _ns(us, self._corrections.decode, "decode")

    def read_ns(self, nbytes: int) -> int:
        """A read alone on the device; nothing takes no time."""
        if not nbytes:
            return 0
        return _ns(self._profile.read_us(nbytes), self._corrections.read, "read")

    def write_ns(self, nbytes: int) -> int:
        """A write alone on the device; nothing takes no time."""
        if not nbytes:
            return 0
        return _ns(self._profile.write_us(nbytes), self._corrections.write, "write")


def _ns(us: float, correction: Correction, what: str) -> int:
    if not (math.isfinite(us) and us >= 0):
        raise ConfigError(f"the profile says that a {what} takes {us} us; measure it again")
    return round(us * 1000 * correction.factor)


def is_worth_loading(
    estimates: Estimates, *, layers: int, new_tokens: int, hit_tokens: int, nbytes: int
) -> bool:
    """Break-even: whether loading a hit ends sooner than computing it.

    nbytes: of the hit, over all layers.  Loading layer by layer takes the first layer's load, then
    for each layer the longer of load and compute, then the last layer's compute.
    """
    if hit_tokens <= 0:
        return False
    load_ns = estimates.read_ns(-(-nbytes // layers))
    compute_ns = estimates.layer_ns(new_tokens, hit_tokens)
    with_load_ns = load_ns + (layers - 1) * max(load_ns, compute_ns) + compute_ns
    return with_load_ns < layers * estimates.layer_ns(new_tokens + hit_tokens, 0)

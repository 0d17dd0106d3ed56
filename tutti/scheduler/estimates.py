"""Expected times: a profile, corrected by what was measured since.

Each kind of work has a factor that follows the ratio of measured to expected time, within bounds.
Several measurements in a row that contradict a factor replace it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tutti.errors import ConfigError
from tutti.scheduler.loads_and_writes import Profile

_WEIGHT = 0.2
_FACTOR_MIN, _FACTOR_MAX = 1 / 8, 8.0
#: A measurement this many times off contradicts the factor ...
_CONTRADICTION = 1.5
#: ... and so many in a row replace it.
_CONTRADICTIONS_MAX = 4
#: Growth of ``best`` with each measurement.  Work is slow if it takes so many times as long as at
#: its best; two in a row raise ``slowed``.  Weight of slow work in ``slowed``.  Fast work scales
#: the excess of ``slowed`` over 1 by the fourth number, and subtracts the fifth.
_FORGETS, _SLOW, _SLOWED_WEIGHT, _SLOWED_LEFT, _SLOWED_END = 1.005, 2.0, 0.25, 0.98, 0.001
#: From this interference on, reads and writes take turns.
TURNS_FROM = 2.0
#: No layer, step or transfer takes longer: the clock jumped.
ABSURD_NS = 600 * 10**9
#: Profiles are asked once for each of so many amounts.
_CACHE_MAX = 4096


@dataclass(slots=True)
class Correction:
    """Measured over expected time of one kind of work.

    factor: smoothed.  best: the lowest ratio, which slowly rises.  last: the last ratio over
    ``best``.  slowed: how many times as long as at its best a lot of work takes, as on a drive
    whose fast cache is full; 1 without such a loss.  learns: whether measurements change it.
    """

    factor: float = 1.0
    contradictions: int = 0
    best: float = 0.0  # nothing was measured
    last: float = 1.0
    slowed: float = 1.0
    learns: bool = True

    @property
    def sustained(self) -> float:
        """The factor of much work over elapsed time: at its best, for 1 / slowed of the time."""
        return self.best * self.slowed if self.slowed > 1 else self.factor

    def measured(self, expected_ns: int, measured_ns: int) -> bool:
        """Takes one more measurement; False for an absurd one, which changes nothing.

        expected_ns: by the profile, without this correction.
        """
        if not 0 < measured_ns < ABSURD_NS or expected_ns <= 0:
            return False
        if not self.learns:
            return True
        ratio, factor = measured_ns / expected_ns, self.factor
        ratio = min(_FACTOR_MAX, max(_FACTOR_MIN, ratio))
        self.best = min(self.best * _FORGETS or math.inf, max(ratio, factor))
        before, self.last = self.last, ratio / self.best
        if self.last < _SLOW:
            self.slowed = max(1.0, 1 + _SLOWED_LEFT * (self.slowed - 1) - _SLOWED_END)
        elif self.slowed > 1 or before >= _SLOW:
            self.slowed += _SLOWED_WEIGHT * (self.last - self.slowed)
        if ratio / factor < _CONTRADICTION and factor / ratio < _CONTRADICTION:
            self.contradictions = 0
        else:
            self.contradictions += 1
            if self.contradictions >= _CONTRADICTIONS_MAX:
                self.factor, self.contradictions = ratio, 0
                return True
        self.factor = factor + _WEIGHT * (ratio - factor)
        return True


class Estimates:
    """Expected times in nanoseconds: the profile's (base) times a correction for each kind of work.

    Raises ConfigError where the profile gives something absurd: negative, not a number, infinite.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.layer = Correction()
        self.decode = Correction()
        self.read = Correction()
        self.write = Correction()
        self.both = Correction()  # of the interference
        self._bases: dict[tuple[str, int, int], int] = {}
        self._interference = 1.0  # as last asked

    @property
    def interference(self) -> float:
        """How many times as long a transfer takes during one in the other direction; at least 1."""
        factor = self.base_interference * self.both.factor
        return factor if factor > 1.0 else 1.0

    @property
    def base_interference(self) -> float:
        """By the profile alone; at least 1."""
        factor = self._profile.interference
        if factor != self._interference:
            if not (math.isfinite(factor) and factor > 0):
                raise ConfigError(f"the profile's interference is {factor}; measure it again")
            self._interference = factor
        return factor if factor > 1.0 else 1.0

    def layer_base_ns(self, tokens: int, prefix_tokens: int) -> int:
        """Computing one layer of a prefill."""
        return self._base_ns("layer", tokens, prefix_tokens)

    def decode_base_ns(self, batch: int, context_tokens: int) -> int:
        """A decode step."""
        return _ns(self._profile.decode_us(batch, context_tokens), "decode")

    def read_base_ns(self, nbytes: int, parts: int = 1) -> int:
        """A read alone on the device, divided by its number of parts."""
        return self._base_ns("read", nbytes, parts)

    def write_base_ns(self, nbytes: int) -> int:
        """A write alone on the device."""
        return self._base_ns("write", nbytes, 1)

    def sustained_ns(self, write_ns: int) -> float:
        """Time per page if writes get all the time that they can use.  write_ns: by the profile."""
        together = self.interference
        if together >= TURNS_FROM:
            together = 1.0
        return max(1.0, write_ns * self.write.sustained * together)

    def layer_ns(self, tokens: int, prefix_tokens: int) -> int:
        """As layer_base_ns, corrected."""
        return round(self.layer_base_ns(tokens, prefix_tokens) * self.layer.factor)

    def read_ns(self, nbytes: int) -> int:
        """As read_base_ns, corrected."""
        return round(self.read_base_ns(nbytes) * self.read.factor)

    def factors(self) -> dict[str, float]:
        """Every correction, by the kind of work."""
        names = ("layer", "decode", "read", "write", "both")
        return {name: getattr(self, name).factor for name in names}

    def _base_ns(self, what: str, first: int, second: int) -> int:
        key = (what, first, second)
        found = self._bases.get(key)
        if found is None:
            if len(self._bases) >= _CACHE_MAX:
                self._bases.clear()
            found = self._bases[key] = self._ask(what, first, second)
        return found

    def _ask(self, what: str, first: int, second: int) -> int:
        if what == "layer":
            return _ns(self._profile.layer_us(first, second), what)
        if not first:
            return 0
        if what == "read":
            return _ns(self._profile.read_us(first) / second, what)
        return _ns(self._profile.write_us(first), what)


def _ns(us: float, what: str) -> int:
    if not (math.isfinite(us) and us >= 0):
        raise ConfigError(f"by the profile a {what} takes {us} us; measure it again")
    return round(us * 1000)


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

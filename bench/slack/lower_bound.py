"""The least that prefills wait under any schedule: a proven lower bound, not an estimate.

The bound covers the sum of two waits: for layers, and for the rest of a decode step that runs when
a request arrives.  A change of the first shifts the second, and a load can be read during it, so
neither has such a bound alone.

`least_ns` holds for every order of reads and writes, also if a scheduler knows the future, under
these rules of the simulated server:

* Requests arrive at given times and prefill in that order.  A prefill is not interrupted.  The GPU
  idles or decodes only while no request waits, and finishes its decode step then.
* A layer begins once its part of its request's load is read.  A load is known when its request
  arrives.
* A put is offered when its prefill ends.  Until all of it is written, all of it lies in one of two
  memories (locked or staged).  Puts larger than both are not stored.  Of the others all but
  ``droppable`` pages are stored.
* Neither direction of the drive is faster than alone.  While both work, each is slower by
  ``interference`` at least.  So time t with r of reading and w of writing (as if alone) has
  t >= r + k w, where k = min(1, interference - 1): with b of both directions at once,
  t >= r + w + b - 2 b / interference, and b <= interference * w.

Proof.  A busy period is a run of prefills without a gap, from the arrival of its first request to
its last prefill's end.  All its reads lie in it: they are not known earlier, and a prefill ends
after its load was read.  Its waiting is its duration minus its compute time.  In it, a prefill ends
no earlier than each of these sums:

1. the end of the previous prefill or its own arrival + its own layers;
2. the arrival of a request + the reads from that one on + the layers after each read;
3. the first arrival + all reads of the busy period up to a layer + the writes without which memory
   would have overflowed at the end of the previous prefill + the layers after that one;
4. the first arrival + the reads so far + the writes without which memory would overflow now.

In the gap after it the drive writes at full speed.  Each schedule divides the requests into busy
periods.  A busy period affects later ones only by the number of waiting pages, because arrivals are
fixed; with fewer pages no schedule waits longer.  A dynamic programme over (first request, waiting
pages) finds the cheapest division.  A busy period may also be longer than necessary.  For k = 1
this writes nothing more, because the gap gets shorter by as much; otherwise see
`_with_more_writes`.  Rounding always makes the bound lower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
#: Numbers of waiting pages that are distinguished; for more, the unit is several pages.
_STATES_MAX = 512


@dataclass(frozen=True)
class Prefill:
    """A request.  layers_ns: compute time of each.  read_ns: to read one.  pages: of its put."""

    arrival_ns: float
    layers_ns: tuple[float, ...]
    read_ns: float
    pages: int

    def pipeline_ns(self, latency_ns: float) -> float:
        """Time from the first read to the end of the last layer, if nothing else is read."""
        longest = left = sum(self.layers_ns)
        if self.read_ns:
            for number, layer_ns in enumerate(self.layers_ns, 1):
                longest = max(longest, number * self.read_ns + latency_ns + left)
                left -= layer_ns
        return longest


@dataclass(frozen=True)
class Rules:
    """Constants of all schedules.  memories: pages of the two.  page_ns: time to write one."""

    memories: tuple[int, int]
    page_ns: float
    interference: float
    latency_ns: float = 0.0

    @property
    def cost(self) -> float:
        """Least time that a write takes from reads, as a share of the write's own time."""
        return min(1.0, max(1.0, self.interference) - 1)


def least_ns(prefills: Sequence[Prefill], rules: Rules, droppable: int = 0) -> float:
    """The least sum of all waiting.  droppable: pages that need not be stored."""
    largest = max(rules.memories)
    pages = [one.pages if one.pages <= largest else 0 for one in prefills]
    room = [most + droppable for most in most_waiting(pages, rules.memories)]
    states = min(max(room, default=0), sum(pages)) + 1
    unit = math.ceil(states / _STATES_MAX)
    # Least waiting before the busy period that begins with a request, by waiting pages.
    least = [np.full(math.ceil(states / unit) + 1, math.inf) for _ in range(len(prefills) + 1)]
    least[0][0] = 0.0
    for first, before in enumerate(least[:-1]):
        _with_more_writes(before, rules, unit)
        _busy_periods(prefills, pages, room, rules, least, first, unit)
    return float(least[-1].min())


def _busy_periods(
    prefills: Sequence[Prefill],
    pages: Sequence[int],
    room: Sequence[int],
    rules: Rules,
    least: Sequence[_Floats],
    first: int,
    unit: int,
) -> None:
    """Updates `least` with all busy periods that begin with request `first`.

    waiting: pages at its beginning and those put since then, if none is written.
    """
    (known,) = np.nonzero(np.isfinite(least[first]))
    before_ns, waiting = least[first][known], known * float(unit)
    began_ns = prefills[first].arrival_ns
    ends_ns, needed_ns = np.full(len(known), began_ns), np.zeros(len(known))
    computed_ns = read_ns = began_ns  # if it did only that
    free_ns = began_ns  # when the drive would be, without writes
    for number in range(first, len(prefills)):
        one = prefills[number]
        compute_ns, reads_ns = sum(one.layers_ns), len(one.layers_ns) * one.read_ns
        ends_ns = np.maximum(ends_ns, one.arrival_ns) + compute_ns  # 1
        if reads_ns:
            pipeline_ns = one.pipeline_ns(rules.latency_ns)
            free_ns = max(free_ns, one.arrival_ns)
            ends_ns = np.maximum(ends_ns, free_ns + pipeline_ns)  # 2
            ends_ns = np.maximum(ends_ns, read_ns + needed_ns + pipeline_ns)  # 3
            free_ns, read_ns = free_ns + reads_ns, read_ns + reads_ns
        computed_ns += compute_ns
        waiting = waiting + pages[number]
        needed_ns = rules.cost * rules.page_ns * np.maximum(0.0, waiting - room[number])
        ends_ns = np.maximum(ends_ns, read_ns + needed_ns)  # 4
        waited_ns = before_ns + ends_ns - computed_ns
        after = least[number + 1]
        if number + 1 == len(prefills):
            after[0] = min(after[0], waited_ns.min(initial=math.inf))
            break
        arrival_ns = prefills[number + 1].arrival_ns
        both_ns = (ends_ns - read_ns) / rules.cost if rules.cost else math.inf
        left = np.floor((waiting - (arrival_ns - ends_ns + both_ns) / rules.page_ns) / unit)
        fits = ends_ns <= arrival_ns  # else the next request belongs to this busy period
        column = np.clip(left, 0, len(after) - 1).astype(np.intp)
        np.minimum.at(after, column[fits], waited_ns[fits])


def _with_more_writes(least: _Floats, rules: Rules, unit: int) -> None:
    """Allows busy periods that are longer than necessary, to write more.

    This helps only if both directions together are faster than one: an extension by x ns then does
    x / k ns of writing instead of x.
    """
    if not 0 < rules.cost < 1:
        return
    unit_ns = unit * rules.page_ns * rules.cost / (1 - rules.cost)
    for column in range(len(least) - 2, -1, -1):
        least[column] = min(least[column], least[column + 1] + unit_ns)


def most_waiting(pages: Sequence[int], memories: tuple[int, int]) -> list[int]:
    """For each put: the most pages that can wait when it is offered, with it.

    A memory holds whole puts.
    """
    memories = (min(memories[0], sum(pages)), min(memories[1], sum(pages)))  # may be unbounded
    found, sums = [], 1  # bit n: some of the puts before have n pages together
    mask = (1 << max(memories) + 1) - 1

    def fullest(most: int) -> int:
        return (sums & (1 << most + 1) - 1).bit_length() - 1

    for put in pages:
        ways = [(mine, other) for mine, other in (memories, memories[::-1]) if put <= mine]
        found.append(max((put + fullest(a - put) + fullest(b) for a, b in ways), default=0))
        sums = (sums | sums << put) & mask
    return found

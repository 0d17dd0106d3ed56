"""Selects the hits that are worth loading."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from tutti.integration.sglang.direct.kv_pools import KvPoolGroup
from tutti.integration.sglang.direct.model_steps import STEPS, StepsWatch
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.scheduler.estimates import Estimates, is_worth_loading
from tutti.scheduler.loads_and_writes import Profile

PAGES_MAX = 1 << 40
#: Number of measured prefills before they are used; the first ones include compilation.
_PREFILLS_MIN = 5
#: One request in so many loads whatever it finds, to notice that the medium has become faster.
_TRIALS = 64

_log = logging.getLogger(__name__)


class Admission:
    """Decides which hits are worth loading.

    page_nbytes: bytes to read per page.  recompute_s: time to compute one page's KV; 0 (unknown):
    ``pays`` decides, or every hit is taken.  pages_min: shorter hits are never taken.
    load_s_max: longest time for the load of a batch; 0: unlimited.  pays: see `break_even`.
    The bandwidth is that of past loads (exponential mean, weight one quarter).
    """

    def __init__(
        self,
        page_nbytes: int,
        recompute_s: float,
        pages_min: int,
        load_s_max: float = 0.0,
        pays: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._page_nbytes = page_nbytes
        self._recompute_s = recompute_s
        self._pages_min = max(1, pages_min)
        self._load_s_max = load_s_max
        self._pays = pays
        self._seconds_per_byte = 0.0
        self._is_logged = False

    @property
    def timed(self) -> bool:
        """Whether the time of a load is limited."""
        return self._load_s_max > 0

    @property
    def page_s(self) -> float:
        """Measured time to load one page; 0 before the first load."""
        return self._seconds_per_byte * self._page_nbytes

    def loaded(self, nbytes: int, duration_s: float) -> None:
        """Records the time of a load."""
        if nbytes:
            measured = duration_s / nbytes
            old = self._seconds_per_byte or measured
            self._seconds_per_byte = old + (measured - old) / 4

    def bounds(
        self, staged: int = 0, *, pages: int = 0, asked: int = 0, rid: str = ""
    ) -> tuple[int, int]:
        """(shortest, longest) prefix to load, in pages; (1, 0) for none.

        staged: leading pages that were read ahead, and take no time.  pages, asked: pages of the
        longest prefix that can be restored, and of the look-up.  rid: the request.  Its hash tells
        whether it is a trial: ranks refuse different hits, but must try the same ones.
        """
        is_trial = xxhash.xxh3_64_intdigest(rid.encode(errors="replace")) % _TRIALS == 0
        if pages and not is_trial and self._loses(pages, asked):
            if not self._is_logged:
                self._is_logged = True
                _log.info(
                    "computing a hit of %d pages: as measured, loading it would take longer;"
                    " further ones are counted in tutti:refused_pages_total",
                    pages,
                )
            return 1, 0
        return self._pages_min, staged + self.fitting()

    def _loses(self, pages: int, asked: int) -> bool:
        if self._recompute_s:
            return self.page_s > self._recompute_s
        return self._pays is not None and not self._pays(pages, asked)

    def fitting(self) -> int:
        """Number of pages that can be read in the time limit of a batch's load."""
        if not self.timed or not self.page_s:
            return PAGES_MAX
        return max(1, int(self._load_s_max / self.page_s))


def break_even(
    profile: Profile,
    *,
    layers: int,
    page_tokens: int,
    page_nbytes: int,
    steps: StepsWatch | None = None,
) -> Callable[[int, int], bool]:
    """A function (pages, asked) that returns whether loading a hit of so many of the asked pages is
    faster than computing it.

    steps: for a profile whose compute times are estimates.  They are scaled by the median ratio of
    measured to estimated times of the last long prefills; every hit pays until there are five.
    """
    estimates = Estimates(profile)
    seen = 0

    def is_known() -> bool:
        nonlocal seen
        if steps is None:
            return True
        if seen != steps.prefills_seen and len(steps.prefills) >= _PREFILLS_MIN:
            seen = steps.prefills_seen
            estimates.layer.factor = statistics.median(
                took_s * 1e9 / max(1, layers * estimates.layer_base_ns(tokens, context))
                for tokens, context, took_s in steps.prefills
            )
        return seen > 0

    def pays(pages: int, asked: int) -> bool:
        return not is_known() or is_worth_loading(
            estimates,
            layers=layers,
            new_tokens=max(1, asked - pages) * page_tokens,
            hit_tokens=pages * page_tokens,
            nbytes=pages * page_nbytes,
        )

    return pays


def admission_for(
    options: Mapping[str, Any], stored_pools: Sequence[StoredPool], group: KvPoolGroup
) -> Admission:
    """The Admission for the linker's options."""
    by_page = [stored_pool for stored_pool in stored_pools if not stored_pool.kv_pool.trailing]
    nbytes = sum(stored_pool.page_nbytes for stored_pool in by_page)
    schedule = stored_pools[0].store.config.schedule
    pays = None
    if schedule is not None:
        # Estimates are of another GPU: they need measured prefills.
        is_estimated = "compute" in getattr(schedule.profile, "estimated", ())
        pays = break_even(
            schedule.profile,
            layers=group.layers,
            page_tokens=group.page_size,
            page_nbytes=nbytes,
            steps=STEPS if is_estimated else None,
        )
    return Admission(
        nbytes,
        options["recompute_us_per_token"] * group.page_size / 1e6,
        -(-options["min_tokens"] // group.page_size),
        options["max_load_ms"] / 1e3,
        pays,
    )

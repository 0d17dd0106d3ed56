"""The linker's pure policies: breaker, pins, break-even, hits of several pools, chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.base.breaker import Breaker, crawls
from tutti.errors import ConfigError
from tutti.integration.sglang.direct.admission import (
    PAGES_MAX,
    Admission,
    admission_for,
    break_even,
)
from tutti.integration.sglang.direct.chains import Chains
from tutti.integration.sglang.direct.lookups import Window, restorable
from tutti.integration.sglang.direct.model_steps import StepsWatch
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.profile import TableProfile, estimated_document
from tutti.scheduler.roofline import DENSE_MODELS, GPUS


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_breaker_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(3, 5.0, Clock())
    for _ in range(5):
        breaker.failure()
        breaker.failure()
        assert breaker.closed
        breaker.success()
    for _ in range(3):
        breaker.failure()
    assert not breaker.closed
    assert breaker.opened == 1


def test_an_open_breaker_is_probed_once_a_pause_until_it_succeeds() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    assert not breaker.take_probe(), "nothing to probe while closed"
    breaker.failure()
    assert not breaker.take_probe()
    clock.now_s += 5.0
    assert breaker.take_probe()
    assert not breaker.take_probe(), "one probe a pause"
    breaker.failure()
    clock.now_s += 4.9
    assert not breaker.take_probe(), "a failed probe starts the pause again"
    clock.now_s += 0.2
    assert breaker.take_probe()
    breaker.success()
    assert breaker.closed
    assert not breaker.take_probe()


@pytest.mark.parametrize(("failures", "pause_s"), [(0, 1.0), (1, 0.0)])
def test_a_breaker_checks_its_numbers(failures: int, pause_s: float) -> None:
    with pytest.raises(ConfigError, match="positive"):
        Breaker(failures, pause_s, Clock())


def test_only_a_long_and_slow_wait_crawls() -> None:
    assert crawls(10_000_000, 2.0, least_mbs=20, patience_s=1.0)
    assert not crawls(50_000_000, 2.0, least_mbs=20, patience_s=1.0)
    assert not crawls(0, 0.9, least_mbs=20, patience_s=1.0), "short waits say nothing"
    assert not crawls(1, 100.0, least_mbs=0, patience_s=1.0), "zero switches it off"


def test_short_hits_are_not_taken() -> None:
    assert Admission(1000, 0.0, 3).bounds() == (3, PAGES_MAX)
    assert Admission(1000, 0.0, 0).bounds() == (1, PAGES_MAX)


def test_hits_that_load_slower_than_they_compute_are_refused_and_tried_again() -> None:
    admission = Admission(1000, 0.001, 1)
    assert admission.bounds() == (1, PAGES_MAX), "nothing was measured yet"
    admission.loaded(1000, 0.002)
    assert admission.bounds() == (1, PAGES_MAX), "nothing was found, so nothing is refused"
    taken = [admission.bounds(pages=1, rid=f"r{number}")[1] > 0 for number in range(640)]
    assert taken.count(True) == 13, "one request in 64 loads it, to measure again"
    for _ in range(20):
        admission.loaded(1000, 0.0001)
    assert admission.bounds() == (1, PAGES_MAX)


class Machine:
    """A profile: 100 us a layer for 16 tokens, and so much for a byte read."""

    interference = 1.0

    def __init__(self, us_per_byte: float) -> None:
        self._us_per_byte = us_per_byte

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return 100 * new_tokens / 16

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return 100.0

    def read_us(self, nbytes: int) -> float:
        return nbytes * self._us_per_byte

    def write_us(self, nbytes: int) -> float:
        return nbytes * self._us_per_byte


@pytest.mark.parametrize(("us_per_byte", "pays"), [(0.01, True), (2.0, False)])
def test_with_a_profile_a_hit_that_computes_sooner_is_not_taken(
    us_per_byte: float, pays: bool
) -> None:
    # Four layers of 1000 bytes a page; computing a page takes 400 us.
    rule = break_even(Machine(us_per_byte), layers=4, page_tokens=16, page_nbytes=4000)
    admission = Admission(4000, 0.0, 1, pays=rule)
    assert (admission.bounds(pages=8, asked=10)[1] > 0) == pays
    assert admission.bounds(pages=0, asked=10)[1] > 0, "all of it is staged: nothing is read"
    named = Admission(4000, 0.001, 1, pays=rule)
    assert named.bounds(pages=8, asked=10)[1] > 0, "a time that is given counts before a profile"


@pytest.mark.parametrize("is_measured", [False, True])
def test_only_measured_computing_refuses_hits(is_measured: bool) -> None:
    document = estimated_document(DENSE_MODELS["llama-3.1-8b"], GPUS["H100"])
    document["compute"]["estimated"] = not is_measured
    config = SimpleNamespace(schedule=Schedule(TableProfile(document)))
    pool: Any = SimpleNamespace(
        kv_pool=SimpleNamespace(trailing=False),
        page_nbytes=4000,
        store=SimpleNamespace(config=config),
    )
    group: Any = SimpleNamespace(layers=4, page_size=16)
    options = {"recompute_us_per_token": 0.0, "min_tokens": 0, "max_load_ms": 0.0}
    admission = admission_for(options, [pool], group)
    # A page's KV is computed in less time than the drive takes for any command.
    assert (admission.bounds(pages=1, asked=1) == (1, 0)) is is_measured


@pytest.mark.parametrize(("took_s", "pays"), [(0.01, False), (1.0, True)])
def test_prefills_that_were_measured_say_what_a_hit_saves(took_s: float, pays: bool) -> None:
    """By the profile each takes 51 ms; the first of all compiles."""
    steps = StepsWatch()
    rule = break_even(Machine(0.3), layers=4, page_tokens=16, page_nbytes=4000, steps=steps)
    for number in range(5):
        assert rule(64, 64), "too few were measured, and the profile's own times are estimates"
        steps.prefills.append((2048, 0, took_s if number else 60.0))
        steps.prefills_seen += 1
    assert rule(64, 64) == pays
    for _ in range(15):
        steps.prefills.append((2048, 0, 1.01 - took_s))
        steps.prefills_seen += 1
    assert rule(64, 64) != pays, "the model computes at another speed now"


def test_a_load_takes_no_longer_than_it_may_and_what_is_staged_is_free() -> None:
    admission = Admission(1000, 0.0, 1, load_s_max=0.010)
    assert admission.bounds() == (1, PAGES_MAX), "nothing was measured yet"
    admission.loaded(10_000, 0.020)  # 2 ms a page
    assert admission.bounds() == (1, 5)
    assert admission.bounds(staged=7) == (1, 12)
    admission.loaded(1000, 1.0)
    assert admission.bounds()[1] == 1, "one page at least, so that it can be measured again"


@given(st.data())
def test_restorable_is_what_the_definition_says(data: st.DataObject) -> None:
    pages = data.draw(st.integers(0, 12))
    windows = [
        Window(np.array(held, np.bool_), data.draw(st.integers(1, 14)))
        for held in data.draw(
            st.lists(st.lists(st.booleans(), min_size=pages, max_size=pages + 3), max_size=3)
        )
    ]
    expected = [
        length
        for length in range(1, pages + 1)
        if all(all(w.held[max(0, length - w.pages) : length]) for w in windows)
    ]
    assert np.flatnonzero(restorable(pages, windows)).tolist() == expected


def chain(*numbers: int) -> npt.NDArray[np.uint8]:
    words = np.zeros((len(numbers), 2), np.uint64)
    words[:, 1] = numbers
    return words.view(np.uint8)


def test_a_chain_tells_what_precedes_a_page() -> None:
    chains = Chains(2)
    chains.seen(chain(1, 2, 3))
    chains.seen(chain(7, 8))
    assert chains.before(chain(3)[0].tobytes()) == (chain(2)[0].tobytes(), 2)
    assert chains.before(chain(1)[0].tobytes()) == (None, 0)
    chains.seen(chain(1, 2, 3, 4))
    assert chains.before(chain(4)[0].tobytes()) == (chain(3)[0].tobytes(), 3)
    chains.seen(chain(1, 2))
    assert chains.before(chain(4)[0].tobytes())[1] == 3, "a shorter one takes nothing away"
    chains.seen(chain(20, 21))
    assert chains.before(chain(8)[0].tobytes()) == (None, 0), "the oldest is forgotten"

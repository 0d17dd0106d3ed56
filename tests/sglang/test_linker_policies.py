"""The linker's pure policies: breaker, pins, break-even."""

from __future__ import annotations

import pytest

from tutti.errors import ConfigError
from tutti.integration.sglang.admission import BreakEven, PinLedger
from tutti.integration.sglang.breaker import Breaker, crawls


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


def test_pins_are_capped_and_expire_by_lookups() -> None:
    ledger = PinLedger(10, lookups=3)
    assert ledger.budget("a") == 10
    ledger.pinned("a", 7)
    assert ledger.budget("b") == 3
    ledger.pinned("b", 3)
    assert ledger.budget("c") == 0
    ledger.pinned("c", 0)
    assert ledger.budget("d") == 0, "the pins of a hold for three later look-ups"
    ledger.pinned("d", 0)
    assert ledger.budget("e") == 7
    assert ledger.pages == 3


def test_a_request_that_looks_again_renews_its_pins_and_does_not_add_to_them() -> None:
    ledger = PinLedger(10, lookups=2)
    for _ in range(20):
        assert ledger.budget("a") == 10
        ledger.pinned("a", 10)
    assert ledger.pages == 10
    assert ledger.budget("b") == 0
    ledger.pinned("b", 0)
    assert ledger.budget("a") == 10
    ledger.pinned("a", 4)
    assert ledger.pages == 4


def test_short_hits_are_not_taken() -> None:
    assert BreakEven(1000, 0.0, 3).lengths(2) == []
    assert BreakEven(1000, 0.0, 3).lengths(5) == [3, 4, 5]
    assert BreakEven(1000, 0.0, 0).lengths(2) == [1, 2]
    assert BreakEven(1000, 0.0, 0).lengths(0) == []


def test_hits_that_load_slower_than_they_compute_are_refused_and_tried_again() -> None:
    even = BreakEven(1000, 0.001, 1)
    assert even.lengths(1) == [1], "nothing was measured yet"
    even.loaded(1000, 0.002)
    taken = [bool(even.lengths(1)) for _ in range(128)]
    assert taken.count(True) == 2, "every 64th is taken, to measure again"
    for _ in range(20):
        even.loaded(1000, 0.0001)
    assert even.lengths(1) == [1]

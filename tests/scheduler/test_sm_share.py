"""The I/O partition: the fewest SMs that keep up with the medium."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError, Unsupported
from tutti.scheduler.roofline import GPUS, mover_gb_per_s
from tutti.scheduler.sm_share import Partition, choose_partition

LINEAR = [(8, 10.0), (16, 20.0), (64, 50.0)]


def test_the_smallest_that_keeps_up() -> None:
    assert choose_partition(LINEAR, 9.0, sms=132) == Partition(8, 10.0, True)
    assert choose_partition(LINEAR, 10.0, sms=132).sms == 8
    assert choose_partition(LINEAR, 10.1, sms=132).sms == 16
    assert choose_partition(LINEAR, 21.0, sms=132).sms == 24
    assert choose_partition(LINEAR, 0.0, sms=132).sms == 8


def test_a_medium_that_is_too_fast_gets_no_more_than_helps() -> None:
    chosen = choose_partition(LINEAR, 80.0, sms=132)
    assert chosen == Partition(64, 50.0, False)
    assert choose_partition(LINEAR, 80.0, sms=132, share_max=0.2).sms == 24


def test_smaller_steps_of_other_gpus() -> None:
    assert choose_partition(LINEAR, 4.0, sms=108, least=2, step=2).sms == 4


def test_more_sms_that_measured_slower_count_as_equal() -> None:
    assert choose_partition([(8, 10.0), (16, 7.0), (24, 12.0)], 11.0, sms=132).sms == 24


@pytest.mark.parametrize(
    ("points", "rate", "options"),
    [
        ([], 1.0, {}),
        ([(0, 1.0)], 1.0, {}),
        ([(8, -1.0)], 1.0, {}),
        ([(8, float("nan"))], 1.0, {}),
        ([(8, 1.0), (8, 2.0)], 1.0, {}),
        (LINEAR, -1.0, {}),
        (LINEAR, float("inf"), {}),
        (LINEAR, 1.0, {"step": 0}),
        (LINEAR, 1.0, {"share_max": 0.0}),
    ],
)
def test_what_means_nothing_is_refused(
    points: list[tuple[int, float]], rate: float, options: dict[str, float]
) -> None:
    with pytest.raises(ConfigError):
        choose_partition(points, rate, sms=132, **options)  # type: ignore[arg-type]


def test_a_gpu_too_small_to_split() -> None:
    with pytest.raises(Unsupported, match="copy engine"):
        choose_partition(LINEAR, 1.0, sms=14)


def test_the_estimated_mover_reaches_the_link() -> None:
    points = [(n, mover_gb_per_s(n)) for n in range(1, GPUS["H100"].sms + 1)]
    assert choose_partition(points, 25.9, sms=GPUS["H100"].sms).keeps_up


@given(
    st.lists(
        st.tuples(st.integers(1, 132), st.floats(0, 100)), min_size=1, unique_by=lambda p: p[0]
    ),
    st.floats(0, 120),
)
def test_no_smaller_partition_would_do(points: list[tuple[int, float]], rate: float) -> None:
    chosen = choose_partition(points, rate, sms=132)
    assert chosen.sms % 8 == 0
    assert 8 <= chosen.sms <= 66
    assert chosen.keeps_up == (chosen.mover_gb_per_s >= rate)
    if chosen.sms > 8:
        # What the next smaller one reaches is slower than the medium, and than this one.
        smaller = choose_partition(points, rate, sms=2 * (chosen.sms - 8))
        assert smaller.mover_gb_per_s < min(rate, chosen.mover_gb_per_s)

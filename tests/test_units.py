"""Sizes and durations for people; clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.base.clock import Clock, SystemClock
from tutti.base.units import GiB, KiB, MiB, TiB, format_duration, format_nbytes, parse_nbytes
from tutti.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * GiB),
        ("1.5 GB", 1_500_000_000),
        (" 4 kib ", 4 * KiB),
        ("4096", 4096),
        ("17B", 17),
        ("0.1 GiB", 107374182),
        ("2TiB", 2 * TiB),
        ("3 MB", 3_000_000),
        (12345, 12345),
        (0, 0),
    ],
)
def test_sizes_that_people_write(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "G", "64G", "1.5.2GB", "-1GiB", "1e9", "GiB", "1 GiB 2", "0x10", -1, True, None, 1.5],
)
def test_sizes_that_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"size"):
        parse_nbytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (1536 * MiB, "1.5 GiB"),
        (64 * GiB, "64 GiB"),
        (100 * TiB, "100 TiB"),
        (123456789, "118 MiB"),
        (-2 * KiB, "-2 KiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back_within_a_percent(nbytes: int) -> None:
    assert abs(parse_nbytes(format_nbytes(nbytes)) - nbytes) <= nbytes * 0.01


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 ns"),
        (25e-9, "25 ns"),
        (320e-6, "320 us"),
        (0.0015, "1.5 ms"),
        (2.0, "2 s"),
        (59.96, "60 s"),
        (125.2, "2 min 5 s"),
        (7500.0, "2 h 5 min"),
        (-0.0015, "-1.5 ms"),
    ],
)
def test_durations_for_people(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


def test_the_system_clock_does_not_go_back() -> None:
    clock: Clock = SystemClock()
    before = clock.now_ns()
    clock.sleep(0.0)
    assert clock.now_ns() >= before
    assert clock.unix_ns() > 1_700_000_000 * 10**9

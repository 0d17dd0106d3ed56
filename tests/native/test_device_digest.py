"""The warp's XXH3-64, fused with the copy or not, against the xxhash package."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.programs import Program, Start

TO_PAGES, TO_STAGING, IN_PLACE = 0, 1, 2
FACTOR = 0x9E3779B97F4A7C15
WAYS = pytest.mark.parametrize("way", [TO_PAGES, TO_STAGING, IN_PLACE])


@pytest.fixture
def digest(start: Start) -> Program:
    return start("device_digest")


def expected(nbytes: int, factor: int) -> int:
    """The digest of the string that device_digest.cpp makes of these two numbers."""
    words = np.arange(1, nbytes + 1, dtype=np.uint64) * np.uint64(factor)
    return xxhash.xxh3_64_intdigest((words >> np.uint64(40)).astype(np.uint8).tobytes())


def check(
    digest: Program, nbytes: int, factor: int, segments: int, unit: int, shift: int, way: int
) -> None:
    high, low, copied = digest.ask(nbytes, factor, segments, unit, shift, way)
    assert (high << 32 | low) == expected(nbytes, factor), nbytes
    assert copied, nbytes


def test_every_short_length(digest: Program) -> None:
    for nbytes in range(1, 400):
        check(digest, nbytes, FACTOR, 1, 1, 0, nbytes % 3)


@WAYS
@pytest.mark.parametrize(("unit", "shift"), [(16, 0), (1, 0), (1, 3)])
def test_lengths_around_stripes_blocks_and_tiles(
    digest: Program, way: int, unit: int, shift: int
) -> None:
    around = [base + off for base in (1024, 2048, 4096, 8192) for off in (-64, -16, -1, 0, 1, 16)]
    for nbytes in around:
        check(digest, nbytes, FACTOR, 1 + nbytes % 4, unit, shift, way)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    nbytes=st.integers(1, 20000),
    factor=st.integers(1, 2**64 - 1),
    segments=st.integers(1, 4),
    unit=st.sampled_from([1, 16]),
    shift=st.integers(0, 15),
    way=st.integers(0, 2),
)
def test_any_string(
    digest: Program, nbytes: int, factor: int, segments: int, unit: int, shift: int, way: int
) -> None:
    check(digest, nbytes, factor, segments, unit, shift, way)


@pytest.mark.parametrize("nbytes", [(1 << 18) - 1, 1 << 20])
def test_long_strings(digest: Program, nbytes: int) -> None:
    check(digest, nbytes, FACTOR, 2, 16, 0, TO_PAGES)

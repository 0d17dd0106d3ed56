"""Stamped pages: whatever is not in its place is seen."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.bench.shape import KvPageShape, parse_shape
from tutti.bench.stamps import Stamps, numbered_keys
from tutti.errors import ConfigError
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import PAGE_FIRST_DIRECT, HostMemory

LAYOUTS = {
    "blocks": KvPageShape(3, 16384).layout(),
    "odd": KVLayout(2, (4096 + 8, 24), 16, "uint8", "bench", 2),
}
PAGES = np.array([4, 0, 2])


@pytest.mark.parametrize("order", [None, PAGE_FIRST_DIRECT])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_byte_counts(layout: KVLayout, order: str | None, rng: np.random.Generator) -> None:
    pool = HostMemory.allocate(layout, 5, order=order, hugepages=False)
    stamps, keys = Stamps(pool), numbered_keys([7, 8, 9])
    stamps.fill(PAGES, keys)
    assert not stamps.wrong(PAGES, keys).any()
    for row, page in enumerate(PAGES.tolist()):
        content = bytearray(pool.read(page))
        at = int(rng.integers(len(content)))
        content[at] ^= 1 << int(rng.integers(8))
        good = pool.read(page)
        pool.write(page, bytes(content))
        assert stamps.wrong(PAGES, keys).tolist() == [i == row for i in range(3)]
        pool.write(page, good)


def test_blocks_in_the_wrong_place_are_seen() -> None:
    pool = HostMemory.allocate(KvPageShape(2, 16384).layout(), 3, hugepages=False)
    stamps, keys = Stamps(pool), numbered_keys([1, 2])
    stamps.fill(np.arange(2), keys)
    assert stamps.wrong(np.array([1, 0]), keys).all()
    for k, other in ((0, 1), (1, 0)):
        pool.segment(2, 0, k)[:] = pool.segment(0, 0, other)
        pool.segment(2, 1, k)[:] = pool.segment(0, 1, k)
    assert stamps.wrong(np.array([2]), keys[:1]).all(), "segments were exchanged"
    pool.write(2, pool.read(0)[::-1])
    content = bytearray(pool.read(0))
    content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
    pool.write(2, bytes(content))
    assert stamps.wrong(np.array([2]), keys[:1]).all(), "blocks were exchanged"


def test_keys_by_number() -> None:
    keys = numbered_keys(np.arange(1000))
    assert keys.shape == (1000, 16)
    assert len(np.unique(keys, axis=0)) == 1000


def test_segments_of_odd_sizes_are_refused() -> None:
    layout = KVLayout(1, (4097,), 16, "uint8", "bench", 1)
    with pytest.raises(ConfigError, match="multiples of 8"):
        Stamps(HostMemory.allocate(layout, 1, hugepages=False))


def test_shapes() -> None:
    assert parse_shape("32x256KiB") == KvPageShape(32, 256 << 10)
    assert str(parse_shape(" 8 x 32KiB")) == "8x32KiB"
    assert KvPageShape(2, 4096).layout().object_nbytes == KvPageShape(2, 4096).object_nbytes == 8192
    for bad in ("", "8", "0x4KiB", "8x0", "8x1000", "8x7KX"):
        with pytest.raises(ConfigError):
            parse_shape(bad)

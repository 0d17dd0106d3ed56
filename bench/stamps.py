"""Page content that is recomputed from the key, so that every byte can be checked without a copy.

Block b (4096 bytes) of segment k in layer l of the object with a key is a fixed random pattern,
every 8-byte word of it XORed with a 64-bit mix of (key, l, k, b). A block that is damaged, stale,
of another object or in another place therefore differs in every word, except by a collision of the
mix (2^-64 a pair).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U64, Keys
from tutti.errors import ConfigError
from tutti.gio_uring.memory import view_at
from tutti.memory.device_memory import DeviceMemory
from tutti.memory.host_memory import HostMemory

Pages = npt.NDArray[np.integer[Any]]

_BLOCK_WORDS = 512
_CHUNK_NBYTES = 1 << 19  # stays in the processor's cache
_PATTERN_SEED = 20260


def mix(words: npt.ArrayLike) -> U64:
    """A bijection of 64-bit words: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = np.asarray(words, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def numbered_keys(numbers: npt.ArrayLike) -> Keys:
    """Distinct keys for distinct numbers below 2^64, uint8 (n, 16)."""
    words = np.asarray(numbers, np.uint64)
    return np.ascontiguousarray(np.stack([mix(words), words], axis=1)).view(np.uint8)


class Stamps:
    """Fills and checks the pages of one registered memory."""

    def __init__(self, registered: HostMemory) -> None:
        """Raises ConfigError for segments that are not a multiple of 8 bytes."""
        memory = registered.memory
        if any(nbytes % 8 for nbytes in memory.segment_nbytes):
            raise ConfigError("stamped segments are multiples of 8 bytes; choose another shape")
        pattern = np.random.default_rng(_PATTERN_SEED).integers(
            0, 2**64, _BLOCK_WORDS, dtype=np.uint64
        )
        self._memory = memory
        self._patterns = [np.resize(pattern, nbytes // 8) for nbytes in memory.segment_nbytes]
        self._views = [
            [self._view(layer, k) for k in range(len(memory.segment_nbytes))]
            for layer in range(memory.bases.shape[0])
        ]

    def fill(self, pages: Pages, keys: Keys) -> None:
        """Fills every page, shape (n,), with the content of the key in the same row of (n, 16)."""
        for rows, layer, k in self._chunks(len(pages)):
            self._views[layer][k][pages[rows]] = self._expected(keys[rows], layer, k)

    def wrong(self, pages: Pages, keys: Keys) -> npt.NDArray[np.bool_]:
        """For every page, shape (n,): whether a byte differs from its key's content."""
        found = np.zeros(len(pages), np.bool_)
        for rows, layer, k in self._chunks(len(pages)):
            content = self._views[layer][k][pages[rows]]
            content ^= self._expected(keys[rows], layer, k)
            found[rows] |= content.any(axis=1)
        return found

    def _view(self, layer: int, k: int) -> U64:
        """Segment k of all pages in a layer, uint64 (pages, words)."""
        memory = self._memory
        stride, nbytes = memory.stride_nbytes[k], memory.segment_nbytes[k]
        span = view_at(int(memory.bases[layer, k]), (memory.pages - 1) * stride + nbytes)
        return np.lib.stride_tricks.as_strided(
            span[:nbytes].view(np.uint64), (memory.pages, nbytes // 8), (stride, 8)
        )

    def _chunks(self, n: int) -> list[tuple[slice, int, int]]:
        chunks = []
        for layer, views in enumerate(self._views):
            for k, view in enumerate(views):
                step = max(1, _CHUNK_NBYTES // (view.shape[1] * 8))
                chunks += [(slice(i, i + step), layer, k) for i in range(0, n, step)]
        return chunks

    def _expected(self, keys: Keys, layer: int, k: int) -> U64:
        """Content of segment k for these keys, uint64 (n, words)."""
        pattern = self._patterns[k]
        words = np.ascontiguousarray(keys).view(np.uint64)
        blocks = np.arange(-(-pattern.size // _BLOCK_WORDS), dtype=np.uint64)
        place = mix(blocks | np.uint64(layer << 40 | k << 36))
        salt = mix(mix(mix(words[:, :1]) ^ words[:, 1:]) ^ place[None, :])
        if pattern.size % _BLOCK_WORDS == 0:
            tiles = pattern.reshape(-1, _BLOCK_WORDS)[None] ^ salt[:, :, None]
            return np.asarray(tiles.reshape(len(keys), pattern.size))
        return pattern[None, :] ^ np.repeat(salt, _BLOCK_WORDS, axis=1)[:, : pattern.size]


class DeviceStamps:
    """`Stamps` of pages in GPU memory, by copies of one page at a time."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._mirror = HostMemory.allocate(memory.layout, 1, hugepages=False)
        self._stamps = Stamps(self._mirror)
        self._row = np.zeros(1, np.int64)

    def fill(self, pages: Pages, keys: Keys) -> None:
        for page, key in zip(pages.tolist(), keys, strict=True):
            self._stamps.fill(self._row, key[None, :])
            self._memory.write(page, self._mirror.read(0))

    def wrong(self, pages: Pages, keys: Keys) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(pages), np.bool_)
        for row, page in enumerate(pages.tolist()):
            self._mirror.write(0, self._memory.read(page))
            found[row] = self._stamps.wrong(self._row, keys[row : row + 1])[0]
        return found

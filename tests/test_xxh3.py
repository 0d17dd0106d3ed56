"""XXH3-64 against the xxhash package: every instruction set, every way in."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tutti import native

HEADER = Path(__file__).parent.parent / "kernels" / "include" / "xxh3.h"
ISAS = {"scalar": 0, "avx2": 1, "avx512": 2}
# Where the algorithm changes, and the edges of a stripe, the buffer and a block.
EDGES = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 256, 257, 320, 512, 1024, 1025, 1088, 2048)
# Where groups of blocks begin to be read as several streams, and the largest group.
GROUPS = [blocks * 1024 + more for blocks in (16, 32, 136, 2 * 136) for more in (0, 1, 64, 65)]

Bytes = npt.NDArray[np.uint8]


def random_bytes(seed: int, nbytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest_pieces(isa: int, pieces: list[Bytes]) -> int:
    addresses = np.array([piece.ctypes.data for piece in pieces], np.uint64)
    nbytes = np.array([piece.nbytes for piece in pieces], np.uint64)
    function = native.lib().tutti_xxh3_64_isa
    return int(function(isa, native.address(addresses), native.address(nbytes), len(pieces)))


def digest(data: Bytes) -> int:
    return digest_pieces(int(native.lib().tutti_isa_best()), [data])


def test_published_value_of_the_empty_string() -> None:
    assert digest(np.empty(0, np.uint8)) == 0x2D06800538D394C2


def test_every_short_length(seed: int) -> None:
    data = random_bytes(seed, 2200)
    for nbytes in range(2200):
        part = data[:nbytes]
        assert digest(part) == xxhash.xxh3_64_intdigest(part.tobytes()), nbytes


@pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS.keys())
def test_lengths_up_to_a_mebibyte(isa: int, seed: int) -> None:
    if isa > native.lib().tutti_isa_best():
        pytest.skip(f"the processor lacks instruction set {isa}")
    data = random_bytes(seed, 1 << 20)
    lengths = [*EDGES, *GROUPS, 4096, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20]
    lengths += np.random.default_rng(seed).integers(0, 1 << 20, 60).tolist()
    for nbytes in lengths:
        part = data[:nbytes]
        assert digest_pieces(isa, [part]) == xxhash.xxh3_64_intdigest(part.tobytes()), nbytes


@given(
    pieces=st.lists(
        st.one_of(st.sampled_from(EDGES), st.integers(0, 700)), min_size=0, max_size=12
    ),
    isa=st.sampled_from(sorted(ISAS.values())),
    offset=st.integers(0, 63),
)
def test_pieces_hash_as_one_string(pieces: list[int], isa: int, offset: int) -> None:
    data = random_bytes(len(pieces), sum(pieces) + offset)[offset:]
    bounds = np.cumsum([0, *pieces])
    parts = [data[a:b].copy() for a, b in itertools.pairwise(bounds)]
    assert digest_pieces(isa, parts) == xxhash.xxh3_64_intdigest(data.tobytes())


@pytest.mark.parametrize("isa", ISAS.values(), ids=ISAS.keys())
def test_long_pieces_hash_as_one_string(isa: int, seed: int) -> None:
    data = random_bytes(seed, 6 * 65536 + 77)
    cuts = np.sort(np.random.default_rng(seed).integers(0, data.nbytes, (8, 2)))
    for cut in ([65536, 131072, 131072, 196608], *cuts):
        pieces = np.split(data, cut)
        assert digest_pieces(isa, pieces) == xxhash.xxh3_64_intdigest(data.tobytes()), cut


def test_a_word_of_each_line_is_read(seed: int) -> None:
    words = random_bytes(seed, 1 << 18).view(np.uint64)
    sizes = np.array([words.nbytes // 2, words.nbytes // 2], np.uint64)
    given = np.array([words.ctypes.data, words.ctypes.data + words.nbytes // 2], np.uint64)
    read = native.lib().tutti_read_lines(native.address(given), native.address(sizes), 2)
    assert read == int(words[::8].sum())


def test_one_flipped_bit_changes_the_digest(seed: int) -> None:
    data = random_bytes(seed, 4097)
    before = digest(data)
    for position in (0, 63, 64, 1023, 1024, 4033, 4096):
        data[position] ^= 1
        assert digest(data) != before, position
        data[position] ^= 1
    assert digest(data) == before


def test_header_includes_nothing() -> None:
    assert not re.search(r"^\s*#\s*include", HEADER.read_text(), re.MULTILINE)


DEVICE_SOURCE = """
#include "xxh3.h"
extern "C" __global__ void digest(const unsigned char* p, unsigned long long nbytes,
                                  unsigned long long* out) {
  tutti::xxh3_state state;
  tutti::xxh3_reset(&state);
  tutti::xxh3_update(&state, p, nbytes / 2);
  tutti::xxh3_update(&state, p + nbytes / 2, nbytes - nbytes / 2);
  out[0] = tutti::xxh3_digest(&state);
  out[1] = tutti::xxh3_64(p, nbytes);
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_for_the_device(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra device-check")
    core = pytest.importorskip("cuda.core", reason="needs the extra device-check")
    options = core.ProgramOptions(std="c++17", arch=arch, include_path=[str(HEADER.parent)])
    code = core.Program(DEVICE_SOURCE, "c++", options).compile("cubin").code
    assert bytes(code)[:4] == b"\x7fELF"

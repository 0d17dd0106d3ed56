"""CRC32C, sealed records, and loading the native library."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti import native
from tutti.errors import NativeError

RECORD = native.RECORD_NBYTES


def crc32c_bitwise(data: bytes) -> int:
    """CRC32C by its definition, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def random_records(seed: int, n: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, RECORD), dtype=np.uint8)


def crc32c_by(function: str) -> Callable[..., int]:
    def crc32c(data: bytes, seed: int = 0) -> int:
        flat = np.frombuffer(data, np.uint8)
        return int(getattr(native.lib(), function)(native.address(flat), flat.nbytes, seed))

    return crc32c


PATHS = {"best": crc32c_by("tutti_crc32c"), "table": crc32c_by("tutti_crc32c_table")}


@pytest.mark.parametrize("crc32c", PATHS.values(), ids=PATHS.keys())
def test_published_crc_values(crc32c: Callable[..., int]) -> None:
    # RFC 3720, appendix B.4; its bytes are the value's, least significant first.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.parametrize("crc32c", PATHS.values(), ids=PATHS.keys())
@given(data=st.binary(max_size=300), cut=st.integers(0, 300))
def test_crc_of_any_bytes_in_one_or_two_parts(
    crc32c: Callable[..., int], data: bytes, cut: int
) -> None:
    expected = crc32c_bitwise(data)
    assert crc32c(data) == expected
    assert crc32c(data[cut:], crc32c(data[:cut])) == expected


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
def test_sealed_records_fit_and_carry_the_crc(n: int, seed: int) -> None:
    records = random_records(seed, n)
    before = records.copy()
    native.records_seal(records)
    assert np.array_equal(records[:, :-4], before[:, :-4])
    for record in records:
        stored = int.from_bytes(record[-4:].tobytes(), "little")
        assert stored == crc32c_bitwise(record[:-4].tobytes())
    assert native.records_check(records).all()
    assert native.records_check(records).shape == (n,)


@given(st.data())
def test_a_flipped_bit_fails_its_record_only(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    records = random_records(n, n)
    native.records_seal(records)
    victim = data.draw(st.integers(0, n - 1))
    records[victim, data.draw(st.integers(0, RECORD - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert np.array_equal(native.records_check(records), np.arange(n) != victim)


def test_a_torn_record_fails(seed: int) -> None:
    old, new = random_records(seed, 2)
    native.records_seal(old)
    native.records_seal(new)
    for cut in range(512, RECORD, 512):
        torn = np.concatenate((new[:cut], old[cut:]))
        assert not native.records_check(torn).any(), cut


def test_a_record_of_zeros_does_not_fit() -> None:
    assert not native.records_check(np.zeros((4, RECORD), np.uint8)).any()


def test_a_missing_library_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="make install"):
        native.load(tmp_path / "_native.so")


def test_a_foreign_library_says_what_to_run() -> None:
    with pytest.raises(NativeError, match="make install"):
        native.load(Path("libc.so.6"))


@pytest.mark.parametrize(
    ("version", "said"), [(0, "ABI version 0"), (native.ABI_VERSION, "no function tutti_isa_best")]
)
def test_a_library_of_other_sources_says_what_to_run(
    tmp_path: Path, version: int, said: str
) -> None:
    source = tmp_path / "old.cpp"
    source.write_text(f'extern "C" unsigned tutti_abi_version() {{ return {version}; }}')
    library = tmp_path / "_native.so"
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(NativeError, match=f"{said}.*make install"):
        native.load(library)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, "S7", [("a", "<u4"), ("b", "u1", 3)]])
def test_the_address_of_an_array(dtype: npt.DTypeLike) -> None:
    array = np.zeros((6, 4), dtype)
    array.flags.writeable = False
    for part in (array, array[2:], array[1, 1:], array[5, 3:], array[:0], array.reshape(-1)):
        assert native.address(part) == part.__array_interface__["data"][0]
    for part in (array.T, array[:, 1], array[::2], array[::-1]):
        with pytest.raises(AssertionError, match="contiguous"):
            native.address(part)
    other = array.reshape(-1).view(np.recarray)
    assert native.address(other) == array.__array_interface__["data"][0], "a subclass is an array"
    with pytest.raises(AssertionError, match="only an array"):
        native.address(memoryview(array.tobytes()))  # type: ignore[arg-type]


def test_arrays_of_another_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_DATA", native._DATA + 1)
    with pytest.raises(NativeError, match="numpy"):
        native.load(native._path())

"""Superblocks, snapshots, and the format page itself."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tutti import native
from tutti.errors import (
    MemberMissing,
    MemberSwapped,
    PoolCorrupt,
    PoolMismatch,
    PoolNotFound,
    TuttiError,
)
from tutti.medium.geometry import FORMAT_VERSION, Geometry
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import (
    RECORD_DTYPE,
    RecordContent,
    RecordIdentity,
    Records,
    RecordState,
    fill_records,
)
from tutti.medium.superblock import (
    SNAPSHOT_ENTRY_DTYPE,
    SNAPSHOT_HEADER_DTYPE,
    SUPERBLOCK_DTYPE,
    PoolState,
    SnapshotDescriptor,
    Superblock,
    check_members,
    choose_superblock,
    decode_snapshot,
    encode_snapshot,
)

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout.mha(4, 2, 128, 16, "bfloat16", model="tiny", weights="1", rank=1, world=2)
SUPERBLOCK = Superblock(
    pool_uuid=bytes(range(16)),
    member_index=1,
    members=3,
    geometry=Geometry.plan(LAYOUT, 64 << 20, group_slots=128),
    layout_json=LAYOUT.to_json(),
    generation=41,
    epoch=0x1122334455667788,
    state=PoolState.CLEAN,
    created_ns=1_700_000_000_000_000_000,
    next_sequence=1001,
    snapshot=SnapshotDescriptor(entries=2, xxh3=0xA1A2A3A4A5A6A7A8, generation=40),
)


def crc32c(data: bytes) -> int:
    """CRC32C from its definition (RFC 3720, appendix B.4), independent of the native library."""
    table = []
    for octet in range(256):
        value = octet
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for octet in data:
        crc = crc >> 8 ^ table[(crc ^ octet) & 0xFF]
    return crc ^ 0xFFFFFFFF


def sealed(block: np.ndarray) -> bytes:
    native.records_seal(block)
    return block.tobytes()


def record() -> Records:
    records = np.zeros(1, RECORD_DTYPE)
    content = RecordContent(
        np.array([0x0102]),
        1000,
        RecordState.READY,
        keys=np.arange(16, 32, dtype=np.uint8)[None],
        parents=np.arange(32, 48, dtype=np.uint8)[None],
        depths=6,
        access_64s=26562500,
        tenants=9,
        digests=np.array([[1, 2, 3, 2**64 - 1]], np.uint64),
    )
    fill_records(records, SUPERBLOCK.identity, content)
    return records


def entries() -> Records:
    rows = np.zeros(2, SNAPSHOT_ENTRY_DTYPE)
    rows["slot"] = [5, 258]
    rows["key"] = np.arange(32, dtype=np.uint8).reshape(2, 16)
    rows["sequence"] = [999, 1000]
    rows["depth"] = [0, 6]
    rows["access_64s"] = [26562499, 26562500]
    rows["state"] = [RecordState.READY, RecordState.QUARANTINED]
    rows["flags"] = [1, 0]
    return rows


def snapshot(rows: Records | None = None) -> tuple[bytes, Superblock]:
    raw, descriptor = encode_snapshot(entries() if rows is None else rows, SUPERBLOCK.identity, 40)
    return raw, dataclasses.replace(SUPERBLOCK, snapshot=descriptor)


# --- the format page and the golden bytes ---------------------------------------------------------


def format_tables() -> dict[str, list[tuple[int, int, str]]]:
    """(offset, nbytes, field) of each table that docs/format.md marks with a dtype's name."""
    text = (ROOT / "docs" / "format.md").read_text()
    tables = {}
    for name, rest in re.findall(r"<!-- table: (\w+) -->(.*?)(?=\n## |<!-- table|\Z)", text, re.S):
        rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", rest, re.M)
        tables[name] = [(int(offset), int(nbytes), field) for offset, nbytes, field in rows]
    return tables


_DTYPES = {
    "SUPERBLOCK_DTYPE": SUPERBLOCK_DTYPE,
    "RECORD_DTYPE": RECORD_DTYPE,
    "SNAPSHOT_HEADER_DTYPE": SNAPSHOT_HEADER_DTYPE,
    "SNAPSHOT_ENTRY_DTYPE": SNAPSHOT_ENTRY_DTYPE,
}


@pytest.mark.parametrize(("name", "dtype"), _DTYPES.items(), ids=_DTYPES.keys())
def test_the_tables_of_the_format_page_are_the_dtypes(name: str, dtype: np.dtype[np.void]) -> None:
    assert dtype.names is not None and dtype.fields is not None
    coded = [(dtype.fields[n][1], dtype.fields[n][0].itemsize, n) for n in dtype.names]
    assert format_tables()[name] == coded
    for (offset, nbytes, field), (behind, _, _) in itertools.pairwise(coded):
        assert offset + nbytes <= behind, field


def read_golden(name: str) -> bytes:
    """A block from rows of "offset: 32 bytes in hex"; rows of zeros are left out."""
    block = bytearray()
    for line in Path(__file__).with_name("golden").joinpath(f"{name}.hex").read_text().splitlines():
        offset, row = line.split(": ")
        block += bytes(int(offset) - len(block)) + bytes.fromhex(row)
    return bytes(block) + bytes(-len(block) % 4096)


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("superblock", SUPERBLOCK.encode),
        ("record", lambda: record().tobytes()),
        ("snapshot", lambda: snapshot()[0]),
    ],
)
def test_golden_bytes(name: str, encode: Callable[[], bytes]) -> None:
    raw = encode()
    assert raw.hex(" ", 32).split() == read_golden(name).hex(" ", 32).split()
    assert crc32c(raw[:4092]) == int.from_bytes(raw[4092:4096], "little")


def test_the_independent_crc_knows_the_published_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


def test_limits_of_the_format_page() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    for limit in (
        "| layers | 1 to 480 |",
        "| segments in a slice | 1 to 4, each 1 byte to 1 GiB |",
        "| slots in a group | 1 to 256 |",
        "| members | 1 to 256 |",
        "| slots in a pool | at most 2^32 - 2 |",
        f"# The format on the medium, version {FORMAT_VERSION}\n",
    ):
        assert limit in text


# --- superblocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", PoolState)
@pytest.mark.parametrize("descriptor", [None, SUPERBLOCK.snapshot])
def test_superblock_round_trip(state: PoolState, descriptor: SnapshotDescriptor | None) -> None:
    superblock = dataclasses.replace(SUPERBLOCK, state=state, snapshot=descriptor)
    raw = superblock.encode()
    assert len(raw) == 4096
    assert Superblock.decode(raw, "m0") == superblock
    assert superblock.fingerprint == LAYOUT.fingerprint
    assert superblock.identity == RecordIdentity(
        superblock.pool_uuid, 1, superblock.epoch, LAYOUT.fingerprint, 4
    )


@given(bit=st.integers(0, 4096 * 8 - 1))
def test_any_flipped_bit_makes_a_superblock_corrupt(bit: int) -> None:
    raw = bytearray(SUPERBLOCK.encode())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PoolCorrupt, match=r"^m0: "):
        Superblock.decode(bytes(raw), "m0")


@pytest.mark.parametrize("nbytes", [0, 4095, 8192])
def test_a_superblock_of_another_size_is_corrupt(nbytes: int) -> None:
    with pytest.raises(PoolCorrupt, match=f"superblock has {nbytes} bytes"):
        Superblock.decode(bytes(nbytes), "m0")


def with_field(field: str, value: object) -> bytes:
    block = np.frombuffer(SUPERBLOCK.encode(), SUPERBLOCK_DTYPE).copy()
    block[field] = value
    return sealed(block)


def test_another_version_is_a_mismatch() -> None:
    with pytest.raises(PoolMismatch, match="format version 2, this version reads 1"):
        Superblock.decode(with_field("version", 2), "m0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", 0),
        ("state", 3),
        ("member_index", 3),
        ("members", 0),
        ("members", 257),
        ("lba_nbytes", 0),
        ("lba_nbytes", 512),
        ("layers", 0),
        ("layers", 481),
        ("layers", 2**32 - 1),
        ("n_segments", 0),
        ("n_segments", 1),
        ("n_segments", 5),
        ("segments", [0, 0, 0, 0]),
        ("segments", [2**64 - 1, 1, 0, 0]),
        ("segments", [8192, 8192, 1, 0]),
        ("slice_nlb", 0),
        ("group_slots", 0),
        ("group_slots", 257),
        ("groups", 0),
        ("groups", 1),
        ("groups", 2**64 - 1),
        ("snapshot_offset", 0),
        ("table_offset", 8192),
        ("groups_offset", 2**63),
        ("layout_nbytes", 2**32 - 1),
        ("layout_nbytes", 3),
        ("fingerprint", 0),
        ("snapshot_valid", 2),
        ("snapshot_entries", 2**40),
    ],
)
def test_numbers_behind_a_right_crc_are_not_trusted(field: str, value: object) -> None:
    with pytest.raises(PoolCorrupt, match="contradicts itself"):
        Superblock.decode(with_field(field, value), "m0")


def test_more_slots_than_slot_numbers_are_refused() -> None:
    geometry = dataclasses.replace(SUPERBLOCK.geometry, groups=2**31 // 128 + 1)
    one = dataclasses.replace(SUPERBLOCK, geometry=geometry, members=1, member_index=0)
    assert Superblock.decode(one.encode(), "m0") == one
    with pytest.raises(PoolCorrupt, match="contradicts itself"):
        Superblock.decode(dataclasses.replace(one, members=2).encode(), "m0")


@given(
    places=st.lists(
        st.tuples(st.integers(8, 207), st.integers(0, 255))
        | st.tuples(st.integers(1024, 1300), st.integers(0, 255)),
        min_size=1,
        max_size=8,
    )
)
def test_damage_behind_a_right_crc_raises_nothing_untyped(places: list[tuple[int, int]]) -> None:
    block = np.frombuffer(bytearray(SUPERBLOCK.encode()), np.uint8)
    for place, octet in places:
        block[place] = octet
    try:
        superblock = Superblock.decode(sealed(block), "m0")
    except (PoolCorrupt, PoolMismatch):
        return
    assert superblock.geometry.slots * superblock.members < 2**32


def test_noise_is_corrupt(seed: int) -> None:
    noise = random.Random(seed).randbytes(8192)
    with pytest.raises(PoolCorrupt, match=r"m0: no superblock here.* check the path"):
        choose_superblock(noise[:4096], noise[4096:], "m0")
    torn = SUPERBLOCK.encode()[:2048] + noise[2048:4096]
    with pytest.raises(PoolCorrupt, match=r"superblock A.*superblock B"):
        choose_superblock(torn, noise[4096:], "m0")


def test_the_higher_generation_wins() -> None:
    old = SUPERBLOCK.encode()
    new = dataclasses.replace(SUPERBLOCK, generation=42, epoch=5).encode()
    for a, b, copy in ((old, new, 1), (new, old, 0), (new, new, 0)):
        superblock, where = choose_superblock(a, b, "m0")
        assert (superblock.generation, where) == (42, copy)


def test_one_valid_copy_is_enough() -> None:
    raw = SUPERBLOCK.encode()
    torn = bytes(512) + raw[512:]
    assert choose_superblock(raw, torn, "m0") == (SUPERBLOCK, 0)
    assert choose_superblock(bytes(4096), raw, "m0") == (SUPERBLOCK, 1)


def test_zeros_are_no_pool() -> None:
    with pytest.raises(PoolNotFound, match="m0: not formatted"):
        choose_superblock(bytes(4096), bytes(4096), "m0")


def test_a_newer_copy_is_not_overruled_by_an_older_one() -> None:
    ours, newer = SUPERBLOCK.encode(), with_field("version", 2)
    for a, b in ((ours, newer), (newer, ours)):
        with pytest.raises(PoolMismatch, match="format version 2"):
            choose_superblock(a, b, "m0")


@pytest.mark.parametrize("change", [{"pool_uuid": bytes(16)}, {"member_index": 0}, {"members": 4}])
def test_copies_of_different_pools_are_corrupt(change: dict[str, object]) -> None:
    other = dataclasses.replace(SUPERBLOCK, **change)  # type: ignore[arg-type]
    with pytest.raises(PoolCorrupt, match="different pools"):
        choose_superblock(SUPERBLOCK.encode(), other.encode(), "m0")


def test_members_make_a_pool() -> None:
    members = [dataclasses.replace(SUPERBLOCK, member_index=i) for i in range(3)]
    check_members(members, ["a", "b", "c"])
    with pytest.raises(MemberMissing, match="has 3 members, 2 were given"):
        check_members(members[:2], ["a", "b"])
    with pytest.raises(MemberSwapped, match="c is member 2, given as number 1"):
        check_members([members[0], members[2], members[1]], ["a", "c", "b"])
    stranger = dataclasses.replace(members[1], pool_uuid=bytes(16))
    with pytest.raises(MemberSwapped, match="b does not belong to the pool of a"):
        check_members([members[0], stranger, members[2]], ["a", "b", "c"])


# --- snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2])
def test_snapshot_round_trip(n: int) -> None:
    raw, superblock = snapshot(entries()[:n])
    assert len(raw) % 4096 == 0
    assert len(raw) <= superblock.geometry.snapshot_nbytes
    assert (decode_snapshot(raw, superblock, "m0") == entries()[:n]).all()
    longer = raw + bytes(8192)
    assert (decode_snapshot(longer, superblock, "m0") == entries()[:n]).all()


@given(bit=st.integers(0, (4096 + 96) * 8 - 1))
def test_any_flipped_bit_makes_a_snapshot_corrupt(bit: int) -> None:
    raw, superblock = snapshot()
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PoolCorrupt, match="scan the slot table"):
        decode_snapshot(bytes(damaged), superblock, "m0")


@pytest.mark.parametrize(
    "change",
    [
        {"pool_uuid": bytes(16)},
        {"member_index": 0},
        {"epoch": 1},
        {"snapshot": None},
        {"snapshot": SnapshotDescriptor(2, 0, 40)},
    ],
)
def test_a_snapshot_of_something_else_is_refused(change: dict[str, object]) -> None:
    raw, superblock = snapshot()
    with pytest.raises(PoolCorrupt, match="scan the slot table"):
        decode_snapshot(raw, dataclasses.replace(superblock, **change), "m0")  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["entries", "generation", "xxh3"])
def test_a_snapshot_of_another_generation_is_refused(field: str) -> None:
    raw, superblock = snapshot()
    assert superblock.snapshot is not None
    changed = dataclasses.replace(superblock.snapshot, **{field: 1})
    with pytest.raises(PoolCorrupt):
        decode_snapshot(raw, dataclasses.replace(superblock, snapshot=changed), "m0")


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 4100])
def test_a_truncated_snapshot_is_refused(nbytes: int) -> None:
    raw, superblock = snapshot()
    with pytest.raises(PoolCorrupt):
        decode_snapshot(raw[:nbytes], superblock, "m0")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("slot", [5, 5]),
        ("slot", [6, 5]),
        ("slot", [5, 2**64 - 1]),
        ("slot", [5, SUPERBLOCK.geometry.slots]),
        ("state", [RecordState.READY, RecordState.VOID]),
        ("state", [255, RecordState.READY]),
    ],
)
def test_entries_behind_a_right_digest_are_not_trusted(field: str, values: list[int]) -> None:
    rows = entries()
    rows[field] = values
    raw, superblock = snapshot(rows)
    with pytest.raises(PoolCorrupt, match="impossible entries"):
        decode_snapshot(raw, superblock, "m0")


@given(raw=st.binary(max_size=300))
def test_a_snapshot_of_noise_raises_nothing_untyped(raw: bytes) -> None:
    superblock = dataclasses.replace(
        SUPERBLOCK, snapshot=SnapshotDescriptor(0, xxhash.xxh3_64_intdigest(b""), 40)
    )
    with pytest.raises(TuttiError):
        decode_snapshot(raw + bytes(4096), superblock, "m0")

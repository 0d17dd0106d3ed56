"""What a drive says about itself is taken over exactly, or refused with a typed error."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.base.units import KiB, MiB
from tutti.errors import MediumError, TuttiError, Unsupported
from tutti.gio_uring.drives.identify import (
    IDENTIFY_NBYTES,
    Capabilities,
    IdentifyController,
    NamespaceIdentity,
    parse_namespace_list,
)


def cap(**fields: int) -> int:
    """A CAP register; a drive with 1024 entries and 500 ms unless told otherwise."""
    given = {"mqes": 1023, "to": 1, "dstrd": 0, "css": 1, "mpsmin": 0, **fields}
    entries, timeout, stride, css, mpsmin = given.values()
    return entries | timeout << 24 | stride << 32 | css << 37 | mpsmin << 48


def capabilities(register: int) -> Capabilities:
    """Of a drive without CRTO, which is not read."""
    return Capabilities.parse(register, lambda: pytest.fail("there is no such register"))


def controller(**fields: Any) -> bytes:
    """An Identify Controller structure of a usual drive, with changes by offset."""
    raw = bytearray(IDENTIFY_NBYTES)
    raw[4:24] = b"S123".ljust(20)
    raw[24:64] = b"A drive".ljust(40)
    raw[77] = 5
    raw[512], raw[513] = 0x66, 0x44
    struct.pack_into("<I", raw, 516, 4)
    struct.pack_into("<H", raw, 520, 1 << 2)
    raw[525] = 1
    struct.pack_into("<I", raw, 536, 1 | 32 << 8)
    for place, content in fields.items():
        offset = int(place.removeprefix("at"))
        raw[offset : offset + len(content)] = content
    return bytes(raw)


def namespace(nlb: int = 1000, shift: int = 12, **fields: Any) -> bytes:
    raw = bytearray(IDENTIFY_NBYTES)
    struct.pack_into("<QQ", raw, 0, nlb, nlb)
    raw[33] = 1
    struct.pack_into("<HB", raw, 128, 0, shift)
    for place, content in fields.items():
        offset = int(place.removeprefix("at"))
        raw[offset : offset + len(content)] = content
    return bytes(raw)


def test_capabilities() -> None:
    found = capabilities(cap(mqes=1500, to=20, dstrd=2))
    assert (found.depth_max, found.timeout_s, found.doorbell_nbytes) == (1024, 10.0, 16)
    assert capabilities(cap(to=0)).timeout_s == 0.5
    assert capabilities(cap(mqes=65535)).depth_max == 65536


@pytest.mark.parametrize(("crto", "timeout_s"), [(0x4_0030, 24.0), (0x30_0004, 10.0)])
def test_time_to_become_ready_with_media(crto: int, timeout_s: float) -> None:
    """Whichever is longer; the other half of CRTO is the time to become ready without media."""
    assert Capabilities.parse(cap(to=20) | 1 << 59, lambda: crto).timeout_s == timeout_s


@pytest.mark.parametrize("fields", [{"mqes": 0}, {"css": 0}, {"css": 0x81}, {"mpsmin": 4}])
def test_unusable_controllers(fields: dict[str, int]) -> None:
    with pytest.raises(Unsupported):
        capabilities(cap(**fields))


def test_identity() -> None:
    found = IdentifyController.parse(controller(), 4096)
    assert (found.serial, found.model) == ("S123", "A drive")
    assert found.mdts_nbytes == 128 * KiB
    assert (found.sgl, found.sgl_advised) == (True, 32)
    assert found.has_deallocate
    assert found.has_volatile_cache
    assert not found.has_shadow_doorbells
    assert found.shutdown_s == 0
    slow = struct.pack("<I", 25_000_000)
    assert IdentifyController.parse(controller(at88=slow), 4096).shutdown_s == 25
    assert IdentifyController.parse(controller(at88=b"\xff" * 4), 4096).shutdown_s == 60
    assert IdentifyController.parse(controller(at77=b"\0"), 4096).mdts_nbytes == 2 * MiB
    assert IdentifyController.parse(controller(at536=b"\x02\0\0\0"), 4096).sgl, "dwords only"


@pytest.mark.parametrize(
    "fields",
    [
        {"at77": b"\x15"},
        {"at77": b"\xff"},
        {"at512": b"\x55"},
        {"at512": b"\x77"},
        {"at513": b"\x33"},
        {"at516": bytes(4)},
        {"at536": b"\x03"},
    ],
)
def test_impossible_controllers(fields: dict[str, bytes]) -> None:
    with pytest.raises(MediumError, match="does not allow"):
        IdentifyController.parse(controller(**fields), 4096)


def test_a_name_cannot_upset_a_terminal() -> None:
    assert IdentifyController.parse(controller(at24=b"\x1b[2J"), 4096).model.startswith("?[2J")


def test_namespaces() -> None:
    found = NamespaceIdentity.parse(namespace(777, 9))
    assert (found.nlb, found.lba_shift, found.deallocated_reads) == (777, 9, "zeros")
    assert found.refusal is None
    # Format 17 is chosen by FLBAS bits 3:0 and 6:5.
    raw = namespace(at25=b"\x11\x21", at196=struct.pack("<HB", 0, 9))
    assert NamespaceIdentity.parse(raw).lba_shift == 9


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"shift": 8}, "2^8 bytes"),
        ({"shift": 17}, "2^17 bytes"),
        ({"at128": b"\x08\0"}, "metadata"),
        ({"at29": b"\x01"}, "protection"),
        ({"nlb": 0}, "no blocks"),
        ({"at99": b"\x01"}, "write protected"),
    ],
)
def test_unusable_namespaces(fields: dict[str, Any], why: str) -> None:
    refusal = NamespaceIdentity.parse(namespace(**fields)).refusal
    assert refusal is not None
    assert why in refusal


@pytest.mark.parametrize(
    "fields", [{"at26": b"\x01"}, {"at8": b"\xff" * 8}, {"nlb": 2**60}, {"at25": b"\xff"}]
)
def test_impossible_namespaces(fields: dict[str, Any]) -> None:
    with pytest.raises(MediumError, match="does not allow"):
        NamespaceIdentity.parse(namespace(**fields))


def test_namespace_lists() -> None:
    assert parse_namespace_list(struct.pack("<6I", 1, 2, 7, 0, 5, 0), 7) == [1, 2, 7]
    for nsids in ((1, 1), (2, 1), (8,)):
        with pytest.raises(MediumError):
            parse_namespace_list(struct.pack(f"<{len(nsids)}I", *nsids), 7)


changes = st.dictionaries(st.integers(0, 1023), st.integers(0, 255), max_size=40)


def changed(raw: bytes, places: dict[int, int]) -> bytes:
    out = bytearray(raw)
    for offset, content in places.items():
        out[offset] = content
    return bytes(out)


@given(changes, st.integers(0, 2**64 - 1))
def test_any_bytes_end_in_sane_numbers_or_a_typed_error(
    places: dict[int, int], register: int
) -> None:
    for parse in (
        lambda: Capabilities.parse(register, lambda: register >> 32),
        lambda: IdentifyController.parse(changed(controller(), places), 4096),
        lambda: NamespaceIdentity.parse(changed(namespace(), places)),
        lambda: parse_namespace_list(changed(bytes(IDENTIFY_NBYTES), places), 1024),
    ):
        try:
            found = parse()
        except TuttiError:
            continue
        if isinstance(found, Capabilities):
            assert 2 <= found.depth_max <= 65536
        if isinstance(found, IdentifyController):
            assert 4096 <= found.mdts_nbytes <= 2 * MiB
        if isinstance(found, NamespaceIdentity) and found.refusal is None:
            assert found.nlb << found.lba_shift < 2**64

"""The readers of untrusted bytes, each as a function of bytes: the fuzzers' targets.

A target returns, or raises a TuttiError; anything else is a finding. Bytes of the medium are sealed
here after they were changed, so that a checksum does not hide what lies behind it: CRC32C keeps
accidents out, not hands.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, opened
from tutti import native
from tutti.bench.traces import parse_trace
from tutti.errors import KeyMissing, TuttiError
from tutti.gio_uring.drives.identify import Capabilities, IdentifyController, NamespaceIdentity
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import (
    RECORD_DTYPE,
    RecordContent,
    RecordIdentity,
    RecordState,
    check_records,
    fill_records,
)
from tutti.medium.superblock import (
    SNAPSHOT_ENTRY_DTYPE,
    SUPERBLOCK_DTYPE,
    Superblock,
    choose_superblock,
    decode_snapshot,
    encode_snapshot,
)
from tutti.node.messages import body_nbytes, keys_of, read_reply, read_request
from tutti.scheduler.policy import SlackPolicy
from tutti.scheduler.profile import TableProfile, load_profile
from tutti.scheduler.trace import replay

PROFILE = Path(__file__).parents[2] / "bench" / "results" / "profile.json"
BLOCK = 4096
KEYS = np.arange(4 * 16, dtype=np.uint8).reshape(4, 16)
_PATCH = struct.Struct("<IB")
_SEAL_NOTHING = 0xFF


def patched(raw: bytes, data: bytes) -> bytearray:
    """`raw` with pieces of it replaced: data is a list of (u32 offset, u8 length, bytes)."""
    out = bytearray(raw)
    at = 0
    while at + _PATCH.size <= len(data):  # bounded: every piece takes some of data
        offset, length = _PATCH.unpack_from(data, at)
        at += _PATCH.size
        piece = data[at : at + length]
        at += length
        offset %= len(out)
        piece = piece[: len(out) - offset]
        out[offset : offset + len(piece)] = piece
    return out


def sealed(raw: bytearray) -> bytes:
    """Blocks with right CRCs."""
    blocks = np.frombuffer(raw, np.uint8).copy()
    native.records_seal(blocks)
    return blocks.tobytes()


@cache
def pool_image() -> bytes:
    """A pool of four objects that was closed cleanly."""
    controller = controller_of(formatted())
    medium = controller.medium(1)
    store = opened([], controller=controller)
    pool = store.allocate_memory(4)
    for page in range(4):
        pool.write(page, bytes([page + 1]) * LAYOUT.object_nbytes)
    store.put(KEYS, np.arange(4)).wait(10)
    keep = store.controller.close
    store.controller.close = lambda: None  # type: ignore[method-assign]
    store.close()
    content = bytes(medium)
    keep()
    return content


def superblock(data: bytes) -> None:
    """Both copies of a superblock; the layout's fingerprint fits unless the first byte is odd."""
    if not data:
        return
    raw = patched(pool_image()[: 2 * BLOCK], data[1:])
    if data[0] % 2 == 0:
        _fit_fingerprints(raw)
    whole = sealed(raw)
    found, copy = choose_superblock(whole[:BLOCK], whole[BLOCK:], "fuzzed")
    assert copy in (0, 1)
    assert Superblock.decode(found.encode(), "again") == found
    KVLayout.from_json(found.layout_json)
    assert found.geometry.groups_offset < found.geometry.member_nbytes


def _fit_fingerprints(raw: bytearray) -> None:
    rows = np.frombuffer(raw, SUPERBLOCK_DTYPE)
    for row in rows:
        length = min(int(row["layout_nbytes"]), row["layout_json"].size)
        digest = xxhash.xxh3_128_digest(row["layout_json"][:length].tobytes())
        row["fingerprint"][:] = np.frombuffer(digest, np.uint8)


@cache
def _records() -> tuple[bytes, RecordIdentity]:
    identity = RecordIdentity(bytes(range(16)), 0, 7, LAYOUT.fingerprint, LAYOUT.layers)
    records = np.zeros(4, RECORD_DTYPE)
    digests = np.ones((4, LAYOUT.layers), np.uint64)
    content = RecordContent(
        np.arange(4), np.arange(1, 5), RecordState.READY, keys=KEYS, digests=digests
    )
    fill_records(records, identity, content)
    return records.tobytes(), identity


def record(data: bytes) -> None:
    """Four slot records."""
    raw, identity = _records()
    records = np.frombuffer(sealed(patched(raw, data)), RECORD_DTYPE)
    verdicts = check_records(records, np.arange(4), identity)
    ready = verdicts == RecordState.READY
    assert (records["sequence"][ready] < 2**63).all()
    assert (records["slot"][ready] == np.arange(4)[ready]).all()


@cache
def _superblock() -> Superblock:
    return choose_superblock(pool_image()[:BLOCK], pool_image()[BLOCK : 2 * BLOCK], "a pool")[0]


def snapshot(data: bytes) -> None:
    """A snapshot whose sums and descriptor fit whatever its entries are."""
    whole = _superblock()
    entries = np.zeros(4, SNAPSHOT_ENTRY_DTYPE)
    entries["slot"] = np.arange(4)
    entries["key"] = KEYS
    entries["state"] = RecordState.READY
    changed = np.frombuffer(bytes(patched(entries.tobytes(), data[1:])), SNAPSHOT_ENTRY_DTYPE)
    raw, descriptor = encode_snapshot(changed, whole.identity, whole.generation)
    if data[:1] > b"\x7f":
        raw = bytes(patched(raw, data[1:]))
    decoded = decode_snapshot(raw, replace(whole, snapshot=descriptor), "fuzzed")
    assert (decoded["slot"] < GEOMETRY.slots).all()


def pool(data: bytes) -> None:
    """A whole pool, changed anywhere in its metadata: opened, read, written, closed."""
    if not data:
        return
    content = pool_image()
    metadata = GEOMETRY.groups_offset
    raw = patched(content[:metadata], data[1:])
    if data[0] != _SEAL_NOTHING:
        if data[0] % 2 == 0:
            head = raw[: 2 * BLOCK]
            _fit_fingerprints(head)
            raw[: 2 * BLOCK] = head
        table = GEOMETRY.table_offset
        raw[: 2 * BLOCK] = sealed(raw[: 2 * BLOCK])
        raw[table : table + GEOMETRY.slots * BLOCK] = sealed(
            raw[table : table + GEOMETRY.slots * BLOCK]
        )
    medium = np.frombuffer(bytes(raw) + content[metadata:], np.uint8)
    controller = controller_of([medium])
    try:
        store = opened([], controller=controller)
    except TuttiError:
        controller.close()
        raise
    with store:
        store.wait_recovered(5)
        memory = store.allocate_memory(4, hugepages=False)
        there = np.flatnonzero(store.present(KEYS))
        if there.size:
            with contextlib.suppress(KeyMissing):
                ticket = store.load(KEYS[there], there)
                try:
                    ticket.wait(5)
                finally:
                    ticket.wait_settled(5)
        store.put(KEYS + 100, np.arange(4)).wait(5)
        del memory


def layout(data: bytes) -> None:
    """The JSON of a layout."""
    made = KVLayout.from_json(data)
    assert KVLayout.from_json(made.to_json()) == made
    assert made.object_nbytes > 0


def trace(data: bytes) -> None:
    """A trace of requests."""
    requests = parse_trace(data.decode("utf-8", "replace").splitlines(), limit=100)
    assert all(request.to_json() for request in requests)


@cache
def _profile() -> TableProfile:
    return load_profile(PROFILE)


def schedule(data: bytes) -> None:
    """A trace of the scheduler's events, replayed."""
    lines = data.decode("utf-8", "replace").splitlines()[:50]
    for _ in replay(lines, SlackPolicy(), _profile()):
        pass


def profile(data: bytes) -> None:
    """A profile: the JSON that the data says, or a measured one with parts replaced by the data."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    for path, value in document.items() if isinstance(document, dict) else ():
        _use_profile(_replaced(json.loads(PROFILE.read_text()), path.split("/"), value))
    if isinstance(document, dict):
        _use_profile(document)


def _replaced(document: Any, path: list[str], value: Any) -> Any:
    place = document
    for name in path[:-1]:
        with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
            place = place[int(name)] if isinstance(place, list) else place[name]
    with contextlib.suppress(ValueError, IndexError, KeyError, TypeError):
        place[int(path[-1]) if isinstance(place, list) else path[-1]] = value
    return document


def _use_profile(document: dict[str, Any]) -> None:
    made = TableProfile(document)
    for amount in (1, 4096, 10**9):
        times = (
            made.layer_us(amount, amount),
            made.decode_us(amount, amount),
            made.read_us(amount),
            made.write_us(amount),
        )
        assert all(0 <= time < float("inf") for time in times), times


def identify(data: bytes) -> None:
    """What a drive says of itself."""
    raw = bytearray(4096)
    raw[512:514] = b"\x66\x44"
    raw[516:520] = b"\1\0\0\0"
    raw = patched(bytes(raw), data)
    registers = data[:12].ljust(12, b"\0")
    for parse in (
        lambda: Capabilities.parse(int.from_bytes(registers[:8], "little"), lambda: registers[8]),
        lambda: IdentifyController.parse(bytes(raw), 4096),
        lambda: NamespaceIdentity.parse(bytes(raw)),
    ):
        with contextlib.suppress(TuttiError):
            parse()


def message(data: bytes) -> None:
    """A message between agent and client."""
    with contextlib.suppress(TuttiError):
        body_nbytes(data[:4].ljust(4, b"\0"))
    for read in (read_request, read_reply):
        with contextlib.suppress(TuttiError):
            found = read(data)
            if hasattr(found, "keys"):
                keys_of(found.keys)


TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (
        *(superblock, record, snapshot, pool, layout),
        *(trace, schedule, profile, identify, message),
    )
}


def run(name: str, data: bytes) -> None:
    """One case; raises only what is a finding."""
    with contextlib.suppress(TuttiError):
        TARGETS[name](data)

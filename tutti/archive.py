"""Exports objects of a pool to a file, and imports such a file on another machine.

    with tutti.open("pool.tutti") as store, open("docs.tkv", "wb") as file:
        export_objects(store, store.catalogue.keys("docs"), file)

A file holds a header (magic, version, length of the JSON that follows, its XXH3-64), the JSON, and
for each object a fixed head, the payload in the order of the medium, and the XXH3-128 of both.  All
integers are little-endian.  The JSON has the number of objects and the layout, whose fingerprint
must be that of the pool.  Chains follow one another, each from its first page on.

Pins, hit counts and namespaces are not exported; the importer chooses a namespace.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from tutti import __version__
from tutti.base.arrays import Keys
from tutti.errors import PoolCorrupt, PoolMismatch
from tutti.interface import Store
from tutti.medium.keys import KEY_NBYTES, as_keys
from tutti.medium.layout import KVLayout, differences
from tutti.memory.host_memory import HostMemory
from tutti.transfers.catalogue import ObjectInfo

VERSION = 1
_MAGIC = b"TUTTIKV\n"
_HEADER = struct.Struct("<8sIIQ")
#: key, parent, depth, seconds to live (0: no limit; a longer time is stored as 2^32 - 1).
_HEAD = struct.Struct(f"<{KEY_NBYTES}s{KEY_NBYTES}sII")
_DIGEST_NBYTES = 16
_JSON_NBYTES_MAX = 1 << 20
_BATCH_NBYTES = 64 << 20
_TIMEOUT_S = 600.0
_RENEW_S = 0.5  # pins end after some later look-ups, and servers make many
_NO_PARENT = bytes(KEY_NBYTES)


@dataclass(frozen=True)
class ImportResult:
    """Objects of an import: stored; already in the pool; dropped, as nothing could be evicted."""

    stored: int
    present: int
    dropped: int


@dataclass(frozen=True)
class _Entry:
    """One object of a file."""

    key: bytes
    parent: bytes
    depth: int
    ttl_s: int
    payload: bytes

    def follows(self, other: _Entry) -> bool:
        """Whether both can be in one put."""
        return (self.parent, self.depth, self.ttl_s) == (other.key, other.depth + 1, other.ttl_s)


def chains_of(infos: Sequence[ObjectInfo]) -> list[list[ObjectInfo]]:
    """Groups objects into chains, from a first page (or one whose parent is gone) to a last page.

    Pages that several chains share are listed in the longest of them only.
    """
    by_key = {info.key: info for info in infos}
    taken: set[bytes] = set()
    chains = []
    for info in sorted(infos, key=lambda each: -each.depth):
        chain: list[ObjectInfo] = []
        page: ObjectInfo | None = info
        while page is not None and page.key not in taken:
            taken.add(page.key)
            chain.append(page)
            page = by_key.get(page.parent)
        if chain:
            chains.append(chain[::-1])
    return chains


def export_objects(store: Store, keys: Keys, file: BinaryIO) -> int:
    """Writes objects to a file opened for binary writing; returns how many.

    keys: uint8 (n, 16); those that are not in the pool, may expire meanwhile, or have no room in
    ``pin_share`` are left out.  Every byte is verified, unless the pool has verify="off".
    Raises OSError when the file cannot be written, and the errors of ``load``.
    """
    name = f"export-{secrets.token_hex(8)}"
    try:
        infos = _pinned(store, keys, name)
        _write(store, infos, file, name)
    finally:
        store.unpin(name)
    return len(infos)


def _pinned(store: Store, keys: Keys, name: str) -> list[ObjectInfo]:
    """Objects in the order of their chains, pinned until ``name`` is unpinned."""
    infos = [info for chain in chains_of(store.catalogue.objects(keys)) for info in chain]
    least_s = 120 + sum(info.nbytes for info in infos) / 100e6  # at 100 MB/s they are read by then
    infos = [info for info in infos if info.expires_s is None or info.expires_s > least_s]
    if not infos:
        return []
    there = store.present(as_keys([info.key for info in infos]), pin=name)
    return [info for info, is_there in zip(infos, there, strict=True) if is_there]


def _write(store: Store, infos: Sequence[ObjectInfo], file: BinaryIO, pin: str) -> None:
    description = json.dumps(
        {"tutti": __version__, "objects": len(infos), "layout": json.loads(store.layout.to_json())}
    ).encode()
    digest = xxhash.xxh3_64_intdigest(description)
    file.write(_HEADER.pack(_MAGIC, VERSION, len(description), digest) + description)
    keys, pinned_s = as_keys([info.key for info in infos]), time.monotonic()
    with _memory(store) as memory:
        for start in range(0, len(infos), memory.pages):
            if time.monotonic() > pinned_s + _RENEW_S:
                store.present(keys[start:], pin=pin)
                pinned_s = time.monotonic()
            some = infos[start : start + memory.pages]
            ticket = store.load(keys[start : start + len(some)], range(len(some)), memory=memory)
            ticket.wait(_TIMEOUT_S)
            for page, info in enumerate(some):
                ttl_s = 0 if info.expires_s is None else min(max(1, info.expires_s), 2**32 - 1)
                head = _HEAD.pack(info.key, info.parent, info.depth, ttl_s)
                payload = memory.read(page)
                file.write(head + payload + _digest(head, payload))
            ticket.wait_settled(_TIMEOUT_S)


def import_objects(store: Store, file: BinaryIO, *, namespace: str = "") -> ImportResult:
    """Stores the objects of a file in a pool.

    file: opened for binary reading.  namespace: owner of the imported objects.  An object is stored
    only after its checksum was verified; objects before a damaged one stay stored.
    Raises PoolMismatch for KV of another model, layout or version, PoolCorrupt for a damaged or
    incomplete file, and the errors of ``put``.
    """
    count = _read_header(store.layout, file)
    totals = np.zeros(3, np.int64)
    with _memory(store) as memory:
        batch: list[_Entry] = []
        for number in range(count):
            entry = _read_entry(file, store.layout.object_nbytes)
            is_full = len(batch) == memory.pages
            if batch and (entry is None or is_full or not entry.follows(batch[-1])):
                totals += _put(store, memory, batch, namespace)
                batch = []
            if entry is None:
                stored, present, dropped = totals.tolist()
                raise PoolCorrupt(
                    f"object {number} of the file is damaged or missing. Of the objects before it,"
                    f" {stored} were stored, {present} were in the pool already and {dropped} were"
                    " dropped. Export the pool again for the rest"
                )
            batch.append(entry)
        if batch:
            totals += _put(store, memory, batch, namespace)
        if file.read(1):
            raise PoolCorrupt("the file has data after its last object; export it again")
    return ImportResult(*totals.tolist())


def _put(
    store: Store, memory: HostMemory, batch: list[_Entry], namespace: str
) -> tuple[int, int, int]:
    for page, entry in enumerate(batch):
        memory.write(page, entry.payload)
    first = batch[0]
    result = store.put(
        as_keys([entry.key for entry in batch]),
        np.arange(len(batch), dtype=np.uint32),
        memory=memory,
        parent=first.parent if first.parent != _NO_PARENT else None,
        depth=first.depth,
        ttl_s=float(first.ttl_s) if first.ttl_s else None,
        namespace=namespace,
    ).wait(_TIMEOUT_S)
    return result.stored, result.present, result.dropped


def _read_header(layout: KVLayout, file: BinaryIO) -> int:
    """The number of objects.  Raises PoolMismatch or PoolCorrupt."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        name = getattr(file, "name", "the file")
        raise PoolMismatch(f"{name} was not written by `tutti export`; pass another file")
    _, version, nbytes, digest = _HEADER.unpack(header)
    if version != VERSION:
        raise PoolMismatch(
            f"the file has version {version}, this program reads {VERSION}; export it again with"
            " the same version of tutti"
        )
    description = file.read(min(nbytes, _JSON_NBYTES_MAX))
    if len(description) != nbytes or xxhash.xxh3_64_intdigest(description) != digest:
        raise PoolCorrupt("the header of the file is damaged; export it again")
    try:
        fields = json.loads(description)
        count = int(fields["objects"])
        found = KVLayout.from_json(json.dumps(fields["layout"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PoolCorrupt("the header of the file is damaged; export it again") from error
    if found.fingerprint != layout.fingerprint:
        raise PoolMismatch(
            f"the pool has another layout than the file: {differences(layout, found)}; import it"
            " into a pool of the same model and layout"
        )
    return count


def _read_entry(file: BinaryIO, object_nbytes: int) -> _Entry | None:
    """The next object; None where it is damaged or missing."""
    raw = file.read(_HEAD.size + object_nbytes + _DIGEST_NBYTES)
    head, payload = raw[: _HEAD.size], raw[_HEAD.size : _HEAD.size + object_nbytes]
    if raw[_HEAD.size + object_nbytes :] != _digest(head, payload):
        return None
    key, parent, depth, ttl_s = _HEAD.unpack(head)
    return _Entry(key, parent, depth, ttl_s, payload)


def _digest(head: bytes, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return digest.digest()


@contextlib.contextmanager
def _memory(store: Store) -> Iterator[HostMemory]:
    """Registered memory for a batch of objects."""
    memory = store.allocate_memory(max(1, _BATCH_NBYTES // store.layout.object_nbytes))
    try:
        yield memory
    finally:
        store.unregister(memory)

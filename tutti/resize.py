"""Gives a pool in files another size: its objects go to new files, which then take the old names.

The old files stay as they are until the new ones are complete. An interrupted resize leaves the old
pool or the new one, never a part of either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.units import MiB
from tutti.errors import CapacityError, DeviceTimeout, KeyMissing, Unsupported
from tutti.gio_uring.drives.block_device import device_name
from tutti.gio_uring.file_trust import resolve
from tutti.medium.keys import as_keys
from tutti.memory.host_memory import HostMemory
from tutti.pool import replacement
from tutti.pool.member_controller import are_drives
from tutti.pool.pool_format import Paths, format, pool_members
from tutti.store import ObjectStore
from tutti.store import open as open_pool
from tutti.transfers.catalogue import ObjectInfo
from tutti.transfers.put_request import PutRequest

_BATCH_NBYTES = 64 * MiB
_WAIT_S = 120.0
#: Slots that stay free in the new pool, so that copying evicts nothing that was copied.
_RESERVE = 16

Progress = Callable[[int, int], None]


class Resized(NamedTuple):
    """Objects that went along, were damaged, and had no room: those used least recently of the ones
    that are not pinned.
    """

    kept: int
    damaged: int
    dropped: int


def resize(
    paths: Paths, capacity: int | str, *, executor: str = "auto", progress: Progress | None = None
) -> Resized:
    """Gives a closed pool in files ``capacity`` bytes in all, as many members as before.

    Pins, expiries, namespaces and the order of use go along. The file systems need room for the
    new files while the old ones are there. progress: called with (objects done, objects).
    Raises Unsupported for devices, CapacityError, PoolInUse, PoolReadOnly before anything is copied
    when the new files cannot have the old ones' owner, and what opening and formatting raise.
    """
    names = pool_members(paths)
    if are_drives(names) or any(device_name(name) is not None for name in names):
        raise Unsupported(
            "a pool on devices cannot be resized, as no copy fits beside it; use `tutti export`,"
            " format the devices with another --capacity, then `tutti import`"
        )
    names = [resolve(name) for name in names]  # or a link would become the pool
    replacement.finish(names)
    news = replacement.beside(names)
    with open_pool(names, executor=executor, profile=None) as old:
        old.wait_recovered()
        try:
            for path in news:  # of an attempt that was interrupted
                Path(path).unlink(missing_ok=True)
            format(news, old.layout, capacity, executor=executor)
            replacement.give_owners(names)
            with open_pool(news, executor=executor, profile=None) as new:
                result = _copy(old, new, progress)
        except BaseException:
            for path in news:
                Path(path).unlink(missing_ok=True)
            raise
    try:
        replacement.replace(names, [s for s in old.members.superblocks if s is not None])
    except BaseException:
        if not replacement.finish(names):  # no name has changed
            for path in news:
                Path(path).unlink(missing_ok=True)
        raise
    return result


def _copy(old: ObjectStore, new: ObjectStore, progress: Progress | None) -> Resized:
    """Copies what fits, the least recently used first, so that the order of use stays."""
    keys = old.catalogue.keys_by_use()
    room = new.stats()["capacity_objects"]
    room -= min(room // 8, max(_RESERVE, new.geometry.group_slots))
    wanted = keys if len(keys) <= room else _chosen(old, keys, room)
    pages = max(1, min(len(wanted), _BATCH_NBYTES // old.layout.object_nbytes))
    memory = HostMemory.allocate(old.layout, pages)
    for store in (old, new):
        store.register(memory)
    kept = 0
    for start in range(0, len(wanted), pages):
        infos = old.catalogue.objects(wanted[start : start + pages])
        kept += _copy_batch(old, new, memory, infos)
        if progress is not None:
            progress(min(start + pages, len(wanted)), len(wanted))
    return Resized(kept, len(wanted) - kept, len(keys) - len(wanted))


def _chosen(old: ObjectStore, keys: Keys, room: int) -> Keys:
    """So many of the keys, in their order: those that are pinned, and the last of the others."""
    pins = {info.key for info in old.catalogue.objects(keys) if info.pinned}
    if len(pins) > room:
        raise CapacityError(
            f"{len(pins)} objects are pinned, the new pool takes {room}: give it more capacity, or"
            " unpin some"
        )
    is_pinned = np.array([key.tobytes() in pins for key in keys], np.bool_)
    others = np.flatnonzero(~is_pinned)
    is_pinned[others[others.size - (room - len(pins)) :]] = True
    return keys[is_pinned]


def _copy_batch(
    old: ObjectStore, new: ObjectStore, memory: HostMemory, infos: list[ObjectInfo]
) -> int:
    """Loads and verifies objects, and puts those that are right; how many."""
    keys = as_keys([info.key for info in infos])
    try:
        ticket = old.load(keys, np.arange(len(infos)), memory=memory)
    except KeyMissing:  # one was found damaged meanwhile: the others one by one
        if len(infos) == 1:
            return 0
        return sum(_copy_batch(old, new, memory, [info]) for info in infos)
    if not ticket.wait_settled(_WAIT_S):
        raise DeviceTimeout("the pool's device does not answer; check it, then try again")
    bad = set(ticket.failed().tolist())
    good = [page for page in range(len(infos)) if page not in bad]
    stored = 0
    for (tenant, expires_s), rows in _by_owner(infos, good).items():
        chosen = [infos[row] for row in rows]
        request = PutRequest(
            as_keys([info.key for info in chosen]),
            as_keys([info.parent for info in chosen]),
            np.array([info.depth for info in chosen], np.uint32),
            np.array(rows, np.uint32),
            memory.memory,
            tenant,
        )
        if expires_s is not None:
            expiry = PutRequest.checked([], [], memory.memory, None, 0, max(1, expires_s))
            request = request._replace(expiry_64s=expiry.expiry_64s)
        stored += new.put_request(request).wait(_WAIT_S).stored
    pinned = [info.key for info in infos if info.pinned]
    if pinned:
        new.catalogue.pin(as_keys(pinned))
    return stored


def _by_owner(infos: list[ObjectInfo], rows: list[int]) -> dict[tuple[int, int | None], list[int]]:
    found: dict[tuple[int, int | None], list[int]] = {}
    for row in rows:
        found.setdefault((infos[row].tenant, infos[row].expires_s), []).append(row)
    return found

"""Changes the size of a pool.

A pool in files: its objects are copied to new files, which are then renamed to the old names. The
old files do not change until the new ones are complete.

A pool on devices: its objects are copied to a pool in a file, the spool, and back after the devices
were formatted. The spool gets its final name when it is complete, before the devices change, and is
removed when they are complete. A second call after an interruption reads from this name what is
left to do (`_Spool`). It refuses devices with other data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.units import MiB, parse_nbytes
from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    ConfigError,
    DeviceTimeout,
    KeyMissing,
    MediumError,
    PoolError,
    PoolExists,
    Unsupported,
)
from tutti.fsck import prove_all
from tutti.gio_uring.drives.block_device import device_name
from tutti.gio_uring.drives.device_content import HEAD_NBYTES
from tutti.gio_uring.file_creation import sync_folder
from tutti.gio_uring.file_trust import resolve
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.medium.keys import as_keys
from tutti.medium.slot_record import expiry_of
from tutti.medium.superblock import choose_superblock
from tutti.memory.host_memory import HostMemory
from tutti.placement.eviction import reserve_slots
from tutti.pool import replacement
from tutti.pool.block_io import opened_io
from tutti.pool.member_controller import are_drives, check_room, open_controller
from tutti.pool.pool_format import Paths, format, make_blank, pool_members
from tutti.store import ObjectStore
from tutti.store import open as open_pool
from tutti.transfers.catalogue import ObjectInfo
from tutti.transfers.put_request import PutRequest

_BATCH_NBYTES = 64 * MiB
_WAIT_S = 120.0
#: Minimum number of slots that stay free in the new pool.
_RESERVE = 16
_SPOOL = "tutti-resize-"

Progress = Callable[[int, int], None]


class _Spool(NamedTuple):
    """The parts of a complete spool's file name: the UUIDs of the old pool and, once it exists, of
    the new pool; the generation of the old pool when it was copied; the number of devices.
    """

    path: Path
    old: str
    generation: int
    devices: int
    new: str

    @classmethod
    def of(cls, path: Path) -> _Spool:
        try:
            old, generation, devices, new = path.stem.removeprefix(_SPOOL).split("-")
            return cls(path, old, int(generation), int(devices), new)
        except ValueError:
            raise ConfigError(f"`tutti resize` did not create {path}; move it away") from None

    def named(self, **changes: Any) -> _Spool:
        """Renames the file after these changes of its parts."""
        it = self._replace(**changes)
        name = f"{_SPOOL}{it.old}-{it.generation}-{it.devices}-{it.new}.tutti"
        path = self.path.rename(self.path.with_name(name))
        sync_folder(str(path))
        return it._replace(path=path)


class Resized(NamedTuple):
    """Numbers of objects that were copied, were damaged, and were dropped because they did not fit:
    the least recently used ones that are not pinned.
    """

    kept: int
    damaged: int
    dropped: int


def resize(
    paths: Paths,
    capacity: int | str,
    *,
    through: str | None = None,
    progress: Progress | None = None,
) -> Resized:
    """Changes the total size of a closed pool to ``capacity``; its number of members stays.

    Pins, expiries, namespaces and the order of use are kept. The file systems need room for old and
    new files at the same time. through: for a pool on devices, a folder with room for its objects.
    progress: called with (objects done, objects).
    Raises Unsupported for devices without ``through``, CapacityError, PoolInUse, PoolReadOnly when
    the new files cannot get the owner of the old ones (before anything is copied), PoolExists when
    the folder has a spool of another pool than that of the devices, and the errors of opening and
    formatting.
    """
    names = pool_members(paths)
    if are_drives(names) or any(device_name(name) is not None for name in names):
        if through is None:
            raise Unsupported(
                "a pool on devices is resized by way of a file; add --through FOLDER, a folder on"
                " another drive with enough space for the objects"
            )
        return _resize_devices(names, parse_nbytes(capacity), Path(through), progress)
    if through is not None:
        raise ConfigError("--through is only for pools on devices; remove it")
    names = [resolve(name) for name in names]  # otherwise a file would replace a symbolic link
    replacement.finish(names)
    news = replacement.beside(names)
    with open_pool(names, profile=None) as old:
        old.wait_recovered()
        try:
            for path in news:  # of an attempt that was interrupted
                Path(path).unlink(missing_ok=True)
            format(news, old.layout, capacity)
            replacement.give_owners(names)
            with open_pool(news, profile=None) as new:
                result = _copy(old, new, progress, _room(new.geometry, len(names)))
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


def _resize_devices(
    names: list[str], capacity: int, folder: Path, progress: Progress | None
) -> Resized:
    """Copies out, formats and copies back; where a spool is complete, only what is left to do."""
    spools = list(folder.glob(f"{_SPOOL}*.tutti"))
    if len(spools) > 1:
        files = ", ".join(map(str, spools))
        raise ConfigError(f"{files} belong to several pools; move those of other pools away")
    lost = Resized(0, 0, 0)
    if spools:
        spool = _Spool.of(spools[0])
        if spool.devices != len(names):
            raise ConfigError(
                f"{spool.path} has objects of a pool on {spool.devices} devices; pass all of them"
            )
    else:
        spool, lost = _spool(names, capacity, folder, progress)
    found = _generations(names, spool)
    if not spool.new or found.keys() != {spool.new}:
        if found.keys() == {spool.old} and found[spool.old] != spool.generation:
            _check_unused(names, spool)  # not needed once a device is erased
        with open_pool(spool.path, profile=None) as source:
            layout = source.layout
            source.wait_recovered()
            _wanted(source, _room(_planned(source, names, capacity), len(names)))
        make_blank(names)
        format(names, layout, capacity)
        (new,) = _generations(names, spool)
        spool = spool.named(new=new)
    with (
        open_pool(spool.path, profile=None) as source,
        open_pool(names, source.layout, capacity, profile=None) as target,
    ):
        if target.geometry.groups != _planned(target, names, capacity).groups:
            raise ConfigError(
                "an interrupted resize formatted the devices for another capacity; pass that again"
            )
        for store in (source, target):
            store.wait_recovered()
        if prove_all(target):  # after a loss of power: what is torn is copied again
            raise MediumError("objects could not be read; check the pool's device, then try again")
        done = _copy(source, target, progress, _room(target.geometry, len(names)))
    if done.damaged:
        raise ChecksumMismatch(
            f"{done.damaged} objects of {spool.path} are damaged; the devices have the other"
            f" {done.kept}. Remove the file, or export from it what can be read"
        )
    spool.path.unlink()
    sync_folder(str(spool.path))
    return Resized(done.kept, lost.damaged, lost.dropped + done.dropped)


def _spool(
    names: list[str], capacity: int, folder: Path, progress: Progress | None
) -> tuple[_Spool, Resized]:
    """Copies the objects that fit into a pool of ``capacity`` bytes to a complete spool; then
    clears the old pool and deallocates its groups.
    """
    with open_pool(names, profile=None) as old:
        old.wait_recovered()
        new = _planned(old, names, capacity)
        check_room(old.controller, names, new)
        room, group_slots = _room(new, len(names)), old.geometry.group_slots
        objects = len(_wanted(old, room))
        groups = (objects + objects // 32 + max(_RESERVE, group_slots)) // group_slots + 2
        size = Geometry(new.layers, new.segments, BLOCK_NBYTES, group_slots, groups).member_nbytes
        uuid = old.members.uuid.hex()
        part = folder / f"{_SPOOL}{uuid}.part"
        part.unlink(missing_ok=True)  # of an attempt that was interrupted
        try:
            format(part, old.layout, size)
            with open_pool(part, profile=None) as spool:
                result = _copy(old, spool, progress, room)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        generation = max(one.generation for one in old.members.superblocks if one is not None)
        complete = _Spool(part, uuid, generation, len(names), "").named()
        try:
            old.clear(deallocate=True)
        except BaseException:  # objects that stay would look as if the pool had been used since
            old.clear()
            raise
    return complete, result


def _check_unused(names: list[str], spool: _Spool) -> None:
    """Raises PoolExists where the old pool has objects again, which the spool does not have."""
    with open_pool(names, profile=None) as old:
        old.wait_recovered()
        if objects := len(old.catalogue.keys_by_use()):
            raise PoolExists(
                f"the pool has {objects} objects, because it was used after an interrupted resize;"
                f" {spool.path} is a pool with the earlier objects: move it to another folder, then"
                " resize again"
            )


def _generations(names: Sequence[str], spool: _Spool) -> dict[str, int]:
    """Generations of the pools on these devices, by UUID; "" and 0 stand for a device without one.

    Raises PoolExists for a device that has no superblock of the spool's pools and is not empty.
    Empty are zeros, and a pool that was never opened, as an interrupted format leaves it.
    """
    found: dict[str, int] = {}
    with open_controller(names) as controller, opened_io(controller) as (_, io):
        for nsid, name in enumerate(names, 1):
            head = io.read(nsid, 0, HEAD_NBYTES)
            copies = head[:BLOCK_NBYTES], head[BLOCK_NBYTES : 2 * BLOCK_NBYTES]
            uuid, generation, is_empty = "", 0, not any(head)
            with suppress(PoolError):
                one = choose_superblock(*copies, name)[0]
                uuid, generation = one.pool_uuid.hex(), one.generation
                is_empty = generation == 1
            if uuid not in (spool.old, spool.new or spool.old) and not is_empty:
                raise PoolExists(
                    f"{name} does not hold the pool whose objects are in {spool.path}; pass that"
                    " pool's devices, or another folder, or erase it if it is one of the devices"
                )
            found[uuid] = max(generation, found.get(uuid, 0))
    return found


def _planned(old: ObjectStore, names: Sequence[str], capacity: int) -> Geometry:
    count, lba_nbytes = len(names), old.geometry.lba_nbytes
    return Geometry.plan(old.layout, capacity // count, lba_nbytes=lba_nbytes, members=count)


def _room(new: Geometry, members: int) -> int:
    """How many objects fit into a new pool without evicting any of them."""
    slots = new.slots * members
    return slots - min(slots // 8, max(_RESERVE, new.group_slots, reserve_slots(slots)))


def _copy(old: ObjectStore, new: ObjectStore, progress: Progress | None, room: int) -> Resized:
    """Copies ``room`` objects, the least recently used first, so that the order of use stays."""
    old.catalogue.expiry.stop(_WAIT_S)  # what it removed meanwhile would count as damaged
    wanted = _wanted(old, room)
    dropped = len(old.catalogue.keys_by_use()) - len(wanted)
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
    return Resized(kept, len(wanted) - kept, dropped)


def _wanted(old: ObjectStore, room: int) -> Keys:
    """At most ``room`` keys, least recently used first: those of pinned objects, and of the others
    the most recently used.
    """
    keys = old.catalogue.keys_by_use()
    if len(keys) <= room:
        return keys
    pins = {info.key for info in old.catalogue.objects(keys) if info.pinned}
    if len(pins) > room:
        raise CapacityError(
            f"{len(pins)} objects are pinned, but only {room} fit into the new pool: pass a larger"
            " capacity, or unpin some"
        )
    is_pinned = np.array([key.tobytes() in pins for key in keys], np.bool_)
    others = np.flatnonzero(~is_pinned)
    is_pinned[others[others.size - (room - len(pins)) :]] = True
    return keys[is_pinned]


def _copy_batch(
    old: ObjectStore, new: ObjectStore, memory: HostMemory, infos: list[ObjectInfo]
) -> int:
    """Loads and verifies objects, and puts the intact ones; returns how many."""
    keys = as_keys([info.key for info in infos])
    try:
        ticket = old.load(keys, np.arange(len(infos)), memory=memory)
    except KeyMissing:  # one was found damaged meanwhile: load them one by one
        if len(infos) == 1:
            return 0
        return sum(_copy_batch(old, new, memory, [info]) for info in infos)
    if not ticket.wait_settled(_WAIT_S):
        raise DeviceTimeout("the pool's device does not answer; check it, then try again")
    bad = set(ticket.failed().tolist())
    if any(old.match([infos[row].key]) for row in bad):  # damaged ones would be quarantined by now
        raise MediumError("objects could not be read; check the pool's device, then try again")
    by_owner = defaultdict[tuple[int, int | None], list[int]](list)
    for row, info in enumerate(infos):
        if row not in bad:
            by_owner[info.tenant, info.expires_s].append(row)
    stored = 0
    for (tenant, expires_s), rows in by_owner.items():
        chosen = [infos[row] for row in rows]
        request = PutRequest.of(
            as_keys([info.key for info in chosen]),
            as_keys([info.parent for info in chosen]),
            np.array([info.depth for info in chosen], np.uint32),
            np.array(rows, np.uint32),
            memory.memory,
            tenant,
            0 if expires_s is None else expiry_of(max(1, expires_s)),
        )
        done = new.put_request(request).wait(_WAIT_S)
        if done.dropped:
            raise CapacityError(f"the new pool had no room for {done.dropped} objects; try again")
        stored += done.stored + done.present  # present: stored by a call that was interrupted
    if pinned := [info.key for info in infos if info.pinned]:
        new.catalogue.pin(as_keys(pinned))
    return stored

"""Makes new pools in files, on devices and on drives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.base.checks import flag, function, instance, one_of, optional, takes
from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.errors import (
    CapacityError,
    ConfigError,
    MemberMissing,
    PoolExists,
    PoolInUse,
    PoolNotFound,
    system_errors,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import EXECUTORS, FileController
from tutti.gio_uring.drives.block_device import check_devices, device_name
from tutti.gio_uring.drives.device_content import (
    HEAD_NBYTES,
    LABEL,
    TAIL_NBYTES,
    Force,
    Held,
    check_force,
    check_forced,
)
from tutti.gio_uring.drives.generic_device import is_generic, readable_path
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.file_creation import ReservedFile, reserve_file
from tutti.gio_uring.file_member import FileMember
from tutti.gio_uring.named_drive import serial_of
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.medium.layout import KVLayout
from tutti.pool import replacement
from tutti.pool.block_io import BlockIo, opened_io
from tutti.pool.member_controller import are_drives, check_blank, check_room, open_controller
from tutti.pool.members import Members
from tutti.pool.places import (
    FolderFile,
    check_distinct,
    check_free,
    exists,
    in_folders,
    make_folder_of,
)

_log = logging.getLogger(__name__)

_TRIES = 3

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@system_errors()
@takes(
    layout=instance(KVLayout),
    force=check_force,
    prewrite=flag,
    progress=optional(function),
    executor=one_of(*EXECUTORS),
)
def format(
    paths: Paths,
    layout: KVLayout,
    capacity: int | str,
    *,
    force: Force = False,
    prewrite: bool = False,
    progress: Any = None,
    executor: str = "auto",
) -> Geometry:
    """Makes a new, empty pool in files or on devices.

    paths: as for ``open``; a folder gets a file.  capacity: of the pool, in bytes or as "64GiB".
    force: True overwrites existing files.  To overwrite a device or drive that holds data, give its
    serial number (of several, a list); one that is in use is always refused.
    prewrite: writes files once, which spares the first puts their journal commits;
    ``progress(done, total)`` is called with bytes.  executor: as for ``open``.
    Raises PoolExists, PoolNotFound, CapacityError (also for a full disk), LayoutError, PoolInUse,
    and for drives what ``open_controller`` raises.
    """
    names = in_folders(member_names(paths), layout, is_new=True)
    nbytes = parse_nbytes(capacity)
    layout.check_model()
    if are_drives(names):
        return _format_drives(names, layout, nbytes // len(names), force)
    check_devices(names, force)
    geometry = Geometry.plan(layout, nbytes // len(names), members=len(names))
    for name in names:
        if os.path.isfile(folder := os.path.dirname(name)):
            raise PoolNotFound(f"{folder} is a file, not a folder; correct the path {name}")
        base = name.base if isinstance(name, FolderFile) else Path(name).parent
        if not exists(str(base)):
            raise PoolNotFound(f"the folder {base} does not exist; create it first")
        place = os.path.realpath(name)
        if os.path.islink(name) and not os.path.isdir(os.path.dirname(place)):
            raise PoolNotFound(
                f"{name} is a link to {place}, whose folder does not exist; make the folder, or"
                " correct the link"
            )
        if device_name(name) is None and os.path.exists(name) and not force:
            raise PoolExists(f"{name} exists; open it, or use --force to overwrite it")
    check_free(names, geometry.member_nbytes, nbytes // len(names))
    for name in names:
        if isinstance(name, FolderFile):
            make_folder_of(name)
    made: list[ReservedFile] = []
    try:
        with contextlib.ExitStack() as claims:
            for name in names:
                _claim(name, claims)
            for name in names:
                may_exist = bool(force) or device_name(name) is not None
                nbytes = geometry.member_nbytes
                made.append(reserve_file(name, nbytes, prewrite, progress, may_exist=may_exist))
        # By descriptors, so that no other process opens the files before they are a pool.
        files = [file.path if file.file is None else file.file.fileno() for file in made]
        with FileController(files, executor=executor, lock=True) as controller:
            _write_format(controller, names, layout, geometry)
    except BaseException as error:
        for file in made:
            if file.is_new and not isinstance(error, PoolInUse):  # else it is another's now
                Path(file.path).unlink(missing_ok=True)
        raise
    finally:
        for file in made:
            file.close()
    return geometry


def _claim(name: str, claims: contextlib.ExitStack) -> None:
    """Checks that no process uses what is there, before anything is written; devices stay claimed.

    Generic devices are claimed whenever they are opened.
    """
    if is_generic(name) or not os.path.exists(name):
        return
    is_device = Path(name).is_block_device()
    member = FileMember(name, lock=not is_device)
    if is_device:
        claims.callback(member.close)
    else:
        member.close()


def warn_of_capacity(name: str, capacity: int | str, members: int, geometry: Geometry) -> None:
    """Logs a warning if an open pool has another size than a new one of this capacity."""
    nbytes = parse_nbytes(capacity)
    with contextlib.suppress(CapacityError):  # less than any pool has
        new = Geometry.plan(
            geometry,
            nbytes // members,
            lba_nbytes=geometry.lba_nbytes,
            group_slots=geometry.group_slots,
            members=members,
        )
        if new.groups == geometry.groups:
            return
    _log.warning(
        "%s has %s, not the given capacity of %s: a pool keeps its size; to change it, close it and"
        " run `tutti resize`",
        name,
        format_nbytes(members * geometry.member_nbytes),
        format_nbytes(nbytes),
    )


def format_missing(
    names: Sequence[str],
    layout: KVLayout | None,
    capacity: int | str | None,
    executor: str = "auto",
) -> None:
    """Formats a pool if its files do not exist, or if its devices are labelled for it.  Returns as
    well if another process does so at the same time.

    Raises PoolNotFound without a layout and a capacity, MemberMissing when only some files exist,
    and what ``format`` raises.
    """
    if capacity is not None:
        parse_nbytes(capacity)  # a wrong one is an error even if the pool exists
    replacement.finish(names)
    for _ in range(_TRIES):  # another process may make it, or fail to, at the same time
        missing = [] if are_drives(names) else _missing(names)
        if not missing:
            if layout is None or capacity is None or not _are_labelled(names):
                return
            with contextlib.suppress(PoolExists):
                format(names, layout, capacity, executor=executor)
                return
            continue
        if len(missing) < len(names):
            _check_incomplete(names, missing)
            continue
        if capacity is None or layout is None:
            raise PoolNotFound(
                f"{names[0]} does not exist; correct the path, or make a pool: use `tutti format`,"
                " or pass layout and capacity to tutti.open"
            )
        with contextlib.suppress(PoolExists):
            format(names, layout, capacity, executor=executor)
            if where := ", ".join(name for name in names if isinstance(name, FolderFile)):
                advice = "if a drive should be mounted there, remove the pool and mount it first"
                _log.warning("made a new pool in %s; %s", where, advice)
            return
    raise PoolInUse(f"another process is formatting {names[0]}; open it later")


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not exists(name)]


def label(paths: Paths, *, force: Force = False) -> None:
    """Labels devices or drives for the pools of a server, which ``open`` may then format there.

    Their contents are lost.  force: as for ``format``.  Raises ConfigError for files, which need no
    label, PoolExists for a device that holds data, PoolInUse, and the errors of opening them.
    """
    names = member_names(paths)
    if not are_drives(names):
        for name in names:
            if device_name(name) is None:
                raise ConfigError(f"{name} is not a device; a server makes files without a label")
        check_devices(names, force)
    with open_controller(names) as controller, opened_io(controller) as (_, io):
        if are_drives(names):
            check_blank(controller, io, names, force)
        for nsid in range(1, len(names) + 1):
            erase(controller, io, nsid)
            io.write(nsid, 0, LABEL)
        io.flush(range(1, len(names) + 1))


def make_blank(names: Sequence[str]) -> None:
    """Erases both ends of devices or drives, so that they count as blank again.

    Raises the errors of opening them.
    """
    with open_controller(names) as controller, opened_io(controller) as (_, io):
        for nsid in range(1, len(names) + 1):
            erase(controller, io, nsid)


def erase(controller: NativeController, io: BlockIo, nsid: int) -> None:
    """Writes zeros to both ends of a namespace, which counts as blank afterwards."""
    nbytes = controller.info.namespace_nlb[nsid - 1] * controller.info.lba_nbytes
    tail_nbytes = min(TAIL_NBYTES, nbytes - nbytes % BLOCK_NBYTES)
    io.write(nsid, 0, bytes(min(HEAD_NBYTES, tail_nbytes)))
    io.write(nsid, nbytes - tail_nbytes, bytes(tail_nbytes))
    io.flush([nsid])
    if isinstance(controller, FileController):
        _erase_rest(controller.members[nsid - 1])


@system_errors()
def _erase_rest(member: FileMember) -> None:
    """Writes zeros behind a device's last whole block, where its controller cannot write."""
    nbytes = member.nbytes % BLOCK_NBYTES
    if nbytes == 0:
        return
    fd = os.open(readable_path(member.name), os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes(nbytes), member.nbytes - nbytes)
    finally:
        os.close(fd)


def unused_from(io: BlockIo, engine: Engine, names: Sequence[str]) -> int:
    """Where the bytes begin in which open devices store nothing: behind the label, in a pool that
    was never opened, or behind the pool.  They end TAIL_NBYTES before the device.
    """
    heads = [io.read(nsid, 0, 2 * BLOCK_NBYTES) for nsid in range(1, len(names) + 1)]
    if all(head.startswith(LABEL) for head in heads):
        return HEAD_NBYTES
    members = Members.open(io, engine, names)
    # An opening writes one of the two superblocks: if that one is damaged, they differ as well.
    is_new = all(head[:BLOCK_NBYTES] == head[BLOCK_NBYTES:] for head in heads)
    if is_new and members.clean and members.next_sequence == 1:
        return members.geometry.groups_offset
    return -(-members.geometry.member_nbytes // MiB) * MiB


def check_unlabelled(names: Sequence[str], force: Force) -> None:
    """Raises PoolExists for devices or drives that are labelled for a server and whose serial
    numbers are not in ``force``, and the errors of opening drives.
    """
    found = [name for name, is_found in zip(names, _labelled(names), strict=True) if is_found]
    if found:
        held = ["the label of `tutti format --for-server`"]
        serials = _serials(found, force)
        places = [Held(name, held, serial) for name, serial in zip(found, serials, strict=True)]
        check_forced(places, force)


def _serials(names: list[str], force: Force) -> list[str]:
    if not are_drives(names):
        return [device.serial for device in check_devices(names, force)]
    with open_controller(names) as controller:
        return [serial_of(controller, nsid) for nsid in range(1, len(names) + 1)]


def is_labelled(name: str) -> bool:
    """Whether a device of the kernel has the label that `label` writes, and so no pool yet."""
    if device_name(name) is None:
        return False
    try:
        fd = os.open(readable_path(name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False  # opening it reports the error
    try:
        # The page cache may be older than what was written without the block layer.
        os.posix_fadvise(fd, 0, len(LABEL), os.POSIX_FADV_DONTNEED)
        return os.pread(fd, len(LABEL), 0) == LABEL
    except OSError:
        return False
    finally:
        os.close(fd)


def _labelled(names: Sequence[str]) -> list[bool]:
    if not are_drives(names):
        return [is_labelled(name) for name in names]
    with open_controller(names) as controller, opened_io(controller) as (_, io):
        return [io.read(nsid, 0, len(LABEL)) == LABEL for nsid in range(1, len(names) + 1)]


def _are_labelled(names: Sequence[str]) -> bool:
    """Whether a pool may be made there.  Raises MemberMissing where a pool has other members."""
    found = _labelled(names)
    if any(found) and not all(found):
        raise MemberMissing(
            f"{names[found.index(True)]} is labelled and has no pool yet,"
            f" {names[found.index(False)]} is not labelled; pass all members of one pool, or label"
            " all devices with `tutti format --for-server`"
        )
    return all(found)


def _check_incomplete(names: Sequence[str], missing: Sequence[str]) -> None:
    """Raises MemberMissing, or PoolInUse where another process makes the members just now."""
    there = next(name for name in names if name not in missing)
    member = FileMember(there, lock=True)  # `format` has this lock until all members exist
    try:
        if _missing(names) == missing:
            raise MemberMissing(
                f"{missing[0]} does not exist; restore it, or leave it out and open with"
                " StoreConfig(degraded=True)"
            )
    finally:
        member.close()


def _format_drives(
    names: Sequence[str], layout: KVLayout, member_nbytes: int, force: Force
) -> Geometry:
    """Keeps the drives open from the check of their contents to the last write."""
    with open_controller(names) as controller:
        lba_nbytes = controller.info.lba_nbytes
        geometry = Geometry.plan(layout, member_nbytes, lba_nbytes=lba_nbytes, members=len(names))
        check_room(controller, names, geometry)
        _write_format(controller, names, layout, geometry, force)
    return geometry


def _write_format(
    controller: NativeController,
    names: Sequence[str],
    layout: KVLayout,
    geometry: Geometry,
    force: Force = True,
) -> None:
    """Erases the signatures of earlier contents on devices and drives; then writes superblocks."""
    has_drives = are_drives(names)
    with opened_io(controller) as (engine, io):
        if has_drives:
            check_blank(controller, io, names, force)
        for nsid, name in enumerate(names, 1):
            if has_drives or device_name(name) is not None:
                erase(controller, io, nsid)
        Members.format(io, engine, names, layout, geometry)


def pool_members(paths: Paths, layout: KVLayout | None = None) -> list[str]:
    """As ``member_names``, with the pool's file in each folder: see ``in_folders``."""
    return in_folders(member_names(paths), layout)


def member_names(paths: Paths) -> list[str]:
    """The members' paths, in order.  ConfigError for none, MemberSwapped for one given twice."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    try:
        names = [os.fsdecode(path) for path in given]
        has_zeros = any("\0" in name for name in names)
        for name in names:
            os.fsencode(name)
    except (TypeError, ValueError) as error:  # also a name that cannot be encoded
        raise ConfigError(
            f"{paths!r} is neither a path nor a sequence of paths; pass text"
        ) from error
    if has_zeros:
        raise ConfigError(f"{paths!r} is not a path; pass text without zero bytes")
    if not names or "" in names:
        raise ConfigError("no path, or an empty path, was given; pass at least one path")
    check_distinct(names)
    return names

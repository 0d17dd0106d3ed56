"""Makes new pools in files, on devices and on drives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.errors import (
    ConfigError,
    MemberMissing,
    MemberSwapped,
    PoolExists,
    PoolInUse,
    PoolNotFound,
    system_errors,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives.block_device import check_devices, device_name
from tutti.gio_uring.drives.device_content import Force
from tutti.gio_uring.file_creation import ReservedFile, reserve_file
from tutti.gio_uring.file_member import FileMember
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.pool.block_io import opened_io
from tutti.pool.member_controller import are_drives, check_blank, check_room, open_controller
from tutti.pool.members import Members
from tutti.units import parse_nbytes

_TRIES = 3

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@system_errors()
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
    """Makes a new, empty pool in files or on devices, of ``capacity`` bytes in all.

    force: overwrite files that exist; a device or drive that holds anything takes its serial number
    for that, several take a list of theirs, and one that is in use is refused in any case.
    prewrite: write files once, which spares the first puts their journal commits;
    ``progress(done, total)`` is called in bytes.  executor: as for ``open``.
    Raises PoolExists, PoolNotFound, CapacityError (also for a full disk), LayoutError, PoolInUse,
    and for drives what ``open_controller`` raises.
    """
    names = member_names(paths)
    nbytes = parse_nbytes(capacity)
    layout.check_model()
    if are_drives(names):
        return _format_drives(names, layout, nbytes // len(names), force)
    check_devices(names, force)
    geometry = Geometry.plan(layout, nbytes // len(names), members=len(names))
    for name in names:
        if os.path.isdir(name):
            raise PoolExists(f"{name} is a folder; name a file in it")
        if device_name(name) is None and os.path.exists(name) and not force:
            raise PoolExists(f"{name} exists; open it, or format with force to lose what it holds")
    made: list[ReservedFile] = []
    try:
        for name in names:
            may_exist = bool(force) or device_name(name) is not None
            nbytes = geometry.member_nbytes
            made.append(reserve_file(name, nbytes, prewrite, progress, may_exist=may_exist))
        # By the open files, so that nobody else has them before they are a pool.
        files = [file.path if file.fd is None else file.fd for file in made]
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


def format_missing(
    names: Sequence[str],
    layout: KVLayout | None,
    capacity: int | str | None,
    executor: str = "auto",
) -> None:
    """Makes the pool whose files do not exist, unless another process makes it at the same time.

    Raises PoolNotFound without a layout and a capacity, MemberMissing when only some files are
    there, and what ``format`` raises.
    """
    for _ in range(_TRIES):  # another process may make it, or fail to, at the same time
        missing = [] if are_drives(names) else _missing(names)
        if not missing:
            return
        if len(missing) < len(names):
            _check_incomplete(names, missing)
            continue
        if capacity is None or layout is None:
            raise PoolNotFound(
                f"{names[0]} does not exist; give layout and capacity to format a new pool"
            )
        with contextlib.suppress(PoolExists):
            format(names, layout, capacity, executor=executor)
            return
    raise PoolInUse(f"{names[0]} is made by another process; open it when that is done")


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.path.exists(name)]


def _check_incomplete(names: Sequence[str], missing: Sequence[str]) -> None:
    """Raises MemberMissing, or PoolInUse where another process makes the members just now."""
    there = next(name for name in names if name not in missing)
    member = FileMember(there, lock=True)  # which a maker keeps until the last member is there
    try:
        if _missing(names) == missing:
            raise MemberMissing(
                f"{missing[0]} does not exist; restore it, or leave it out and open with"
                " degraded=True"
            )
    finally:
        member.close()


def _format_drives(
    names: Sequence[str], layout: KVLayout, member_nbytes: int, force: Force
) -> Geometry:
    """The drives stay this process's from the look at what they hold to the last write."""
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
    with opened_io(controller) as (engine, io):
        if are_drives(names):
            check_blank(controller, io, names, force)
        Members.format(io, engine, names, layout, geometry)


def member_names(paths: Paths) -> list[str]:
    """The members' paths, in order.  ConfigError for none, MemberSwapped for one given twice."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    try:
        names = [os.fsdecode(path) for path in given]
    except TypeError as error:
        raise ConfigError(f"{paths!r} is no path and no sequence of paths; give text") from error
    if not names or "" in names:
        raise ConfigError("a pool lies somewhere; give at least one path, and none that is empty")
    if len({os.path.realpath(name) for name in names}) != len(names):
        raise MemberSwapped("a path is given twice; give each member of the pool once")
    return names

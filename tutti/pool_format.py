"""Makes new pools in files and on devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tutti.block_io import BlockIo
from tutti.errors import ConfigError, MemberSwapped, PoolExists
from tutti.geometry import Geometry
from tutti.gio_uring.block_device import check_devices, device_name
from tutti.gio_uring.controller_file import FileController, allocate_file
from tutti.gio_uring.engine import Engine
from tutti.layout import KVLayout
from tutti.members import Members
from tutti.units import parse_nbytes

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def format(
    paths: Paths,
    layout: KVLayout,
    capacity: int | str,
    *,
    force: bool | str = False,
    prewrite: bool = False,
    progress: Any = None,
) -> Geometry:
    """Makes a new, empty pool in files or on devices, of ``capacity`` bytes in all.

    force: overwrite files that exist; a device that holds anything takes its serial number for
    that, and one that is in use is refused in any case.  prewrite: write them once, which spares
    the first puts their journal commits; ``progress(done, total)`` is called in bytes.
    Raises PoolExists, CapacityError (also for a full disk), LayoutError, PoolInUse, PoolNotFound.
    """
    names = member_names(paths)
    check_devices(names, force)
    nbytes = parse_nbytes(capacity)
    geometry = Geometry.plan(layout, nbytes // len(names), members=len(names))
    for name in names:
        if device_name(name) is None and os.path.exists(name) and not force:
            raise PoolExists(f"{name} exists; open it, or format with force to lose what it holds")
    made: list[str] = []
    try:
        for name in names:
            if not os.path.exists(name):
                made.append(name)
            allocate_file(name, geometry.member_nbytes, prewrite=prewrite, progress=progress)
        _write_format(names, layout, geometry)
    except BaseException:
        for name in made:
            if os.path.exists(name):
                os.unlink(name)
        raise
    return geometry


def _write_format(names: Sequence[str], layout: KVLayout, geometry: Geometry) -> None:
    with FileController(names) as controller:
        for member in controller.members:
            member.lock()
        engine = Engine(controller)
        io = BlockIo(engine)
        try:
            Members.format(io, engine, names, layout, geometry)
        finally:
            io.close()
            engine.close()


def member_names(paths: Paths) -> list[str]:
    """The members' paths, in order.  ConfigError for none, MemberSwapped for one given twice."""
    if isinstance(paths, (str, os.PathLike)):
        return [os.fspath(paths)]
    names = [os.fspath(path) for path in paths]
    if not names:
        raise ConfigError("give at least one path")
    if len({os.path.realpath(name) for name in names}) != len(names):
        raise MemberSwapped("a path is given twice; give each member of the pool once")
    return names

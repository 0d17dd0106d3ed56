"""Files and devices that a benchmark uses without a pool, or for several pools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tutti.errors import Unsupported
from tutti.gio_uring.file_creation import allocate_file
from tutti.pool.places import is_device
from tutti.pool.pool_format import label, make_blank


def beside(paths: Sequence[str], name: str) -> list[str]:
    """A file next to each of a pool's, for a second pool."""
    return [f"{path}.{name}" for path in paths]


def refuse(places: Sequence[str], why: str, refused: Callable[[str], bool] = is_device) -> None:
    """Raises Unsupported if one of the places is a device, or otherwise refused."""
    if found := [place for place in places if refused(place)]:
        raise Unsupported(f"{found[0]}: {why}")


@contextmanager
def removed(paths: Sequence[str]) -> Iterator[None]:
    """At the end removes the files of a pool, and blanks its devices."""
    devices = [path for path in paths if is_device(path)]
    try:
        yield
    finally:
        for path in paths:
            if path not in devices:
                Path(path).unlink(missing_ok=True)
        if devices:
            make_blank(devices)


@contextmanager
def temporary_members(
    places: Sequence[str], nbytes: int, *, prewrite: bool = False, force: Sequence[str] = ()
) -> Iterator[None]:
    """Makes files and takes devices; at the end removes the files and blanks the devices.

    prewrite: write the files once.  force: serial numbers of drives that may be overwritten.
    Raises PoolExists for existing files and devices that are not blank, and errors of making and
    opening them.
    """
    devices = [place for place in places if is_device(place)]
    with ExitStack() as undo:
        if devices:
            label(devices, force=list(force))
            undo.callback(make_blank, devices)
        for place in places:
            if place not in devices:
                allocate_file(place, nbytes, prewrite=prewrite, may_exist=False)
                undo.callback(os.unlink, place)
        yield

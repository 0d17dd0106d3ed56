"""Pools that a benchmark makes for itself and removes afterwards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tutti import store as object_store
from tutti.base.terminal import ProgressFactory
from tutti.bench.writable import options
from tutti.errors import ConfigError, PoolExists
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import Engine
from tutti.medium.layout import KVLayout
from tutti.pool.member_controller import open_controller
from tutti.pool.places import is_device
from tutti.pool.pool_format import make_blank
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the place of a benchmark's files."""
    option = options(parser.add_mutually_exclusive_group())
    what = "directories for the pool's files, one in each (default: the current one); or blank"
    what += " devices and drives, which are erased at the end"
    option("--dir PLACE", ["."], what)
    what = "members of the pool: new files, which are removed at the end, folders for such files,"
    what += " or blank devices and drives, which are erased at the end"
    option("--path", None, what, nargs="+")
    what = "overwrite the drive with this serial number; repeat for each drive"
    options(parser)("--force SERIAL", [], what, action="append")


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the place and the opening of a benchmark's pools."""
    add_place_arguments(parser)
    option = options(parser)
    for name, choices, what in (
        ("--verify", ("always", "sampled", "off"), "loads to verify by their digests"),
        (
            *("--durability", ("process", "flush")),
            "finished puts survive a crash of the process, or also a power loss",
        ),
        ("--executor", ("auto", "uring", "threads"), "how files are read and written"),
        ("--memory-pages", ("huge", "ordinary"), "kind of memory pages for the buffers of loads"),
    ):
        option(name, choices[0], what, choices)
    what = "write the pool's files once before measuring, like a pool in long use"
    option("--prewrite", False, what)


def pool_paths(args: argparse.Namespace, name: str) -> list[str]:
    """Paths of a pool's members; in a folder, a file called `name`.

    Raises ConfigError for a `--dir`, or a `--path` ending in "/", that is not a folder or device.
    """
    places = args.path or ([args.dir] if isinstance(args.dir, str) else args.dir)
    for place in places:
        is_folder = not args.path or place.endswith("/")
        if is_folder and not is_device(place) and not os.path.isdir(place):
            raise ConfigError(f"{place} is not a directory; make it, or name another")
    return [str(Path(p) / f"{name}.tutti") if os.path.isdir(p) else p for p in places]


def medium_of(args: argparse.Namespace) -> str:
    """The first place of the pool's members: a directory or a device."""
    first = str((args.path or args.dir)[0])
    if is_device(first) or os.path.isdir(first):
        return first
    return os.path.dirname(os.path.abspath(first))


@contextmanager
def temporary_pool(
    paths: list[str],
    layout: KVLayout,
    capacity_nbytes: int,
    *,
    config: StoreConfig | None = None,
    prewrite: bool = False,
    progress: ProgressFactory | None = None,
    force: Sequence[str] = (),
    engine: Mapping[str, Any] | None = None,
) -> Iterator[ObjectStore]:
    """Formats and opens a pool; at the end removes its files or erases its devices.

    force: serial numbers of drives that may be overwritten.  engine: `executor` and `profile` as
    for `tutti.open` (by default no profile, as most benchmarks measure the medium), or options of
    its Engine.  Raises PoolExists if a file exists, and errors of formatting and opening.
    """
    files = [path for path in paths if not is_device(path)]
    for path in files:
        if os.path.exists(path):
            raise PoolExists(f"{path} exists; a benchmark overwrites nothing: move it away")
    try:
        _format(paths, layout, capacity_nbytes, prewrite, progress, list(force))
        try:
            with _opened(paths, layout, config, engine or {}) as store:
                yield store
        finally:
            if len(files) < len(paths):
                make_blank([path for path in paths if path not in files])
    finally:
        for path in files:
            Path(path).unlink(missing_ok=True)


def _opened(
    paths: list[str], layout: KVLayout, config: StoreConfig | None, engine: Mapping[str, Any]
) -> ObjectStore:
    options = dict(engine)
    executor, profile = options.pop("executor", "auto"), options.pop("profile", None)
    if not options:
        return object_store.open(paths, layout, config=config, executor=executor, profile=profile)
    controller = open_controller(paths, executor=executor)
    try:
        made = Engine(controller, **options)
        return ObjectStore(controller, paths, config=config, engine=made)
    except BaseException:
        controller.close()
        raise


def medium_facts(store: ObjectStore) -> dict[str, Any]:
    """How the pool's members are accessed, for JSON."""
    controller, members = store.controller, store.members.count
    if not isinstance(controller, FileController):
        return {"controller": type(controller).__name__, "members": members}
    facts: dict[str, Any] = {
        "controller": "file",
        "members": members,
        "executor": controller.executor_name,
        "direct_io": controller.direct,
    }
    if not controller.direct:
        facts["buffered_because"] = [member.buffered_reason for member in controller.members]
    return facts


def _format(
    paths: list[str],
    layout: KVLayout,
    capacity_nbytes: int,
    prewrite: bool,
    progress: ProgressFactory | None,
    force: list[str],
) -> None:
    if not prewrite or progress is None:
        object_store.format(paths, layout, capacity_nbytes, prewrite=prewrite, force=force)
        return
    with progress("writing the pool once, MiB", capacity_nbytes >> 20) as bar:
        shown = 0

        def advance(done: int, total: int) -> None:
            nonlocal shown
            # The progress of each member restarts at 0.
            shown = shown if done >> 20 >= shown else 0
            bar.advance((done >> 20) - shown)
            shown = done >> 20

        object_store.format(
            paths, layout, capacity_nbytes, prewrite=True, progress=advance, force=force
        )

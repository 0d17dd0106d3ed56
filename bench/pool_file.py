"""Pools that a benchmark makes for itself and removes afterwards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tutti import store as object_store
from tutti.errors import ConfigError, PoolExists
from tutti.gio_uring.controller_file import FileController
from tutti.medium.layout import KVLayout
from tutti.store import ObjectStore
from tutti.terminal import ProgressFactory
from tutti.transfers.core import StoreConfig


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the pools of a benchmark lie, and how they are opened."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dir", default=".", help="directory for the pool's file (default: %(default)s)"
    )
    where.add_argument(
        "--path",
        nargs="+",
        help="files of the pool, one a member, which must not exist; they are removed at the end",
    )
    parser.add_argument(
        "--verify",
        choices=("always", "sampled", "off"),
        default="always",
        help="compare digests on load (default: %(default)s)",
    )
    parser.add_argument(
        "--durability",
        choices=("process", "flush"),
        default="process",
        help="what a finished put survives: the end of the process, or also a loss of power",
    )
    parser.add_argument("--executor", choices=("auto", "uring", "threads"), default="auto")
    parser.add_argument(
        "--memory-pages",
        choices=("huge", "ordinary"),
        default="huge",
        help="what engine memory is asked to lie on (default: %(default)s)",
    )
    parser.add_argument(
        "--prewrite",
        action="store_true",
        help="write the pool's files once before, as after weeks of use",
    )


def pool_paths(args: argparse.Namespace, name: str) -> list[str]:
    """The members of a pool called `name`.  Raises ConfigError for a directory that is none."""
    if args.path:
        return list(args.path)
    if not os.path.isdir(args.dir):
        raise ConfigError(f"{args.dir} is no directory; make it, or name another with --dir")
    return [str(Path(args.dir) / f"{name}.tutti")]


@contextmanager
def temporary_pool(
    paths: list[str],
    layout: KVLayout,
    capacity_nbytes: int,
    *,
    config: StoreConfig | None = None,
    executor: str = "auto",
    prewrite: bool = False,
    progress: ProgressFactory | None = None,
) -> Iterator[ObjectStore]:
    """Formats a pool, opens it, and removes its files at the end.

    Raises PoolExists where a file is in the way, and what formatting and opening raise.
    """
    for path in paths:
        if os.path.exists(path):
            raise PoolExists(f"{path} exists; a benchmark overwrites nothing: move it away")
    try:
        _format(paths, layout, capacity_nbytes, prewrite, progress)
        with object_store.open(paths, layout, config=config, executor=executor) as store:
            yield store
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)


def medium_facts(store: ObjectStore) -> dict[str, Any]:
    """How the pool's files are accessed, for JSON."""
    controller = store.controller
    if not isinstance(controller, FileController):
        return {"controller": type(controller).__name__}
    facts: dict[str, Any] = {
        "controller": "file",
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
) -> None:
    if not prewrite or progress is None:
        object_store.format(paths, layout, capacity_nbytes, prewrite=prewrite)
        return
    with progress("writing the pool once, MiB", capacity_nbytes >> 20) as bar:
        shown = 0

        def advance(done: int, total: int) -> None:
            nonlocal shown
            # Each member counts from 0 again.
            shown = shown if done >> 20 >= shown else 0
            bar.advance((done >> 20) - shown)
            shown = done >> 20

        object_store.format(paths, layout, capacity_nbytes, prewrite=True, progress=advance)

"""`tutti resize`: arguments and report; the work is in tutti/resize.py."""

from __future__ import annotations

import argparse

from tutti.arguments import add_paths, nbytes, options, say_capacity
from tutti.base.terminal import Progress
from tutti.commands.members import existing_members
from tutti.commands.outcome import CommandResult
from tutti.resize import resize

_DESCRIPTION = """\
Changes the size of a closed pool. Objects are verified and copied to new files, which then replace
the old ones; until then the disk needs room for both. Objects of a pool on devices are copied to a
file in the folder --through, and back when the devices are deallocated and formatted again. Pins,
expiries and the order of use are preserved. A smaller pool keeps pinned objects and, of the others,
those used most recently.

An interrupted resize loses nothing: run the same command again."""
_EXAMPLE = """\
example:
  tutti resize pool.tutti --capacity 128GiB
  tutti resize /dev/nvme0n1 /dev/nvme1n1 --capacity 4TiB --through /mnt/other"""


def add_resize(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_paths(parser)
    option = options(parser)
    option("--capacity SIZE", None, "new total size of the pool", nbytes, required=True)
    option("--through FOLDER", None, "for devices: folder for a temporary copy of the pool")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> CommandResult:
    paths = existing_members(args.paths)
    say_capacity(args.capacity)
    with Progress("objects", 0) as bar:
        done = resize(paths, args.capacity, through=args.through, progress=bar.update)
    text = f"{done.kept} objects were kept, {done.dropped} had no room, {done.damaged} were damaged"
    return CommandResult({"paths": args.paths, **done._asdict()}, text)

"""`tutti resize`: arguments and report; the work is in tutti/resize.py."""

from __future__ import annotations

import argparse

from tutti.arguments import add_paths, nbytes, say_capacity
from tutti.base.terminal import Progress
from tutti.commands.outcome import CommandResult
from tutti.resize import resize

_DESCRIPTION = """\
Gives a pool in files another size. Its objects are verified and copied to new files next to the old
ones, which then take their names; pins, expiries and the order of use go along. A smaller pool
keeps what was used last. The pool must be closed, and there must be room for both meanwhile.

When it is interrupted the pool is as before, or as afterwards; it can be run again."""
_EXAMPLE = """\
example:
  tutti resize pool.tutti --capacity 128GiB"""


def add_resize(parser: argparse.ArgumentParser) -> None:
    """Describes `tutti resize`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    add_paths(parser)
    parser.add_argument(
        "--capacity", type=nbytes, required=True, metavar="SIZE", help="new total size of the pool"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> CommandResult:
    """Resizes a pool."""
    say_capacity(args.capacity)
    with Progress("objects", 0) as bar:
        done = resize(args.paths, args.capacity, progress=bar.update)
    text = f"{done.kept} objects were kept, {done.dropped} had no room, {done.damaged} were damaged"
    return CommandResult({"paths": args.paths, **done._asdict()}, text)

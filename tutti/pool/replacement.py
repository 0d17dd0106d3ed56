"""Puts the finished members of a new pool in the place of an old pool's, whatever is interrupted.

A new member waits beside the old one, under its name with ".resize" behind it. No name changes
before all new members are complete, so once one has changed the others may follow at any time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tutti.errors import PoolError, PoolInUse
from tutti.gio_uring.file_creation import sync_folder
from tutti.gio_uring.file_member import FileMember
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.superblock import PoolState, Superblock, choose_superblock

SUFFIX = ".resize"


def beside(names: Sequence[str]) -> list[str]:
    """Where the new members are made."""
    return [f"{name}{SUFFIX}" for name in names]


def superblock_of(path: str) -> Superblock | None:
    """The superblock that counts of a member in a file; None where there is none."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(2 * BLOCK_NBYTES)
        return choose_superblock(raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:], path)[0]
    except (OSError, PoolError):
        return None


def finish(names: Sequence[str]) -> bool:
    """Ends a replacement that was interrupted after its first name; whether there was one."""
    waiting = [name for name in names if os.path.exists(f"{name}{SUFFIX}")]
    if not waiting or len(waiting) == len(names):
        return False  # of all members: not one name has changed
    found = [superblock_of(f"{n}{SUFFIX}" if n in waiting else n) for n in names]
    first = found[0]
    if first is None or any(
        s is None or s.pool_uuid != first.pool_uuid or s.members != len(names) for s in found
    ):
        return False
    for name in waiting:
        _rename(name)
    return True


def replace(names: Sequence[str], olds: Sequence[Superblock]) -> None:
    """Gives the new members the names of the old ones, which are closed cleanly.

    olds: the superblocks of the old pool when it was closed.  Raises PoolInUse when it was opened
    since; nothing has changed then.
    """
    with contextlib.ExitStack() as stack:
        for name, old in zip(names, olds, strict=True):
            stack.callback(FileMember(name, lock=True).close)
            now = superblock_of(name)
            if now is None or (now.pool_uuid, now.generation) != (old.pool_uuid, old.generation):
                raise PoolInUse(f"{name} was opened meanwhile; close it there, then try again")
        news = [superblock_of(path) for path in beside(names)]
        assert all(s is not None and s.state == PoolState.CLEAN for s in news), "finished members"
        for name in names:
            _rename(name)


def _rename(name: str) -> None:
    os.rename(f"{name}{SUFFIX}", name)
    sync_folder(name)

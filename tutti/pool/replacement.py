"""Replaces the members of an old pool by the complete members of a new one.

A new member is a file next to the old one, with the same name and the suffix ".resize". No file is
renamed before all new members are complete, so an interrupted replacement can be finished later.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tutti.errors import MemberSwapped, PoolError, PoolInUse, PoolReadOnly
from tutti.gio_uring.file_creation import sync_folder
from tutti.gio_uring.file_member import FileMember
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.superblock import PoolState, Superblock, choose_superblock

SUFFIX = ".resize"


def beside(names: Sequence[str]) -> list[str]:
    """The paths of the new members."""
    return [f"{name}{SUFFIX}" for name in names]


def give_owners(names: Sequence[str]) -> None:
    """Gives the new members the owners, the groups and the modes of the old ones.

    Raises PoolReadOnly where this process may not.
    """
    for name in names:
        status = os.stat(name)
        try:
            os.chown(f"{name}{SUFFIX}", status.st_uid, status.st_gid)
        except PermissionError as error:
            # A pool whose owner is neither this user nor root is never opened.
            is_own = status.st_uid == os.geteuid()
            remedy = "give it a group of yours with chgrp" if is_own else "run as its owner"
            raise PoolReadOnly(
                f"{name} belongs to user {status.st_uid} and group {status.st_gid}, to whom this"
                f" process cannot give a new file; {remedy}"
            ) from error
        os.chmod(f"{name}{SUFFIX}", stat.S_IMODE(status.st_mode))


def superblock_of(path: str) -> Superblock | None:
    """The current superblock of a member in a file; None if there is none."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(2 * BLOCK_NBYTES)
        return choose_superblock(raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:], path)[0]
    except (OSError, PoolError):
        return None


def finish(names: Sequence[str]) -> bool:
    """Finishes a replacement that was interrupted after its first rename; whether there was one."""
    waiting = _waiting(names)
    for name in waiting:
        _rename(name)
    return bool(waiting)


def leftovers(names: Sequence[str]) -> list[str]:
    """The files that an interrupted resize left next to the members of a complete pool."""
    files = beside([os.path.realpath(name) for name in names])
    return [file for file in files if os.path.exists(file)]


def remedy(files: Sequence[str]) -> str:
    """What to do about leftovers."""
    return (
        f"An interrupted resize left {', '.join(files)}: run `tutti resize` again, or remove"
        f" {'it' if len(files) == 1 else 'them'}. The pool is as it was before."
    )


@contextlib.contextmanager
def explained(names: Sequence[str]) -> Iterator[None]:
    """Explains a MemberSwapped by an interrupted resize, if that is the reason."""
    try:
        yield
    except MemberSwapped as error:
        if waiting := _waiting(names):
            raise MemberSwapped(
                f"a resize was interrupted when {', '.join(beside(waiting))} had not replaced the"
                " old file yet; run `tutti resize` again, or open the pool: both finish it"
            ) from error
        raise


def _waiting(names: Sequence[str]) -> list[str]:
    """The members that still have to be replaced; none if no member was replaced yet."""
    names = [os.path.realpath(name) for name in names]  # as `resize` names the new members
    waiting = [name for name in names if os.path.exists(f"{name}{SUFFIX}")]
    if not waiting or len(waiting) == len(names):
        return []  # none is left, or none was renamed yet
    found = [superblock_of(f"{n}{SUFFIX}" if n in waiting else n) for n in names]
    first = found[0]
    if first is None or any(
        s is None or s.pool_uuid != first.pool_uuid or s.members != len(names) for s in found
    ):
        return []
    return waiting


def replace(names: Sequence[str], olds: Sequence[Superblock]) -> None:
    """Gives the new members the names of the old ones, which are closed cleanly.

    olds: the superblocks of the old pool when it was closed.  Raises PoolInUse when it was opened
    since; nothing has changed then.
    """
    members: list[FileMember] = []
    with contextlib.ExitStack() as stack:
        for name, old in zip(names, olds, strict=True):
            members.append(FileMember(name, lock=True))
            stack.callback(members[-1].close)
            now = superblock_of(name)
            if now is None or (now.pool_uuid, now.generation) != (old.pool_uuid, old.generation):
                raise PoolInUse(f"{name} was opened meanwhile; close it there, then try again")
        news = [superblock_of(path) for path in beside(names)]
        assert all(s is not None and s.state == PoolState.CLEAN for s in news), "finished members"
        for name in names:
            _rename(name)
        for member in members:
            _forget(member)


def _forget(member: FileMember) -> None:
    """Erases the superblocks of a file that has lost its name.

    A process that waits for its lock has it open already, and would store objects that are lost.
    """
    if os.fstat(member.fd).st_nlink == 0 and member.buffered_fd is not None:
        os.pwrite(member.buffered_fd, bytes(2 * BLOCK_NBYTES), 0)
        os.fsync(member.buffered_fd)


def _rename(name: str) -> None:
    os.rename(f"{name}{SUFFIX}", name)
    sync_folder(name)

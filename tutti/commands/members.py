"""Checks the paths of pools before a command uses them, so that each fault has one message."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tutti.errors import PoolNotFound
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.superblock import SUPERBLOCK_MAGIC
from tutti.pool.places import exists, is_device
from tutti.pool.pool_format import pool_members


def check_exist(paths: Sequence[str]) -> None:
    """Raises PoolNotFound for a file, folder, device or drive that does not exist."""
    for path in paths:
        if not exists(path):
            advice = "correct the path, or create a pool with `tutti format`"
            if is_device(path):
                advice = "correct the path (`tutti nvme list --all` lists the devices)"
            raise PoolNotFound(f"{path} does not exist; {advice}")


def has_superblock(file: str | os.PathLike[str], *, or_zeros: bool = False) -> bool:
    """Whether a file begins as a pool does, or with zeros, as after a format that was interrupted.

    True for a file that this process may not read: opening it reports the reason.
    """
    try:
        with open(file, "rb") as opened:
            raw = opened.read(2 * BLOCK_NBYTES)
    except PermissionError:
        return True
    if any(copy.startswith(SUPERBLOCK_MAGIC) for copy in (raw, raw[BLOCK_NBYTES:])):
        return True
    return or_zeros and len(raw) == 2 * BLOCK_NBYTES and not any(raw)


def existing_members(paths: Sequence[str]) -> list[str]:
    """The members behind these paths.

    Raises PoolNotFound where something does not exist or is a file without a pool, and what
    `pool_members` raises.
    """
    check_exist(paths)
    members = pool_members(paths)
    check_exist(members)
    for member in filter(os.path.isfile, members):
        if not has_superblock(member, or_zeros=True):
            raise PoolNotFound(f"{member} is not a Tutti pool; correct the path")
    return members

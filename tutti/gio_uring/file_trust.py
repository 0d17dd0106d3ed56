"""Refuses files that other users control: their links in shared folders, and files they own.

The rule for links is the kernel's for sticky folders (protected_symlinks, sysctl/fs), applied to
every folder that others may write.
"""

from __future__ import annotations

import os
import stat

from tutti.errors import ConfigError, PoolUntrusted

_LINKS_MAX = 40  # as the kernel's, path_resolution(7)
_SHARED_MODE = stat.S_IWGRP | stat.S_IWOTH


def resolve(name: str) -> str:
    """Resolves symbolic links of a path; parts that do not exist stay as they are.

    Raises PoolUntrusted for a link of another user in a folder that several users can write,
    ConfigError for a loop.
    """
    parts = _parts(os.path.join(os.getcwd(), name))  # abspath would resolve ".." before links
    place = "/"
    links = 0
    while parts:  # bounded by _LINKS_MAX
        part = parts.pop()
        if part == "..":
            place = os.path.dirname(place)
            continue
        path = os.path.join(place, part)
        if not os.path.islink(path):
            place = path
            continue
        _check_link(path, place)
        links += 1
        if links > _LINKS_MAX:
            raise ConfigError(f"{name} leads through too many symbolic links; correct them")
        target = os.readlink(path)
        place = "/" if os.path.isabs(target) else place
        parts += _parts(target)
    return place


def check_owner(fd: int, name: str) -> None:
    """Raises PoolUntrusted for a regular file that another user owns, or that everyone may write.

    Files of root and of this process's user are accepted, also if their group may write.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return  # the modes of devices are the system's
    if status.st_uid not in (0, os.geteuid()):
        raise PoolUntrusted(
            f"{name} belongs to user {status.st_uid}, who can replace its content; run as that"
            " user, or change its owner with chown"
        )
    if status.st_mode & stat.S_IWOTH:
        raise PoolUntrusted(
            f"{name} can be written by every user, who can replace its content; remove that right"
            " with chmod o-w"
        )


def _check_link(path: str, folder: str) -> None:
    link, around = os.lstat(path), os.stat(folder)
    if around.st_mode & _SHARED_MODE and link.st_uid not in (0, os.geteuid(), around.st_uid):
        raise PoolUntrusted(
            f"{path} is a symbolic link of user {link.st_uid} in a folder that others can write;"
            " name the file that is meant"
        )


def _parts(path: str) -> list[str]:
    """The components of a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]

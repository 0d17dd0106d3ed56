"""The agent's socket, which only one user, or also a group, may connect to."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import stat
import struct
import time
from pathlib import Path

from tutti.errors import AgentRefused, ConfigError, PoolInUse

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_BACKLOG = 128
_TURN_S, _NAP_S = 2.0, 0.01  # longest wait for another agent's start, and between looks
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether a call failed because the process, or the machine, has too many open files."""
    return isinstance(error, OSError) and error.errno in _OUT_OF_FILES


def out_of_files() -> AgentRefused:
    """The error for a client when the agent has no free descriptor."""
    return AgentRefused(
        "the agent has as many files open as it may; end other clients, or restart the agent with"
        " a higher limit (ulimit -Hn)"
    )


class SpareFile:
    """A reserved descriptor, released when no other is free, so that one more peer can be answered.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._fd = -1

    def take(self) -> None:
        """Reserves a descriptor, if one is free."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> None:
        """Frees the descriptor.  A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_peer(peer: socket.socket, group: int | None) -> int:
    """The peer's process id.  Raises AgentRefused for a process of another user and group."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    allowed = uid in (0, os.geteuid())
    if not allowed and group is not None:
        allowed = group in (gid, *_groups_of(pid))
    if not allowed:
        raise AgentRefused(
            f"user {uid} may not use the agent of user {os.geteuid()}; run as that user, or start"
            " the agent with a group that both are in"
        )
    return int(pid)


def listen(path: str, group: int | None) -> socket.socket:
    """A listening socket for this user, and ``group`` unless None.  Replaces a dead agent's."""
    with socket.socket(socket.AF_UNIX) as turn:
        _take_turn(turn, path)  # until it listens: before, it looks like a dead agent's
        _remove_stale(path)
        listener = _bound(path, group)
        listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _take_turn(turn: socket.socket, path: str) -> None:
    """Waits until no other agent starts on this path: it could find a dead agent's socket, and then
    remove this one's.  An abstract name, unix(7), is free again as soon as ``turn`` is closed.
    """
    name = b"\0tutti-" + hashlib.sha256(os.fsencode(os.path.realpath(path))).digest()
    deadline_s = time.monotonic() + _TURN_S  # another program may have the name
    while time.monotonic() < deadline_s:
        try:
            turn.bind(name)
            return
        except OSError:
            time.sleep(_NAP_S)


def _bound(path: str, group: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror}; choose one that this user can write"
        ) from error
    finally:
        os.umask(before)
    if group is not None:
        try:
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
        except OSError as error:
            listener.close()
            os.unlink(path)
            raise ConfigError(
                f"cannot change the group of {path} to {group}: {error.strerror}; pass a group that"
                " this user is in"
            ) from error
    return listener


def _remove_stale(path: str) -> None:
    """Removes a dead agent's socket.  Raises PoolInUse for a live one, ConfigError otherwise."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is not a socket; choose another path for the agent's socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as error:
            raise ConfigError(f"cannot use {path}: {error}; pass another path") from error
    raise PoolInUse(f"an agent listens on {path} already; stop it, or pass another socket")


def _groups_of(pid: int) -> tuple[int, ...]:
    """Supplementary groups of a process, from /proc; empty if it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().split(b"\n")
    except OSError as error:
        if is_out_of_files(error):
            raise out_of_files() from error
        return ()
    for line in lines:  # bytes: a process's name may be any, except a newline
        if line.startswith(b"Groups:"):
            return tuple(int(word) for word in line.split()[1:])
    return ()

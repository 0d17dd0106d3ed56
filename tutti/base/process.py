"""Keeps objects to the process that opened them: in a forked child they raise, and release nothing.

A forked child has copies of its parent's objects, but none of its threads, and its descriptors
refer to the parent's open files: unlocking or closing there what the parent uses damages the
parent.  Therefore every object that owns a descriptor, a lock, a thread or device memory is
`Owned`, every finalizer is made by `finalize`, and an open file is named by `own_file`.

A child closes its copies of the descriptors at once and without unlocking anything: a lock lasts as
long as any copy, so a parent that is killed would leave its pool locked while the child lives.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from io import FileIO
from typing import Any, Self, TypeVar

from tutti.errors import ConfigError, ForkedProcess

#: A plain set of references, as a WeakSet takes twice the time for each object.
_owned: set[weakref.ref[Owned]] = set()
_reference, _forget = weakref.ref, _owned.discard
_exits: set[Callable[[], object]] = set()
_files: weakref.WeakSet[FileIO | socket.socket] = weakref.WeakSet()
_File = TypeVar("_File", bound=FileIO | socket.socket)
generation = object()  #: Of this process; a forked child has another.


class Uncopied:
    """Base of objects that cannot be copied or sent to another process."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            f"{type(self).__name__} cannot be copied or sent to another process; close it and open "
            "the pool in that process"
        )


class Owned(Uncopied):
    """Base of objects that belong to the process that made them.

    In a forked child each becomes `Foreign`: `close` does nothing, and any other use raises
    ForkedProcess at once.  An object is registered here before it acquires anything.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = object.__new__(cls)
        _owned.add(_reference(self, _forget))
        return self


_REFUSAL = (
    "this was opened before the process forked and belongs to the parent; a pool is open in one "
    "process only: open it after the fork, in the process that is to use it"
)


def refusal() -> ForkedProcess:
    """The error of what belongs to the process from which this one was forked."""
    return ForkedProcess(_REFUSAL)


class Foreign:
    """What an `Owned` object is in a process forked from its owner."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        if name == "close":
            return _nothing
        raise refusal()

    def __enter__(self) -> Self:
        raise refusal()

    def __len__(self) -> int:
        raise refusal()

    def __contains__(self, item: object) -> bool:
        raise refusal()

    def __bool__(self) -> bool:
        return True

    def __exit__(self, *exception: object) -> None:
        """Does nothing, as `close`."""


def finalize(
    owner: object, function: Callable[..., object], *args: Any
) -> weakref.finalize[..., Any]:
    """A weakref.finalize that does nothing in another process than this."""
    return weakref.finalize(owner, _call_in, os.getpid(), function, *args)


def own_file(file: _File) -> _File:
    """Has a forked child close its copy of a file or socket.  Keeps no reference; returns it."""
    _files.add(file)
    return file


def at_exit(function: Callable[[], object]) -> None:
    """Calls `function` when this process exits, but not when a fork of it does."""
    _exits.add(function)
    atexit.register(function)


def forget_exit(function: Callable[[], object]) -> None:
    """Undoes `at_exit`."""
    atexit.unregister(function)
    _exits.discard(function)


def _call_in(pid: int, function: Callable[..., object], *args: Any) -> None:
    if os.getpid() == pid:
        function(*args)


def _nothing(*args: object, **kwargs: object) -> None:
    """Stands for `close` in another process."""


def _disown() -> None:
    """Runs in a child, whose only thread is the one that forked."""
    global generation
    generation = object()
    for thing in [reference() for reference in _owned]:
        if thing is not None:
            object.__setattr__(thing, "__class__", Foreign)
    _owned.clear()
    for function in list(_exits):
        forget_exit(function)
    for file in list(_files):
        with contextlib.suppress(OSError):
            file.close()
    _files.clear()


os.register_at_fork(after_in_child=_disown)

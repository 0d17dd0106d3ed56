"""Checks of arguments: numbers, durations, strings and files.

Functions with the parameters (name, value) are also rules for `takes`.
"""

from __future__ import annotations

import errno
import functools
import inspect
import operator
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, ParamSpec, TypeVar

from tutti.errors import ConfigError

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Raises ConfigError for a value of a parameter that is not acceptable.
Rule = Callable[[str, Any], object]

#: The longest wait: a day.
SECONDS_MAX = 86_400.0
_SOCKET_NBYTES_MAX = 107  # sun_path without its final zero, unix(7)


def takes(**rules: Rule) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: checks arguments by the rules of their parameters, before anything is done.

    A rule may be for a keyword that the function does not have: its error names the replacement.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = list(inspect.signature(function).parameters)
        names += [name for name in rules if name not in names]
        places = [(name, names.index(name), rule) for name, rule in rules.items()]
        first = min(place for _, place, _ in places)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, place, rule in places if kwargs or len(args) > first else ():
                if name in kwargs:
                    rule(name, kwargs[name])
                elif place < len(args):
                    rule(name, args[place])
            return function(*args, **kwargs)

        return call

    return decorate


def optional(rule: Rule) -> Rule:
    """The rule, for what may be None as well."""
    return lambda name, value: None if value is None else rule(name, value)


def belongs_in(place: str) -> Rule:
    """A rule for a keyword that is given elsewhere: always raises."""

    def check(name: str, value: Any) -> None:
        raise ConfigError(f"{name} is not a parameter of this function; pass it in {place}")

    return check


def flag(name: str, value: Any) -> None:
    """Raises ConfigError for anything but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; pass True or False")


def text(name: str, value: Any) -> None:
    """Raises ConfigError for anything but a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; pass a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {value!r}; pass a string without surrogates") from error


def path_text(name: str, value: Any) -> None:
    """Raises ConfigError for what is not the text of a path."""
    text(name, value)
    if "\0" in value:
        raise ConfigError(f"{name} is {value!r}; pass one without zero bytes")


def socket_path(name: str, value: Any) -> None:
    """Raises ConfigError for what no Unix socket can have as its path, with or without "unix:"."""
    path_text(name, value)
    nbytes = len(value.removeprefix("unix:").encode())
    if not 0 < nbytes <= _SOCKET_NBYTES_MAX:
        limit = f"a socket's path has 1 to {_SOCKET_NBYTES_MAX}"
        raise ConfigError(f"{name} is {value!r}, of {nbytes} bytes; {limit}: choose another")


def pin_name(name: str, value: Any) -> None:
    """Raises ConfigError for what is neither True nor False nor the name of a pin."""
    if not isinstance(value, bool):
        text(name, value)


def function(name: str, value: Any) -> None:
    """Raises ConfigError for what cannot be called."""
    if not callable(value):
        raise ConfigError(f"{name} is {value!r}; pass a function")


def one_of(*choices: str) -> Rule:
    """A rule: one of these strings."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{name} is {value!r}; use one of {', '.join(choices)}")

    return check


def instance(kind: type) -> Rule:
    """A rule: an object of this class."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            given = type(value).__name__  # the repr of an array is many lines
            raise ConfigError(f"{name} has type {given}; pass a {kind.__name__}")

    return check


def seconds(name: str, value: Any) -> float:
    """A duration from 0 to a day in seconds.  Raises ConfigError for anything else."""
    if isinstance(value, bool | str | bytes):
        raise ConfigError(f"{name} is {value!r}; pass a number of seconds")
    try:
        duration_s = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r}; pass a number of seconds") from error
    if not 0 <= duration_s <= SECONDS_MAX:
        raise ConfigError(f"{name} is {value!r}; pass 0 to {SECONDS_MAX:g} seconds, at most a day")
    return duration_s


def whole(name: str, value: Any, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``.  Raises ConfigError for anything else."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; pass an integer") from error
    if isinstance(value, bool) or not low <= number <= high:
        raise ConfigError(f"{name} is {value!r}; pass an integer from {low} to {high}")
    return number


def share(name: str, value: Any) -> float:
    """A number from 0 to 1.  Raises ConfigError for anything else."""
    if isinstance(value, bool | str | bytes):
        raise ConfigError(f"{name} is {value!r}; pass a number from 0 to 1")
    try:
        part = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r}; pass a number from 0 to 1") from error
    if not 0 <= part <= 1:
        raise ConfigError(f"{name} is {value!r}; pass a number from 0 to 1")
    return part


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; to open a FIFO or to read a device could block forever.

    Raises OSError, also for what is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise

"""Checks of what callers give: numbers, durations and the files that they name."""

from __future__ import annotations

import errno
import operator
import os
import stat
from typing import Any, BinaryIO

from tutti.errors import ConfigError

#: The longest wait: a day.
SECONDS_MAX = 86_400.0


def seconds(name: str, value: Any) -> float:
    """A duration from 0 to a day in seconds.  Raises ConfigError for anything else."""
    if isinstance(value, bool | str | bytes):
        raise ConfigError(f"{name} is {value!r}; give a number of seconds")
    try:
        duration_s = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r}; give a number of seconds") from error
    if not 0 <= duration_s <= SECONDS_MAX:
        raise ConfigError(f"{name} is {value!r}; give 0 to {SECONDS_MAX:g} seconds, at most a day")
    return duration_s


def whole(name: str, value: Any, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``.  Raises ConfigError for anything else."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; give an integer") from error
    if isinstance(value, bool) or not low <= number <= high:
        raise ConfigError(f"{name} is {value!r}; give an integer from {low} to {high}")
    return number


def share(name: str, value: Any) -> float:
    """A number from 0 to 1.  Raises ConfigError for anything else."""
    if isinstance(value, bool | str | bytes):
        raise ConfigError(f"{name} is {value!r}; give a number from 0 to 1")
    try:
        part = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r}; give a number from 0 to 1") from error
    if not 0 <= part <= 1:
        raise ConfigError(f"{name} is {value!r}; give a number from 0 to 1")
    return part


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file that ends: the open of a FIFO, and the read of some devices, wait without end.

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

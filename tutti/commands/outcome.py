"""Result of a command, as the command line receives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tutti.errors import KeyMissing

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNUSABLE = 3
EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h
EXIT_HUNG_UP = 129  # 128 + SIGHUP
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE
EXIT_TERMINATED = 143  # 128 + SIGTERM


class NotThere(KeyMissing):
    """What the arguments name is not in the pool."""


@dataclass(frozen=True)
class CommandResult:
    """What a command found: `result` for programs (--json), `text` for people."""

    result: dict[str, Any]
    text: str
    exit_code: int = EXIT_OK

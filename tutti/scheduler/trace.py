"""A recorded trace of events and decisions, as JSON lines, and its replay.

A line is the event, a space, and the decision that followed.  Replaying the events through the same
policy, profile and limits gives the same bytes.  The first line of a file has limits and profile.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tutti.base.checks import open_regular
from tutti.base.units import MiB
from tutti.errors import ConfigError
from tutti.scheduler.event import Event, from_json, to_json
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import Limits
from tutti.scheduler.profile import TableProfile
from tutti.scheduler.state import Decision, Policy
from tutti.scheduler.state_changes import Scheduler

KIND = "tutti trace"
SCHEMA = 2
#: The largest file; later events are not recorded.
NBYTES_MAX = 64 * MiB

_log = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """What a file holds: lines for `replay`, and what they were decided by."""

    limits: Limits
    profile: TableProfile
    lines: list[str]


class TraceFile:
    """Writes a trace; pass it as ``record`` of a Schedule.  Replaces an existing file.

    Each line is written at once, so that a process that is killed leaves whole lines.
    Raises ConfigError where the file cannot be written.
    """

    def __init__(
        self, path: Path, limits: Limits, profile: TableProfile, nbytes_max: int = NBYTES_MAX
    ) -> None:
        self._path, self._left = path, nbytes_max
        head = {
            "kind": KIND,
            "schema": SCHEMA,
            "limits": asdict(limits),
            "profile": dict(profile.document),
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o600)
            weakref.finalize(self, os.close, self._fd).atexit = False  # threads may still write
            self._write(json.dumps(head, separators=(",", ":")))
        except OSError as error:
            raise ConfigError(
                f"cannot write the scheduler's trace {path}: {error.strerror}; choose a folder that"
                " exists and that this user may write to"
            ) from error

    def __call__(self, event: Event, decision: Decision) -> None:
        if self._left >= 0:
            self._write(line(event, decision))

    def _write(self, text: str) -> None:
        content = text.encode() + b"\n"
        self._left -= len(content)
        if self._left < 0:
            _log.warning("the scheduler's trace %s is full; no more is recorded", self._path)
        elif os.write(self._fd, content) < len(content):
            raise OSError(f"no space for the scheduler's trace {self._path}")


def read(path: str | os.PathLike[str]) -> Recorded:
    """Reads what a TraceFile wrote, without an incomplete last line.

    Raises ConfigError, or ProfileError, for other files.
    """
    try:
        with open_regular(path) as file:
            content = file.read(NBYTES_MAX + 1)
        head, *lines = content.decode().split("\n")[:-1]
        values = json.loads(head)
        if (values["kind"], values["schema"]) != (KIND, SCHEMA):
            raise ValueError(f"another kind or schema than {SCHEMA}")
        return Recorded(Limits(**values["limits"]), TableProfile(values["profile"]), lines)
    except (OSError, LookupError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(
            f"{os.fspath(path)} is not a trace of the scheduler ({error}); record the trace again"
        ) from error


def line(event: Event, decision: Decision) -> str:
    """One line of a trace, without the line feed."""
    values = {name: value for name, value in asdict(decision).items() if value}
    return f"{to_json(event)} {json.dumps(values, separators=(',', ':'))}"


def replay(lines: Iterable[str], policy: Policy, profile: Profile) -> Iterator[str]:
    """Yields the trace that the events of ``lines`` result in.  Raises ConfigError."""
    scheduler = Scheduler(policy, profile)
    for one in lines:
        event = from_json(_event_part(one))
        yield line(event, scheduler.take(event))


def _event_part(one: str) -> str:
    try:
        _, end = json.JSONDecoder().raw_decode(one)
    except ValueError as error:
        raise ConfigError(
            f"{one[:80]!r} is not a line of a trace ({error}); record the trace again"
        ) from error
    return one[:end]

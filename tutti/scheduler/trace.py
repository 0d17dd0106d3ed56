"""A recorded trace of events and decisions, as JSON lines, and its replay.

A line is the event, a space, and the decision that followed.  Replaying the events through the same
policy, profile and limits gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict

from tutti.errors import ConfigError
from tutti.scheduler.event import Event, from_json, to_json
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.state import Decision, Policy
from tutti.scheduler.state_changes import Scheduler


def line(event: Event, decision: Decision) -> str:
    """One line of a trace, without its end."""
    values = {name: value for name, value in asdict(decision).items() if value}
    return f"{to_json(event)} {json.dumps(values, separators=(',', ':'))}"


def replay(lines: Iterable[str], policy: Policy, profile: Profile) -> Iterator[str]:
    """The trace that the events of ``lines`` give.  Raises ConfigError for other lines."""
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

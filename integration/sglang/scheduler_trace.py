"""The option `scheduler_trace`: a file with the events and decisions of a rank's scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.medium.layout import KVLayout
from tutti.profiles.at_open import Speeds, find_schedule
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.profile import TableProfile
from tutti.scheduler.trace import TraceFile


def record_of(options: Mapping[str, Any], name: str, schedule: Schedule | None) -> Schedule | None:
    """The schedule, recorded into NAME.trace if the option is set.

    Pools that share another pool's queue are recorded there: their own file has no events.
    Raises ConfigError if recording is not possible.
    """
    folder = options["scheduler_trace"]
    if not folder or schedule is None:
        return schedule
    assert isinstance(schedule.profile, TableProfile), "as the option profile gives"
    file = TraceFile(Path(folder) / f"{name}.trace", schedule.limits, schedule.profile)
    return replace(schedule, record=file)


def traced(
    options: Mapping[str, Any], members: Sequence[str] | Speeds, layout: KVLayout, name: str
) -> Schedule | None:
    """The schedule that a store of these members would choose by itself, recorded."""
    executor = options["executor"]
    found = find_schedule(options["profile"], members, layout, executor=executor)
    return record_of(options, name, found)

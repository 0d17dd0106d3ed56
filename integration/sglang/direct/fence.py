"""What has to happen on the engine's device before its pages may be read or written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tutti.errors import DeviceTimeout
from tutti.gio_uring.gpu.host_engine import wait_until


class Fence:
    """Events recorded on the engine's streams.  On the CPU they have always happened.

    The events are those of SGLang's `record_offload_ready`: one on the scheduler's stream, which
    computed the slots, and one on the forward's, which may still use the pages.  Not run on a GPU.
    """

    def __init__(self, events: Sequence[Any] = ()) -> None:
        self.events = list(events)

    def wait(self, deadline_s: float) -> None:
        """Returns when all have happened.  Raises DeviceTimeout at the deadline (monotonic)."""
        self._wait(self.events, deadline_s)

    def wait_slots(self, deadline_s: float) -> None:
        """As `wait`, for the first event alone: then the slots are known."""
        self._wait(self.events[:1], deadline_s)

    @staticmethod
    def _wait(events: Sequence[Any], deadline_s: float) -> None:
        for event in events:
            if not wait_until(event.query, max(0.0, deadline_s - time.monotonic())):
                raise DeviceTimeout(
                    "the engine's device did not finish its work in time; nothing was moved"
                )

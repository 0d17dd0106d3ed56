"""A wait for what another thread or process brings about."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "it did not come true",
    timeout_s: float = 60.0,
) -> None:
    """Fails after the timeout with `what`; standard error has what every thread does then."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(what if isinstance(what, str) else what())
        time.sleep(0.002)


def wait_idle(scheduler: Any) -> None:
    """Until a Dispatcher has heard of the end of every transfer; who waits for one hears first."""

    def idle() -> bool:
        scheduler.run_due()  # takes what was posted, also while its own thread is about to
        counters = scheduler.counters()
        return not (counters["loads_waiting"] or counters["writes_waiting"])

    wait_until(idle, lambda: f"{scheduler.counters()}")

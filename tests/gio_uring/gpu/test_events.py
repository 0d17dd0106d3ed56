"""Events that are used again, on a stand-in for the CUDA driver."""

from __future__ import annotations

import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.gio_uring.gpu.events import EventPool


def test_events_of_a_forgotten_job_come_back_while_the_others_are_destroyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its finalizer runs whenever the garbage collector does, on any thread."""
    driver = StandInDriver()
    pool, late = EventPool(driver), list[int]()
    known = set(driver.spare_events)
    pool.acquire(2, late)
    destroy = driver.destroy_event

    def destroyed(event: int) -> None:
        pool.release(late)
        late.clear()
        destroy(event)

    monkeypatch.setattr(driver, "destroy_event", destroyed)
    pool.close()
    assert set(driver._events) == known
    driver.close()

"""Calls of the stand-in for CUDA's driver that are made together, as `Driver.together` says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Protocol


class Enqueuing(threading.local):
    """The calls of a thread that wait for the end of its block; None outside of one.

    entered: called for each block, and each call outside of one.
    """

    calls: list[Callable[[], None]] | None = None

    def __init__(self, entered: Callable[[], None]) -> None:
        self.entered = entered

    @contextmanager
    def together(self) -> Iterator[None]:
        if self.calls is not None:
            yield
            return
        self.calls = calls = []
        try:
            yield
        finally:
            self.calls = None
        self.entered()
        for call in calls:
            call()


class _Enqueues(Protocol):
    enqueuing: Enqueuing


def enqueues(method: Callable[..., None]) -> Callable[..., None]:
    """A method that is called at the end of the thread's block, or at once outside of one."""

    @wraps(method)
    def called(driver: _Enqueues, *arguments: object, **options: object) -> None:
        calls = driver.enqueuing.calls
        if calls is None:
            driver.enqueuing.entered()
            method(driver, *arguments, **options)
        else:
            calls.append(partial(method, driver, *arguments, **options))

    return called

"""Starts threads, and raises CapacityError where the system has no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tutti.errors import CapacityError


def start_thread(
    thread: threading.Thread, name: str = "", give_up: Callable[[], object] = lambda: None
) -> None:
    """Starts a thread, and names it.

    Raises CapacityError when the system has no more of them, after ``give_up``.
    """
    thread.name = name or thread.name
    try:
        thread.start()
    except RuntimeError as error:
        give_up()
        raise CapacityError(
            f"cannot start the thread {thread.name}; end other work, or raise the limit of "
            "threads (ulimit -u)"
        ) from error

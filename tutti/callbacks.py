"""Calls to code of the user's: whatever it raises, the thread that called it goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from tutti.interrupts import is_main_thread

_log = logging.getLogger(__name__)


class Guard:
    """Calls what a user passed in, and logs and counts what that raises.

    errors: how many calls raised.
    """

    def __init__(self) -> None:
        self.errors = 0

    def call(self, what: str, function: Callable[..., object], *given: object) -> bool:
        """Whether the call returned.  ``what`` names it in the log."""
        try:
            function(*given)
        except BaseException as error:
            self.caught(what, error)
            return False
        return True

    def caught(self, what: str, error: BaseException) -> None:
        """Logs and counts an error, of any class: CancelledError and SystemExit are the user's.

        Raises a KeyboardInterrupt of the main thread again, which is Ctrl-C.
        """
        if isinstance(error, KeyboardInterrupt) and is_main_thread():
            raise error
        self.errors += 1
        with contextlib.suppress(BaseException):  # a log handler is the user's too
            _log.error("%s failed", what, exc_info=error)

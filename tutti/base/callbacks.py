"""Calls user code so that the calling thread continues, whatever that code raises."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from tutti.base.interrupts import is_main_thread
from tutti.errors import ConfigError

_log = logging.getLogger(__name__)


class _Calls(threading.local):
    depth = 0  # calls under way of a thread


_calls = _Calls()


class Guard:
    """Calls functions that a user passed in, and logs and counts the errors that they raise.

    errors: how many calls raised.
    """

    def __init__(self) -> None:
        self.errors = 0

    def call(self, what: str, function: Callable[..., object], *given: object) -> bool:
        """Whether the call returned.  ``what`` names it in the log."""
        _calls.depth += 1
        try:
            function(*given)
        except BaseException as error:
            self.caught(what, error)
            return False
        finally:
            _calls.depth -= 1
        return True

    def caught(self, what: str, error: BaseException) -> None:
        """Logs and counts an error of any class, as CancelledError and SystemExit are the user's.

        Raises a KeyboardInterrupt again in the main thread, where it is Ctrl-C.
        """
        if isinstance(error, KeyboardInterrupt) and is_main_thread():
            raise error
        self.errors += 1
        with contextlib.suppress(BaseException):  # a log handler is the user's too
            _log.error("%s failed", what, exc_info=error)


def check_not_called() -> None:
    """Raises ConfigError in a callback, which runs on a thread that a close waits for."""
    if _calls.depth:
        raise ConfigError("a callback cannot close a store; close it in another thread")

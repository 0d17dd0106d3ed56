"""Protects calls from Ctrl-C: an exception of a signal handler leaves nothing half done.

Python runs signal handlers in the main thread, between any two of its instructions, and what they
raise ends whatever ran there.  Code that acquires and releases therefore runs on other threads.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tutti.errors import CapacityError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)

_LINGER_S = 0.5  # how long a thread waits for its next call
_LOOK_S = 1.0
_PIECE_S = 0.2
_EXIT_S = 30.0  # the longest that the exit of the process waits for calls that go on


class Latch:
    """A threading.Event that is never cleared.

    The main thread may wait for it: unlike an Event's, its wait takes no lock that an interrupt
    could leave taken, which would block the thread that sets it.
    """

    _is_set = False
    _waiting: list[_thread.LockType] | None = None  # the first wait makes it

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Wakes all waiters, now and later."""
        self._is_set = True
        waiting = self._waiting
        while waiting:  # bounded: no more come
            try:
                lock = waiting.pop()
            except IndexError:  # it timed out
                break
            lock.release()

    def wait(self, timeout_s: float = threading.TIMEOUT_MAX) -> bool:
        """Waits until it is set.  False after the timeout."""
        if not self._is_set and timeout_s > 0:
            waiting: list[_thread.LockType] = vars(self).setdefault("_waiting", [])
            lock = _thread.allocate_lock()
            lock.acquire(blocking=False)
            waiting.append(lock)
            # It may have been set before the append.
            if self._is_set or not lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
                with contextlib.suppress(ValueError):
                    waiting.remove(lock)
        return self._is_set


def in_pieces(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """Calls ``wait(seconds)``, a native wait that no signal ends, for short times, between which
    Ctrl-C is raised.  False after the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    left_s = timeout_s
    while left_s > _PIECE_S:
        if wait(_PIECE_S):
            return True
        left_s = deadline_s - time.monotonic()
    return wait(left_s)


_main = threading.main_thread().ident


def _forked() -> None:
    global _main
    _main = threading.get_ident()


os.register_at_fork(after_in_child=_forked)


def is_main_thread() -> bool:
    """Whether signal handlers run in this thread."""
    return threading.get_ident() == _main


def uninterrupted(
    undo: Callable[[Any, Any], object] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: calls from the main thread run on a thread of their own, to their end.

    An interrupted call raises the interrupt when it has ended and was undone by
    ``undo(first argument, result)``; a second interrupt does not wait for that.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if threading.get_ident() != _main:  # as is_main_thread, a call fewer
                return function(*args, **kwargs)
            first = args[0] if args else None
            revert = functools.partial(undo, first) if undo is not None else None
            result: _R = _call_elsewhere(functools.partial(function, *args, **kwargs), revert)
            return result

        return call

    return decorate


class _Call:
    """A call on another thread, which begins at most once."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._claim = _thread.allocate_lock()
        self._ended = Latch()
        self._result: Any = None
        self._has_result = self._is_over = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Runs on its thread."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._result = self._function()
            self._has_result = True
        except BaseException as error:
            self._error = error
        self._is_over = True
        _running.discard(weakref.ref(self))
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end.  False after the timeout."""
        return self._ended.wait(timeout_s) or self._is_over  # also if its thread could not wake us

    def start(self) -> None:
        """Hands it to a thread that waits for calls, or to a new one."""
        _running.add(weakref.ref(self, _running.discard))
        try:
            _idle.pop().put(self)
        except IndexError:
            self._start_thread()

    def _start_thread(self) -> None:
        """Raises CapacityError where the system has no more threads: the call never begins then."""
        try:
            # Not Thread.start, which waits for an Event.
            _thread.start_new_thread(_start_thread, (self,))
        except RuntimeError as error:
            if self._claim.acquire(blocking=False):
                _running.discard(weakref.ref(self))
                self._ended.set()
            raise CapacityError(
                "cannot start a thread; end other work, or raise the limit of threads (ulimit -u)"
            ) from error

    def finish(self) -> tuple[Any, BaseException | None]:
        """Waits for its end, which comes by the deadlines inside the called function.  Returns its
        result and its error.
        """
        while not self.wait(_LOOK_S):
            if not self._claim.locked():  # the idle thread ended before it took the call
                self._start_thread()
        error, self._error = self._error, None  # its frames refer to this object
        return self._result, error

    def revert(self, undo: Callable[[Any], object] | None) -> None:
        """Undoes the call once it has ended.  One that has not begun will never begin."""
        if self._claim.acquire(blocking=False):
            _running.discard(weakref.ref(self))
            self._ended.set()
            return
        while not self.wait(_LOOK_S):
            pass  # bounded by the deadlines of what is called
        try:
            if undo is not None and self._has_result:
                undo(self._result)
        except Exception:
            _log.exception("an interrupted call could not be undone")


def _call_elsewhere(function: Callable[[], Any], undo: Callable[[Any], object] | None) -> Any:
    call = _Call(function)
    undoing = _Call(functools.partial(call.revert, undo))
    raised: BaseException | None = None
    try:
        call.start()
        result, raised = call.finish()
        if raised is not None:
            raise raised
        return result
    except BaseException as error:
        if error is not raised:
            try:
                undoing.start()
            except BaseException:  # interrupted again: a call that is handed over twice begins once
                undoing.start()
                raise
            undoing.finish()
        raise
    finally:
        del call, undoing, raised  # an error refers to its frames, and so to itself


def start(function: Callable[[], object]) -> None:
    """Runs a function on another thread, for which the exit of the process waits."""
    call = _Call(function)
    _running.add(weakref.ref(call, _running.discard))
    call._start_thread()  # a new one: an idle thread may be about to end


#: What was started and has not ended.  Weak: an interrupted start may have handed it to no thread.
_running: set[weakref.ref[_Call]] = set()


def _wait_for_calls() -> None:
    """Waits for calls at exit, before finalizers run, which may end the same objects."""
    deadline_s = time.monotonic() + _EXIT_S
    for weak in list(_running):
        call = weak()
        # A call that has not begun by then was interrupted before a thread got it.
        if call is not None and not call.wait(_LOOK_S) and call._claim.locked():
            call.wait(deadline_s - time.monotonic())


# The first finalizer makes weakref register its own function.  What is registered after it, as
# here, runs before it.
weakref.finalize(Latch(), id, 0)
atexit.register(_wait_for_calls)
os.register_at_fork(after_in_child=_running.clear)

#: The queues at which idle threads wait for a call.
_idle: deque[queue.SimpleQueue[_Call]] = deque()
os.register_at_fork(after_in_child=_idle.clear)


def _start_thread(call: _Call) -> None:
    """Runs on a bare thread, and passes the call to a daemon thread of `threading`."""
    inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
    inbox.put(call)
    threading.Thread(target=_serve, args=(inbox,), name="tutti-calls", daemon=True).start()


def _serve(inbox: queue.SimpleQueue[_Call]) -> None:
    while (call := _next(inbox)) is not None:  # bounded: ends when none comes for a while
        call.run()
        del call  # otherwise its result would stay alive here
        _idle.append(inbox)


def _next(inbox: queue.SimpleQueue[_Call]) -> _Call | None:
    with contextlib.suppress(queue.Empty):
        return inbox.get(timeout=_LINGER_S)
    try:
        _idle.remove(inbox)
    except ValueError:  # a caller took it, and is about to put its call
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=_LOOK_S)
    return None

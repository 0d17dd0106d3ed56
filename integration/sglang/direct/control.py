"""Clears and detaches a linker by the requests with which SGLang clears and detaches HiCache.

SGLang answers `POST /hicache/storage-backend/clear` and `DELETE /hicache/storage-backend` for
HiCache alone. The plugin answers them for the linkers of this process, on the scheduler's thread.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tutti.errors import TuttiError

_log = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


class Controlled(Protocol):
    """See TuttiLinker, whose methods these are."""

    def clear(self) -> None: ...
    def detach(self) -> None: ...


#: The linkers of this process.
LINKERS: weakref.WeakSet[Any] = weakref.WeakSet()


def activate() -> None:
    """Hooks both requests; for SGLang's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SCHEDULER + "clear_hicache_storage_wrapped", _clear, HookType.AROUND)
    HookRegistry.register(_SCHEDULER + "detach_hicache_storage_wrapped", _detach, HookType.AROUND)


def _clear(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    if not LINKERS:
        return original(scheduler, request)
    done, message = for_all("clear", lambda linker: linker.clear(), scheduler.is_fully_idle())
    _log.info("Tutti: %s", message)
    return ClearHiCacheReqOutput(success=done)


def _detach(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

    if not LINKERS:
        return original(scheduler, request)
    done, message = for_all("detach", lambda linker: linker.detach(), scheduler.is_fully_idle())
    _log.info("Tutti: %s", message)
    return DetachHiCacheStorageReqOutput(success=done, message=message)


def for_all(what: str, action: Callable[[Controlled], None], idle: bool) -> tuple[bool, str]:
    """Does it to every linker; whether it was done, and what to tell the caller.

    idle: whether SGLang has no request; with one nothing is done.
    """
    if not idle:
        return False, f"{what}: requests are running or waiting; try again when there are none"
    try:
        for linker in list(LINKERS):
            action(linker)
    except TuttiError as error:
        return False, f"{what}: {error}"
    return True, f"{what}: done"

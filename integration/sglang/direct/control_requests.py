"""Clears, detaches, attaches and asks for a linker by the requests that SGLang has for HiCache.

SGLang answers `/hicache/storage-backend` (DELETE, PUT, GET) and `/hicache/storage-backend/clear`
for HiCache alone. The plugin answers them for the linkers of this process, on the scheduler's
thread, and GET in the HTTP server's process, from what the other requests did.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tutti.errors import ConfigError, TuttiError

_log = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_BACKEND = "hicache_storage_backend"

#: The linkers of this process, attached and detached.
LINKERS: weakref.WeakSet[Any] = weakref.WeakSet()
#: HTTP servers of this process whose linkers were detached or attached since the start.
_CHANGED: weakref.WeakSet[Any] = weakref.WeakSet()


def activate() -> None:
    """Hooks the requests; for SGLang's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        (_SCHEDULER + "clear_hicache_storage_wrapped", _clear),
        (_SCHEDULER + "detach_hicache_storage_wrapped", _detach),
        (_SCHEDULER + "attach_hicache_storage_wrapped", _attach),
        (_TOKENIZER + "record_config_updates", _record),
        (_TOKENIZER + "config_value", _value),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _hook(what: str, output: str, action: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Does it to every linker, of an idle scheduler alone.  output: SGLang's type of the answer."""

    def answer(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        from sglang.srt.managers import io_struct

        if not LINKERS:
            return original(scheduler, request)
        done, message = True, f"{what}: done"
        try:
            if not scheduler.is_fully_idle():
                raise ConfigError("requests are running or waiting; try again when there are none")
            for linker in list(LINKERS):
                action(linker, request)
        except TuttiError as error:
            done, message = False, f"{what}: {error}"
        _log.info("Tutti: %s", message)
        more = {} if what == "clear" else {"message": message}
        return getattr(io_struct, output)(success=done, **more)

    return answer


_clear = _hook("clear", "ClearHiCacheReqOutput", lambda linker, _: linker.clear())
_detach = _hook("detach", "DetachHiCacheStorageReqOutput", lambda linker, _: linker.detach())
_attach = _hook(
    "attach",
    "AttachHiCacheStorageReqOutput",
    lambda linker, asked: linker.attach(_options(asked.hicache_storage_backend_extra_config_json)),
)


def _options(text: str | None) -> Mapping[str, Any] | None:
    """Options of the linker in a request: alone, or in the object of SGLang's flag."""
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the options are not JSON: {error}") from error
    inner = config.get("linker_extra_config", config) if isinstance(config, dict) else None
    if not isinstance(inner, dict):
        raise ConfigError('the options are not an object such as {"path": "/mnt/nvme/tutti"}')
    return inner


def _record(original: Callable[..., Any], manager: Any, source: str, **fields: Any) -> None:
    if _BACKEND in fields:
        _CHANGED.add(manager)
    original(manager, source, **fields)


def _value(original: Callable[..., Any], manager: Any, name: str) -> Any:
    """A linker that is attached since the start has no record; SGLang knows it by its flags."""
    known = manager.server_args
    if name == _BACKEND and manager not in _CHANGED and known.enable_unified_cache_external_linker:
        return known.unified_cache_external_linker_backend
    return original(manager, name)

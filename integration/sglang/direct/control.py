"""Clears, detaches, attaches and asks for a linker by the requests that SGLang has for HiCache.

SGLang answers `/hicache/storage-backend` (DELETE, PUT, GET) and `/hicache/storage-backend/clear`
for HiCache alone. The plugin answers the first three for the linkers of this process, on the
scheduler's thread; GET is answered in the HTTP server's process, from what these requests did.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tutti.errors import ConfigError, TuttiError

_log = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_BACKEND, _CONFIG = "hicache_storage_backend", "hicache_storage_backend_extra_config"


class Controlled(Protocol):
    """See TuttiLinker, whose methods these are."""

    def clear(self) -> None: ...
    def detach(self) -> None: ...
    def attach(self, config: Mapping[str, Any] | None = None) -> None: ...


#: The linkers of this process.
LINKERS: weakref.WeakSet[Any] = weakref.WeakSet()
#: Those HTTP servers of this process whose linkers were detached or attached since the start.
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


def _clear(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    if not LINKERS:
        return original(scheduler, request)
    done, _ = _for_all("clear", lambda linker: linker.clear(), scheduler)
    return ClearHiCacheReqOutput(success=done)


def _detach(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

    if not LINKERS:
        return original(scheduler, request)
    done, message = _for_all("detach", lambda linker: linker.detach(), scheduler)
    return DetachHiCacheStorageReqOutput(success=done, message=message)


def _attach(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    if not LINKERS:
        return original(scheduler, request)
    config = request.hicache_storage_backend_extra_config_json
    done, message = _for_all("attach", lambda linker: linker.attach(_options(config)), scheduler)
    return AttachHiCacheStorageReqOutput(success=done, message=message)


def _record(original: Callable[..., Any], manager: Any, source: str, **fields: Any) -> None:
    if _BACKEND in fields:
        _CHANGED.add(manager)
    original(manager, source, **fields)


def _value(original: Callable[..., Any], manager: Any, name: str) -> Any:
    """What SGLang knows; a linker that is attached since the start it knows by its own flags."""
    known = manager.server_args
    linked = known.enable_unified_cache_external_linker and manager not in _CHANGED
    if linked and known.unified_cache_external_linker_backend == "dynamic":
        if name == _BACKEND:
            return "dynamic"
        if name == _CONFIG:
            return known.unified_cache_external_linker_config
    return original(manager, name)


def _options(text: str | None) -> Mapping[str, Any] | None:
    """Options of the linker in a request: alone, or in the object of SGLang's flag."""
    if not text:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the options are not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError('the options are not an object such as {"path": "/mnt/nvme/tutti"}')
    inner = config.get("linker_extra_config", config)
    return dict(inner) if isinstance(inner, dict) else None


def _for_all(what: str, action: Callable[[Controlled], None], scheduler: Any) -> tuple[bool, str]:
    """Does it to every linker of an idle scheduler; whether it was done, and what to tell."""
    try:
        if not scheduler.is_fully_idle():
            raise ConfigError("requests are running or waiting; try again when there are none")
        for linker in list(LINKERS):
            action(linker)
    except TuttiError as error:
        _log.warning("Tutti: %s: %s", what, error)
        return False, f"{what}: {error}"
    _log.info("Tutti: %s: done", what)
    return True, f"{what}: done"

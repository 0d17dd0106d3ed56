"""Controls the linker by SGLang's HTTP requests for HiCache: clear, detach, attach, status.

SGLang handles `/hicache/storage-backend` (DELETE, PUT, GET) and `/hicache/storage-backend/clear`
only for HiCache. The plugin handles them for the linkers of this process, on the scheduler's
thread; and GET in the HTTP server's process, from the results of the other requests.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tutti.errors import ConfigError, DeviceTimeout, TuttiError
from tutti.integration.sglang import storages

_log = logging.getLogger(__name__)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_BACKEND = "hicache_storage_backend"
_KV = "kv_cache"  # SGLang's tag of that memory

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
        (_UPDATER + "release_memory_occupation", _release),
        (_TOKENIZER + "record_config_updates", _record),
        (_TOKENIZER + "config_value", _value),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _clear_hicache(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Reports a failed clear; SGLang ignores the storage's answer and reports success."""
    answer = original(scheduler, request)
    if storages.clear_failed(scheduler):
        answer.success = False
    return answer


def _detach_hicache(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Refuses before SGLang ends some threads of the storage and then fails at a blocked one."""
    if storages.held(scheduler):
        from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

        message = "detach: the device still holds host pages of a load; try again later"
        return DetachHiCacheStorageReqOutput(success=False, message=message)
    return original(scheduler, request)


def _attach_hicache(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Refuses an attach with pipeline stages, which SGLang 0.5.23 never completes.

    A stage forwards a request only after handling it, but an attach waits for the next stage.
    """
    tree = scheduler.tree_cache
    attaches = scheduler.enable_hierarchical_cache and not getattr(tree, "enable_storage", False)
    stages = getattr(tree, "pp_size", 1)
    if attaches and stages > 1 and request.hicache_storage_backend == "dynamic":
        from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

        message = "attach: impossible with pipeline stages; start the server with the storage"
        return AttachHiCacheStorageReqOutput(success=False, message=message)
    return original(scheduler, request)


def _hook(
    what: str, output: str, action: Callable[[Any, Any], None], of_hicache: Callable[..., Any]
) -> Callable[..., Any]:
    """A hook that applies ``action`` to every linker, only while the scheduler is idle.

    The answer is a success only if all ranks that share a model's KV succeed.
    output: SGLang's type of the answer.  of_hicache: the hook if there is no linker.
    """

    def answer(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        from sglang.srt.managers import io_struct

        if not LINKERS:
            return of_hicache(original, scheduler, request)
        done, message = True, f"{what}: done"
        try:
            if not scheduler.is_fully_idle():
                raise ConfigError("requests are running or waiting; try again when there are none")
            for linker in list(LINKERS):
                action(linker, request)
        except TuttiError as error:
            done, message = False, f"{what}: {error}"
        except Exception as error:  # any error: the scheduler must survive
            _log.exception("Tutti: %s failed", what)
            done, message = False, f"{what}: {type(error).__name__}: {error}"
        # SGLang returns the answer of the first rank alone.
        if storages.on_any_rank(scheduler, not done) and done:
            done, message = False, f"{what}: failed on another rank; see its log"
        _log.info("Tutti: %s", message)
        more = {} if what == "clear" else {"message": message}
        return getattr(io_struct, output)(success=done, **more)

    return answer


_clear = _hook("clear", "ClearHiCacheReqOutput", lambda linker, _: linker.clear(), _clear_hicache)
_detach = _hook(
    "detach", "DetachHiCacheStorageReqOutput", lambda linker, _: linker.detach(), _detach_hicache
)
_attach = _hook(
    "attach",
    "AttachHiCacheStorageReqOutput",
    lambda linker, asked: linker.attach(_options(asked.hicache_storage_backend_extra_config_json)),
    _attach_hicache,
)


def _release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Ends transfers before SGLang unmaps its KV, which it does before it flushes its cache.

    Raises DeviceTimeout if the device does not finish.
    """
    if not request.tags or _KV in request.tags:
        if storages.held(manager.scheduler):  # SGLang would not notice that the flush failed
            raise DeviceTimeout("a load still uses host pages; stop this server")
        for linker in list(LINKERS):
            linker.backlog.finish()
    return original(manager, request)


def _options(text: str | None) -> Mapping[str, Any] | None:
    """The linker's options in a request: by themselves, or in the object of SGLang's flag."""
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
    """Status of the linkers; one attached since the start has no record, but SGLang's flags."""
    known = manager.server_args
    if name == _BACKEND and manager not in _CHANGED and known.enable_unified_cache_external_linker:
        return known.unified_cache_external_linker_backend
    return original(manager, name)

"""Detects updates of the weights while the server runs, so that no KV of other weights is served.

`activate` is SGLang's plugin (entry point group `sglang.srt.plugins`). From the start of an update
until the next flush of SGLang's cache nothing is looked up or stored; after it, keys have a new
namespace, so that everything stored before misses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from tutti.errors import ConfigError
from tutti.integration.sglang import kv_events, large_pages, second_touch, storages
from tutti.integration.sglang.direct import control_requests, model_steps
from tutti.integration.sglang.launch import VERSIONS, installed_version
from tutti.integration.sglang.metrics import UNFLUSHED, level_all

_log = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_OFFERS = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper."


class WeightsWatch:
    """Tracks the weights to which the KV of this process belongs.

    watched: whether the plugin is active, so that updates are detected.
    namespace: the salt of keys: empty for the weights at the start, None while unknown.
    """

    def __init__(self) -> None:
        self.watched = False
        self.namespace: bytes | None = b""
        self._warned = False

    def check(self, allow_unwatched: bool) -> None:
        """Raises ConfigError if updates would not be detected, unless that is allowed."""
        if not (self.watched or allow_unwatched):
            raise ConfigError(
                "updates of weights would go unnoticed: the plugin `tutti` is not loaded (is it "
                "missing in SGLANG_PLUGINS, or tutti not installed with pip?); load it, or set the "
                'option "allow_unwatched_weights" and never update weights in place'
            )

    def changed(self) -> None:
        """Called when weights change: they are not those of the KV in SGLang's memory any more."""
        self.namespace = None
        level_all(UNFLUSHED, 1)

    def warn(self) -> None:
        """Called after an update; warns, once until the next flush, if no flush followed it."""
        if self.namespace is None and not self._warned:
            self._warned = True
            _log.warning(
                "Tutti: weights change, or an update failed: nothing is found or stored until"
                " SGLang flushes its cache, for an update with flush_cache or for /flush_cache"
            )

    def flushed(self) -> None:
        """Called after a flush of SGLang's cache: later KV is of the current weights."""
        self._warned = False
        if self.namespace is None:
            self.namespace = os.urandom(16)
            level_all(UNFLUSHED, 0)


WATCH = WeightsWatch()

#: While weights are loaded: whether any rank's storage thread was blocked before that.
_held: bool | None = None


def activate() -> None:
    """SGLang's plugin: hooks updates of weights, flushes, offers, steps, events, pools and control.

    Every server of the environment loads it, also without Tutti. It hooks nothing in other
    versions of SGLang, where these functions may differ.
    """
    version = installed_version()
    if version.split("+")[0] not in VERSIONS:
        _log.warning(
            "Tutti: its plugin does nothing in SGLang %s; it works with %s",
            version,
            ", ".join(VERSIONS),
        )
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        (_UPDATER + "update_weights_from_disk", _around_loading),
        (_UPDATER + "update_weights_from_ipc", _around_loading),
        (_UPDATER + "update_weights_from_distributed", _if_session(bool, _around_loading)),
        (_UPDATER + "update_weights_from_tensor", _if_session(bool, _around_loading)),
        (_UPDATER + "begin_weight_update", _if_session(lambda session: session is None)),
        # SGLang flushes after weights that it loaded itself, but not after others.
        (_UPDATER + "end_weight_update", _if_session(lambda s: s and not s.loaded_weights)),
        ("sglang.srt.managers.scheduler.Scheduler.flush_cache", _around_flush),
        (_OFFERS + "offload_nodes", second_touch.around_offers),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    WATCH.watched = True
    model_steps.activate()
    control_requests.activate()
    kv_events.activate()
    large_pages.activate()


def _around_update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    WATCH.changed()
    try:
        return original(*args, **kwargs)
    finally:
        WATCH.warn()


def _around_loading(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Checks for blocked threads before the loading, for the flush after it: a rank whose loading
    fails does not flush, and would not take part in a check then.
    """
    global _held
    _held = storages.held(manager.scheduler)
    try:
        return _around_update(original, manager, *args, **kwargs)
    finally:
        _held = None


def _if_session(
    changes: Callable[[Any], Any], around: Callable[..., Any] = _around_update
) -> Callable[..., Any]:
    """Applies a hook in some states of SGLang's session; in others SGLang refuses or flushed."""

    def hook(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        if changes(manager._session):
            return around(original, manager, *args, **kwargs)
        return original(manager, *args, **kwargs)

    return hook


def _around_flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if storages.held(scheduler) if _held is None else _held:
        return False
    done = original(scheduler, *args, **kwargs)
    if done:
        WATCH.flushed()
    return done

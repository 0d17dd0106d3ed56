"""Notices that weights change while the server runs, so that no KV of other weights is served.

`activate` is SGLang's plugin (entry point group `sglang.srt.plugins`). From the start of an update
until the next flush of SGLang's cache nothing is looked up or stored; after it, keys live in a new
namespace, so that everything stored before misses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tutti.errors import ConfigError
from tutti.integration.sglang import kv_events
from tutti.integration.sglang.direct import control_requests, model_steps

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)
_END = "end_weight_update"
_FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"


class WeightsWatch:
    """Which weights the KV of this process belongs to.

    watched: whether the plugin is active, so that updates are noticed.
    """

    def __init__(self) -> None:
        self.watched = False
        self._namespace: bytes | None = b""

    @property
    def namespace(self) -> bytes | None:
        """What keys are salted with: empty for the weights of the start, None while unknown."""
        return self._namespace

    def check(self, allow_unwatched: bool) -> None:
        """Raises ConfigError when updates would go unnoticed and that is not allowed."""
        if not (self.watched or allow_unwatched):
            raise ConfigError(
                "updates of weights would go unnoticed: the plugin `tutti` is not loaded (is it "
                "missing in SGLANG_PLUGINS, or tutti not installed with pip?); load it, or set the "
                'option "allow_unwatched_weights" and never update weights in place'
            )

    def changed(self) -> None:
        """The weights are no longer those of the KV in SGLang's memory."""
        self._namespace = None

    def flushed(self) -> None:
        """SGLang's memory holds no KV any more: what comes now is of the present weights."""
        if self._namespace is None:
            self._namespace = os.urandom(16)


WATCH = WeightsWatch()


def activate() -> None:
    """SGLang's plugin: hooks updates of weights, flushes, steps, events and a linker's control."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in _UPDATES:
        HookRegistry.register(_UPDATER + name, _around_update, HookType.AROUND)
    HookRegistry.register(_UPDATER + _END, _around_end, HookType.AROUND)
    HookRegistry.register(_FLUSH, _around_flush, HookType.AROUND)
    WATCH.watched = True
    model_steps.activate()
    control_requests.activate()
    kv_events.activate()


def _around_update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    WATCH.changed()
    return original(*args, **kwargs)


def _around_end(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    # Weights that came through SGLang were followed by a flush; others come behind its back.
    session = manager._session
    if session is None or not session.loaded_weights:
        WATCH.changed()
    return original(manager, *args, **kwargs)


def _around_flush(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    done = original(*args, **kwargs)
    if done:
        WATCH.flushed()
    return done

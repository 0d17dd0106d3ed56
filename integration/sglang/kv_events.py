"""KV events of the disk tier: they tell routers which pages are on this server's SSD.

SGLang publishes events of pages in GPU and host memory. With the option `kv_events`, those of pages
on disk are added to the same stream, in the same format, with medium DISK: stored pages that are
durable, and pages that were evicted or deleted. The plugin adds them where the scheduler takes the
events of its tree.

An event contains the page's tokens, which storage does not get: they are remembered from SGLang's
own events. Memory is bounded; pages beyond the limits are not announced, but counted.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tutti.base.arrays import Keys, Mask
from tutti.errors import ConfigError
from tutti.integration.sglang.metrics import Metrics
from tutti.interface import Store

_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."
_BLOCKS_MAX = 1 << 16  # remembered, of each kind
_ANNOUNCED_MAX = 1 << 19  # about 100 MB
_TAKEN_MAX = 4096  # blocks per turn of the scheduler
_CHECK_S = 1.0
_CHECK_SHARE = 0.02  # share of the time, whatever the pool's size

#: Of this process; removed once all of their events were taken.
EVENTS: set[DiskEvents] = set()
_HOOKED = threading.Event()


class DiskEvents:
    """The events of one KV pool.  Thread-safe; no call blocks.

    page_size: tokens per page.  blocks_max: limit of remembered pages of each kind.
    """

    def __init__(self, page_size: int, metrics: Metrics, *, blocks_max: int = _BLOCKS_MAX) -> None:
        from tutti.integration.sglang import adapter

        self._sglang = adapter
        self._recorder = adapter.KVCacheEventRecorder(enabled=True, page_size=page_size)
        self._metrics = metrics
        self._max = blocks_max
        self._lock = threading.Lock()
        self._offered: OrderedDict[bytes, int] = OrderedDict()  # block hashes by object key
        self._known: OrderedDict[int, dict[str, Any]] = OrderedDict()  # BlockStored, by hash
        self._waiting: OrderedDict[int, bytes] = OrderedDict()  # durable, tokens unknown
        self._ready: OrderedDict[int, bool] = OrderedDict()  # stored (or gone), to be published
        self._announced: dict[bytes, int] = {}
        self._next_check_s = 0.0
        self._closed = False
        EVENTS.add(self)

    def offered(self, names: Sequence[str], keys: Keys) -> None:
        """Records SGLang's page hashes (hexadecimal) and their object keys (n, 16)."""
        with self._lock:
            for name, key in zip(names, keys, strict=True):
                self._remember(self._offered, key.tobytes(), self._sglang.block_hash(name))

    def stored(self, keys: Keys, good: Mask) -> None:
        """Announces stored pages of a chain, up to the first one whose ``good`` (n,) is False."""
        n = len(good) if good.all() else int(np.argmin(good))
        with self._lock:
            for key in keys[:n]:
                self._durable(key.tobytes())

    def found(self, names: Sequence[str], keys: Keys) -> None:
        """Announces pages that a look-up found, also pages that another process stored."""
        n = len(keys)
        if n and keys[-1].tobytes() not in self._announced:
            self.offered(names[:n], keys)
            self.stored(keys, np.ones(n, np.bool_))

    def take(self, events: list[Any]) -> list[Any]:
        """SGLang's events, followed by those of this pool.  Called on the scheduler's thread."""
        with self._lock:
            for event in events:
                if isinstance(event, self._sglang.AllBlocksCleared):
                    # Routers forget disk pages, too; look-ups announce them again.
                    for each in (self._waiting, self._ready, self._announced):
                        each.clear()
                elif isinstance(event, self._sglang.BlockStored):
                    self._learn(event)
            for _ in range(min(_TAKEN_MAX, len(self._ready))):
                block, is_there = self._ready.popitem(last=False)
                self._enqueue(block, is_there)
            if self._closed and not (self._ready or self._announced):
                EVENTS.discard(self)
        if self._closed:  # the rest follows in later turns
            self._withdraw(list(islice(self._announced, _TAKEN_MAX)))
        return [*events, *self._recorder.take()]

    def check(self, store: Store) -> None:
        """Withdraws pages that the pool does not have any more.  Call it about once a second."""
        began_s = time.monotonic()
        if began_s < self._next_check_s:
            return
        with self._lock:
            mine = list(self._announced)
        if mine:
            there = np.ascontiguousarray(store.catalogue.keys()).view(np.uint64)[:, 0]
            words = np.frombuffer(b"".join(mine), np.uint64)[::2]
            self._withdraw([mine[row] for row in np.flatnonzero(~np.isin(words, there))])
        took_s = time.monotonic() - began_s
        self._next_check_s = began_s + max(_CHECK_S, took_s / _CHECK_SHARE)

    def close(self) -> None:
        """Withdraws all pages, because the pool is detached."""
        self._withdraw(list(self._announced))
        self._closed = True

    def _withdraw(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                block = self._announced.get(key)
                if block is not None and self._queue(block, is_there=False):
                    del self._announced[key]

    def _durable(self, key: bytes) -> None:
        block = self._offered.get(key)
        if block is None or key in self._announced:
            return
        if block not in self._known:
            self._remember(self._waiting, block, key)
        elif len(self._announced) < _ANNOUNCED_MAX and self._queue(block, is_there=True):
            self._announced[key] = block
        else:
            self._metrics.count("unannounced_pages")

    def _learn(self, event: Any) -> None:
        """Remembers tokens of SGLang's pages; announces pages that are durable already."""
        size, parent = event.block_size, event.parent_block_hash
        names = ("block_size", "lora_id", "cache_salt", "lora_name")
        common = {name: getattr(event, name) for name in names}
        for i, block in enumerate(event.block_hashes):
            tokens = np.array(event.token_ids[i * size : (i + 1) * size])
            block_event = {**common, "parent_block_hash": parent, "token_ids": tokens}
            self._remember(self._known, block, block_event)
            parent = block
            if (key := self._waiting.pop(block, None)) is not None:
                self._durable(key)

    def _enqueue(self, block: int, is_there: bool) -> None:
        sglang, medium = self._sglang, self._sglang.StorageMedium.DISK
        if not is_there:
            self._recorder.enqueue(sglang.BlockRemoved([block], medium=medium))
            self._metrics.count("withdrawn_pages")
            return
        known = self._known.get(block)
        if known is None:  # forgotten meanwhile
            self._metrics.count("unannounced_pages")
            return
        there = {**known, "block_hashes": [block], "token_ids": known["token_ids"].tolist()}
        self._recorder.enqueue(sglang.BlockStored(**there, medium=medium))
        self._metrics.count("announced_pages")

    def _queue(self, block: int, *, is_there: bool) -> bool:
        """Queues an event; False if there are too many."""
        if len(self._ready) >= self._max and block not in self._ready:
            return False
        self._ready[block] = is_there
        self._ready.move_to_end(block)
        return True

    def _remember(self, known: OrderedDict[Any, Any], name: Any, value: Any) -> None:
        known[name] = value
        known.move_to_end(name)
        if len(known) > self._max:
            known.popitem(last=False)
            if known is self._waiting:
                self._metrics.count("unannounced_pages")


def publishes() -> bool:
    """Whether this rank publishes events.  Raises ConfigError, with the remedy, if none does."""
    from tutti.integration.sglang import adapter

    if not _HOOKED.is_set():
        raise ConfigError(
            "the option kv_events needs the plugin `tutti`; install tutti with pip, and name it in"
            " SGLANG_PLUGINS if that is set"
        )
    return adapter.publishes_kv_events()


def activate() -> None:
    """Hooks where SGLang takes the events of its tree; for SGLang's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TREE + "take_events", _around_take, HookType.AROUND)
    _HOOKED.set()


def _around_take(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    events = original(*args, **kwargs)
    for pool in tuple(EVENTS):
        events = pool.take(events)
    return events

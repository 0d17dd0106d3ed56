"""`TuttiLinker`: SGLang's KV pages to SSD and back, layer by layer, without a host cache tier.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "TuttiLinker",
      "linker_module_path": "tutti.integration.sglang.linker",
      "linker_extra_config": {"path": "/mnt/nvme/tutti", "capacity": "2TiB"}}'

Wrong options and pools that do not fit are errors at start, with what to do. After that an error of
the medium is a miss, an offload that was not kept, or SGLang's 503 for the batch whose load failed;
it is counted, and logged once per kind.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import tutti
from tutti.errors import ConfigError, DeviceTimeout, KeyMissing, TuttiError
from tutti.integration.sglang import linker_adapter as adapter
from tutti.integration.sglang.adapter import ServedModel, check_version, served_model
from tutti.integration.sglang.admission import BreakEven, PinLedger
from tutti.integration.sglang.backlog import Backlog
from tutti.integration.sglang.breaker import Breaker, crawls
from tutti.integration.sglang.host_store import Complaints
from tutti.integration.sglang.identity import (
    Place,
    identity_of,
    layout_of,
    make_folder,
    pool_path,
)
from tutti.integration.sglang.layer_counter import LayerCounter
from tutti.integration.sglang.linker_options import LINKER_OPTIONS
from tutti.integration.sglang.load_batch import LoadBatch, LoadPlan, QueuedLoad, plan_loads
from tutti.integration.sglang.metrics import LOAD, Recorder
from tutti.integration.sglang.options import LINKER, parse_options
from tutti.integration.sglang.pools import EnginePool, engine_pool
from tutti.integration.sglang.staging import Staging
from tutti.integration.sglang.upkeep import Upkeep
from tutti.integration.sglang.weights import WATCH
from tutti.keys import object_keys
from tutti.store import ObjectStore
from tutti.tickets import LoadTicket

Keys = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)

_IDLE_S = 60.0
_PATIENCE_S = 1.0


class TuttiLinker(adapter.UnifiedCacheLinker):
    """One rank's store.  Made by SGLang's `dynamic` linker backend; see the module.

    SGLang calls everything from its scheduler's thread, except the layer counter's waits.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Opens the pool.  Raises TuttiError with what to do."""
        check_version()
        self.forward_stream = forward_stream
        self._options = options = parse_options(extra_config, LINKER, LINKER_OPTIONS)
        _check_weights(options)
        self._engine = engine = engine_pool(params, components)
        self.pools = {adapter.PoolName.KV: engine}
        model = served_model()
        place = adapter.place_of(params, model, replicated=engine.replicated)
        self._alone = place.ranks == place.dp_size
        self.recorder = Recorder(
            {"mode": LINKER, "pool": "kv", "rank": place.name},
            prometheus=bool(getattr(server_args, "enable_metrics", False)),
        )
        self.complaints = Complaints(self.recorder)
        self.store = _open(options, engine, model, place)
        try:
            self._start_parts()
        except BaseException:
            self.store.close()
            raise

    def _start_parts(self) -> None:
        options, engine, store = self._options, self._engine, self.store
        self._timeout_s = float(options["load_timeout_s"])
        self._memory = store.register(engine.host_pool(store.layout))
        self._staging = Staging(store, options["load_staging"])
        self._copied_out = Staging(store, options["store_staging"])
        failures, pause_s = options["breaker_failures"], options["breaker_pause_s"]
        self.reads = Breaker(failures, pause_s, time.monotonic)
        self.writes = Breaker(failures, pause_s, time.monotonic)
        capacity = int(store.stats()["capacity_objects"])
        self._pins = PinLedger(int(capacity * options["pin_share"]), options["pin_lookups"])
        page = engine.page_size
        self._break_even = BreakEven(
            store.layout.object_nbytes,
            options["recompute_us_per_token"] * page / 1e6,
            -(-options["min_tokens"] // page),
        )
        self._batch_pages_max = options["max_load_tokens"] // page
        self.layer_done_counter = LayerCounter(engine.shape.layers)
        self._queued: dict[str, QueuedLoad] = {}
        self._loads: queue.Queue[LoadBatch | None] = queue.Queue()
        self._closed = False
        self._backlog = Backlog(
            store,
            engine,
            self._memory,
            self._copied_out,
            locked_max=int(engine.pages * options["backlog_share"]),
            breaker=self.writes,
            recorder=self.recorder,
            complain=self.complaints.add,
        )
        self._upkeep = Upkeep(
            store,
            Staging(store, store.layout.object_nbytes),
            self.reads,
            recorder=self.recorder,
            complain=self.complaints.add,
            probe_s=options["timeout_s"],
        )
        self._loader = threading.Thread(target=self._start_loads, name="tutti-load", daemon=True)
        self._loader.start()
        # A scheduler that dies of an error never calls close.
        atexit.register(self.close)

    def lookup(self, rid: str, transfers: list[adapter.PoolTransfer]) -> list[int]:
        """Every prefix length in pages that is stored, pinned, and worth loading."""
        keys = self._keys(_kv(transfers))
        if keys is None or not self.reads.closed:
            return []
        wanted = keys[: self._pins.budget(rid)]
        if self._batch_pages_max:
            wanted = wanted[: self._batch_pages_max]
        found = self._match(wanted)
        self._pins.pinned(rid, found)
        self.recorder.count("hit_pages", found)
        self.recorder.count("miss_pages", len(keys) - found)
        return self._break_even.lengths(found)

    def load(self, rid: str, transfers: list[adapter.PoolTransfer]) -> bool:
        """Queues a load for the next batch; False makes SGLang compute instead.

        With several ranks the answer depends on the transfers alone. A single rank also refuses
        what was evicted since the look-up.
        """
        transfer = _kv(transfers)
        keys = self._keys(transfer)
        if transfer is None or keys is None or rid in self._queued:
            return False
        pages = self._engine.page_numbers(transfer.device_indices, len(keys))
        if pages is None:
            self.complaints.add("load: slots", "device slots are not whole pages; not loaded")
            return False
        queued = sum(load.pages.size for load in self._queued.values())
        if self._batch_pages_max and queued + pages.size > self._batch_pages_max:
            return False
        if self._match(keys) < len(keys) and self._alone:
            return False
        self._queued[rid] = QueuedLoad(keys, pages)
        return True

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads; the index of their batch, or -1 when there are none."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        plan = plan_loads(list(queued.values()), self._engine, self._memory, self._staging)
        batch = LoadBatch(plan, self._engine, self._staging, self._timeout_s)
        self._loads.put(batch)
        return self.layer_done_counter.add(batch)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing is written to the batch's pages; whether all of them are right."""
        batch = self.layer_done_counter.finish(counter_index)
        return batch is None or self._end(batch)

    def cancel_queued_load(self, rid: str) -> bool:
        """Forgets a load that was not started."""
        return self._queued.pop(rid, None) is not None

    def offload(self, transfers: list[adapter.PoolTransfer], session_id: str | None = None) -> bool:
        """Takes pages to store; False, from the transfers alone, when they are no whole pages."""
        transfer = _kv(transfers)
        keys = self._keys(transfer)
        if transfer is None or keys is None:
            return False
        pages = self._engine.page_numbers(transfer.device_indices, len(keys))
        if pages is None:
            self.complaints.add("offload: slots", "device slots are not whole pages; not stored")
            return False
        self._backlog.add(keys, pages)
        self._upkeep.remember(keys)
        self.recorder.level("backlog_pages", self._backlog.locked)
        return True

    def num_completed_offloads(self) -> int:
        """Offloads, from the oldest on, whose pages SGLang may reuse."""
        return self._backlog.completed()

    def pop_completed_offload(self) -> bool:
        """Takes the oldest: whether its pages are stored, or copied out to be."""
        kept = self._backlog.pop()
        self.recorder.level("backlog_pages", self._backlog.locked)
        return kept

    def reset(self) -> None:
        """Ends what is under way.  Raises DeviceTimeout when the medium does not let go."""
        self._queued.clear()
        self.layer_done_counter.reset(self._end)
        if not self._backlog.reset(self._timeout_s):
            raise DeviceTimeout(
                "the medium has not let go of pages that it was to store, and SGLang would use "
                "them for other requests; restart the server"
            )

    def close(self) -> None:
        """As reset, then closes the pool; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.reset()
        finally:
            self._loads.put(None)
            self._loader.join(self._timeout_s)
            self._backlog.close(self._timeout_s)
            self._upkeep.close(self._timeout_s)
            try:
                self.store.close()
            except TuttiError as error:
                self.complaints.add(f"close: {type(error).__name__}", error)

    def _keys(self, transfer: adapter.PoolTransfer | None) -> Keys | None:
        """ObjectKeys of a transfer; None for none, or while it is not known which weights hold."""
        namespace = WATCH.namespace
        if transfer is None or not transfer.keys or namespace is None:
            return None
        fingerprint = self.store.layout.fingerprint
        if namespace:
            fingerprint = xxhash.xxh3_128_digest(fingerprint + namespace)
        return object_keys(fingerprint, [bytes.fromhex(name) for name in transfer.keys])

    def _match(self, keys: Keys) -> int:
        try:
            return self.store.match(keys, pin=True, proven=True)
        except TuttiError as error:
            self.complaints.add(f"look-up: {type(error).__name__}", error)
            return 0

    def _start_loads(self) -> None:
        ended = False
        while not ended:
            try:
                batch = self._loads.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            ended = batch is None  # the end mark of close()
            if batch is not None:
                batch.start(self._submit)

    def _submit(self, plan: LoadPlan) -> LoadTicket:
        return self.store.load(plan.keys, plan.source, pool=plan.pool)

    def _end(self, batch: LoadBatch) -> bool:
        good = batch.end()
        self.recorder.count("bubble_seconds", batch.waited_s)
        if not good:
            assert batch.error is not None, "a batch that is not good has an error"
            self.complaints.add(f"load: {type(batch.error).__name__}", batch.error)
            self.recorder.count("failed_pages", len(batch.plan.keys), LOAD)
            if not isinstance(batch.error, KeyMissing):
                self.reads.failure()
            return False
        self.recorder.moved(LOAD, len(batch.plan.keys), batch.nbytes, batch.waited_s)
        self._break_even.loaded(batch.nbytes, batch.waited_s)
        if crawls(
            batch.nbytes,
            batch.waited_s,
            least_mbs=self._options["crawl_mbs"],
            patience_s=_PATIENCE_S,
        ):
            self.complaints.add("load: slow", f"{batch.nbytes} bytes in {batch.waited_s:.3g} s")
            self.reads.failure()
        else:
            self.reads.success()
        return True


def _kv(transfers: Sequence[adapter.PoolTransfer]) -> adapter.PoolTransfer | None:
    for transfer in transfers:
        if transfer.name == adapter.PoolName.KV:
            return transfer
    return None


def _check_weights(options: Mapping[str, Any]) -> None:
    if not (WATCH.watched or options["allow_unwatched_weights"]):
        raise ConfigError(
            "updates of weights would go unnoticed: the plugin `tutti` is not loaded (is it "
            "missing in SGLANG_PLUGINS, or tutti not installed with pip?); load it, or set the "
            'option "allow_unwatched_weights" and never update weights in place'
        )


def _open(
    options: Mapping[str, Any], engine: EnginePool, model: ServedModel, place: Place
) -> ObjectStore:
    identity = identity_of(
        options,
        path=model.path,
        revision=model.revision,
        weight_version=model.weight_version,
        load_format=model.load_format,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        overrides=model.overrides,
    )
    layout = layout_of(engine.shape, identity, place)
    path = pool_path(options["path"], layout, "linker-kv", place)
    make_folder(path)
    config = tutti.StoreConfig(
        verify=options["verify"],
        durability=options["durability"],
        timeout_s=options["timeout_s"],
        pin_lookups=options["pin_lookups"],
    )
    store: ObjectStore = tutti.open(
        str(path),
        layout,
        options["capacity"] // place.ranks,
        executor=options["executor"],
        config=config,
    )
    _log.info("Tutti: %s holds %s pages", path, store.stats()["capacity_objects"])
    return store

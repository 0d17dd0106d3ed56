"""`TuttiLinker`: SGLang's KV pages to SSD and back, layer by layer, without a host cache tier.

README.md shows the flags. Wrong options and pools that do not fit are errors at start, with the
remedy. Later an error of the medium is a miss, an offload that was not kept, or SGLang's 503 for
the batch whose load failed; it is counted, and logged once per kind.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import xxhash

from tutti.base.arrays import Keys
from tutti.base.breaker import crawls
from tutti.base.process import Owned, at_exit, forget_exit
from tutti.errors import ConfigError, DeviceTimeout, KeyMissing, PoolClosed, TuttiError, Unsupported
from tutti.integration.sglang.adapter import check_version, load_page_hashes, served_model
from tutti.integration.sglang.direct import adapter
from tutti.integration.sglang.direct.admission import admission_for
from tutti.integration.sglang.direct.backlog import Backlog, OffloadPart, admitted
from tutti.integration.sglang.direct.chains import Chains
from tutti.integration.sglang.direct.control_requests import LINKERS
from tutti.integration.sglang.direct.gpu_copies import open_gpu
from tutti.integration.sglang.direct.kv_pools import kv_pool_group
from tutti.integration.sglang.direct.load_batch import LayerCounter, LoadBatch, QueuedLoad
from tutti.integration.sglang.direct.lookups import Lookups
from tutti.integration.sglang.direct.maintenance import Maintenance
from tutti.integration.sglang.direct.model_steps import STEPS
from tutti.integration.sglang.direct.open_pools import limits_of, open_stored_pools, served_profile
from tutti.integration.sglang.direct.read_ahead import ReadAhead
from tutti.integration.sglang.direct.staging_copy import Fence
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.kv_events import DiskEvents, publishes
from tutti.integration.sglang.metrics import LOAD
from tutti.integration.sglang.options import LINKER, check_limits, parse_options
from tutti.integration.sglang.page_keys import page_keys
from tutti.integration.sglang.second_touch import SecondTouch
from tutti.integration.sglang.server_log import ErrorLog
from tutti.integration.sglang.weights import WATCH
from tutti.profiles.at_open import OFF
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import Schedule, Unknown

_IDLE_S = 60.0
_PATIENCE_S = 1.0


class TuttiLinker(Owned, adapter.UnifiedCacheLinker):
    """The linker of one rank, made by SGLang's `dynamic` linker backend; see the module.

    SGLang calls all methods on its scheduler's thread, except the layer counter's waits.
    pools: SGLang's KV pools by name.  stored_pools: the same with their stores.
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
        """Opens the pools.  Raises TuttiError with the remedy."""
        check_version()
        load_page_hashes()
        adapter.check_server(server_args)
        self.forward_stream = forward_stream
        options = parse_options(extra_config, LINKER)
        self._group = group = kv_pool_group(params, components)
        check_limits(options, group.page_size)
        self.pools = {adapter.PoolName(name): pool for name, pool in group.pools.items()}
        self._model = served_model()
        self._rank = adapter.parallel_rank_of(params, self._model, replicated=group.replicated)
        if self._rank.pp_size > 1:
            # Stages with different hits would deadlock: SGLang combines only the answers of TP
            # and CP ranks (sglang PR 38658, open).
            raise Unsupported(
                "SGLang 0.5.23 does not synchronize pipeline stages that use a linker; start with "
                "--pp-size 1, or use Tutti behind HiCache, which works with pipeline stages"
            )
        self._alone = self._rank.ranks == self._rank.dp_size
        self._prometheus = bool(getattr(server_args, "enable_metrics", False))
        self._queued: dict[str, list[QueuedLoad]] = {}
        self._ended: deque[bool] = deque()  # offloads that ended before a detach, or while detached
        self._unclosed: list[str] = []
        self._open(options)
        # A GPU computes a layer long after the forward's thread asked for it; its stream reports.
        began = STEPS.layer_began if self._gpu is None else None
        self.layer_done_counter = LayerCounter(group.layers, began)
        if group.has_states:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        LINKERS.add(self)

    def _open(self, options: dict[str, Any]) -> None:
        """Opens the pools and starts the threads.  Raises TuttiError, with nothing left open."""
        WATCH.check(options["allow_unwatched_weights"])
        self._announces = options["kv_events"] and publishes()
        profile, source = served_profile(options, self._group, self._rank) or (None, OFF)
        timeout_s = float(options["load_timeout_s"])
        with ExitStack() as opened:
            gpu = open_gpu(self._group.device, options["gpu_mover"], profile, options["gpu_engine"])
            if gpu is not None:
                opened.callback(gpu.close, timeout_s)
            self.stored_pools = open_stored_pools(
                options,
                self._group,
                self._model,
                self._rank,
                prometheus=self._prometheus,
                profile=profile,
                profile_source=source,
                gpu=gpu,
            )
            stored_pools = list(self.stored_pools.values())
            self.metrics = stored_pools[0].metrics
            self.error_log = ErrorLog(self.metrics)
            for stored_pool in stored_pools:
                opened.callback(self._close_store, stored_pool)
            if gpu is not None:
                opened.callback(gpu.rest, timeout_s)
            self._timeout_s, self._gpu = timeout_s, gpu
            self._start_parts(options, stored_pools, opened)
            self._options, self._opened = options, opened.pop_all()
        # A scheduler that ends with an error does not call close.
        at_exit(self.close)
        self._closed = False

    def _start_parts(
        self, options: dict[str, Any], stored_pools: Sequence[StoredPool], opened: ExitStack
    ) -> None:
        """Makes the parts that depend on the options.  opened: closes parts that have threads."""
        timeout_s = self._timeout_s
        self._admission = admission_for(options, stored_pools, self._group)
        self._batch_pages_max = options["max_load_tokens"] // self._group.page_size
        if self._gpu is not None:
            self._gpu.began = STEPS.stream_began
        self._loads: queue.Queue[LoadBatch | None] = queue.Queue()
        self._chains = Chains()
        schedule = stored_pools[0].store.config.schedule
        if schedule is None:
            limits = limits_of(options, list(self._group.pools.values()))
            schedule = Schedule(Unknown(), limits, policy=ImmediatePolicy)
        touching = stored_pools if options["second_touch"] else ()
        self._second_touches = {pool.name: SecondTouch(pool.metrics) for pool in touching}
        self.ahead = ReadAhead(
            stored_pools,
            schedule=schedule,
            lookups=options["pin_lookups"],
            timeout_s=timeout_s,
            measured=self._admission.loaded,
            log_error=self.error_log.add,
        )
        opened.callback(self.ahead.close, timeout_s)
        self._lookups = Lookups(stored_pools, self._admission, self.ahead, self.error_log.add)
        self.backlog = Backlog(
            stored_pools,
            schedule=schedule,
            locked_share=options["backlog_share"],
            timeout_s=timeout_s,
            chains=self._chains,
            errors=self.error_log,
        )
        opened.callback(self.backlog.close, timeout_s)
        self._maintenance: dict[str, Maintenance] = {}
        for stored_pool in stored_pools:
            self._maintenance[stored_pool.name] = maintenance = Maintenance(
                stored_pool,
                errors=self.error_log,
                probe_s=options["timeout_s"],
                page_tokens=0 if stored_pool.kv_pool.trailing else self._group.page_size,
            )
            opened.callback(maintenance.close, timeout_s)
            if (scheduler := stored_pool.store.scheduler) is not None:
                STEPS.follow(scheduler, self._group.layers)
                opened.callback(STEPS.leave, scheduler)
        self._events: DiskEvents | None = None
        if self._announces:
            kv = self.stored_pools[str(adapter.PoolName.KV)]
            self._events = kv.events = DiskEvents(self._group.page_size, kv.metrics)
        loader = threading.Thread(target=self._start_loads, name="tutti-load", daemon=True)
        loader.start()
        opened.callback(loader.join, timeout_s)
        opened.callback(self._loads.put, None)

    def lookup(self, rid: str, transfers: list[adapter.PoolTransfer]) -> list[int]:
        """Prefix lengths, in pages, that all pools can restore and that pay to load; pins them."""
        keys = None if self._closed else self._keys(adapter.kv_of(transfers))
        if keys is None:
            return []
        self._chains.seen(keys)
        stored_pools = self.stored_pools.values()
        if not all(p.reads.closed for p in stored_pools) or not self._complete(transfers):
            return []
        found = self._lookups.find(rid, keys, transfers, self._pages_left(rid, transfers))
        self.ahead.note(rid, found.wanted)
        if self._events is not None and found.lengths:
            self._events.found(adapter.kv_names(transfers), keys[: max(found.lengths)])
        return found.lengths

    def load(self, rid: str, transfers: list[adapter.PoolTransfer]) -> bool:
        """Queues a load for the next batch; False makes SGLang compute instead.

        With several ranks the answer depends only on the transfers. A single rank also refuses
        pages that were evicted since the look-up.
        """
        if self._closed or rid in self._queued:
            return False
        loads = self._parts_of(transfers, "load")
        most = self._pages_left(rid, transfers)
        if loads is None or (most is not None and max(len(p[1]) for p in loads) > most):
            self.cancel_queued_load(rid)
            return False
        there = self._lookups.still_there(rid, [load[:2] for load in loads])
        if self._alone and not there:
            self.cancel_queued_load(rid)
            return False
        self._queued[rid] = [QueuedLoad(*load) for load in loads]
        return True

    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads; returns the index of their batch, or -1 if there are none."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        batch = LoadBatch(
            [load for loads in queued.values() for load in loads],
            self._group.layers,
            rids=list(queued),
            name=str(self.layer_done_counter.next_index),
            ahead=self.ahead,
            fence=Fence(self.record_offload_ready()),
            timeout_s=self._timeout_s,
            gpu=self._gpu,
        )
        self._loads.put(batch)
        return self.layer_done_counter.add(batch)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing writes to the batch's pages; returns whether all are correct.

        Releases its requests' pins here, because this is the same call on all ranks.
        """
        batch = self.layer_done_counter.finish(counter_index)
        if batch is None:
            return True
        good = self._end(batch)
        self._lookups.release(batch.rids)
        return good

    def cancel_queued_load(self, rid: str) -> bool:
        """Drops a load that was not started, with its reads ahead and pins."""
        self.ahead.forget(rid)
        self._lookups.release([rid])
        return self._queued.pop(rid, None) is not None

    def offload(self, transfers: list[adapter.PoolTransfer], session_id: str | None = None) -> bool:
        """Takes pages to store; False if the transfers have none, whatever the store's state."""
        parts = self._parts_of(transfers, "offload")
        if parts is None or adapter.kv_of(transfers) is None:
            return False
        if self._closed:  # answers must not depend on whether a rank is attached
            self._ended.append(False)
            return True
        if self._events is not None and (keys := self._keys(adapter.kv_of(transfers))) is not None:
            self._events.offered(adapter.kv_names(transfers), keys)
        taken, declined = admitted([OffloadPart(*part) for part in parts], self._second_touches)
        self.backlog.add(taken, Fence(self.record_offload_ready()), whole=not declined)
        self.metrics.level("backlog_pages", self.backlog.locked)
        return True

    def num_completed_offloads(self) -> int:
        """Number of offloads, from the oldest on, whose pages SGLang may reuse."""
        return len(self._ended) + self.backlog.completed()

    def pop_completed_offload(self) -> bool:
        """Removes the oldest one; returns whether its pages are stored, or copied to be stored."""
        if self._ended:
            return self._ended.popleft()
        kept = self.backlog.pop()
        self.metrics.level("backlog_pages", self.backlog.locked)
        return kept

    def reset(self) -> None:
        """Ends transfers in flight.  Raises DeviceTimeout if they do not end."""
        self._queued.clear()
        self._ended.clear()
        if self._closed:
            return
        self.ahead.reset()
        self.layer_done_counter.reset(self._end)
        self._lookups.reset()
        self.backlog.reset(stale=WATCH.namespace is None)  # KV of the old weights

    def close(self) -> None:
        """As reset, then closes the pools; a second call does nothing."""
        LINKERS.discard(self)
        if self._closed:
            return
        try:
            self.reset()
        finally:
            self._shut()

    def stats(self) -> dict[str, Any]:
        """Statistics by pool: of its store, and of its reads ahead by path; {} if detached."""
        pools = {} if self._closed else self.stored_pools
        ahead = self.ahead.trials.stats
        return {name: {**p.store.stats(), "read_ahead": ahead(p)} for name, p in pools.items()}

    def clear(self) -> None:
        """Removes all pages of this rank; durable on return.  Raises TuttiError.

        The scheduler must have no requests: pages that it looked up are gone.
        """
        if self._closed:
            raise PoolClosed("the linker was detached; attach it first")
        self.ahead.reset()
        self._lookups.reset()
        if not self.backlog.wait_quiet(self._timeout_s):
            raise DeviceTimeout("pages are still being stored; try again")
        for stored_pool in self.stored_pools.values():
            stored_pool.store.clear()
        for second_touch in self._second_touches.values():
            second_touch.clear()

    def detach(self) -> None:
        """Closes the pools cleanly; afterwards the linker finds and stores nothing.

        The scheduler must have no requests.  Raises DeviceTimeout if stores do not end; the linker
        is unchanged then.  Also if a pool could not be closed; the linker is detached then.  A
        second call does nothing.
        """
        if self._closed:
            return
        if not self.backlog.wait_quiet(self._timeout_s):
            raise DeviceTimeout("pages are still being stored; try again")
        self.ahead.reset()
        self._lookups.reset()
        self._unclosed.clear()
        self._shut()
        if self._unclosed:
            raise DeviceTimeout(
                f"pools that stay in use until this server ends: {'; '.join(self._unclosed)}"
            )

    def attach(self, config: Mapping[str, Any] | None = None) -> None:
        """Opens the pools of a detached linker again.

        The scheduler must have no requests.  Raises TuttiError; the linker is still detached then.
        config: as the constructor's extra_config; None keeps the options.
        """
        options = self._options
        if config is not None:
            options = parse_options(config, LINKER)
            check_limits(options, self._group.page_size)
        if self._closed:
            self._open(options)
        elif options != self._options:
            raise ConfigError("the linker is attached with other options; detach it first")

    def _shut(self) -> None:
        """Ends the threads and closes the pools; nothing may be under way."""
        self._closed = True
        forget_exit(self.close)
        while self.backlog.completed():  # SGLang may still pop them
            self._ended.append(self.backlog.pop())
        self._opened.close()

    def _close_store(self, stored_pool: StoredPool) -> None:
        stored_pool.metrics.level("attached", 0)
        try:
            stored_pool.store.close()
        except TuttiError as error:
            self.error_log.add(f"close: {type(error).__name__}", error)
            self._unclosed.append(f"{stored_pool.name} ({error})")

    def _complete(self, transfers: Sequence[adapter.PoolTransfer]) -> bool:
        """Whether the transfers have the keys of every pool."""
        named = {str(transfer.name) for transfer in transfers if transfer.keys}
        return all(pool.source in named for pool in self._group.pools.values())

    def _parts_of(
        self, transfers: Sequence[adapter.PoolTransfer], what: str
    ) -> list[tuple[StoredPool, Keys, Any]] | None:
        """Keys and slots by pool; None if there are none, or the slots are not whole pages."""
        by_name = {str(transfer.name): transfer for transfer in transfers if transfer.keys}
        known = {name: self._keys(transfer) for name, transfer in by_name.items()}
        parts: list[tuple[StoredPool, Keys, Any]] = []
        for stored_pool in self.stored_pools.values():
            source = stored_pool.kv_pool.source
            if source not in by_name:
                continue
            keys, slots = known[source], by_name[source].device_indices
            if keys is None:
                return None
            if slots is None or slots.numel() != len(keys) * stored_pool.kv_pool.slots:
                self.error_log.add(f"{what}: slots", "slots are not whole pages; nothing is moved")
                return None
            parts.append((stored_pool, keys, slots))
        return parts or None

    def _pages_left(self, rid: str, transfers: Sequence[adapter.PoolTransfer]) -> int | None:
        """Longest prefix, in pages, that the next batch can load for a request; None: any.

        Depends only on the transfers, the queued loads and the options, so that all ranks agree.
        """
        queued = [loads for other, loads in self._queued.items() if other != rid]
        asked = {str(transfer.name): len(transfer.keys or ()) for transfer in transfers}
        lefts = []
        for stored_pool in self.stored_pools.values():
            limit, kv_pool = stored_pool.batch_pages_max, stored_pool.kv_pool
            if limit is None:
                continue
            taken = [load for loads in queued for load in loads if load.stored_pool is stored_pool]
            left = limit - sum(len(load.keys) for load in taken)
            # Of windows and states, a longer prefix needs no more.
            if not (kv_pool.trailing and asked.get(kv_pool.source, 0) <= left):
                lefts.append(left)
        if self._batch_pages_max:
            pages = [max(len(load.keys) for load in loads) for loads in queued]
            lefts.append(self._batch_pages_max - sum(pages))
        return max(0, min(lefts)) if lefts else None

    def _keys(self, transfer: adapter.PoolTransfer | None) -> Keys | None:
        """ObjectKeys of a transfer; None without keys, or while the current weights are unknown."""
        namespace = WATCH.namespace
        if transfer is None or not transfer.keys or namespace is None:
            return None
        return page_keys(self._fingerprint, namespace, transfer.keys)

    @property
    def _fingerprint(self) -> bytes:
        """Fingerprint of all pools: one pool's pages are useless without the others'."""
        prints = [pool.store.layout.fingerprint for pool in self.stored_pools.values()]
        return prints[0] if len(prints) == 1 else xxhash.xxh3_128_digest(b"".join(prints))

    def _start_loads(self) -> None:
        ended = False
        while not ended:
            with suppress(queue.Empty):
                batch = self._loads.get(timeout=_IDLE_S)
                ended = batch is None  # the end mark of close()
                if batch is not None:
                    batch.start()

    def _end(self, batch: LoadBatch) -> bool:
        good = batch.end()
        self.metrics.count("bubble_seconds", batch.bubble_s)
        if not good:
            assert batch.error is not None, "a batch that is not good has an error"
            self.error_log.add(f"load: {type(batch.error).__name__}", batch.error)
            failed = not isinstance(batch.error, (KeyMissing, ConfigError))
            for stored_pool, pages, *_ in batch.moved():
                stored_pool.metrics.count("failed_pages", pages, LOAD)
        else:
            for stored_pool, pages, nbytes, part_s in batch.moved():
                stored_pool.metrics.moved(LOAD, pages, nbytes, part_s)
            nbytes, took_s = batch.nbytes + batch.ahead_nbytes, batch.took_s
            if not batch.ahead_nbytes:
                self._admission.loaded(nbytes, took_s)
            least_mbs = self._options["crawl_mbs"]
            failed = crawls(nbytes, took_s, least_mbs=least_mbs, patience_s=_PATIENCE_S)
            if failed:
                self.error_log.add("load: slow", f"{nbytes} bytes in {took_s:.3g} s")
        if failed:
            for load in batch.queued:  # a probe reads these before requests do
                load.stored_pool.remember(load.keys)
        for stored_pool in {load.stored_pool for load in batch.queued}:
            if failed:
                stored_pool.reads.failure()
            elif good:  # it may have been read before the medium failed
                stored_pool.reads.success(closes=False)
        return good

"""Opens the Tutti pools of one rank: one per pool of SGLang."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from tutti.base.breaker import Breaker
from tutti.errors import TuttiError
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import KvPool, KvPoolGroup
from tutti.integration.sglang.direct.staging_size import staging_sizes
from tutti.integration.sglang.direct.stored_pool import StoredPool, split_nbytes
from tutti.integration.sglang.identity import (
    ParallelRank,
    ServedModel,
    facts_of,
    identity_of,
    layout_of,
    open_store,
    uses_agent,
)
from tutti.integration.sglang.metrics import Metrics
from tutti.integration.sglang.options import LINKER
from tutti.integration.sglang.rank_members import share
from tutti.integration.sglang.scheduler_trace import record_of
from tutti.node.connect import speeds_of
from tutti.profiles.at_open import find_profile, is_off, media_of, model_like
from tutti.scheduler.dispatcher import GIVEN, Schedule
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import UNBOUNDED, Limits
from tutti.scheduler.profile import TableProfile

_log = logging.getLogger(__name__)

_KV_SHARE = 0.75


def open_stored_pools(
    options: Mapping[str, Any],
    group: KvPoolGroup,
    model: ServedModel,
    parallel_rank: ParallelRank,
    *,
    prometheus: bool,
    profile: Profile | None = None,
    profile_source: str = GIVEN,
    gpu: Gpu | None = None,
) -> dict[str, StoredPool]:
    """Opens a StoredPool for every pool, by name.  Raises TuttiError, with nothing left open.

    profile: schedules its puts and loads; None starts them at once.  profile_source: its origin.
    """
    pools = list(group.pools.values())
    loads = split_nbytes(options["load_staging"], pools, _KV_SHARE)
    stores = split_nbytes(options["store_staging"], pools, _KV_SHARE)
    capacities = _capacities(options, pools)
    gpu_staging = {} if gpu is None else staging_sizes(options, group, parallel_rank)
    failures, pause_s = options["breaker_failures"], options["breaker_pause_s"]
    breaker = partial(Breaker, failures, pause_s, time.monotonic)
    stored_pools: dict[str, StoredPool] = {}
    identity = identity_of(options, model)
    schedule = None
    if profile is not None:
        limits = limits_of(options, pools)
        media = () if uses_agent(options) else media_of(options["path"])[1]
        schedule = Schedule(profile, limits, source=profile_source, media=media, puts=False)
    schedule = record_of(options, f"linker-{parallel_rank.name}", schedule)
    with ExitStack() as undo:
        for pool in pools:
            layout = layout_of(pool.shape, identity, parallel_rank)
            store, path = open_store(
                layout,
                f"linker-{pool.name}",
                capacities[pool.name],
                options,
                parallel_rank,
                schedule,
                is_kv=pool is group.pools.get("kv", pools[0]),
            )
            undo.callback(store.close)
            metrics = Metrics(
                {"mode": LINKER, "pool": pool.name, "rank": parallel_rank.name},
                prometheus=prometheus,
            )
            stored_pools[pool.name] = StoredPool(
                pool,
                store,
                metrics,
                staging=(loads[pool.name], stores[pool.name]),
                breaker=breaker,
                namespace=options["namespace"],
                gpu=gpu,
                gpu_staging=gpu_staging.get(pool.name),
            )
            metrics.info(facts_of(store, path))
            _log.info("Tutti: %s holds %s pages", path, store.stats()["capacity_objects"])
        undo.pop_all()
    return stored_pools


def limits_of(options: Mapping[str, Any], pools: Sequence[KvPool]) -> Limits:
    """Limits of the queue of all pools, in which writes yield to the reads of any pool.

    The backlog posts each write and the space for each pool's writes.  Puts of other stores that
    share this queue are not limited by these.
    """
    loads = split_nbytes(options["load_staging"], pools, _KV_SHARE)
    share = min(1.0, options["read_ahead_share"])
    ahead_nbytes = sum(int(loads[pool.name] // pool.nbytes * share) * pool.nbytes for pool in pools)
    return Limits(locked_pages=UNBOUNDED, staged_pages=0, read_ahead_nbytes=ahead_nbytes)


def _capacities(options: Mapping[str, Any], pools: list[KvPool]) -> dict[str, int]:
    """Capacity by pool: pools by KV page share it (equally many pages); each other has its own."""
    shares = split_nbytes(options["capacity"], [pool for pool in pools if not pool.trailing], 1.0)
    aside = options["sidecar_capacity"] or options["capacity"] // 8
    return {pool.name: shares.get(pool.name, aside) for pool in pools}


def served_profile(
    options: Mapping[str, Any], group: KvPoolGroup, parallel_rank: ParallelRank
) -> tuple[TableProfile, str] | None:
    """(profile for the pools' scheduling, its origin); None if the option turns it off.

    Raises ProfileError for a file that is not a profile, AgentLost and AgentRefused.
    """
    choice, paths = options["profile"], options["path"]
    if is_off(choice):
        return None
    media = speeds_of(paths[0]) if uses_agent(options) else media_of(_own(paths, parallel_rank))[0]
    layers, nbytes = _kv_shape(group, parallel_rank)
    model = model_like("the served model", layers, nbytes)
    return find_profile(choice, media, model, executor=options["executor"])


def _own(paths: Sequence[str], parallel_rank: ParallelRank) -> Sequence[str]:
    """The files and devices of one rank's KV, which it alone may open; all paths without any."""
    place, ranks = parallel_rank.place_on_node
    with suppress(TuttiError):  # opening the pools reports it
        return [one.path for one in share(paths, ranks).dealt[place]] or paths
    return paths


def _kv_shape(group: KvPoolGroup, parallel_rank: ParallelRank) -> tuple[int, int]:
    """(layers, bytes of KV per token) of the whole model, over the ranks that share it."""
    own = sum(pool.nbytes // pool.slots for pool in group.pools.values() if not pool.trailing)
    heads = 1 if parallel_rank.replicated else parallel_rank.tp_size
    return group.layers * parallel_rank.pp_size, own * heads * parallel_rank.pp_size

"""Prometheus metrics of open pools, for programs without SGLang and for the agent.

    from prometheus_client import REGISTRY
    REGISTRY.register(StoreCollector({"chat": store}))

`tutti serve --metrics` publishes those of its pools over HTTP.  Every number comes from
``store.stats()`` when the page is read; nothing is counted twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tutti import __version__
from tutti.errors import ConfigError, TuttiError, Unsupported
from tutti.store_numbers import DRIVES, NUMBERS, drive_numbers, numbers

if TYPE_CHECKING:
    from tutti.interface import Store
    from tutti.node.agent import Agent

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise Unsupported(
        "metrics need the package prometheus-client: pip install prometheus-client"
    ) from _missing

_FAMILIES: Mapping[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
#: Name without prefix: (type, key of `numbers`, meaning).  Prometheus appends _total to a counter.
POOLS: Mapping[str, tuple[str, str, str]] = {
    **NUMBERS,
    "lookups": ("counter", "lookups", "look-ups"),
    "lookup_pages": ("counter", "looked_up", "pages that look-ups asked for"),
    "hit_pages": ("counter", "hits", "pages that look-ups found"),
    "stored_pages": ("counter", "stored", "pages stored"),
    "present_pages": ("counter", "present", "pages offered that were in the pool already"),
    "dropped_pages": ("counter", "dropped", "pages offered and not stored: no room, no budget"),
    "store_errors": ("counter", "store_errors", "pages that could not be stored"),
    "loaded_pages": ("counter", "loaded", "pages loaded"),
    "load_errors": ("counter", "load_errors", "pages that could not be loaded"),
    "space_waits": ("counter", "space_waits", "batches of puts that waited for evicted slots"),
    "early_evictions": ("counter", "evicted_too_early", "objects stored again after eviction"),
    "expired_objects": ("counter", "expired", "objects removed at the end of their time to live"),
    "quarantined_objects": ("counter", "quarantined", "damaged objects whose slots are out of use"),
    "bubble_seconds": ("counter", "bubble_s", "time that layers waited for their loads"),
    "read_bytes": ("counter", "bytes_read", "bytes read from the medium"),
    "written_bytes": ("counter", "bytes_written", "bytes written to the medium: its wear"),
    "commands": ("counter", "commands", "NVMe commands"),
    "missed_calls": ("counter", "missed_calls", "a client's look-ups that got no answer"),
    "lost_pages": ("counter", "lost_pages", "pages of a client's puts that got no answer"),
    "capacity_objects": ("gauge", "capacity_objects", "objects that fit into the pool"),
    "free_objects": ("gauge", "free_objects", "slots that are free"),
    "write_budget_bytes": ("gauge", "write_budget_nbytes", "bytes per day that puts may write"),
    "pinned_objects": ("gauge", "pinned_objects", "objects that an operator pinned"),
    "evicts_by_uses": ("gauge", "evicts_by_uses", "1 if what is used most is kept"),
}
#: Of namespaces with a quota: (key of one, type, meaning).
NAMESPACES: Mapping[str, tuple[str, Any, str]] = {
    "bytes": ("used_nbytes", GaugeMetricFamily, "bytes of a namespace's objects"),
    "quota_bytes": ("quota_nbytes", GaugeMetricFamily, "quota of a namespace in bytes, if any"),
    "write_budget_bytes": ("write_budget", GaugeMetricFamily, "its write budget in bytes per day"),
    "written_bytes": ("written_nbytes", CounterMetricFamily, "bytes written for a namespace"),
    "evicted_objects": ("evicted", CounterMetricFamily, "objects evicted for its own quota"),
    "over_quota_pages": ("over_quota", CounterMetricFamily, "pages dropped because of its quota"),
    "over_budget_pages": ("over_budget", CounterMetricFamily, "pages beyond its daily budget"),
}
#: Of a second tier: (key of ``stats()["remote"]``, meaning).
REMOTE: Mapping[str, tuple[str, str]] = {
    "missed_pages": ("missed", "pages that look-ups asked the second tier for"),
    "fetched_pages": ("fetched", "pages that were fetched from it into the pool"),
    "absent_pages": ("absent", "pages that it did not have or that had expired"),
    "failed_pages": ("fetch_failed", "pages that it had and could not deliver"),
    "corrupt_pages": ("corrupt", "pages whose digest was wrong"),
    "late_pages": ("late", "pages that were not fetched because their deadline had passed"),
    "over_budget_pages": ("over_budget", "pages beyond what one look-up may fetch"),
    "not_stored_pages": ("not_stored", "fetched pages that found no space in the pool"),
    "fetch_dropped_pages": ("fetch_dropped", "pages not fetched because the queue was full"),
    "fetch_refused_pages": ("fetch_refused", "pages not fetched after failures"),
    "offered_pages": ("offered", "pages of the pool to be copied to it"),
    "there_pages": ("there", "of the offered pages, those that it already had"),
    "replicated_pages": ("replicated", "of the offered pages, those that were copied to it"),
    "replicate_failed_pages": ("replicate_failed", "of the offered pages, those it did not accept"),
    "not_copied_pages": ("not_copied", "of the offered pages, those gone or unreadable"),
    "dropped_pages": ("dropped", "of the offered pages, those that the full queue dropped"),
    "refused_pages": ("refused", "of the offered pages, those not copied after failures"),
    "removed_pages": ("removed", "pages deleted in the pool and removed from it"),
    "remove_failed_pages": ("remove_failed", "pages deleted in the pool that may still be in it"),
    "failures": ("failures", "calls of the second tier that failed, fully or partly"),
    "local_failures": ("local_failures", "its work that failed because of the pool or the machine"),
    "fetch_waits": ("fetch_waits", "times that a fetch waited for local loads"),
}
LATENCIES: Mapping[str, str] = {"load": "load_latency", "store": "store_latency"}


class StoreCollector(Collector):
    """Collects stores for a Prometheus registry.

    stores: by the value of their label `pool`, or a function that returns such a mapping.
    A store whose counters cannot be read has only one sample: `tutti_up` 0.
    """

    def __init__(self, stores: Mapping[str, Store] | Callable[[], Mapping[str, Any]]) -> None:
        self._stores: Callable[[], Mapping[str, Any]] = (
            stores if callable(stores) else lambda: stores
        )

    def collect(self) -> Iterator[Any]:
        labels = ["pool"]
        info = InfoMetricFamily("tutti", "version and settings of a pool", labels=labels)
        up = GaugeMetricFamily("tutti_up", "1 if the pool answers", labels=labels)
        recovered = GaugeMetricFamily(
            "tutti_recovered", "1 after recovery; look-ups miss before", labels=labels
        )
        pools = {
            name: _FAMILIES[kind](f"tutti_{name}", meaning, labels=labels)
            for name, (kind, _, meaning) in POOLS.items()
        }
        slots = GaugeMetricFamily("tutti_slots", "slots by state", labels=["pool", "state"])
        namespaces = {
            key: family(f"tutti_namespace_{name}", meaning, labels=["pool", "namespace"])
            for name, (key, family, meaning) in NAMESPACES.items()
        }
        drives = {
            name: _FAMILIES[kind](f"tutti_{name}", meaning, labels=["pool", "drive", "direction"])
            for name, (kind, meaning) in DRIVES.items()
        }
        remotes: dict[str, dict[str, Any]] = {}
        latency = HistogramMetricFamily(
            "tutti_transfer_seconds",
            "time from the call until its pages are free, by direction",
            labels=["pool", "direction"],
        )
        for pool, store in self._stores().items():
            stats = _stats_of(store)
            up.add_metric([pool], float(stats is not None))
            if stats is None:
                continue
            info.add_metric([pool], _settings(store, stats))
            recovered.add_metric([pool], float(store.recovered))
            for name, (_, key, _) in POOLS.items():
                if key in stats:
                    pools[name].add_metric([pool], float(stats[key]))
            for state, count in stats["slots"].items():
                slots.add_metric([pool, state], float(count))
            for namespace, counts in stats["namespaces"].items():
                for key, family in namespaces.items():
                    if counts[key] is not None:
                        family.add_metric([pool, namespace], float(counts[key]))
            for name, drive, direction, value in drive_numbers(stats):
                drives[name].add_metric([pool, drive, direction], value)
            if remote := stats.get("remote"):
                remotes[pool] = remote
            for direction, key in LATENCIES.items():
                buckets, sum_s = _cumulative(stats[key])
                latency.add_metric([pool, direction], buckets=buckets, sum_value=sum_s)
        yield from (info, up, recovered, slots, latency)
        yield from _second_tiers(remotes)
        for families in (pools, namespaces, drives):
            yield from families.values()


class AgentCollector(Collector):
    """Collects what an agent counts: see AgentCounters, whose fields are the counters' names."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Any]:
        for name, value in vars(self._agent.counters).items():
            meaning = f"{name} of the agent since it started"
            yield CounterMetricFamily(f"tutti_agent_{name}", meaning, value=float(value))
        open_sessions = float(len(self._agent.sessions))
        yield GaugeMetricFamily("tutti_agent_open_sessions", "clients", value=open_sessions)


@contextlib.contextmanager
def published(address: str, *collectors: Collector) -> Iterator[None]:
    """Serves metrics over HTTP at "HOST:PORT", or at "PORT" of 127.0.0.1, inside the block.

    Raises ConfigError for an address that cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{address!r} is not an address; pass HOST:PORT, or PORT for 127.0.0.1")
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host has this form
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot serve metrics at {address}: {why}; choose another") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def _second_tiers(remotes: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    for name, calls in (("state", "fetches"), ("write_state", "copies")):
        meaning = f"breaker of {calls} of the second tier: 1 for its current state"
        state = GaugeMetricFamily(f"tutti_remote_{name}", meaning, labels=["pool", "state"])
        for pool, remote in remotes.items():
            state.add_metric([pool, remote[name]], 1.0)
        yield state
    for name, (key, meaning) in REMOTE.items():
        counter = CounterMetricFamily(f"tutti_remote_{name}", meaning, labels=["pool"])
        for pool, remote in remotes.items():
            counter.add_metric([pool], float(remote[key]))
        yield counter


def _stats_of(store: Any) -> dict[str, Any] | None:
    try:
        stats: dict[str, Any] = store.stats()
    except TuttiError:
        return None
    if not stats.get("connected", 1):  # without a connection to the agent the numbers are old
        return None
    found = numbers(stats)
    if (budget := store.config.write_budget_nbytes) is not None:
        found["write_budget_nbytes"] = budget
    return found


def _settings(store: Any, stats: Mapping[str, Any]) -> dict[str, str]:
    return {
        "version": __version__,
        "model": str(store.layout.model),
        "page_size": str(store.layout.page_size),
        "verify": store.config.verify,
        "durability": store.config.durability,
        "profile": str(stats["profile"]),
    }


def _cumulative(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    total = 0
    buckets = []
    bounds = [*(f"{bound:g}" for bound in histogram["bounds_s"]), "+Inf"]
    for bound, count in zip(bounds, histogram["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, float(histogram["sum_s"])

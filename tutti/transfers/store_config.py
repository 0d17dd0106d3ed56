"""The settings of an open pool, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.base.checks import flag, one_of, seconds, share, whole
from tutti.base.units import parse_nbytes
from tutti.errors import ConfigError
from tutti.placement.eviction import POLICIES, EvictionPolicy
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.put_limits import Quota

VERIFY = ("always", "sampled", "off")
DURABILITY = ("process", "flush")
RESIDENCY = ("dynamic", "static")


@dataclass(frozen=True)
class StoreConfig:
    """How a pool is opened and behaves; not stored on the medium.  Raises ConfigError.

    verify: "always" compares the digest of every slice that is loaded; "sampled" does so for one
        load in sixteen; "off" neither compares nor computes digests.  Objects that were stored with
        "off" do not survive an unclean close, because they cannot be verified.
    durability: acknowledged puts survive the death of the process ("process"), or also a power
        loss ("flush").
    timeout_s: longest time for one command, and for a wait for space.
    pin_lookups: number of later look-ups after which a pin of ``match`` ends.
    pin_share: share of the pool's slots, from 0 to 1, that all pins together may protect; look-ups
        that pin return fewer objects rather than exceed it.
    digest_cache_nbytes: memory for digests of recent objects.
    write_budget: bytes per day that puts may write, also as "2TiB"; None for no limit.  An hour's
        budget may be written at once; opening a pool again does not refill it.  Pages beyond it are
        dropped; ``over_budget`` counts those of the part of a put in which it ended.
    quotas: limits of namespaces; see tutti.transfers.put_limits.
    schedule: decides when transfers are issued; None issues each at once.  See docs/scheduler.md.
    window_nbytes: bytes of commands in flight on each drive; None finds the smallest number that
        reaches the drive's full bandwidth, so that the first layers of loads arrive early.
    service_threads: native threads, each of which serves some of the pool's files; None starts one
        for each drive that has files, which is best for independent drives.  `open` refuses more
        threads than files; a drive by vfio has exactly one.
    page_cache_share: share of the memory that is free at the opening that the page cache may use
        for groups of the pool, from 0 (none: all by direct I/O) to 1; see docs/residency.md.
    residency: "dynamic" follows changes of free memory, "static" plans at the opening only.
    eviction: which objects are evicted first: "lru" (the least recently used), "mq" (multi-queue:
        likewise, but those that were used often later), or an EvictionPolicy.
    degraded: open a pool whose other members are missing; their objects are misses.
    any_owner: accept files that other users can change, and so the data that they wrote there.
    """

    verify: str = "always"
    durability: str = "process"
    timeout_s: float = 30.0
    pin_lookups: int = 64
    pin_share: float = 1.0
    digest_cache_nbytes: int = 16 << 20
    window_nbytes: int | None = None
    service_threads: int | None = None
    page_cache_share: float = 0.0
    residency: str = "dynamic"
    eviction: str | EvictionPolicy = "mq"
    write_budget: int | str | None = None
    quotas: tuple[Quota, ...] = ()
    schedule: Schedule | None = None
    degraded: bool = False
    any_owner: bool = False

    @classmethod
    def choose(cls, config: StoreConfig | None, **settings: str | int | None) -> StoreConfig:
        """``config``, or one made of those of these settings that are not None.

        Raises ConfigError for both, because they may contradict each other.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        if config is None:
            return cls(**given)  # type: ignore[arg-type]
        if not isinstance(config, cls):
            raise ConfigError(f"config is {config!r}; pass a StoreConfig")
        if given:
            names = ", ".join(given)
            raise ConfigError(f"config and {names} are given; put {names} into the StoreConfig")
        return config

    def __post_init__(self) -> None:
        one_of(*VERIFY)("verify", self.verify)
        one_of(*DURABILITY)("durability", self.durability)
        one_of(*RESIDENCY)("residency", self.residency)
        flag("degraded", self.degraded)
        flag("any_owner", self.any_owner)
        for name in ("page_cache_share", "pin_share"):
            share(name, getattr(self, name))
        whole("pin_lookups", self.pin_lookups, 1, 2**31)
        whole("digest_cache_nbytes", self.digest_cache_nbytes, 0, 2**48)
        if seconds("timeout_s", self.timeout_s) == 0:
            raise ConfigError("timeout_s is 0; pass more than 0 seconds, at most a day")
        if not callable(getattr(self.eviction_policy, "victims", None)):
            names = ", ".join(POLICIES)
            raise ConfigError(
                f"eviction is {self.eviction!r}; pass one of {names}, or an EvictionPolicy"
            )
        if not isinstance(self.schedule, Schedule | None):
            raise ConfigError(f"schedule is {self.schedule!r}; pass a Schedule, or None")
        if self.window_nbytes is not None:
            whole("window_nbytes", self.window_nbytes, 1, 2**48)
        if self.write_budget is not None:
            whole("write_budget", self.write_budget_nbytes, 1, 2**62)
        if self.service_threads is not None:
            whole("service_threads", self.service_threads, 1, 64)

    @property
    def write_budget_nbytes(self) -> int | None:
        """``write_budget`` in bytes."""
        return None if self.write_budget is None else parse_nbytes(self.write_budget)

    @property
    def eviction_policy(self) -> EvictionPolicy | None:
        """The policy that ``eviction`` names."""
        return POLICIES.get(self.eviction) if isinstance(self.eviction, str) else self.eviction

"""Limits of puts: quotas of namespaces, and budgets of bytes that may be written per day.

A day's budget spares the drive, which wears with every byte that is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from tutti.base.arrays import Mask
from tutti.base.checks import whole
from tutti.errors import ConfigError
from tutti.medium.slot_record import EXPIRY_UNIT_S, tenant_of
from tutti.placement.index import Index

_DAY_S = 86_400.0
#: Share of a day's budget that may be written at once after a time without puts.
_BURST = 1 / 24


@dataclass(frozen=True)
class Quota:
    """Limits of one namespace, records included; None for no limit.  Raises ConfigError.

    nbytes: of its objects in the pool; for more, its own objects are evicted.
    write_budget: bytes per day that its puts may write; see StoreConfig.write_budget.
    """

    namespace: str
    nbytes: int | None = None
    write_budget: int | None = None

    def __post_init__(self) -> None:
        if not tenant_of(self.namespace):
            raise ConfigError("a quota has an empty namespace; pass its name")
        for name, value in (("nbytes", self.nbytes), ("write_budget", self.write_budget)):
            if value is not None:
                whole(f"{name} of {self.namespace}", value, 1, 2**62)


class WriteBudget:
    """Grants objects as a token bucket does.  Not thread-safe: the store holds a lock around it.

    nbytes_per_day: None for no limit.  object_nbytes: what one object costs, its record included.
    A bucket holds the budget of an hour, and one object at least; it is full in a new pool.
    """

    def __init__(
        self,
        nbytes_per_day: int | None,
        object_nbytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._per_s = None if nbytes_per_day is None else nbytes_per_day / object_nbytes / _DAY_S
        self._most = max(1.0, (self._per_s or 0.0) * _DAY_S * _BURST)
        self._left, self._since_s = self._most, clock()

    def allowed(self, objects: int) -> int:
        """How many of these objects may be written now."""
        if self._per_s is None:
            return objects
        now_s = self._clock()
        earned = max(0.0, now_s - self._since_s) * self._per_s
        self._left, self._since_s = min(self._most, self._left + earned), now_s
        return min(objects, int(self._left))

    def recovered(self, idle_s: float) -> None:
        """The pool was opened again after this time: before it, all may have been used up."""
        if self._per_s is not None:
            self._left, self._since_s = min(self._most, idle_s * self._per_s), self._clock()

    def take(self, objects: int) -> None:
        """Counts objects as written, at most as many as ``allowed`` said; below 0 undoes it."""
        self._left -= objects


class Limit(Enum):
    """What keeps an object from being written."""

    QUOTA = "bytes of a namespace"
    OWN_BUDGET = "bytes a day of a namespace"
    BUDGET = "bytes a day of all"


class Grant(NamedTuple):
    """How many objects may be written, and how many of the others are beyond a budget of the day.

    limit: of the first of these others.
    """

    objects: int
    over_budget: int = 0
    limit: Limit | None = None


class _Account:
    """What one namespace may do, and did, in objects."""

    def __init__(self, quota: Quota, object_nbytes: int) -> None:
        self.quota = quota
        self.most = None if quota.nbytes is None else quota.nbytes // object_nbytes
        self.budget = WriteBudget(quota.write_budget, object_nbytes)
        self.granted = self.evicted = self.over_quota = self.over_budget = 0
        self.unplaced = 0  # granted, and without a slot as yet


class Quotas:
    """The accounts of all namespaces with a quota.  The store holds a lock around it.

    write_budget: bytes a day that puts of all namespaces may write; None for no limit.
    Raises ConfigError for two namespaces that have one number on the medium.
    """

    def __init__(
        self, quotas: Sequence[Quota], object_nbytes: int, write_budget: int | None = None
    ) -> None:
        self._object_nbytes = object_nbytes
        self._budget = WriteBudget(write_budget, object_nbytes)
        self._accounts: dict[int, _Account] = {}
        for quota in quotas:
            account = _Account(quota, object_nbytes)
            other = self._accounts.setdefault(tenant_of(quota.namespace), account)
            if other is not account:
                raise ConfigError(
                    f"namespaces {other.quota.namespace!r} and {quota.namespace!r} have the same"
                    " number on the medium; pass one quota per namespace, or rename one"
                )

    def recovered(self, idle_64s: int) -> None:
        """See WriteBudget, for all budgets; in units of 64 s."""
        for budget in (self._budget, *(account.budget for account in self._accounts.values())):
            budget.recovered(max(0, idle_64s) * EXPIRY_UNIT_S)

    def grant(self, tenant: int, n: int, index: Index, evict: Callable[[int, Mask], int]) -> Grant:
        """How many of n objects may be written.

        No budget is charged for objects that the quota refuses.  evict(n, mask): removes about n
        objects of a mask of slots; returns how many.
        """
        account = self._accounts.get(tenant)
        if account is None:
            granted = self._budget.allowed(n)
            self._budget.take(granted)
            return Grant(granted, n - granted, Limit.BUDGET if granted < n else None)
        fitting = n if account.most is None else min(n, account.most)
        own = account.budget.allowed(fitting)
        allowed = granted = self._budget.allowed(own)
        if account.most is not None:
            room = account.most - int(index.tenant_slots[tenant]) - account.unplaced
            if allowed > room:
                evicted = evict(allowed - room, index.tenant == tenant)
                account.evicted += evicted
                room += evicted
            granted = min(allowed, max(0, room))
        account.budget.take(granted)
        self._budget.take(granted)
        account.over_budget += fitting - own
        account.over_quota += n - fitting + allowed - granted
        account.granted += granted
        account.unplaced += granted
        wanted = (allowed, Limit.QUOTA), (own, Limit.BUDGET), (fitting, Limit.OWN_BUDGET)
        limits = (limit for most, limit in (*wanted, (n, Limit.QUOTA)) if granted < most)
        return Grant(granted, fitting - allowed, next(limits, None))

    def refuse(self, tenant: int, n: int, limit: Limit | None) -> Grant:
        """Grants none of n objects, which follow one that was refused because of this limit."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.over_quota += n * (limit is Limit.QUOTA)
            account.over_budget += n * (limit is Limit.OWN_BUDGET)
        return Grant(0, n * (limit in (Limit.OWN_BUDGET, Limit.BUDGET)), limit)

    def settle(self, tenant: int, n: int) -> None:
        """``n`` of the granted objects have slots now, or will have none."""
        if (account := self._accounts.get(tenant)) is not None:
            account.unplaced -= n

    def give_back(self, tenant: int, n: int) -> None:
        """``n`` of the granted objects are not written: they are not charged."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.budget.take(-n)
            account.granted -= n
        self._budget.take(-n)

    def stats(self, index: Index) -> dict[str, dict[str, Any]]:
        """By namespace: its limits and usage in bytes, and what happened, in objects."""
        return {
            account.quota.namespace: {
                "used_nbytes": self._object_nbytes * int(index.tenant_slots[tenant]),
                "quota_nbytes": account.quota.nbytes,
                "written_nbytes": account.granted * self._object_nbytes,
                "write_budget": account.quota.write_budget,
                "evicted": account.evicted,
                "over_quota": account.over_quota,
                "over_budget": account.over_budget,
            }
            for tenant, account in self._accounts.items()
        }

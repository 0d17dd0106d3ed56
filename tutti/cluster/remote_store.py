"""Interface of a cluster's store for the second tier, and the URLs of `tutti serve --remote`.

    mooncake://HOST:PORT?replica_num=2&namespace=prod

The store runs in a process of its own (worker.py), so that its crash or hang spares the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from tutti.base.checks import one_of, seconds, whole
from tutti.base.units import parse_nbytes
from tutti.errors import ConfigError
from tutti.medium.slot_record import tenant_of

REPLICATE = ("second", "first", "off")
TENANTS_MAX = 16  # each costs a Mooncake client, and a call per look-up that misses

#: Options of Mooncake by its own names.
OPTIONS = frozenset(
    ("protocol", "metadata_server", "local_hostname", "device_name", "replica_num", "tenant_id")
)
#: Options of the tier: the field of RemoteConfig, and the function that parses it.
_SETTINGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "namespace": ("namespace", str),
    "replicate": ("replicate", str),
    "timeout": ("timeout_s", float),
    "connect": ("connect_s", float),
    "client_ttl": ("client_ttl_s", float),
    "failures_max": ("failures_max", int),
    "queue": ("queue_nbytes", parse_nbytes),
    "prefetch": ("prefetch_nbytes", parse_nbytes),
    "staging": ("staging_nbytes", parse_nbytes),
    "tenants": ("tenants", lambda names: tuple(names.split(","))),
}


class ValueStatus(IntEnum):
    """The result of an operation for one value."""

    DONE = 0
    ABSENT = 1
    FAILED = 2
    CORRUPT = 3


class RemoteStore(Protocol):
    """A store of the cluster, made by ``factory(options, address, nbytes)`` of its memory.

    Names and addresses: one per value.  A method that raises has failed for all values.
    """

    def exists(self, names: Sequence[str]) -> list[ValueStatus]:
        """DONE for values that are there, else ABSENT."""

    def get(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        """Reads values of ``nbytes`` each to addresses."""

    def put(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        """Stores values of ``nbytes`` each from addresses; existing values may stay unchanged.

        ABSENT for values that the tenant may not store, for example beyond its quota.
        """

    def remove(self, names: Sequence[str]) -> list[ValueStatus]:
        """Removes values: DONE, or ABSENT for those that were not there."""


@dataclass(frozen=True)
class RemoteConfig:
    """Configuration of a second tier.

    factory: "module:class" of a RemoteStore.  options: passed to it.
    namespace: part of the name of every value.
    replicate: pages to copy to the remote store: when they are used for the second time ("second":
    loaded, or offered again), as soon as they are stored ("first"), or none ("off").
    timeout_s: limit of one call; a fetch that old makes no further call.
    connect_s: limit for the start of its process, and again for the client of each tenant.
    client_ttl_s: for how long a key that failed is not tried again; Mooncake's name for it.
    failures_max: failures in a row after which no call is made for ``client_ttl_s``.
    queue_nbytes: limit of pages that wait for replication.  prefetch_nbytes: limit of pages
    fetched for one look-up.  Each is one page at least.  staging_nbytes: memory that both copy
    through.
    tenants: namespaces whose pages go to the tenant of the same name (its tenant_id); pages of
    other namespaces go to the tenant_id of ``options``.
    """

    factory: str
    options: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "default"
    replicate: str = "second"
    timeout_s: float = 5.0
    connect_s: float = 10.0
    client_ttl_s: float = 10.0
    failures_max: int = 3
    queue_nbytes: int = 256 << 20
    prefetch_nbytes: int = 1 << 30
    staging_nbytes: int = 128 << 20
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of(*REPLICATE)("replicate", self.replicate)
        for name in ("timeout_s", "connect_s", "client_ttl_s"):
            if seconds(name, getattr(self, name)) == 0:
                raise ConfigError(f"{name} is 0; pass more than 0 seconds")
        whole("failures_max", self.failures_max, 1, 2**31)
        for name in ("queue_nbytes", "prefetch_nbytes", "staging_nbytes"):
            whole(name, getattr(self, name), 1, 2**48)
        self._check_tenants()

    def _check_tenants(self) -> None:
        if len(self.tenants) > TENANTS_MAX:
            raise ConfigError(f"{len(self.tenants)} tenants are given; pass at most {TENANTS_MAX}")
        others = self.options.get("tenant_id", "default")
        known: dict[int, str] = {}
        for name in self.tenants:
            if not name.strip() or name.startswith("_") or not name.isprintable():
                raise ConfigError(
                    f"{name!r} cannot be a tenant; pass names with commas between them, without"
                    " control characters and without an underscore at the start"
                )
            if name == others:
                raise ConfigError(
                    f"tenant {name!r} is tenant_id, the tenant of all other namespaces; remove it"
                    " from tenants, or change tenant_id"
                )
            number = tenant_of(name)
            if number in known:
                raise ConfigError(
                    f"tenants {known[number]!r} and {name!r} have the same number; list each once,"
                    " or rename one"
                )
            known[number] = name

    def check(self, verify: str) -> None:
        """Raises ConfigError if pages of a pool with this ``verify`` may not be copied."""
        if verify != "always" and self.replicate != "off":
            raise ConfigError(
                f"a second tier copies only verified pages, and verify is {verify!r}; pass"
                " --verify always, or replicate=off to fetch only"
            )

    @classmethod
    def parse(cls, url: str) -> RemoteConfig:
        """Parses the URL of ``--remote``.  Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
            query = parse_qsl(parts.query, True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise ConfigError(f"{url!r} is not an address: {error}") from error
        if parts.scheme != "mooncake" or not parts.hostname or not port or parts.path:
            raise ConfigError(f"{url!r} is not an address; pass mooncake://HOST:PORT of the master")
        if ":" in parts.hostname:
            raise ConfigError("the master has an IPv6 address; pass its name or IPv4 address")
        if blank := [name for name, value in query if not value.strip()]:
            raise ConfigError(f"the option {blank[0]} of --remote is empty; pass a value")
        given = dict(query)
        settings = {}
        for name, (setting, convert) in _SETTINGS.items():
            if name in given:
                try:
                    settings[setting] = convert(given.pop(name))
                except ValueError as error:
                    raise ConfigError(f"the option {name} of --remote: {error}") from error
        if unknown := sorted(given.keys() - OPTIONS):
            raise ConfigError(
                f"--remote has no option {unknown[0]!r}; pass one of"
                f" {', '.join(sorted((*OPTIONS, *_SETTINGS)))}"
            )
        if not given.get("replica_num", "1").isdecimal():
            raise ConfigError(f"replica_num is {given['replica_num']!r}; pass a number")
        options = {**given, "master_server_address": f"{parts.hostname}:{port}"}
        return cls("tutti.cluster.mooncake:MooncakeStore", options, **settings)

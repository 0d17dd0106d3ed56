"""The pools that one agent owns: one that it was given, or those of a folder, by layout."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tutti.base.units import format_nbytes
from tutti.cluster.remote_store import RemoteConfig
from tutti.errors import CapacityError, ConfigError, PoolMismatch, PoolNotFound, TuttiError
from tutti.medium.layout import KVLayout, differences
from tutti.node.pool_service import PoolService
from tutti.pool.pool_format import Paths
from tutti.store import ObjectStore
from tutti.store import open as open_pool
from tutti.transfers.store_config import StoreConfig

SUFFIX = ".tutti"


class AgentPools:
    """Opens pools when a client first asks for them, and closes all of them at the end.

    paths: the members of the only pool.  folder: instead of them, where each layout has a file.
    capacity: for pools that clients have made, in bytes, all pools of the folder together.
    remote: the second tier of each pool.
    """

    def __init__(
        self,
        paths: Sequence[str] = (),
        *,
        folder: str | None = None,
        capacity: int = 0,
        config: StoreConfig | None = None,
        executor: str = "auto",
        remote: RemoteConfig | None = None,
    ) -> None:
        if bool(paths) == (folder is not None):
            raise ConfigError("give the members of one pool, or a folder of pools")
        if remote is not None:
            remote.check((config or StoreConfig()).verify)
        self._paths = list(paths)
        self._folder = None if folder is None else Path(folder)
        self._capacity = capacity
        self._config = config or StoreConfig()
        self._executor = executor
        self._remote = remote
        self._lock = threading.Lock()
        self._closed = False
        self.services: dict[str, PoolService] = {}

    def open_given(self) -> None:
        """Opens the pool that was given, so that a wrong one is known at the start."""
        if self._paths:
            self.open("", 0)
        elif self._folder is not None and not self._folder.is_dir():
            raise PoolNotFound(f"{self._folder} is not a folder; make it first")

    def open(self, layout_json: str, capacity: int, name: str = "") -> PoolService:
        """The pool of a layout (as JSON), opened, or made with a capacity in bytes.

        Without a layout: the pool whose name begins so, or the only one.  Raises TuttiError.
        """
        with self._lock:
            if self._closed:
                raise PoolNotFound("the agent is stopping; connect again later")
            layout = KVLayout.from_json(layout_json) if layout_json else None
            name = layout.fingerprint.hex() if layout and self._folder else self._named(name)
            if self._paths:
                return self._given(layout_json)
            if name not in self.services:
                self.services[name] = self._open_file(name, layout, capacity)
            return self.services[name]

    def names(self) -> list[str]:
        """What pools are called, open or not: their files, without the suffix."""
        paths = self._folder.glob(f"*{SUFFIX}") if self._folder else map(Path, self._paths[:1])
        return sorted(path.name.removesuffix(SUFFIX) for path in paths)

    def _named(self, start: str) -> str:
        names = self.names()
        found = [name for name in names if name.startswith(start)]
        if len(found) != 1:
            which = f"whose name begins with {start!r}" if start else "in all"
            raise PoolNotFound(
                f"the agent has {len(found)} pools {which}; give a layout, or --pool with one of:"
                f" {', '.join(names) or '(none)'}"
            )
        return found[0]

    def _given(self, layout_json: str) -> PoolService:
        service = self.services.get("")
        if service is None:
            store = self._open(self._paths)
            service = self.services[""] = self._serve(store)
        own = service.store.layout
        wanted = KVLayout.from_json(layout_json) if layout_json else own
        if wanted != own:
            raise PoolMismatch(
                f"the agent's pool has another layout: {differences(own, wanted)}; connect with"
                " that layout, or start an agent with --folder, which has a pool for each"
            )
        return service

    def _open_file(self, name: str, layout: KVLayout | None, capacity: int) -> PoolService:
        assert self._folder is not None
        path = self._folder / f"{name}{SUFFIX}"
        if not path.exists():
            self._check_capacity(capacity)
        return self._serve(self._open(str(path), layout, capacity or None))

    def _serve(self, store: ObjectStore) -> PoolService:
        try:
            return PoolService(store, self._remote)
        except BaseException:
            store.close()
            raise

    def _open(
        self, paths: Paths, layout: KVLayout | None = None, capacity: int | None = None
    ) -> ObjectStore:
        # Clients move the data: the agent has no transfers to schedule.
        config, executor = self._config, self._executor
        return open_pool(paths, layout, capacity, config=config, executor=executor, profile=None)

    def _check_capacity(self, capacity: int) -> None:
        assert self._folder is not None
        if not capacity:
            raise PoolNotFound(
                "the agent has no pool of this layout; give a capacity, with which it makes one"
            )
        used = sum(path.stat().st_size for path in self._folder.glob(f"*{SUFFIX}"))
        if used + capacity > self._capacity:
            raise CapacityError(
                f"a pool of {format_nbytes(capacity)} in addition to {format_nbytes(used)} is"
                f" more than the agent's {format_nbytes(self._capacity)}; raise its --capacity,"
                " or remove pools that are not used any more"
            )

    def stores(self) -> dict[str, ObjectStore]:
        """Open pools by the name of their first member."""
        with self._lock:
            return {service.files[0]: service.store for service in self.services.values()}

    def close(self) -> None:
        """Closes all pools.  Raises the first error after all were tried."""
        with self._lock:
            self._closed = True
            services, self.services = list(self.services.values()), {}
        errors: list[TuttiError] = []
        for service in services:
            try:
                service.close()
            except TuttiError as error:
                errors.append(error)
        if errors:
            raise errors[0]

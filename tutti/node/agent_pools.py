"""The pools that one agent owns: a given one, or one per layout in a folder."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tutti.base.interrupts import uninterrupted
from tutti.base.units import format_nbytes
from tutti.cluster.remote_store import RemoteConfig
from tutti.errors import (
    CapacityError,
    DeviceTimeout,
    PoolMismatch,
    PoolNotFound,
    PoolReadOnly,
    TuttiError,
)
from tutti.gio_uring.file_member import lock_file
from tutti.medium.layout import KVLayout, differences
from tutti.node.pool_service import PoolService
from tutti.pool.places import exists
from tutti.pool.pool_format import Paths
from tutti.profiles.at_open import Speeds, find_speeds
from tutti.store import ObjectStore
from tutti.store import open as open_pool
from tutti.transfers.store_config import StoreConfig

SUFFIX = ".tutti"
#: Limit of an opening, in time-outs of the pool: four for its snapshot, and one for the rest.
_OPENING_TIMEOUTS = 5
_STOPPING = "the agent is stopping; connect again later"


class AgentPools:
    """Opens pools when a client first asks for them, and closes all of them at the end.

    paths: the members of a single pool.  folder: instead of paths; holds one file per layout.
    capacity: limit in bytes of all pools of the folder, beyond which clients cannot make pools.
    remote: configuration of each pool's second tier.
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
        if remote is not None:
            remote.check((config or StoreConfig()).verify)
        self._paths = list(paths)
        self._folder = None if folder is None else Path(folder)
        self._capacity = capacity
        self._config = config or StoreConfig()
        self._executor = executor
        self._remote = remote
        #: Guards what follows; notified when an opening has ended; not held while a pool opens.
        self._changed = threading.Condition()
        self._closed = False
        self._claimed: int | None = None
        self._opening: dict[str, int] = {}  # capacity by pool; 0 if it exists
        self.services: dict[str, PoolService] = {}

    @functools.cached_property
    def speeds(self) -> Speeds:
        """Speeds of the pools' media, which clients schedule their transfers by."""
        members = self._paths if self._folder is None else [str(self._folder)]
        return find_speeds(members, executor=self._executor)

    def open_given(self) -> None:
        """Measures the media, which is not possible on devices of an open pool; then opens the
        given pool, so that an error is found at the start.
        """
        if self._folder is not None:
            self._claim(self._folder)
        if all(map(exists, self._paths)):  # else the path may be wrong: nothing is written there
            _ = self.speeds
        if self._paths:
            self.open("", 0)
        _ = self.speeds

    def _claim(self, folder: Path) -> None:
        """Locks the folder against other agents, until ``close``."""
        if not folder.is_dir():
            raise PoolNotFound(f"{folder} is not a folder; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PoolReadOnly(
                f"cannot make pools in {folder}; change its permissions, or remount it writable"
            )
        self._claimed = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        lock_file(self._claimed, str(folder))

    def open(self, layout_json: str, capacity: int, name: str = "") -> PoolService:
        """Returns the pool of a layout (JSON); opens it, or makes it with ``capacity`` bytes.

        Without a layout: the pool whose name begins with ``name``, or the only one.  An opening
        delays only requests for the same pool.  Raises TuttiError.
        """
        layout = KVLayout.from_json(layout_json) if layout_json else None
        name = layout.fingerprint.hex() if layout and self._folder else self._named(name)
        service = self._begin(name, capacity)
        if service is None:
            service = self._make(name, layout, capacity)
        if layout is not None and layout != service.store.layout:
            raise PoolMismatch(
                "the agent's pool has another layout:"
                f" {differences(service.store.layout, layout)}; connect with that layout, or start"
                " an agent with --folder, which has a pool for each"
            )
        return service

    def _begin(self, name: str, capacity: int) -> PoolService | None:
        """The open pool of a name, or None: the caller must open it then."""
        timeout_s = _OPENING_TIMEOUTS * self._config.timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._opening, timeout_s):
                raise DeviceTimeout("the pool is still being opened; connect again later")
            if self._closed:
                raise PoolNotFound(_STOPPING)
            service = self.services.get(name)
            if service is None:
                self._opening[name] = self._checked(name, capacity)
            return service

    def _make(self, name: str, layout: KVLayout | None, capacity: int) -> PoolService:
        try:
            service = self._open(name, layout, capacity)
            with self._changed:
                if not self._closed:
                    self.services[name] = service
                    return service
            service.close()
            raise PoolNotFound(_STOPPING)
        finally:
            with self._changed:
                del self._opening[name]
                self._changed.notify_all()

    def names(self) -> list[str]:
        """Names of the pools, open or not: their file names without the suffix."""
        paths = self._folder.glob(f"*{SUFFIX}") if self._folder else map(Path, self._paths[:1])
        return sorted(path.name.removesuffix(SUFFIX) for path in paths)

    def _named(self, start: str) -> str:
        names = self.names()
        found = [start] if start and start in names else [n for n in names if n.startswith(start)]
        if not names:
            raise PoolNotFound("the agent has no pools yet; a client with a layout makes one")
        if len(found) != 1:
            which = f"whose name begins with {start!r}" if start else "in all"
            raise PoolNotFound(
                f"the agent has {len(found)} pools {which}; pass a layout, or --pool with one of:"
                f" {', '.join(names)}"
            )
        return found[0]

    def _open(self, name: str, layout: KVLayout | None, capacity: int) -> PoolService:
        paths: Paths = self._paths
        if self._folder is not None:
            paths = str(self._folder / f"{name}{SUFFIX}")
        # Clients move the data: the agent has no transfers to schedule.
        store = open_pool(
            paths,
            layout if self._folder else None,
            (capacity or None) if self._folder else None,
            config=self._config,
            executor=self._executor,
            profile=None,
        )
        try:
            return PoolService(store, self._remote)
        except BaseException:
            store.close()
            raise

    def _checked(self, name: str, capacity: int) -> int:
        """Capacity to make a pool of the folder with; 0 if it exists.  The lock must be held."""
        if self._folder is None or (self._folder / f"{name}{SUFFIX}").exists():
            return 0
        if not capacity:
            raise PoolNotFound(
                "the agent has no pool of this layout; pass a capacity to create one"
            )
        sizes = dict(self._opening)  # their files may exist in part
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # removed after its making failed
                sizes[path.stem] = max(path.stat().st_size, sizes.get(path.stem, 0))
        used = sum(sizes.values())
        if used + capacity > self._capacity:
            raise CapacityError(
                f"a pool of {format_nbytes(capacity)} in addition to {format_nbytes(used)} is"
                f" more than the agent's {format_nbytes(self._capacity)}; raise its --capacity,"
                " or remove pools that are not used any more"
            )
        return capacity

    def stores(self) -> dict[str, ObjectStore]:
        """Open pools by the name of their first member."""
        with self._changed:
            return {service.files[0]: service.store for service in self.services.values()}

    @uninterrupted()  # or a second Ctrl-C would leave pools unclean
    def close(self) -> None:
        """Closes all pools.  Raises the first error after all were tried."""
        errors: list[TuttiError] = []
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._opening, self._config.timeout_s):
                names = ", ".join(self._opening)
                left = f"still being opened: {names}; the next opening recovers what they have"
                errors.append(DeviceTimeout(left))
            services, self.services = list(self.services.values()), {}
        for service in services:
            try:
                service.close()
            except TuttiError as error:
                errors.append(error)
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None
        if errors:
            raise errors[0]

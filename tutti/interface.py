"""What every store offers, embedded (`tutti.open`) or over the node's agent (`tutti.connect`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.scheduler.dispatcher import Dispatcher
from tutti.transfers.core import Closable, StoreConfig
from tutti.transfers.tickets import LoadTicket, PutTicket

Keys = npt.NDArray[np.uint8] | Sequence[bytes]


class Store(Protocol):
    """See ObjectStore, whose methods these are."""

    config: StoreConfig

    @property
    def layout(self) -> KVLayout: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def scheduler(self) -> Dispatcher | None: ...
    @property
    def engine(self) -> Any: ...
    @property
    def controller(self) -> Any: ...
    def register(self, memory: HostMemory) -> HostMemory: ...
    def unregister(self, memory: HostMemory) -> None: ...
    def allocate_memory(
        self, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostMemory: ...
    def attach(self, part: Closable) -> None: ...
    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int: ...
    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]: ...
    def unpin(self, name: str | None = None) -> None: ...
    def put(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        parent: bytes | None = None,
        depth: int = 0,
    ) -> PutTicket: ...
    def load(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        batch: str = "",
    ) -> LoadTicket: ...
    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int: ...
    def quarantine(self, keys: Keys) -> int: ...
    def clear(self, *, deallocate: bool = True) -> None: ...
    def wait_recovered(self, timeout_s: float = 600.0) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self, timeout_s: float | None = None) -> None: ...

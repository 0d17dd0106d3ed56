"""The interface of a store, embedded (`tutti.open`) or through the node's agent (`tutti.connect`).

The methods are documented here, and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from tutti.base.checks import Rule, flag, instance, optional, pin_name, seconds, takes, text, whole
from tutti.base.interrupts import uninterrupted
from tutti.base.units import format_nbytes
from tutti.errors import ConfigError, PoolMismatch, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory, as_pages
from tutti.medium.geometry import Geometry
from tutti.medium.keys import as_keys
from tutti.medium.layout import KVLayout, differences
from tutti.memory.host_memory import HostMemory
from tutti.scheduler.dispatcher import Dispatcher
from tutti.transfers.catalogue import ObjectInfo
from tutti.transfers.core import Closable
from tutti.transfers.put_request import PutRequest
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadTicket, PutTicket
from tutti.transfers.transfer_queue import TransferQueue

_COUNT_MAX = 2**31
UNDO_S = 60.0  # the longest wait for an interrupted put or load


def _count(name: str, value: Any) -> None:
    whole(name, value, 1, _COUNT_MAX)


#: Rules for the arguments of the methods that stores implement, checked before anything is done.
#: Keys and pages are checked where they are converted.
_RULES: dict[str, dict[str, Rule]] = {
    "register": {"memory": instance(HostMemory)},
    "unregister": {"memory": instance(HostMemory)},
    "attach": {"part": instance(Closable)},
    "match": {"pin": pin_name, "proven": flag},
    "present": {"pin": pin_name, "proven": flag},
    "unpin": {"name": optional(text)},
    "clear": {"deallocate": flag},
    "prove": {"max_objects": _count, "timeout_s": seconds},
    "wait_recovered": {"timeout_s": seconds},
    "close": {"timeout_s": optional(seconds)},
}

KeyArray = npt.NDArray[np.uint8]
Keys = KeyArray | Sequence[bytes]


class CatalogueCalls(Protocol):
    """The methods of a catalogue; see tutti.transfers.catalogue.Catalogue."""

    def keys(self, namespace: str | None = None) -> KeyArray: ...
    def objects(self, keys: KeyArray) -> list[ObjectInfo]: ...
    def delete(self, keys: KeyArray, *, timeout_s: float = 30.0) -> int: ...
    def pin(self, keys: KeyArray) -> int: ...
    def unpin(self, keys: KeyArray) -> int: ...
    def expire(self, keys: KeyArray, ttl_s: float | None) -> int: ...


class Store(ABC):
    """An open pool.  Thread-safe; use it as a context manager or call ``close``.

    ``len(store)`` is the number of objects, ``key in store`` looks up one object.

    config: settings.  layout: of the objects.  geometry: byte offsets of all parts of the pool.
    catalogue: lists, pins, expires and deletes objects.
    """

    config: StoreConfig
    layout: KVLayout
    geometry: Geometry
    catalogue: CatalogueCalls
    _closed: bool
    _queue: TransferQueue

    def __init_subclass__(cls) -> None:
        """Every store checks its arguments by the same rules."""
        for name, rules in _RULES.items():
            setattr(cls, name, takes(**rules)(cls.__dict__[name]))

    @property
    def scheduler(self) -> Dispatcher | None:
        """Decides when puts and loads are issued; None when each is issued at once.

        Post the steps of the model to it as events: see docs/scheduler.md.
        """
        return self._queue.dispatcher

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """Moves the pages of this process.  Raises AgentLost while the agent is away."""

    @property
    @abstractmethod
    def controller(self) -> NativeController:
        """Executes the engine's commands.  Raises AgentLost while the agent is away."""

    def path_of(self, keys: npt.NDArray[np.uint8]) -> tuple[str, int]:
        """Returns the path of objects, and how often the pool's groups have changed paths.

        keys: uint8 (n, 16).  The path is "direct", "page cache", or "both" for objects of each.
        """
        return "direct", 0

    @property
    @abstractmethod
    def recovered(self) -> bool:
        """Whether recovery is done; every look-up misses until then."""

    @abstractmethod
    def register(self, memory: HostMemory) -> HostMemory:
        """Registers paged memory, so that ``put`` and ``load`` may name its pages.  Returns it.

        Raises PoolMismatch when its layout is not the pool's, ConfigError when it is registered
        already, Unsupported when the drive cannot reach it, and CapacityError when a GPU engine has
        no room to stage one of its pages.
        """

    @abstractmethod
    def unregister(self, memory: HostMemory) -> None:
        """Undoes ``register``: waits for transfers of the memory, and lets no new ones begin.

        Raises DeviceTimeout when they do not end in time; the memory stays registered then.
        """

    def allocate_memory(
        self, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostMemory:
        """Allocates and registers host memory of ``pages`` pages; see HostMemory.allocate."""
        return self.register(
            HostMemory.allocate(self.layout, pages, order=order, hugepages=hugepages)
        )

    @abstractmethod
    def attach(self, part: Closable) -> None:
        """Has ``close`` close ``part`` too, after the engine and before the controller."""

    @abstractmethod
    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        """Returns how many of ``keys``, from the first on without a gap, are in the pool.

        keys: uint8 (n, 16), or a list of 16-byte strings, in the order of the chain.
        pin: True protects these objects from eviction during the next ``pin_lookups`` look-ups.
        With a name, ``unpin`` of it and the next look-up that pins by it end the protection sooner.
        Objects beyond ``pin_share`` are not counted.  See StoreConfig for both limits.
        proven: counts only objects that need no verification before they are served; see ``prove``.
        Returns 0 until recovery is done.  Raises KeySizeError, PoolClosed.
        """

    @abstractmethod
    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Returns for each of ``keys`` whether it is in the pool: bool (n,).

        Arguments as for ``match``; counts as one look-up for any n.  Where ``pin_share`` does not
        allow to pin all found objects, the last ones are pinned and the others are not reported.
        """

    @abstractmethod
    def unpin(self, name: str | None = None) -> None:
        """Releases the pins that look-ups made by this name; without a name, those of all."""

    @uninterrupted(lambda _, ticket: ticket.wait_ended(UNDO_S))
    def put(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        parent: bytes | None = None,
        depth: int = 0,
        ttl_s: float | None = None,
        namespace: str = "",
    ) -> PutTicket:
        """Starts to store pages under keys.  Objects that are in the pool already stay unchanged.

        keys: as for ``match``: consecutive pages of a chain.  parent: key of the page before the
        first, None at the start of a chain.  depth: number of pages before the first.
        pages: page numbers (n,) in ``memory``, which may be left out when only one is registered;
        their bytes must not change before the ticket is done.  Pages for which no slot can be
        freed are dropped and counted.  ttl_s: removes the objects after this time, in steps of
        64 s.  namespace: owner of the objects in the catalogue.
        Raises KeySizeError, PageRangeError, ConfigError, PoolClosed or DeviceTimeout (no staging).
        """
        paged = self._memory(memory)
        request = PutRequest.checked(keys, pages, paged, parent, depth, ttl_s, namespace)
        if ttl_s is not None:
            self._watch_expiry()
        return PutTicket(self._queue.put(request))

    @uninterrupted(lambda _, ticket: ticket.cancel(UNDO_S))
    def load(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        batch: str = "",
        ahead: bool = False,
    ) -> LoadTicket:
        """Starts to read objects into pages; layers become ready one after another.

        keys, pages, memory: as for ``put``.  batch: name by which a ``StepBegan`` event calls for
        this load.  A load that was announced to the scheduler and issued under this name makes
        this one start at once.  ahead: nothing waits for the pages yet, so into host memory they
        are read after all other loads, until ``LoadTicket.wait_layer`` is called.
        Raises KeyMissing unless every key is in the pool, ConfigError for a page that is given to
        two keys, and the errors of ``put``.  Raises PagesInUse when it was aborted after a partial
        start and the device may still write into ``pages``; after other errors it does not.
        """
        if type(batch) is not str or batch or ahead is not False:  # seldom
            text("batch", batch)
            flag("ahead", ahead)
        array, paged = as_keys(keys), self._memory(memory)
        numbers = as_pages(pages, len(array))  # their range is checked as the load starts
        if paged.path is not None:
            numbers = paged.check_pages(numbers, once=self.config.verify != "off")
        return LoadTicket(self._queue.load(array, numbers, paged, batch, ahead))

    def delete(self, keys: KeyArray, *, timeout_s: float = 30.0) -> int:
        """Removes objects, pinned ones too; returns how many, once their records are voided.

        Waits for transfers of these objects.  Raises DeviceTimeout when they do not end in time.
        """
        return self.catalogue.delete(keys, timeout_s=timeout_s)

    @abstractmethod
    def clear(self, *, deallocate: bool = True) -> None:
        """Removes every object; durable on return.

        deallocate: also sends DSM deallocate (on files: punches holes).
        Waits for transfers in flight; raises DeviceTimeout.
        """

    @abstractmethod
    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        """Verifies up to ``max_objects`` objects that an unclean close left unproven.

        Intact ones need no verification from then on; damaged ones are removed.  Returns how many
        were read: 0 at the end of each round through the pool.  Raises DeviceTimeout.
        """

    @abstractmethod
    def quarantine(self, keys: Keys) -> int:
        """Removes proven objects and takes their slots out of use.  Returns how many."""

    @abstractmethod
    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        """Waits until recovery is done.  Raises the error that ended recovery, or DeviceTimeout."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Returns the counters since the pool was opened, and its usage.

        profile: source of the scheduler's profile ("file", "cache", "measured", "estimated" or
        "given"), "off" without a scheduler.  scheduler: its counters, see docs/scheduler.md.
        """

    @abstractmethod
    def close(self, timeout_s: float | None = None) -> None:
        """Ends all transfers, writes the snapshots and marks the pool clean.

        Waits ``timeout_s`` (default: that of the config) for commands that are past their deadline,
        because a late answer still leaves the pool clean.  Then it resets the device; at once where
        only commands are left that an engine on the GPU has abandoned.

        Raises DeviceTimeout when the device does not answer in time, and PoolMoved when a member
        is no longer the file under its name; the pool is not marked clean then.  Raises ConfigError
        when it is called in a callback; call it in another thread.
        """

    def __len__(self) -> int:
        slots = self.stats().get("slots", {})
        return int(slots.get("ready", 0)) + int(slots.get("unproven", 0))

    def __bool__(self) -> bool:
        return True  # an empty store is a store

    def __contains__(self, key: bytes) -> bool:
        return bool(self.present([key])[0])

    def __repr__(self) -> str:
        name, each = type(self).__name__, format_nbytes(self.layout.object_nbytes)
        if self._closed:
            return f"<{name}: closed>"
        try:
            objects, capacity = len(self), self.stats().get("capacity_objects", "?")
        except TuttiError as error:
            return f"<{name}: {error}>"
        return f"<{name}: {objects} of {capacity} objects, {each} each>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_new(self, memory: HostMemory, registered: Sequence[HostMemory]) -> None:
        if any(memory is known for known in registered):
            raise ConfigError("this memory is already registered; do not register it again")
        if memory.layout != self.layout:
            raise PoolMismatch(
                "the layout of the memory differs from that of the pool:"
                f" {differences(self.layout, memory.layout)}; open a pool with the memory's layout"
            )

    @abstractmethod
    def _watch_expiry(self) -> None:
        """Called before a put of objects that expire."""

    @abstractmethod
    def _memory(self, memory: HostMemory | None) -> PagedMemory:
        """The pages of the memory that `_chosen` returns.  Raises PoolClosed."""

    @staticmethod
    def _chosen(memory: HostMemory | None, registered: Sequence[HostMemory]) -> HostMemory:
        """The memory of a call: as given, or the only one that is registered."""
        if memory is None:
            if len(registered) == 1:
                return registered[0]
            if not registered:
                raise ConfigError(
                    "no memory is registered; call allocate_memory() or register() first"
                )
            raise ConfigError(f"{len(registered)} memories are registered; pass one as memory=")
        for known in registered:
            if known is memory:
                return known
        raise ConfigError("this memory is not registered; call store.register(memory) first")

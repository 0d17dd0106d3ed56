"""What a TransferQueue starts transfers with: Writer and Loader, or those of an agent's client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict, Unpack

from tutti.base.arrays import Keys
from tutti.gio_uring.iocb import PagedMemory, Pages
from tutti.transfers.put_request import PutPart
from tutti.transfers.tickets import LoadProgress


class Order(TypedDict, total=False):
    """When a load's commands are issued.  held: layers as ``LoadProgress.grant`` allows.  ahead:
    after other loads, see ObjectStore.load.
    """

    held: bool
    ahead: bool


class PartStarter(Protocol):
    """Starts parts of puts.  batch_pages: most pages of a batch.  active, finished: batches under
    way, and batches that ended.  batch_ended: called after each.
    """

    active: int
    finished: int
    batch_ended: Callable[[], object]

    @property
    def batch_pages(self) -> int: ...

    def put(self, parts: Sequence[PutPart]) -> BaseException | None:
        """Starts parts; each of them ends.  Returns why nothing was started, or None."""


class LoadStarter(Protocol):
    """Starts loads; see Loader.  pages: see iocb.as_pages; checked before for a memory's path."""

    def load(
        self,
        keys: Keys,
        pages: Pages,
        memory: PagedMemory,
        *,
        admit: bool = False,
        waits: bool = True,
        **order: Unpack[Order],
    ) -> LoadProgress: ...

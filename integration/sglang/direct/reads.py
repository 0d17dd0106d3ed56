"""One read of objects of one pool, into staging or directly into SGLang's pages."""

from __future__ import annotations

import threading
import time

from tutti.base.arrays import Keys
from tutti.errors import DeviceTimeout, PagesInUse, TuttiError
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.transfers.tickets import LoadTicket


class Read:
    """A read of objects ``keys`` (n, 16) into ``pages`` (n,).  Thread-safe.

    staged: whether the pages are in the stored pool's staging; else they are in SGLang's pool.
    batch, ahead: as for ObjectStore.load.
    """

    def __init__(
        self,
        stored_pool: StoredPool,
        keys: Keys,
        pages: Pages,
        *,
        staged: bool,
        batch: str = "",
        ahead: bool = False,
    ) -> None:
        self.stored_pool = stored_pool
        self.keys = keys
        self.pages = pages
        self.staged = staged
        self._batch = batch
        self._ahead = ahead
        self.error: Exception | None = None
        self.began_s = self._settled_s = 0.0  # monotonic
        self._ticket: LoadTicket | None = None
        self._started = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes read from the medium."""
        return len(self.keys) * self.stored_pool.page_nbytes

    @property
    def ended_s(self) -> float:
        """time.monotonic() at the end of the medium's part; before that, of the begin."""
        return (self._ticket._read_s() if self._ticket is not None else 0.0) or self._settled_s

    @property
    def has_failed(self) -> bool:
        """Whether a part of it is known to have failed."""
        ticket = self._ticket
        return self.error is not None or (ticket is not None and ticket.failed().size > 0)

    def start(self) -> None:
        """Submits the read, on a thread that may block; a failure is raised to waiters."""
        pool = self.stored_pool.loads.memory if self.staged else self.stored_pool.memory
        self.began_s = self._settled_s = time.monotonic()
        try:
            self._ticket = self.stored_pool.store.load(
                self.keys, self.pages, memory=pool, batch=self._batch, ahead=self._ahead
            )
            self._ticket.on_settled(self._settled)
        except Exception as error:
            self.error = error
        finally:
            self._started.set()

    def _settled(self) -> None:
        self._settled_s = time.monotonic()

    def order_stream(self, stream: int, layer: int) -> None:
        """Makes a GPU stream wait for a layer of SGLang's pool; the read must have been started.

        The stream also continues if the read fails.  Raises the error of a failed start.
        """
        if self.error is not None:
            raise self.error
        if self._ticket is not None:
            self._ticket.order_stream(stream, layer)

    def wait_layer(self, layer: int, deadline_s: float) -> None:
        """Waits until a layer of SGLang's pool is in ``pages``.  Raises TuttiError."""
        if not self._started.wait(max(0.0, deadline_s - time.monotonic())):
            raise DeviceTimeout("the load did not start before its deadline")
        if self.error is not None:
            raise self.error
        if self._ticket is not None:
            own = 0 if self.stored_pool.kv_pool.packed else layer
            self._ticket.wait_layer(own, max(0.001, deadline_s - time.monotonic()))

    def wait_over(self, deadline_s: float) -> bool:
        """Waits until the device does not use ``pages`` any more; False after the deadline."""
        left_s = max(0.0, deadline_s - time.monotonic())
        if not self._started.wait(left_s):
            return False
        if self._ticket is not None:
            return self._ticket.wait_settled(left_s)
        if isinstance(self.error, PagesInUse):
            return self.error.wait_settled(max(0.0, deadline_s - time.monotonic()))
        return True  # the store began nothing, or has ended it

    def outcome(self) -> Exception | None:
        """The error of a read that has ended, or None."""
        if self.error is None and self._ticket is not None:
            try:
                self._ticket.wait(0.001)
            except TuttiError as error:
                self.error = error
        return self.error

    def retire(self) -> None:
        """Frees staging as soon as the device does not use it any more."""
        assert self.staged, "SGLang frees its own pages"
        self.stored_pool.loads.retire(self.pages, lambda: self.wait_over(0.0))

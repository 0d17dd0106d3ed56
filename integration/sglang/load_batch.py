"""The loads of one SGLang batch: each key is read once, and goes to every page that wants it.

The device writes into staging, whose layers are copied into the engine's pages by who waits for
them. A batch that is larger than staging is read into the engine's pages directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import DeviceTimeout, TuttiError
from tutti.host_pool import HostPool
from tutti.integration.sglang.pools import EnginePool, Pages, Views
from tutti.integration.sglang.staging import Staging
from tutti.tickets import LoadTicket

Keys = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class QueuedLoad:
    """What one request wants: keys (n, 16) and engine pages (n,)."""

    keys: Keys
    pages: Pages


@dataclass(frozen=True)
class LoadPlan:
    """Keys (n, 16), each once, and where they go.

    source: the pages (n,) that the device writes, in ``pool`` whose memory is ``views``.
    staged: whether those are staging.
    copy_from, copy_to: (m,) pages of ``views`` and of the engine.
    """

    keys: Keys
    pool: HostPool
    views: Views
    source: Pages
    staged: bool
    copy_from: Pages
    copy_to: Pages


def plan_loads(
    queued: Sequence[QueuedLoad], engine: EnginePool, engine_memory: HostPool, staging: Staging
) -> LoadPlan:
    """Reads each key once: into staging if all fit, else into the first page that wants it."""
    keys = np.concatenate([load.keys for load in queued])
    pages = np.concatenate([load.pages for load in queued])
    rows: dict[bytes, int] = {}
    row_of = np.array([rows.setdefault(key.tobytes(), len(rows)) for key in keys], np.int64)
    _, first = np.unique(row_of, return_index=True)
    source = staging.allocate(len(rows))
    if source is not None and staging.pool is not None:
        return LoadPlan(
            keys[first], staging.pool, staging.views, source, True, source[row_of], pages
        )
    more = np.ones(len(keys), bool)
    more[first] = False
    return LoadPlan(
        keys[first],
        engine_memory,
        engine.views,
        pages[first],
        False,
        pages[first][row_of[more]],
        pages[more],
    )


class LoadBatch:
    """One batch on its way.  Thread-safe; whoever waits does the copying.

    timeout_s: from now to the last layer.
    """

    def __init__(
        self, plan: LoadPlan, engine: EnginePool, staging: Staging, timeout_s: float
    ) -> None:
        self.plan = plan
        self.error: BaseException | None = None
        self.waited_s = 0.0
        self._engine = engine
        self._staging = staging
        self._deadline_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._ticket: LoadTicket | None = None
        self._ready = 0
        self._layers = engine.shape.layers
        self._ended = False

    @property
    def nbytes(self) -> int:
        """What is read from the medium."""
        return len(self.plan.keys) * self.plan.pool.layout.object_nbytes

    def start(self, load: Callable[[LoadPlan], LoadTicket]) -> None:
        """Submits the load, on a thread that may wait."""
        try:
            self._ticket = load(self.plan)
        except Exception as error:
            self.error = error
        finally:
            self._started.set()

    def wait_layer(self, layer: int) -> None:
        """Returns when the layer is in the engine's pages, or ``error`` says why not."""
        if layer < self._ready:
            return
        with self._lock:
            began_s = time.monotonic()
            try:
                for due in range(self._ready, min(layer + 1, self._layers)):
                    if self.error is not None:
                        break
                    self._bring(due)
                    self._ready = due + 1
            except TuttiError as error:
                self.error = error
            self.waited_s += time.monotonic() - began_s

    def end(self) -> bool:
        """Waits for all layers, and gives staging back; whether every page is right.

        Raises DeviceTimeout when the device may still write into the engine's pages.
        """
        self.wait_layer(self._layers - 1)
        if self._ended:
            return self.error is None
        self._ended = True
        if self.plan.staged:
            self._staging.retire(self.plan.source, self._is_over)
        elif not self._wait_over():
            raise DeviceTimeout(
                "the medium has not let go of pages that it was to fill, and SGLang would use them "
                "for other requests; restart the server, with a larger load_staging if this lasts"
            )
        return self.error is None

    def _bring(self, layer: int) -> None:
        if not self._started.wait(max(0.0, self._deadline_s - time.monotonic())):
            raise DeviceTimeout("the load was not started in time")
        if self._ticket is None:
            return
        self._ticket.wait_layer(layer, max(0.001, self._deadline_s - time.monotonic()))
        plan = self.plan
        if plan.copy_to.size:
            for source, target in zip(plan.views[layer], self._engine.views[layer], strict=True):
                target[plan.copy_to] = source[plan.copy_from]

    def _is_over(self) -> bool:
        """Whether the device has let go."""
        if not self._started.is_set():
            return False
        if self._ticket is not None:
            return self._ticket.wait_settled(0.0)
        # Abandoned by the store because the device did not answer: its pages are lost.
        return not isinstance(self.error, DeviceTimeout)

    def _wait_over(self) -> bool:
        left_s = max(1.0, self._deadline_s - time.monotonic())
        if not self._started.wait(left_s):
            return False
        if self._ticket is not None:
            return self._ticket.wait_settled(left_s)
        return self._is_over()

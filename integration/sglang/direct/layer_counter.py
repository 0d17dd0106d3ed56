"""The hook through which SGLang's KV pools wait for a layer before they read it."""

from __future__ import annotations

from collections.abc import Callable

from tutti.integration.sglang.direct.load_batch import LoadBatch


class LayerCounter:
    """Blocks the forward until the layer that it wants is there; on a GPU its stream waits.

    A failure does not raise into the forward: `finish` reports it, and SGLang aborts the batch.
    began: is told of every layer that the forward asks for, and how many seconds it waited.
    """

    def __init__(
        self, num_layers: int, began: Callable[[int, float], object] | None = None
    ) -> None:
        self.num_layers = num_layers
        self._began = began
        self.consumer_index = -1
        self._producer_index = -1
        self._batches: dict[int, LoadBatch] = {}

    @property
    def next_index(self) -> int:
        """The index that ``add`` will answer."""
        return self._producer_index + 1

    def add(self, batch: LoadBatch) -> int:
        """The index by which a batch's forward will ask for it."""
        self._producer_index += 1
        self._batches[self._producer_index] = batch
        return self._producer_index

    def set_consumer(self, index: int) -> None:
        """Which batch the next waits are for; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Returns when the layer is in the engine's pages, or never will be.  Idempotent."""
        batch = self._batches.get(self.consumer_index)
        waited_s = 0.0
        if batch is not None:
            waited_s = -batch.waited_s
            batch.wait_layer(layer)
            waited_s += batch.waited_s
        if self._began is not None:
            self._began(layer, waited_s)

    def finish(self, index: int) -> LoadBatch | None:
        """Takes out a batch."""
        return self._batches.pop(index, None)

    def reset(self, end: Callable[[LoadBatch], object]) -> None:
        """Forgets all batches, ending each."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            end(batch)
        self._producer_index = self.consumer_index = -1

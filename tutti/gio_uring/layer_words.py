"""Words in memory through which an engine's job and the mover of its staging report layers.

The layout is `gio::LayerWords` of gio_uring/layer_words.h; a test compares the two.  Every word
has one writer, and no thread sleeps on it: the engine's thread stores `ready` with release order, a
GPU stream stores `moved` after its copies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti.gio_uring.memory import view_at

#: Bytes before the layers' words: the mover's word has a cache line of its own.
HEAD_NBYTES = 128
LAYER_NBYTES = 8  # `ready` and `status`


class LayerWords:
    """The words of one job of `layers` layers, at an address in memory that the caller keeps."""

    def __init__(self, address: int, layers: int) -> None:
        self.address = address
        self.layers = layers
        self._words: npt.NDArray[np.uint32] = view_at(address, self.nbytes_of(layers)).view(
            np.uint32
        )

    @staticmethod
    def nbytes_of(layers: int) -> int:
        """Bytes of the words for `layers` layers, a multiple of 128."""
        return -(-(HEAD_NBYTES + layers * LAYER_NBYTES) // HEAD_NBYTES) * HEAD_NBYTES

    def clear(self) -> None:
        """Zeroes everything, before the job is submitted."""
        self._words[:] = 0

    def grant(self, layers: int) -> None:
        """Lets the engine begin the first `layers` layers; call it before the submission."""
        self._words[0] = layers

    @property
    def moved(self) -> int:
        """Number of layers that the engine may begin: the mover filled or freed their places."""
        return int(self._words[0])

    def status(self, layer: int) -> int:
        """The job's first error when `layer` ended; 0 for none, or before the end."""
        return int(self._words[self._index(layer) + 1])

    def is_ready(self, layer: int) -> bool:
        """Whether the engine has published the final status of `layer`."""
        return bool(self._words[self._index(layer)])

    def abort(self, status: int) -> None:
        """Ends the layers that are not ready with an error, after the engine or kernel that should
        end them has stopped.
        """
        for layer in range(self.layers):
            if not self.is_ready(layer):
                self._words[self._index(layer) + 1] = status
                self._words[self._index(layer)] = 1

    def ready_offset(self, layer: int) -> int:
        """Offset of a layer's word from `address`, in bytes."""
        return self._index(layer) * 4

    def _index(self, layer: int) -> int:
        assert 0 <= layer < self.layers, "a layer of the job"
        return (HEAD_NBYTES + layer * LAYER_NBYTES) // 4

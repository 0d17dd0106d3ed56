"""Launches the kernels of a job's layers, and decides their order on a stream.

kernels/device/parameters.cuh describes each kernel.  `launch` has short kernels for every layer,
`resident` one kernel per layer that waits for it; `persistent` has one kernel for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.base.arrays import U64
from tutti.base.process import Owned
from tutti.gio_uring.gpu.device_batch import DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_queues import DeviceQueues
from tutti.gio_uring.gpu.parameters import BLOCK_THREADS_MAX
from tutti.gio_uring.gpu.stream_queue import StagedLayers, StreamQueue

_WARP = 32


@dataclass(frozen=True)
class KernelWork:
    """What kernels need of a job until its end.

    computed: array for the digests of a write, or None.  timeout_s: limit of each wait in a kernel.
    """

    batch: DeviceBatch
    staged: StagedLayers
    is_read: bool
    computed: U64 | None
    timeout_s: float

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.staged.words.layers


class Launcher(Owned):
    """Enqueues layers on a stream queue.  The hooks for persistent kernels do nothing here.

    move_blocks: number of blocks of a kernel that moves slices.
    """

    def __init__(
        self, modules: Modules, queues: DeviceQueues, stream_queue: StreamQueue, move_blocks: int
    ) -> None:
        self._modules, self._queues = modules, queues
        self._stream_queue, self._move_blocks = stream_queue, move_blocks

    def wake(self, layers: int, timeout_s: float) -> None:
        """Prepares for a job, under the stream queue's lock.  Raises DeviceTimeout."""

    def begin(self, work: KernelWork) -> None:
        """Called once the job's tables are enqueued; from now on the device may use its memory."""

    def put_layer(self, work: KernelWork, layer: int, window: range) -> None:
        """Enqueues one layer: work that is enqueued later finds it moved or failed.

        window: the layers that are enqueued together; other jobs may come behind its last one, and
        none of its commands may be in flight then.
        """
        raise NotImplementedError

    def is_overdue(self, work: KernelWork) -> bool:
        """Whether no kernel works on ``work``, the first job, any more."""
        return False

    def rest(self) -> None:
        """Called regularly while there is no job; makes no CUDA call."""

    def stop(self, timeout_s: float) -> bool:
        """Ends a persistent kernel.  False if it still runs after the timeout."""
        return True

    def close(self) -> None:
        """Frees its memory; none of its kernels may run."""

    def _launch(
        self, name: str, work: KernelWork, layer: int, threads: int, publish: int | None
    ) -> None:
        launch_layer(
            self._stream_queue.driver,
            self._modules[f"{name}_{self._queues.ring}"],
            work.batch,
            layer,
            self._stream_queue.stream,
            self._queues.count,
            threads=threads,
            publish=publish,
        )


class ResidentKernels(Launcher):
    """One kernel per layer, which runs until the layer is complete."""

    def put_layer(self, work: KernelWork, layer: int, window: range) -> None:
        self._launch("gio_resident", work, layer, BLOCK_THREADS_MAX, 1)


class ShortKernels(Launcher):
    """Per layer: a kernel that submits, one that reaps completions, and one that moves slices."""

    def put_layer(self, work: KernelWork, layer: int, window: range) -> None:
        """Submits reads one layer of the window ahead if the staging has room."""
        if not work.is_read:
            self._move(work, layer, publish=0)
            self._launch("gio_drain", work, layer, _WARP, 1)
            return
        if layer == window.start:
            self._launch("gio_submit", work, layer, _WARP, None)
        if work.staged.window > 1 and layer + 1 < window.stop:
            self._launch("gio_submit", work, layer + 1, _WARP, None)
        self._launch("gio_drain", work, layer, _WARP, 0)
        self._move(work, layer, publish=1)

    def _move(self, work: KernelWork, layer: int, *, publish: int) -> None:
        stream_queue, function = self._stream_queue, self._modules["gio_move"]
        launch_layer(
            stream_queue.driver,
            function,
            work.batch,
            layer,
            stream_queue.stream,
            self._move_blocks,
            publish=publish,
        )

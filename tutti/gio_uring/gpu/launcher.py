"""Launches the kernels of a job's layers, and decides their order on a stream.

kernels/device/parameters.cuh describes each kernel.  `launch` has short ones for every layer,
`resident` one that stays for its layer; `persistent` has one that stays for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.base.arrays import U64
from tutti.base.process import Owned
from tutti.gio_uring.gpu.device_batch import DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_queues import DeviceQueues
from tutti.gio_uring.gpu.stream_queue import StagedLayers, StreamQueue

_WARP = 32


@dataclass(frozen=True)
class KernelWork:
    """What kernels need of a job until it is over.

    computed: where the digests of a write go, or None.  timeout_s: of each wait in a kernel.
    """

    batch: DeviceBatch
    staged: StagedLayers
    is_read: bool
    computed: U64 | None
    timeout_s: float

    @property
    def layers(self) -> int:
        """How many there are."""
        return self.staged.words.layers


class Launcher(Owned):
    """Enqueues layers on a stream queue.  Hooks of persistent kernels do nothing here.

    threads: of a block that moves slices.  move_blocks: of the kernel that moves slices.
    """

    def __init__(
        self,
        modules: Modules,
        queues: DeviceQueues,
        stream_queue: StreamQueue,
        threads: int,
        move_blocks: int,
    ) -> None:
        self._modules, self._queues = modules, queues
        self._stream_queue = stream_queue
        self._threads, self._move_blocks = threads, move_blocks

    def wake(self, layers: int, timeout_s: float) -> None:
        """Prepares a job, under the stream queue's lock.  Raises DeviceTimeout."""

    def begin(self, work: KernelWork) -> None:
        """The tables are on the stream; from here on the device may touch memory."""

    def put_layer(self, work: KernelWork, layer: int) -> None:
        """Puts one layer on the stream: what comes behind it finds the layer moved, or failed."""
        raise NotImplementedError

    def is_overdue(self, work: KernelWork) -> bool:
        """Whether no kernel works any more on the job that is the first of all."""
        return False

    def rest(self) -> None:
        """Looked in while there is no job; makes no CUDA call."""

    def stop(self, timeout_s: float) -> bool:
        """Ends what stays.  False when it still runs after the timeout."""
        return True

    def close(self) -> None:
        """Releases its memory; none of its kernels may run."""

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
    """One kernel a layer, which stays for all of it."""

    def put_layer(self, work: KernelWork, layer: int) -> None:
        self._launch("gio_resident", work, layer, self._threads, 1)


class ShortKernels(Launcher):
    """A kernel that sends a layer's commands, one that takes their ends, and one that moves."""

    def put_layer(self, work: KernelWork, layer: int) -> None:
        """Reads are sent a layer ahead where staging has the room."""
        if not work.is_read:
            self._move(work, layer, publish=0)
            self._launch("gio_drain", work, layer, _WARP, 1)
            return
        if layer == 0:
            self._launch("gio_submit", work, 0, _WARP, None)
        if work.staged.window > 1 and layer + 1 < work.layers:
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

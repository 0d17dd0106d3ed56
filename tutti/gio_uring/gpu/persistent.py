"""The engine `persistent`: one kernel that runs across layers and jobs.

The first job launches it, not the constructor: registrations and allocations of a starting program
may wait for all kernels.  It is told to end after a time without jobs, and the next job launches it
again.  It gets work through pinned words, each with one writer:

posts, stop   the host          posted        the stream queue, after the tables were copied
consumed[b]   block b           layer words   the kernel, or the host once that is overdue

The stream queue waits for the layers' words as in `HostEngine`.  Nothing is enqueued after the
kernel on its own stream.  docs/gpu.md lists the calls that are forbidden while it runs.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.process import finalize
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_queues import DeviceQueues
from tutti.gio_uring.gpu.launcher import KernelWork, Launcher
from tutti.gio_uring.gpu.parameters import BLOCK_THREADS_MAX, MailboxStruct, PostStruct
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory
from tutti.gio_uring.gpu.stream_queue import StreamQueue, wait_until
from tutti.gio_uring.memory import view_at

#: Entries of the ring of posts, one per layer of a job; a power of two.
CAPACITY = 1024
#: After this time without posts the kernel ends by itself, for a host process that is gone.
_IDLE_TIMEOUT_S = 3600.0
#: Limit for moving a layer's slices, added to the time-out of its commands.
_GRACE_S = 5.0
_TABLE_TIMEOUT_S = 10.0
_LINE_NBYTES = 128
_POSTED, _STOP, _CONSUMED = (n * _LINE_NBYTES for n in (1, 2, 3))
_MASK = 0xFFFFFFFF
_POST = np.dtype(PostStruct)


class PersistentKernel(Launcher):
    """The kernel, its mailbox and its stream.

    stream: used only by the kernel, such as a green context's; by default a new one.
    rest_s: time without a job after which the kernel is told to end.
    """

    def __init__(
        self,
        modules: Modules,
        queues: DeviceQueues,
        stream_queue: StreamQueue,
        tables: TableMemory,
        stream: int | None,
        rest_s: float,
    ) -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise ConfigError(
                "CUDA_LAUNCH_BLOCKING=1 waits for every kernel, and this one stays; unset it, or "
                "use another engine"
            )
        super().__init__(modules, queues, stream_queue, 0)
        self._driver = driver = stream_queue.driver
        self._function = modules[f"gio_persistent_{queues.ring}"]
        posts = -(-(_CONSUMED + 4 * queues.count) // _LINE_NBYTES) * _LINE_NBYTES
        place = tables.lease(posts + CAPACITY * _POST.itemsize, _TABLE_TIMEOUT_S, LeaseOwner())
        self._pinned = pinned = place.host.address + place.to_device
        memory = view_at(place.host.address, place.host.nbytes)
        memory[:] = 0
        words: npt.NDArray[np.uint32] = memory.view(np.uint32)
        self._posted_word = words[_POSTED // 4 :][:1]
        self._stop_word = words[_STOP // 4 :][:1]
        self._consumed = words[_CONSUMED // 4 :][: queues.count]
        self._posts: Any = memory[posts:][: CAPACITY * _POST.itemsize].view(_POST)
        box = MailboxStruct(
            posts=pinned + posts,
            posted=pinned + _POSTED,
            stop=pinned + _STOP,
            consumed=pinned + _CONSUMED,
            idle_timeout_ns=int(_IDLE_TIMEOUT_S * 1e9),
            capacity=CAPACITY,
        )
        nbytes = ctypes.sizeof(box)
        memory[:nbytes] = np.frombuffer(box, np.uint8)  # type: ignore[call-overload]
        self._address = place.device.address
        self._own_stream = stream is None
        self._stream = driver.create_stream() if stream is None else stream
        tables.upload(place, nbytes, self._stream)
        self._rest_s = rest_s
        self._posted = 0
        self._is_running = False
        self._quiet_since_s = time.monotonic()
        self._progress: tuple[int, ...] = ()
        self._progress_s = 0.0
        # For a process that ends without close: ends the kernel.
        self._finalizer = finalize(self, _store_stop, self._stop_word, tables)

    def wake(self, layers: int, timeout_s: float) -> None:
        if layers > CAPACITY:
            raise ConfigError(
                f"the engine persistent supports {CAPACITY} layers at once, not {layers}; use "
                "another engine"
            )
        self._quiet_since_s = time.monotonic()
        if not self._is_running:
            if not wait_until(lambda: self._driver.is_stream_done(self._stream), timeout_s):
                raise DeviceTimeout(
                    f"the kernel that was told to end still runs after {timeout_s:g} s; close the "
                    "engine"
                )
            self._stop_word[0] = 0
            arguments = [(self._address, ctypes.c_void_p)]
            count, threads = self._queues.count, BLOCK_THREADS_MAX
            try:
                self._driver.launch(self._function, count, threads, arguments, self._stream)
                self._is_running = True
            except BaseException:  # interrupted: the kernel may run
                self._stop_word[0] = 1
                self._is_running = False
                raise
        if not wait_until(lambda: self._outstanding() + layers <= CAPACITY, timeout_s):
            raise DeviceTimeout(
                f"the persistent kernel accepted no work for {timeout_s:g} s; close the engine"
            )

    def _outstanding(self) -> int:
        """Number of posts that the slowest block has not consumed."""
        return int(((self._posted - self._consumed.astype(np.int64)) & _MASK).max())

    def begin(self, work: KernelWork) -> None:
        for layer in range(work.layers):
            place = (self._posted + layer) % CAPACITY
            self._posts[place] = (work.batch.address, layer, 1)
        posted = (self._posted + work.layers) & _MASK
        # The stream stores it after the copy of the tables, and after streams that it follows.
        self._driver.write_value(self._stream_queue.stream, self._pinned + _POSTED, posted)
        self._posted = posted

    def put_layer(self, work: KernelWork, layer: int, window: range) -> None:
        words = work.staged.device_words + work.staged.words.ready_offset(layer)
        self._driver.wait_value(self._stream_queue.stream, words, 1)

    def is_overdue(self, work: KernelWork) -> bool:
        """Whether there are posts and the kernel made no progress for the job's time-out.

        A layer ends within the job's time-out; it is later only if the kernel does not run.
        """
        posted, consumed = int(self._posted_word[0]), self._consumed.tolist()
        progress, now_s = (id(work), posted, *consumed), time.monotonic()
        self._quiet_since_s = now_s
        if progress != self._progress or all(done == posted for done in consumed):
            self._progress, self._progress_s = progress, now_s
        return now_s - self._progress_s > work.timeout_s + _GRACE_S

    def rest(self) -> None:
        now_s = time.monotonic()
        if not self._is_running or self._outstanding():
            self._quiet_since_s = now_s
        # If the lock is taken, its holder is about to post.
        if now_s - self._quiet_since_s < self._rest_s or not self._stream_queue.lock.acquire(
            blocking=False
        ):
            return
        try:
            if self._is_running and not self._outstanding():
                self._stop_word[0] = 1
                self._is_running = False
        finally:
            self._stream_queue.lock.release()

    def stop(self, timeout_s: float) -> bool:
        self._stop_word[0] = 1
        self._is_running = False
        return wait_until(lambda: self._driver.is_stream_done(self._stream), timeout_s)

    def close(self) -> None:
        self._finalizer.detach()
        if self._own_stream:
            self._driver.destroy_stream(self._stream)


def _store_stop(word: npt.NDArray[np.uint32], tables: TableMemory) -> None:
    """Tells the kernel to end.  tables: keeps the memory of the word."""
    word[0] = 1

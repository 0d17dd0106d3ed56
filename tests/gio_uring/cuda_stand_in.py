"""A stand-in for the CUDA driver: streams are ordered worker threads over host memory.

It does not emulate a GPU: it shows that the product enqueues the right things in the right order
and never waits for itself, not that a GPU does them.  Device addresses are host addresses with a
mark, so that the two are not mixed up.

It is hostile, as a driver may be to careless code: streams share 8 queues, so that what is behind
a wait of another stream waits, too; a full queue blocks the calls of every thread; and creating a
stream or an event and what may wait for the device wait for all that is enqueued by then.  Code
that waits for itself gets a `CudaError` in the end.  `queue_max` makes queues shorter, and
`queues=1` puts all streams on one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from gio_uring.enqueuing import Enqueuing, enqueues

from tutti.base.arrays import U64
from tutti.errors import CudaError
from tutti.gio_uring.gpu.calls import Arguments
from tutti.gio_uring.gpu.driver import SmResource

PINNED_MARK = 1 << 56
DEVICE_MARK = 1 << 57
_GIVE_UP_S = 30.0
_LAUNCH_TIMEOUT = 702
#: Hardware queues that SGLang asks for, by CUDA_DEVICE_MAX_CONNECTIONS.
_QUEUES = 8
#: Calls that may wait for every kernel: docs/gpu.md, "The persistent kernel".
_SYNCHRONISE = {
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
}
#: Calls that wait for what is enqueued, if not for kernels that stay.
_WAIT = _SYNCHRONISE | {"cuStreamCreateWithPriority", "cuEventCreate"}


@dataclass
class _Work:
    """One thing on a stream: done when `step` returns True."""

    step: Callable[[], bool]
    waits_for: int = 0  # the host address of a word


@dataclass
class _Queue:
    work: deque[_Work] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    done: int = 0
    added: int = 0
    stays: bool = False  # one stream's own, whose kernel stays


class StandInDriver:
    """The calls of `Driver`.

    entered: calls into the driver, with those that are made together as one.
    fail: {name of a call: which one from now fails}.  violations: what the product must never do.
    watchdog_s: kernels that stay longer lose the context, as on a GPU with a display.  kernels:
    what `launch` runs, by name, given the arguments.  staying: the same for kernels that stay; what
    they return is run again and again, until it is True.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        queues: int = _QUEUES,
        queue_max: int = 1024,
        give_up_s: float = _GIVE_UP_S,
        has_copy_batch: bool = True,
        watchdog_s: float = 0.0,
        sms: SmResource | None = None,
    ) -> None:
        self.device = 0
        self.numa_node: int | None = None
        self.violations: list[str] = []
        self.fail: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.local_batches = 0
        self.kernels: dict[str, Callable[..., None]] = {}
        self.staying: dict[str, Callable[..., Callable[[], bool]]] = {}
        self._stays = 0  # kernels that stay, and have not ended
        self.owed: dict[int, tuple[int, int]] = {}  # address -> (nbytes, thread that must act)
        self._rng = np.random.default_rng(seed)
        self._has_copy_batch = has_copy_batch
        self._watchdog_s = watchdog_s
        self._is_lost = False
        self._queue_max, self._give_up_s = queue_max, give_up_s
        self._gate = threading.RLock()  # held by a call that waits
        self._sms = sms or SmResource(132, 8, 8)
        self._queues: list[_Queue] = []
        self._streams: dict[int, tuple[_Queue, int]] = {}
        self._events: dict[int, tuple[_Queue, int] | None] = {}
        self._registered: dict[int, int] = {}
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._functions: dict[int, str] = {}
        self._greens: dict[int, int] = {}
        self._next = 1
        self._lock = threading.RLock()
        self._stop = False
        self.enqueuing, self.entered = Enqueuing(self._entered), 0
        self._threads: list[threading.Thread] = []
        self._shared = deque(self._add_queue() for _ in range(queues))  # the next stream's first
        self._default = self.create_stream()
        #: PyTorch's, which makes them while streams wait for what a test opens.
        self.spare_events = deque(self.create_event() for _ in range(64))

    # -- the stand-in itself

    def _add_queue(self) -> _Queue:
        queue = _Queue()
        self._queues.append(queue)
        thread = threading.Thread(target=self._work, args=(queue,), daemon=True, name="stand-in")
        self._threads.append(thread)
        thread.start()
        return queue

    def _work(self, queue: _Queue) -> None:
        while not self._stop:
            with queue.changed:
                queue.changed.wait_for(lambda: queue.work or self._stop, 0.2)
                work = queue.work[0] if queue.work else None
            if work is None:
                continue
            if work.step():
                with queue.changed:
                    queue.work.popleft()
                    queue.done += 1
                    queue.changed.notify_all()
            else:
                time.sleep(0.0001)

    def _entered(self) -> None:
        with self._lock:
            self.entered += 1

    def _called(self, name: str) -> None:
        """Counts, fails on demand, checks the rules, and waits where a driver may."""
        with self._gate, self._lock:
            self.calls[name] = self.calls.get(name, 0) + 1
            left = self.fail.get(name, 0)
            if left:
                self.fail[name] = left - 1
                if left == 1:
                    raise CudaError(f"{name} failed; a test said so", call=name, code=719)
            if self._stays and name in _SYNCHRONISE:
                self.violations.append(f"{name} while a kernel stays")
            if self._is_lost:
                raise CudaError(f"{name}: a kernel ran too long", call=name, code=_LAUNCH_TIMEOUT)
            thread = threading.current_thread()
            if thread.name.startswith("gio-"):
                self.violations.append(f"{name} on {thread.name}, a controller's thread")
            for queue in self._queues:
                for work in list(queue.work):
                    for address, (nbytes, ident) in self.owed.items():
                        inside = address <= work.waits_for < address + nbytes
                        if inside and ident == thread.ident:
                            self.violations.append(f"{name} while a stream waits for its caller")
        if name in _WAIT:
            with self._gate:
                for queue in [queue for queue in self._queues if not queue.stays]:
                    last = queue.added
                    self._wait(queue, lambda q=queue, n=last: q.done >= n, name)  # type: ignore[misc]

    def _wait(self, queue: _Queue, holds: Callable[[], bool], name: str) -> None:
        with queue.changed:
            if not holds() and not queue.changed.wait_for(holds, self._give_up_s):
                text = f"deadlock: {name} waits for the device, and that for its caller"
                raise CudaError(text, call=name, code=_LAUNCH_TIMEOUT)

    def _put(self, stream: int, work: _Work) -> tuple[_Queue, int]:
        queue, _ = self._streams[stream or self._default]
        with self._gate, queue.changed:
            self._wait(queue, lambda: len(queue.work) < self._queue_max, "a full queue")
            queue.work.append(work)
            queue.added += 1
            self._streams[stream or self._default] = (queue, queue.added)
            queue.changed.notify_all()
            return queue, queue.added

    def _handle(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def host(self, address: int, nbytes: int) -> int:
        """The host address behind a device address; a plain host address stays what it is."""
        if address & DEVICE_MARK:
            plain = address & ~DEVICE_MARK
            for start, memory in self._memory.items():
                if start <= plain and plain + nbytes <= start + memory.size:
                    return plain
            raise CudaError(f"{address:#x} is not device memory; a wild address")
        if address & PINNED_MARK:
            plain = address & ~PINNED_MARK
            for start, length in self._registered.items():
                if start <= plain and plain + nbytes <= start + length:
                    return plain
            raise CudaError(f"{address:#x} is not registered; a wild address")
        return address

    def _is_devices(self, address: int) -> bool:
        return bool(address & (PINNED_MARK | DEVICE_MARK))

    def array(self, address: int) -> npt.NDArray[np.uint8]:
        """The bytes of an allocation of device memory."""
        return self._memory[address & ~DEVICE_MARK]

    @enqueues
    def call(self, stream: int, function: Callable[[], object]) -> None:
        """Calls on a stream's own thread, once all that is on it by now is over."""
        self._put(stream, _Work(lambda: function() is None or True))

    def close(self) -> None:
        self._stop = True
        for queue in self._queues:
            with queue.changed:
                queue.changed.notify_all()
        for thread in self._threads:
            thread.join(2)

    # -- the protocol

    @property
    def architecture(self) -> str:
        return "sm_90"

    @property
    def has_copy_batch(self) -> bool:
        return self._has_copy_batch

    @property
    def limits_kernels(self) -> bool:
        return self._watchdog_s > 0

    def together(self) -> AbstractContextManager[None]:
        return self.enqueuing.together()

    def create_stream(self, priority: int = 0) -> int:
        self._called("cuStreamCreateWithPriority")
        handle = self._handle()
        with self._lock:
            self._shared.rotate(-1)
            self._streams[handle] = (self._shared[-1], 0)
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._called("cuStreamDestroy")
        assert self._is_past(self._streams.pop(stream)), "a stream destroyed while it has work"

    @staticmethod
    def _is_past(place: tuple[_Queue, int] | None) -> bool:
        return place is None or place[0].done >= place[1]

    def is_stream_done(self, stream: int) -> bool:
        self._called("cuStreamQuery")
        return self._is_past(self._streams[stream or self._default])

    @enqueues
    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._called("cuStreamWaitValue32")
        assert self._is_devices(address), "a device address"
        host = self.host(address, 4)
        word = ctypes.c_int32.from_address(host)
        self._put(stream, _Work(lambda: word.value - value >= 0, host))

    @enqueues
    def write_value(self, stream: int, address: int, value: int) -> None:
        self._called("cuStreamWriteValue32")
        assert self._is_devices(address), "a device address"
        word = ctypes.c_uint32.from_address(self.host(address, 4))

        def write() -> bool:
            word.value = value
            return True

        self._put(stream, _Work(write))

    @enqueues
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._called("cuMemcpyAsync")
        self._copies([(target, source, nbytes)], stream)

    @enqueues
    def copy_batch(
        self, targets: U64, sources: U64, nbytes: U64, stream: int, *, is_local: bool = False
    ) -> None:
        self._called("cuMemcpyBatchAsync")
        assert self._has_copy_batch
        self.local_batches += is_local
        ends = np.concatenate((targets, sources)) & np.uint64(PINNED_MARK)
        if is_local == bool(ends.any()):
            self.violations.append("a batch of copies with the flags of the other kind")
        rows = list(zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True))
        self._copies([rows[i] for i in self._rng.permutation(len(rows))], stream)

    def _copies(self, rows: Sequence[tuple[int, int, int]], stream: int) -> None:
        plain = [(self.host(t, n), self.host(s, n), n) for t, s, n in rows]

        def move() -> bool:
            for target, source, nbytes in plain:
                ctypes.memmove(target, source, nbytes)
            return True

        self._put(stream, _Work(move))

    @enqueues
    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self._called("cuMemsetD8Async")
        plain = self.host(target, nbytes)

        def fill() -> bool:
            ctypes.memset(plain, value, nbytes)
            return True

        self._put(stream, _Work(fill))

    def create_event(self) -> int:
        self._called("cuEventCreate")
        handle = self._handle()
        self._events[handle] = None
        return handle

    def destroy_event(self, event: int) -> None:
        self._called("cuEventDestroy")
        del self._events[event]

    @enqueues
    def record_event(self, event: int, stream: int) -> None:
        self._called("cuEventRecord")
        assert event in self._events
        self._events[event] = self._put(stream, _Work(lambda: True))

    @enqueues
    def stream_wait_event(self, stream: int, event: int) -> None:
        self._called("cuStreamWaitEvent")
        place = self._events[event]  # the record that counts is the one before this call
        self._put(stream, _Work(lambda: self._is_past(place)))

    def is_event_done(self, event: int) -> bool:
        self._called("cuEventQuery")
        return self._is_past(self._events[event])

    def register_host(self, address: int, nbytes: int) -> bool:
        self._called("cuMemHostRegister")
        for start, length in self._registered.items():
            if start < address + nbytes and address < start + length:
                inside = start <= address and address + nbytes <= start + length
                if not inside:
                    raise CudaError("partly registered", call="cuMemHostRegister", code=712)
                return False
        self._registered[address] = nbytes
        return True

    def register_io(self, address: int, nbytes: int) -> None:
        assert self.register_host(address, nbytes), "registers were registered before"

    def unregister_host(self, address: int) -> None:
        self._called("cuMemHostUnregister")
        del self._registered[address]

    def device_address(self, address: int) -> int:
        self.host(address | PINNED_MARK, 1)
        return address | PINNED_MARK

    def allocate(self, nbytes: int) -> int:
        self._called("cuMemAlloc")
        memory = np.zeros(nbytes + 256, np.uint8)
        start = -memory.ctypes.data % 256
        memory = memory[start : start + nbytes]
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data) | DEVICE_MARK

    def free(self, address: int) -> None:
        self._called("cuMemFree")
        del self._memory[address & ~DEVICE_MARK]

    def load_module(self, image: bytes) -> int:
        self._called("cuModuleLoadData")
        assert image[:4] == b"\x7fELF"
        return self._handle()

    def unload_module(self, module: int) -> None:
        self._called("cuModuleUnload")

    def find_function(self, module: int, name: str) -> int:
        self._called("cuModuleGetFunction")
        handle = self._handle()
        self._functions[handle] = name
        return handle

    @enqueues
    def launch(
        self, function: int, grid: int, block: int, arguments: Arguments, stream: int
    ) -> None:
        self._called("cuLaunchKernel")
        name = self._functions[function]
        values = [kind(value).value for value, kind in arguments]
        if name in self.staying:
            self._leave_queue(stream or self._default)
            self._put(stream, _Work(self._stay(lambda: self.staying[name](*values))))
            return

        def run() -> bool:
            self.kernels[name](*values)
            return True

        self._put(stream, _Work(run))

    def _leave_queue(self, stream: int) -> None:
        """A kernel that runs is on no hardware queue, so that it is in the way of its own stream
        alone: gives that one a queue of its own."""
        former = self._streams[stream]
        if not former[0].stays:
            self._streams[stream] = (self._add_queue(), 0)
            self._streams[stream][0].stays = True
            self._put(stream, _Work(lambda: self._is_past(former)))

    def _stay(self, begin: Callable[[], Callable[[], bool]]) -> Callable[[], bool]:
        """Counts a kernel as there until its step says that it has ended."""
        self._stays += 1
        step: Callable[[], bool] | None = None
        began_s = 0.0

        def run() -> bool:
            nonlocal step, began_s
            began_s = began_s or time.monotonic()
            step = step or begin()
            ended = step()
            if self._watchdog_s and time.monotonic() - began_s > self._watchdog_s:
                self._is_lost = ended = True
            self._stays -= ended
            return ended

        return run

    def sm_resource(self) -> SmResource:
        return self._sms

    def create_green_context(self, sms: int) -> tuple[int, int]:
        self._called("cuGreenCtxCreate")
        step = self._sms.granularity
        count = max(self._sms.minimum, -(-sms // step) * step)
        handle = self._handle()
        self._greens[handle] = count
        return handle, count

    def create_green_pair(self, sms: int) -> tuple[tuple[int, int], tuple[int, int]]:
        handle, count = self.create_green_context(sms)
        rest = self._handle()
        self._greens[rest] = self._sms.count - count
        return (handle, count), (rest, self._greens[rest])

    def create_green_stream(self, context: int, priority: int = 0) -> int:
        self._called("cuGreenCtxStreamCreate")
        assert context in self._greens
        return self.create_stream(priority)

    def destroy_green_context(self, context: int) -> None:
        self._called("cuGreenCtxDestroy")
        del self._greens[context]


class StandInTensor:
    """Device memory as PyTorch hands it over."""

    def __init__(self, driver: StandInDriver, nbytes: int) -> None:
        self._address = driver.allocate(nbytes)
        self._nbytes = nbytes
        self.array = driver.array(self._address)

    def data_ptr(self) -> int:
        return self._address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self._nbytes

    def element_size(self) -> int:
        return 1

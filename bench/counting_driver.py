"""A CUDA driver that does nothing and counts calls, to measure an engine's own cost.

Work on a stream ends at once and no byte moves, so a transfer's result is meaningless.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tutti.base.arrays import U64
from tutti.gio_uring.gpu.calls import Arguments
from tutti.gio_uring.gpu.driver import SmResource
from tutti.gio_uring.memory import HostBuffer

_WORD_NBYTES = 8  # of a handle, an address or a number in a call
_ROW_NBYTES = 24  # target, source and length of one copy of a batch


class CountingDriver:
    """The methods of `Driver` that transfers use; counts enqueueing calls and argument bytes."""

    device = 0
    architecture = "sm_90"
    has_copy_batch = True
    limits_kernels = False
    numa_node: int | None = None

    def __init__(self) -> None:
        self.calls = 0
        self.argument_nbytes = 0
        self._memory: dict[int, HostBuffer] = {}
        self._handles = 0

    def _count(self, words: int) -> None:
        self.calls += 1
        self.argument_nbytes += _WORD_NBYTES * words

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def create_stream(self, priority: int = 0) -> int:
        return self._handle()

    def destroy_stream(self, stream: int) -> None:
        pass

    def is_stream_done(self, stream: int) -> bool:
        return True

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._count(3)

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Stores the word, as the only call with an effect: other threads wait for it."""
        self._count(3)
        ctypes.c_uint32.from_address(address).value = value

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._count(4)

    def copy_batch(
        self, targets: U64, sources: U64, nbytes: U64, stream: int, *, is_local: bool = False
    ) -> None:
        self._count(1)
        self.argument_nbytes += _ROW_NBYTES * targets.size

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self._count(4)

    def create_event(self) -> int:
        return self._handle()

    def destroy_event(self, event: int) -> None:
        pass

    def record_event(self, event: int, stream: int) -> None:
        self._count(2)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._count(2)

    def is_event_done(self, event: int) -> bool:
        return True

    def register_host(self, address: int, nbytes: int) -> bool:
        return True

    def unregister_host(self, address: int) -> None:
        pass

    def device_address(self, address: int) -> int:
        return address

    def allocate(self, nbytes: int) -> int:
        memory = HostBuffer(nbytes, hugepages=False)
        self._memory[memory.address] = memory
        return memory.address

    def free(self, address: int) -> None:
        del self._memory[address]

    def launch(
        self, function: int, grid: int, block: int, arguments: Arguments, stream: int
    ) -> None:
        self._count(4 + len(arguments))

    def sm_resource(self) -> SmResource:
        return SmResource(132, 8, 8)


class NamedKernels:
    """Replaces `Modules`: all kernels have the same handle, and nothing is compiled."""

    def __getitem__(self, name: str) -> Any:
        return 1

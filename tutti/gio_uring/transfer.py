"""Interface of every way to move pages: submitters, and the transfers that they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.layer_words import LayerWords

#: `Options.timeout_s` where it is not given.
TIMEOUT_S = 30.0


class Transfer(Protocol):
    """Pages on their way, layer by layer; `Job` is one."""

    @property
    def page_status(self) -> npt.NDArray[np.uint32]:
        """uint32 (pages,), 0 or the first NVMe status that a page met."""

    @property
    def done(self) -> bool:
        """Whether every layer is where it shall be, or failed."""

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers are there or the transfer failed; False after the timeout."""

    def order_stream(self, stream: int, layers: int) -> None:
        """Lets a stream of the GPU wait for `layers` layers.  Unsupported for host memory."""

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until no device can touch memory for it any more; False after the timeout."""

    def open_gate(self) -> None:
        """Lets a gated transfer compare its digests."""

    def cancel(self) -> None:
        """Issues nothing more."""


@runtime_checkable
class HeldTransfer(Protocol):
    """A transfer whose layers can be granted, see `Job.grant`."""

    @property
    def layers_ready(self) -> int:
        """Layers that came from the medium, from the first on."""

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """Lets the first ``layers`` layers be issued."""


class TransferOptions(TypedDict, total=False):
    """Options of a transfer.

    digests: uint64 (n, layers), filled with each slice's digest, or compared with it when
    ``compare``; with ``gated`` only once the gate was opened.
    held: its layers are issued as `HeldTransfer.grant` lets them, or all after ``timeout_s``; for
    host memory, and for GPU memory by an engine that says so.
    ahead: a load in host memory that nothing waits for: its commands come after those of other
    loads, until `Transfer.wait_layers` is called.
    priority: PRIORITY_RECORDS (default), PRIORITY_LOAD or PRIORITY_STORE; lower goes first.
    timeout_s: how long one command may be outstanding (default TIMEOUT_S).
    on_released: called with the transfer once the medium is done with it.
    """

    digests: U64 | None
    compare: bool
    gated: bool
    held: bool
    ahead: bool
    priority: int
    timeout_s: float
    on_released: Callable[[Any], None] | None


class HostOptions(TransferOptions, total=False):
    """Options in host memory.  fua: a write is durable when it ends.

    words: shared with a mover of the memory, cleared and kept until the job was released: the
    engine marks each layer there, and begins layer l only once ``moved + window > l``.
    layer_ns: uint64 (layers,), filled with the times at which they were ready, by CLOCK_MONOTONIC
    or the controller's own.  Commands of all loads are issued in the order in which their layers
    are due: the first one of a load at once, each of the others as fast as the drive delivers.
    """

    fua: bool
    words: LayerWords | None
    window: int
    layer_ns: U64 | None


class Submitter(Protocol):
    """Moves slices between the medium and one kind of memory; `Engine` does for host memory."""

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[TransferOptions],
    ) -> Transfer:
        """See `Engine.submit`."""

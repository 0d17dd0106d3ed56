"""The interface to all engines that move pages: submitters, and the transfers they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.layer_words import LayerWords

#: Default of `TransferOptions.timeout_s`.
TIMEOUT_S = 30.0


class Transfer(Protocol):
    """A transfer of pages, layer by layer; `Job` implements it."""

    @property
    def page_status(self) -> npt.NDArray[np.uint32]:
        """uint32 (pages,), 0 or the first error status of a page."""

    @property
    def done(self) -> bool:
        """Whether every layer was moved or failed."""

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers are there or the transfer failed; False after the timeout."""

    def order_stream(self, stream: int, layers: int) -> None:
        """Makes a GPU stream wait for `layers` layers.  Raises Unsupported for host memory."""

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until no device uses its memory any more; False after the timeout."""

    def open_gate(self) -> None:
        """Lets a gated transfer compare its digests."""

    def cancel(self) -> None:
        """Issues no more commands; those in flight end by themselves."""


@runtime_checkable
class HeldTransfer(Protocol):
    """A transfer that issues layers as they are granted, see `Job.grant`."""

    @property
    def layers_ready(self) -> int:
        """Number of layers that the medium has delivered, from the first on."""

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """Permits the first ``layers`` layers to be issued; see `Job.grant`."""


class TransferOptions(TypedDict, total=False):
    """Options of a transfer.

    digests: uint64 (n, layers), filled with each slice's digest, or compared with it if
    ``compare``; if ``gated``, only after `Transfer.open_gate`.
    held: 0 (default), or 1 + the number of layers to issue at once: the others wait for
    `HeldTransfer.grant`, at most ``timeout_s``; for host memory, and for engines of GPU memory that
    support it.
    ahead: a load into host memory that nothing waits for: its commands go after those of other
    loads, until `Transfer.wait_layers` is called.
    priority: PRIORITY_RECORDS (default), PRIORITY_LOAD or PRIORITY_STORE; lower goes first.
    timeout_s: how long one command may be outstanding (default TIMEOUT_S).
    on_released: called with the transfer once the medium no longer uses its memory.
    """

    digests: U64 | None
    compare: bool
    gated: bool
    held: int
    ahead: bool
    priority: int
    timeout_s: float
    on_released: Callable[[Any], None] | None


class HostOptions(TransferOptions, total=False):
    """Options for host memory.  fua: a write is durable when it ends.

    words: shared with a mover of the memory, cleared by the caller and kept until the release: the
    engine marks each layer there, and begins layer l only once ``moved + window > l``.
    layer_ns: uint64 (layers,), filled with the times at which layers became ready, in nanoseconds
    of CLOCK_MONOTONIC or of the controller's own clock.  Commands of all loads are issued in the
    order in which layers are due: a load's first layer at once, the others at the drive's rate.
    """

    fua: bool
    words: LayerWords | None
    window: int
    layer_ns: U64 | None


class Submitter(Protocol):
    """Moves slices between the medium and one kind of memory; `Engine` is that of host memory."""

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[TransferOptions],
    ) -> Transfer:
        """See `Engine.submit`."""

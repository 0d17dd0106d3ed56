"""The GPU with SGLang's pages: the linker's streams, and copies on them.

One engine per pool moves pages between SSD and GPU. Other copies use two streams here:
`copy_stream`, on which a batch's layers become ready one after another, and `leaving`, for pages
that are copied out.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch

from tutti.base.units import MiB
from tutti.errors import CudaError, DeviceTimeout, Unsupported
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import DeviceEngine
from tutti.gio_uring.gpu.driver import CudaDriver, Driver
from tutti.gio_uring.gpu.engine_choice import AUTO, HOST, Choice, choose_engine
from tutti.gio_uring.gpu.events import EventPool
from tutti.gio_uring.gpu.host_engine import STREAMS, HostEngine
from tutti.gio_uring.gpu.mover import (
    FRAGMENT_NBYTES_MIN,
    AutoMover,
    BatchCopyMover,
    CopyMover,
    Mover,
    choose_mover,
)
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.gio_uring.gpu.verifier import Verifier
from tutti.integration.sglang.direct.kernel_share import KernelShare
from tutti.integration.sglang.direct.kv_pools import Pages, Span
from tutti.integration.sglang.direct.layer_marks import LayerMarks
from tutti.integration.sglang.direct.staging_size import StagingSize
from tutti.integration.sglang.direct.table_copy import TableCopies, are_short
from tutti.interface import Store
from tutti.memory.host_memory import HostMemory
from tutti.scheduler.profile import TableProfile
from tutti.store import ObjectStore

_log = logging.getLogger(__name__)

#: Streams of SGLang: the default stream, scheduler, forward, and one for page numbers.
_ENGINES_STREAMS = 4
#: Blocks of the kernel that compares digests, and bounds of the memory for a pool's tables.
_VERIFY_BLOCKS, _TABLES_NBYTES_MIN, _TABLES_NBYTES_MAX = 16, MiB, 64 * MiB
#: Hardware queues if CUDA_DEVICE_MAX_CONNECTIONS is not set.
_CHANNELS = 8


class TorchStreams:
    """The PyTorch calls that the linker needs on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aside = torch.cuda.Stream(device)

    def current(self) -> int:
        """The stream that the calling thread enqueues on."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def on_side_stream(self) -> AbstractContextManager[Any]:
        """A context whose CUDA work does not wait for the model's."""
        on_side_stream: AbstractContextManager[Any] = torch.cuda.stream(self._aside)
        return on_side_stream

    def handle_of(self, event: Any) -> int:
        """The driver's handle of a recorded event."""
        return int(event.cuda_event)


class Gpu:
    """The linker's use of one GPU.  Thread-safe as far as CUDA is.

    copy_stream, leaving: its streams.  mover: see the option gpu_mover; `profile` gives the number
    of multiprocessors of its kernel.  engine: see the option gpu_engine.  marks: of its batches.
    """

    def __init__(
        self,
        driver: Driver,
        streams: TorchStreams,
        mover: str,
        profile: TableProfile | None = None,
        engine: str = "auto",
    ) -> None:
        self.driver = driver
        self.streams = streams
        self._modules: Modules | None = None
        self.share = None
        if mover == "kernel":
            self.share = KernelShare(driver, self._device_code(), profile)
        self._asked_mover = mover
        self._rare: KernelShare | None = None  # for the mover auto, once a pool has short fragments
        self._short: TableCopies | None = None  # once a staged pool has short fragments
        self.copy_stream = driver.create_stream(-1)
        self.leaving = driver.create_stream()
        self._engine = engine
        self._profile = profile
        self._is_warned = False
        self._engines: list[HostEngine | DeviceEngine] = []
        self.events = EventPool(driver)
        self._left = driver.create_event()
        self._leaving_lock = threading.Lock()
        self.marks = LayerMarks(driver)
        #: Called with (batch, layer, seconds waited) when the forward's stream begins a layer.
        self.began: Callable[[str, int, float], object] = lambda batch, layer, waited_s: None

    def attach(self, store: Store, staging: StagingSize) -> HostEngine | DeviceEngine:
        """Makes the engine that moves a store's pages; it is closed with the store.

        staging: size of the pinned memory for each direction, through which all bytes go.
        """
        controller = store.engine.controller
        choice = self._choose_engine(store)
        _log.info("GPU engine %s: %s; staging: %s", choice.kind, choice.reason, staging.reason)
        engine: HostEngine | DeviceEngine
        if choice.kind == HOST:
            share, count = self.share, self._streams_each()
            with ExitStack() as undo:
                verifier = self._verifier_for(store, staging)
                if verifier is not None:
                    undo.callback(verifier.close)
                engine = HostEngine(
                    self.driver,
                    store.engine,
                    mover=self._mover_for(store),
                    verifier=verifier,
                    load_staging_nbytes=staging.nbytes,
                    store_staging_nbytes=staging.nbytes,
                    load_streams=count if share is None else share.create_streams(count),
                    store_streams=count if share is None else share.create_streams(count),
                )
                undo.pop_all()
        else:
            engine = DeviceEngine(
                self.driver,
                self._device_code(),
                controller,
                kind=choice.kind,
                staging_nbytes=2 * staging.nbytes,
            )
        engine.reason, engine.staging_reason = choice.reason, staging.reason
        store.attach(engine)
        self._engines.append(engine)
        self._check_channels()
        return engine

    def _choose_engine(self, store: Store) -> Choice:
        """Chooses the engine.  Raises Unsupported for one that an agent's client cannot use."""
        if isinstance(store, ObjectStore):
            controller = store.engine.controller
            return choose_engine(self._engine, self.driver, controller, self._profile)
        if self._engine not in (AUTO, HOST):
            raise Unsupported(
                f"gpu_engine {self._engine}: its kernels need direct access to the drives, which"
                " the agent owns; use gpu_engine host, or a folder as the path"
            )
        return Choice(HOST, "the pool is an agent's")

    def _device_code(self) -> Modules:
        """Loads all kernels.  Raises Unsupported or CudaError."""
        self._modules = self._modules or Modules(self.driver)
        return self._modules

    def _verifier_for(self, store: Store, staging: StagingSize) -> Verifier | None:
        """The verifier of a store's loads on the GPU; None: the CPU verifies."""
        if store.config.verify == "off":
            return None
        nbytes = Verifier.tables_nbytes(staging.pages, store.layout.layers)
        blocks = _VERIFY_BLOCKS if self.share is None else self.share.mover.blocks
        try:
            return Verifier(
                self.driver,
                self._device_code(),
                tables_nbytes=max(_TABLES_NBYTES_MIN, min(_TABLES_NBYTES_MAX, nbytes)),
                blocks=blocks,
            )
        except (CudaError, Unsupported) as error:
            _log.warning("digests of loads are compared by the CPU, not by the GPU: %s", error)
            return None

    def _mover_for(self, store: Store) -> Mover:
        """The mover of a store's pages; see the option gpu_mover."""
        if self.share is not None:
            return self.share.mover
        if self._asked_mover != "auto":
            is_batch = self._asked_mover == "copy-batch"
            return BatchCopyMover(self.driver) if is_batch else CopyMover(self.driver)
        copies = choose_mover(self.driver)
        if min(store.layout.segments) >= FRAGMENT_NBYTES_MIN:
            return copies
        try:
            self._rare = self._rare or KernelShare(
                self.driver, self._device_code(), None, is_rare=True
            )
        except (CudaError, Unsupported) as error:
            _log.warning("copying short fragments by copy engines, not by a kernel: %s", error)
            return copies
        return AutoMover(copies, self._rare.mover)

    def _channels_left(self) -> int:
        """Number of hardware queues without a stream; negative if streams share queues."""
        streams = _ENGINES_STREAMS + 2 + sum(engine.stream_count for engine in self._engines)
        return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or _CHANNELS) - streams

    def _streams_each(self) -> int:
        """Streams per direction of the next engine: two if there are hardware queues for them."""
        if self._channels_left() >= 2 * STREAMS:
            return STREAMS
        _log.info("layers of a load do not overlap: CUDA_DEVICE_MAX_CONNECTIONS is too small")
        return 1

    def _check_channels(self) -> None:
        """Warns if there are more streams than hardware queues: streams that share a queue wait for
        each other, so a load that waits for the SSD can block a forward.
        """
        missing = -self._channels_left()
        if missing > 0 and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%d CUDA streams have no hardware queue of their own "
                "(CUDA_DEVICE_MAX_CONNECTIONS), so a load can delay another stream; SGLang sets 8, "
                "use its variable to allow up to 32",
                missing,
            )

    def read_pages_max(self, store: Store) -> int | None:
        """Pages of the longest read by the engine attached last; None for any number."""
        engine = self._engines[-1]
        if isinstance(engine, HostEngine):
            return None
        return engine.read_pages_max(store.layout.layers, store.geometry.slice_nlb)

    def pin(self, store: Store, pool: HostMemory) -> int:
        """Maps a pool's host memory for the GPU until the store is closed; returns the GPU's
        address minus the host's.
        """
        pinned = PinnedMemory(self.driver, pool.owner)
        store.attach(pinned)
        return pinned.device_address - pinned.address

    def expect(self, layers: Sequence[Sequence[Span]]) -> None:
        """Prepares `copy` for a pool with these segments: loads a kernel for short ones."""
        wants_kernel = self._asked_mover in ("auto", "kernel") and any(map(are_short, layers))
        if self._short is not None or not wants_kernel:
            return
        try:
            self._short = TableCopies(self.driver, self.events)
        except (CudaError, Unsupported) as error:
            _log.warning("copying short fragments by copy engines, not by a kernel: %s", error)

    def follow(self, events: Sequence[Any]) -> None:
        """Orders later writes to SGLang's pages after ``events``."""
        for event in events:
            self.driver.stream_wait_event(self.copy_stream, self.streams.handle_of(event))
        for engine in self._engines:
            engine.follow(self.copy_stream)

    def copy(
        self,
        stream: int,
        targets: Sequence[Span],
        to: Pages,
        sources: Sequence[Span],
        of: Pages,
        *,
        is_local: bool = False,
    ) -> bool:
        """Enqueues copies of pages ``of`` (n,) of the source segments to pages ``to`` (n,) of the
        targets; returns whether a kernel does them.

        is_local: both are in GPU memory.
        """
        if self._short is not None and self._short.copy(stream, targets, to, sources, of):
            return True
        there = np.concatenate([_addresses(span, to) for span in targets])
        here = np.concatenate([_addresses(span, of) for span in sources])
        nbytes = np.repeat(np.array([span.nbytes for span in targets], np.uint64), len(to))
        if len(to) and self.driver.has_copy_batch:
            self.driver.copy_batch(there, here, nbytes, stream, is_local=is_local)
            return False
        with self.driver.together():
            for target, source, n in zip(there, here, nbytes, strict=True):
                self.driver.copy(int(target), int(source), int(n), stream)
        return False

    def wait_left(self, timeout_s: float) -> None:
        """Waits for the work on ``leaving``.  Raises DeviceTimeout: it may still run."""
        with self._leaving_lock:
            self.driver.record_event(self._left, self.leaving)
            if not wait_until(lambda: self.driver.is_event_done(self._left), timeout_s):
                raise DeviceTimeout(
                    f"the GPU did not copy pages out within {timeout_s:g} s; they stay locked"
                )

    def rest(self, timeout_s: float) -> None:
        """Ends persistent kernels: closing a store would wait for those of other stores."""
        for engine in self._engines:
            if isinstance(engine, DeviceEngine) and not engine.rest(timeout_s):
                _log.warning("a kernel of the GPU engine %s does not end", engine.name)

    def close(self, timeout_s: float) -> None:
        """Destroys streams and events, after the stores were closed.  Raises DeviceTimeout."""
        deadline_s = time.monotonic() + timeout_s
        for stream in (self.copy_stream, self.leaving):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not wait_until(lambda s=stream: self.driver.is_stream_done(s), left_s):  # type: ignore[misc]
                raise DeviceTimeout("a stream of the GPU did not end; end the process")
        self.marks.close(max(0.0, deadline_s - time.monotonic()))
        self.events.release([self._left])
        for part in (self.share, self._rare, self._short):
            if part is not None:
                part.close()
        for stream in (self.copy_stream, self.leaving):
            self.driver.destroy_stream(stream)
        self.events.close()
        if self._modules is not None:
            self._modules.close()


def open_gpu(
    device: torch.device, mover: str, profile: TableProfile | None, engine: str
) -> Gpu | None:
    """The GPU with SGLang's pools; None for host memory.

    Raises Unsupported without cuda-bindings or a driver, or for a mover that the driver lacks.
    """
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return Gpu(CudaDriver(index), TorchStreams(device), mover, profile, engine)


def _addresses(span: Span, pages: Pages) -> np.ndarray:
    base, stride = np.uint64(span.address), np.uint64(span.stride_nbytes)
    return base + pages.astype(np.uint64) * stride

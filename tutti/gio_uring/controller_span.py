"""Several drives as one controller, whose namespaces are those of the drives one after another."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from tutti.base.interrupts import uninterrupted
from tutti.base.process import finalize
from tutti.errors import ConfigError, TuttiError
from tutti.gio_uring.controller import (
    HAS_VOLATILE_CACHE,
    ControllerInfo,
    NativeController,
    ServingEngine,
)
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.memory import DmaRegion, address_of
from tutti.gio_uring.queue_pair import QueuePair


class SpanController(NativeController):
    """Several drives as one controller, each with a service thread of its own; it closes them.

    drives: open drives of the same block size, without queue pairs. places: (drive from 0, its
    nsid) of each namespace; by default all usable namespaces, drive after drive.

    The loss of a drive does not affect the others: its commands end with STATUS_DEVICE_GONE.

    Raises ConfigError for drives that do not fit together.
    """

    def __init__(
        self, drives: Sequence[NativeController], *, places: Sequence[tuple[int, int]] | None = None
    ) -> None:
        if not drives or len({drive.info.lba_shift for drive in drives}) != 1:
            raise ConfigError("pass at least one drive; all drives need the same block size")
        self.drives = list(drives)
        usable = [
            (i, nsid)
            for i, drive in enumerate(drives)
            for nsid, nlb in enumerate(drive.info.namespace_nlb, 1)
            if nlb
        ]
        self.places = usable if places is None else list(places)
        assert set(self.places) <= set(usable), "places that can be used"
        self._on_drives: dict[int, list[DmaRegion]] = {}  # by address
        super().__init__(*(drive.handle for drive in drives))

    def _read_info(self) -> ControllerInfo:
        """Combines the drives' data: a volatile cache of any, other features if all have them."""
        infos = [drive.info for drive in self.drives]
        flags = infos[0].flags
        for other in infos[1:]:
            flags = (flags & other.flags) | ((flags | other.flags) & HAS_VOLATILE_CACHE)
        return ControllerInfo(
            lba_shift=infos[0].lba_shift,
            namespaces=len(self.places),
            mdts_nbytes=min(info.mdts_nbytes for info in infos),
            sgl_descriptors=min(info.sgl_descriptors for info in infos),
            flags=flags,
            depth_max=min(info.depth_max for info in infos),
            namespace_nlb=tuple(infos[i].namespace_nlb[nsid - 1] for i, nsid in self.places),
        )

    def _finalize(self) -> weakref.finalize[..., Any]:
        return finalize(self, list, self.drives)  # they close themselves when unreferenced

    @property
    def routes(self) -> list[tuple[int, int]]:
        return self.places

    @property
    def device_routes(self) -> list[tuple[int, int]]:
        return self.places

    @property
    def doorbell_registers(self) -> list[tuple[int, int]]:
        return [registers for drive in self.drives for registers in drive.doorbell_registers]

    @property
    def gone(self) -> list[str]:
        """PCI addresses of the drives that were lost."""
        drives = [drive for drive in self.drives if isinstance(drive, VfioController)]
        return [drive.device.bdf for drive in drives if drive.is_gone]

    def register(self, buffer: Any) -> DmaRegion:
        """See NativeController.register; registers with every drive."""
        self._check_open()
        done: list[DmaRegion] = []
        try:
            for drive in self.drives:
                done.append(drive.register(buffer))
        except BaseException:
            for other in done:
                other.close()
            raise
        address, _ = address_of(buffer)
        self._on_drives[address] = done
        self._buffers[address] = buffer
        return DmaRegion(buffer, address, self._unregister)

    def _unregister(self, region: DmaRegion) -> None:
        if not self.is_closed:
            for other in self._on_drives.pop(region.address):
                other.close()
            del self._buffers[region.address]

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        """See NativeController.create_queue_pair; service thread i is that of drive i."""
        self._check_open()
        return self.drives[service_thread].create_queue_pair(depth, is_device=is_device)

    def expect_rings(self, is_busy: bool) -> None:
        for drive in self.drives:
            drive.expect_rings(is_busy)

    def served_by(self, server: ServingEngine) -> None:
        super().served_by(server)
        for drive in self.drives:
            drive.served_by(server)

    def keep_after_failure(self) -> None:
        super().keep_after_failure()
        for drive in self.drives:
            drive.keep_after_failure()

    @uninterrupted()
    def close(self) -> None:
        """Closes the drives. Raises ConfigError, see NativeController.close."""
        if self.is_closed:
            return
        self._check_idle()
        self._finalizer.detach()
        for drive in self.drives:
            with contextlib.suppress(TuttiError):
                drive.close()

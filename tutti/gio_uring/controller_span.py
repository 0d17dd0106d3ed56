"""Several drives as one controller, whose namespaces are those of the drives one after another."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

from tutti.errors import ConfigError, TuttiError
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.memory import DmaRegion
from tutti.process import finalize

_P = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64

_lib = _native.part({"gio_span_controller_create": (ctypes.c_int, (_P, _P))})


class SpanPlaceStruct(ctypes.LittleEndianStructure):
    """`gio::SpanPlace`."""

    _fields_ = (("drive", _U32), ("nsid", _U32))


class SpanConfigStruct(ctypes.LittleEndianStructure):
    """`gio::SpanConfig`."""

    _fields_ = (
        ("drives", _U64),
        ("pairs", _U64),
        ("places", _U64),
        ("n_drives", _U32),
        ("namespaces", _U32),
        ("depth", _U32),
        ("wake_fd", ctypes.c_int),
    )


#: Deepest queue pair of a drive, and so how many commands each may have.
_DEPTH_MAX = 256


class SpanController(NativeController):
    """Drives that are used together; it closes them.

    drives: open drives of one block size with no queue pairs of their own yet. places: which drive,
    from 0, and which nsid of it each namespace is; by default all that can be used, drive after
    drive.

    A drive that is lost leaves the others alone: its commands end with STATUS_DEVICE_GONE.

    Raises ConfigError for drives that do not fit together.
    """

    def __init__(
        self,
        drives: Sequence[VfioController],
        *,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        if not drives or len({drive.info.lba_shift for drive in drives}) != 1:
            raise ConfigError("give at least one drive, and drives with blocks of one size only")
        self.drives = list(drives)
        usable = [
            (i, nsid)
            for i, drive in enumerate(drives)
            for nsid, nlb in enumerate(drive.info.namespace_nlb, 1)
            if nlb
        ]
        self.places = usable if places is None else list(places)
        assert set(self.places) <= set(usable), "places that can be used"
        depth = min([_DEPTH_MAX, *(drive.info.depth_max for drive in drives)])
        pairs = [drive.create_queue_pair(depth) for drive in drives]
        handles = (_U64 * len(drives))(*(drive.handle for drive in drives))
        addresses = (_U64 * len(pairs))(*(pair.struct_address for pair in pairs))
        structs = (SpanPlaceStruct * len(self.places))(*(SpanPlaceStruct(*p) for p in self.places))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake = finalize(self, os.close, self._wake_fd)
        config = SpanConfigStruct(
            drives=ctypes.addressof(handles),
            pairs=ctypes.addressof(addresses),
            places=ctypes.addressof(structs),
            n_drives=len(drives),
            namespaces=len(self.places),
            depth=depth,
            wake_fd=self._wake_fd,
        )
        handle = _P()
        result = _lib().gio_span_controller_create(ctypes.byref(config), ctypes.byref(handle))
        _native.check(result, "cannot join these drives", "use at most 256 namespaces", ConfigError)
        super().__init__(int(handle.value or 0))
        self._rings += [self.drives]
        self._on_drives: dict[int, list[DmaRegion]] = {}  # by address

    @property
    def gone(self) -> list[str]:
        """The addresses of the drives that were lost."""
        return [drive.device.bdf for drive in self.drives if drive.is_gone]

    def register(self, buffer: Any) -> DmaRegion:
        """As NativeController.register, with every drive."""
        region = super().register(buffer)
        done: list[DmaRegion] = []
        try:
            for drive in self.drives:
                done.append(drive.register((region.address, region.nbytes)))
        except BaseException:
            for other in done:
                other.close()
            super()._unregister(region)
            raise
        self._on_drives[region.address] = done
        return region

    def _unregister(self, region: DmaRegion) -> None:
        if not self.is_closed:
            for other in self._on_drives.pop(region.address):
                other.close()
        super()._unregister(region)

    def close(self) -> None:
        """As NativeController.close, and then the drives."""
        super().close()
        for drive in self.drives:
            with contextlib.suppress(TuttiError):
                drive.close()

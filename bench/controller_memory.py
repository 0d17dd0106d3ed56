"""A controller whose medium is memory: for upper bounds, and for tests, which inject faults.

Modes: "copy" moves bytes between the medium and registered memory; "zero_copy" checks and completes
commands but moves nothing, which measures the protocol alone; "virtual" copies under a virtual
clock with given bandwidths, so that results do not depend on the machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tutti.base.units import GiB, MiB
from tutti.errors import ConfigError
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.memory import Bytes, view_at
from tutti.native import members

MODES = ("copy", "zero_copy", "virtual")

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class MemoryConfigStruct(ctypes.LittleEndianStructure):
    """`gio::MemoryConfig`."""

    _fields_ = (
        *members(_U64, "namespace_nlb read_bandwidth write_bandwidth latency_ns"),
        *members(_U32, "interference_percent namespaces lba_shift mdts_nbytes sgl_descriptors"),
        *members(_U32, "depth_max mode write_back"),
        ("channel_bandwidth", _U64),
        *members(_U32, "channels crowd crowd_percent is_shared"),
    )


class MemoryController(NativeController):
    """A controller over memory of this process, which is zero at first.

    namespace_nbytes: size of each namespace, multiples of lba_nbytes. mode: see MODES. more: other
    fields of MemoryConfigStruct.

    Raises ConfigError for arguments that are invalid for drives or exceed the memory.
    """

    def __init__(
        self,
        namespace_nbytes: Sequence[int] = (64 * MiB,),
        *,
        mode: str = "copy",
        lba_nbytes: int = 4096,
        **more: int,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"the mode {mode!r} does not exist; use one of {', '.join(MODES)}")
        if lba_nbytes & (lba_nbytes - 1) or any(n % lba_nbytes for n in namespace_nbytes):
            raise ConfigError("lba_nbytes is a power of two that divides the namespaces' sizes")
        sizes = (_U64 * len(namespace_nbytes))(*(n // lba_nbytes for n in namespace_nbytes))
        values = {
            "mdts_nbytes": MiB,
            "sgl_descriptors": 256,
            "depth_max": 4096,
            "read_bandwidth": 4 * GiB,
            "write_bandwidth": 2 * GiB,
            "latency_ns": 80_000,
            "interference_percent": 100,
            **more,
        }
        config = MemoryConfigStruct(
            namespace_nlb=ctypes.addressof(sizes),
            namespaces=len(sizes),
            lba_shift=lba_nbytes.bit_length() - 1,
            mode=MODES.index(mode),
            **values,
        )
        handle = ctypes.c_void_p()
        create = _native.lib().gio_memory_controller_create
        result = create(ctypes.byref(config), ctypes.byref(handle))
        remedy = "use 1 to 64 namespaces that fit into memory and blocks of 512 to 65536 bytes"
        _native.check(result, "cannot create a memory controller", remedy, ConfigError)
        super().__init__(int(handle.value or 0))

    def medium(self, nsid: int) -> Bytes:
        """The bytes of a namespace, uint8 (nbytes,), which tests may read and damage.

        Valid until the controller is closed. Raises ConfigError for a missing namespace.
        """
        self._check_open()
        address = self._lib.gio_memory_controller_medium(self.handle, nsid)
        if not address:
            raise ConfigError(f"namespace {nsid} does not exist; use 1 to {self.info.namespaces}")
        return view_at(address, self.info.namespace_nlb[nsid - 1] * self.info.lba_nbytes)

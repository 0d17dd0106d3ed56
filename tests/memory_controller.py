"""The controller over memory with faults on demand, a write cache and a parallel virtual drive."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tutti.base.units import MiB
from tutti.bench import controller_memory
from tutti.errors import ConfigError
from tutti.gio_uring.nvme_spec import (
    STATUS_DATA_TRANSFER_ERROR,
    STATUS_UNRECOVERED_READ,
    STATUS_WRITE_FAULT,
)

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_MILLION = 1_000_000


class FaultConfigStruct(ctypes.LittleEndianStructure):
    """`gio::FaultConfig`."""

    _fields_ = (
        ("seed", _U64),
        ("stall_from", _U64),
        ("status_ppm", _U32),
        ("status", _U32),
        ("delay_ppm", _U32),
        ("delay_turns", _U32),
        ("reorder_ppm", _U32),
        ("torn_ppm", _U32),
        ("torn_status", _U32),
        ("lost_ppm", _U32),
        ("short_ppm", _U32),
        ("short_status", _U32),
        ("reset_fails", _U32),
        ("reserved", _U32),
    )


class RangeFaultStruct(ctypes.LittleEndianStructure):
    """`gio::RangeFault`."""

    _fields_ = (
        ("slba", _U64),
        ("nlb", _U64),
        ("nsid", _U32),
        ("opcode", _U32),
        ("count", _U32),
        ("status", _U32),
    )


class MemoryStats(ctypes.LittleEndianStructure):
    """`gio::MemoryStats`: totals since creation; `unanswered` commands are held back now."""

    _fields_ = (
        ("commands", _U64),
        ("completed", _U64),
        ("bytes_read", _U64),
        ("bytes_written", _U64),
        ("faults", _U64),
        ("unanswered", _U64),
    )


@dataclass(frozen=True)
class Parallelism:
    """How a drive on the virtual clock serves several commands at once.

    channels: each moves one transfer at a time, at channel_bandwidth bytes per second, and all
    together no more than the drive's bandwidth. crowd: with more transfers in flight each takes
    crowd_factor times as long on the drive. is_shared: the transfers in flight share the bandwidth,
    and all end with the last one.
    """

    channels: int = 0
    channel_bandwidth: int = 0
    crowd: int = 0
    crowd_factor: float = 0.0
    is_shared: bool = False


@dataclass(frozen=True)
class Faults:
    """What goes wrong, drawn from `seed` and the number of the command since the faults were set.

    Chances are in ppm of commands. status_ppm: answered with `status`, not executed. delay_ppm:
    executed 1 to delay_turns turns of service later. reorder_ppm: executed after the rest of its
    turn, in random order. torn_ppm: a prefix of a write's blocks lands, answered with torn_status
    (0 = acknowledged). lost_ppm: a write is acknowledged and not executed. short_ppm: a prefix of
    the blocks is moved, answered with short_status. stall_from: this command (1 is the first) and
    all later ones get no answer until `release` or a reset; 0 = never. reset_fails: a reset times
    out while unanswered commands exist.
    """

    seed: int = 0
    stall_from: int = 0
    status_ppm: int = 0
    status: int = STATUS_UNRECOVERED_READ
    delay_ppm: int = 0
    delay_turns: int = 8
    reorder_ppm: int = 0
    torn_ppm: int = 0
    torn_status: int = STATUS_WRITE_FAULT
    lost_ppm: int = 0
    short_ppm: int = 0
    short_status: int = STATUS_DATA_TRANSFER_ERROR
    reset_fails: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            number = int(getattr(self, field.name))
            if number < 0 or (field.name.endswith("_ppm") and number > _MILLION):
                raise ConfigError(f"{field.name}={number} is not acceptable; use 0 to {_MILLION}")


class MemoryController(controller_memory.MemoryController):
    """NVMe over memory that can be told to fail.

    write_back: a volatile write cache that `power_cut` loses. interference: how much longer a
    transfer takes that starts while the other direction is busy; it and `parallelism` count in mode
    "virtual" alone. more: as in the base class.
    """

    def __init__(
        self,
        namespace_nbytes: Sequence[int] = (64 * MiB,),
        *,
        mode: str = "copy",
        lba_nbytes: int = 4096,
        write_back: bool = False,
        interference: float = 1.0,
        parallelism: Parallelism | None = None,
        **more: int,
    ) -> None:
        if parallelism is not None:
            more["channels"] = parallelism.channels
            more["channel_bandwidth"] = parallelism.channel_bandwidth
            more["crowd"] = parallelism.crowd
            more["crowd_percent"] = round(parallelism.crowd_factor * 100)
            more["is_shared"] = int(parallelism.is_shared)
        super().__init__(
            namespace_nbytes,
            mode=mode,
            lba_nbytes=lba_nbytes,
            write_back=int(write_back),
            interference_percent=round(interference * 100),
            **more,
        )

    def set_faults(self, faults: Faults | None) -> None:
        """From the next command on; None ends all faults, those of `fault_range` included."""
        self._check_open()
        config = FaultConfigStruct(
            **{f.name: int(getattr(faults, f.name)) for f in fields(Faults)} if faults else {}
        )
        self._lib.gio_memory_controller_faults(self.handle, ctypes.byref(config))

    def fault_range(
        self, nsid: int, slba: int, nlb: int, opcode: int, status: int, count: int = 1
    ) -> None:
        """Answer `status` to the next `count` commands of `opcode` that touch these blocks.

        Flush and Dataset Management name no blocks: any of them matches.
        """
        assert count >= 1, "a fault that strikes at least once"
        self._check_open()
        fault = RangeFaultStruct(slba, nlb, nsid, opcode, count, status)
        self._lib.gio_memory_controller_fault_range(self.handle, ctypes.byref(fault))

    def release(self) -> None:
        """End a stall: the next turn of service executes and answers what went unanswered."""
        self._check_open()
        self._lib.gio_memory_controller_release(self.handle)

    def recover(self) -> None:
        """End all faults, and the stall."""
        self.set_faults(None)
        self.release()

    def power_cut(self, seed: int) -> None:
        """Lose or tear any subset of the writes since the last flush; FUA writes survive.

        Needs write_back. Reset first: commands that are held back are not lost by this.
        """
        self._check_open()
        self._lib.gio_memory_controller_power_cut(self.handle, seed)

    def stats(self) -> MemoryStats:
        """Totals since creation."""
        self._check_open()
        stats = MemoryStats()
        self._lib.gio_memory_controller_stats(self.handle, ctypes.byref(stats))
        return stats

    @property
    def now_ns(self) -> int:
        """The virtual clock."""
        self._check_open()
        return int(self._lib.gio_memory_controller_now_ns(self.handle))

    def advance(self, duration_ns: int) -> None:
        """Let virtual time pass outside of the drive, as computing does."""
        self._check_open()
        self._lib.gio_memory_controller_advance(self.handle, duration_ns)

    def limit(self, limit_ns: int) -> None:
        """Virtual time does not pass `limit_ns` by itself: what is due later stays in flight."""
        self._check_open()
        self._lib.gio_memory_controller_limit(self.handle, limit_ns)

    def trace(self, commands: int) -> npt.NDArray[np.uint64]:
        """(commands, 2), filled with opcode and first LBA of the next commands as they are issued,
        in the order in which the controller fetches them; zeros where none came yet.
        """
        self._check_open()
        self._trace = np.zeros((commands, 2), np.uint64)
        self._lib.gio_memory_controller_trace(self.handle, self._trace.ctypes.data, commands)
        return self._trace

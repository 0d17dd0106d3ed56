"""Moves pages by a kernel, on as few multiprocessors as are needed to keep up with the SSD."""

from __future__ import annotations

import logging

from tutti.base.units import MiB
from tutti.errors import CudaError, Unsupported
from tutti.gio_uring.gpu.device_batch import KernelMover
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.green_context import SmPartition, partition
from tutti.gio_uring.gpu.pinned_memory import TableMemory
from tutti.scheduler.profile import TableProfile
from tutti.scheduler.sm_share import choose_partition

_log = logging.getLogger(__name__)

_TABLES_NBYTES = 8 * MiB
#: Blocks without a profile.  The kernel uses at most as many multiprocessors as blocks.
_BLOCKS = 16


class KernelShare:
    """A mover, and streams that are restricted to its multiprocessors.

    profile: gives their number; without one, or if the driver refuses, the streams are ordinary
    streams and a warning is logged.
    """

    def __init__(
        self,
        driver: Driver,
        modules: Modules,
        profile: TableProfile | None,
        *,
        is_rare: bool = False,
    ) -> None:
        self._tables = TableMemory(driver, _TABLES_NBYTES)
        self.partition, blocks = SmPartition(driver, 0, reason="the kernel is rare"), _BLOCKS
        if not is_rare:
            self.partition, blocks = _share(driver, profile)
        self.mover = KernelMover(driver, modules["gio_move"], self._tables, blocks=blocks)

    def create_streams(self, count: int) -> list[int]:
        """Creates streams, which are closed with the share."""
        return [self.partition.create_stream(-1) for _ in range(count)]

    def close(self) -> None:
        """Frees everything; the streams must be idle."""
        self.partition.close()
        self._tables.close()


def _share(driver: Driver, profile: TableProfile | None) -> tuple[SmPartition, int]:
    """The partition, and the number of blocks of the kernel."""
    if profile is None:
        reason = "the option profile is off, so the mover's share is unknown"
        _log.warning("no partition of multiprocessors: %s", reason)
        return SmPartition(driver, 0, reason=reason), _BLOCKS
    try:
        sm = driver.sm_resource()
        chosen = choose_partition(
            profile.mover_points,
            profile.read_gb_per_s,
            sms=sm.count,
            least=sm.minimum,
            step=sm.granularity,
        )
    except (CudaError, Unsupported) as error:
        _log.warning("no partition of multiprocessors: %s", error)
        return SmPartition(driver, 0, reason=str(error)), _BLOCKS
    if not chosen.keeps_up:
        _log.warning(
            "the kernel moves %.3g GB/s on %d multiprocessors and the SSD delivers %.3g; use the "
            "copy engines (gpu_mover auto)",
            chosen.mover_gb_per_s,
            chosen.sms,
            profile.read_gb_per_s,
        )
    found = partition(driver, chosen.sms)
    return found, found.sms if found.is_partition else chosen.sms

"""Green contexts: a share of the multiprocessors for kernels that move pages.

A green context is not a reservation: kernels of the primary context still run on its
multiprocessors.  Only kernels of the complementary green context do not.

The device reports which partitions it allows.  If the driver refuses, everything stays in the
primary context, and the reason is given.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from tutti.base.process import Owned
from tutti.errors import ConfigError, CudaError, Unsupported
from tutti.gio_uring.gpu.driver import Driver

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class SmPartition(Owned):
    """Streams that run on some multiprocessors of a device.

    sms: number of multiprocessors; all of the device if there is no partition, and `reason` why.
    """

    driver: Driver
    sms: int
    context: int = 0
    reason: str = ""
    streams: list[int] = field(default_factory=list)

    @property
    def is_partition(self) -> bool:
        """Whether the streams are confined."""
        return self.context != 0

    def create_stream(self, priority: int = 0) -> int:
        """A stream of this partition, destroyed with it."""
        driver = self.driver
        if self.is_partition:
            stream = driver.create_green_stream(self.context, priority)
        else:
            stream = driver.create_stream(priority)
        self.streams.append(stream)
        return stream

    def close(self) -> None:
        """Destroys streams and context; the streams must be idle.  A second call does nothing."""
        while self.streams:
            self.driver.destroy_stream(self.streams.pop())
        context, self.context = self.context, 0
        if context:
            self.driver.destroy_green_context(context)


def partition(driver: Driver, sms: int) -> SmPartition:
    """A partition of at least `sms` multiprocessors, rounded up to the device's granularity.

    If the driver or the device refuses: the whole device, with the reason.  Raises ConfigError for
    a number that the device cannot split off.
    """
    if sms < 1:
        raise ConfigError(f"a partition of {sms} multiprocessors; ask for at least 1")
    try:
        found = driver.sm_resource()
    except (CudaError, Unsupported) as error:
        return _refused(driver, 0, f"the driver has no green contexts: {error}")
    wanted = max(found.minimum, -(-sms // found.granularity) * found.granularity)
    if wanted >= found.count:
        raise ConfigError(
            f"a partition of {sms} multiprocessors takes {wanted} of {found.count} and leaves none;"
            " ask for fewer"
        )
    try:
        context, count = driver.create_green_context(wanted)
    except (CudaError, Unsupported) as error:
        return _refused(driver, found.count, f"the driver refuses the split: {error}")
    return SmPartition(driver, count, context)


def _refused(driver: Driver, sms: int, reason: str) -> SmPartition:
    _log.warning("no partition of multiprocessors: %s", reason)
    return SmPartition(driver, sms, reason=reason)

"""GPU memory for a benchmark of pools, and the engine that moves its pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine
from tutti.gio_uring.gpu.driver import CudaDriver, Driver
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.verifier import Verifier
from tutti.medium.layout import KVLayout
from tutti.memory.device_memory import DeviceMemory
from tutti.store import ObjectStore

ENGINES = ("host", *KINDS)


class DevicePool:
    """GPU memory for pages; one store at a time moves them with an engine of its own.

    engine: one of ENGINES.
    """

    def __init__(
        self, driver: Driver, modules: Modules, engine: str, layout: KVLayout, pages: int
    ) -> None:
        self.backing = "gpu"
        self._driver, self._modules, self._engine = driver, modules, engine
        self._layout, self._pages = layout, pages
        # Before an engine is made, because persistent kernels block allocations.
        self._address = driver.allocate(pages * layout.object_nbytes)

    def data_ptr(self) -> int:
        """The address, as for tensors."""
        return self._address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self._pages * self._layout.object_nbytes

    def element_size(self) -> int:
        return 1

    def attach(self, store: ObjectStore) -> DeviceMemory:
        """Registers the pages, with an engine that is closed with the store."""
        engine = self._open_engine(store)
        store.attach(engine)
        memory = DeviceMemory.from_buffer(self._layout, self, self._pages, gpu=engine)
        store.register(memory)
        return memory

    def close(self) -> None:
        """Frees the memory; the store must have been closed."""
        self._driver.free(self._address)

    def _open_engine(self, store: ObjectStore) -> HostEngine | DeviceEngine:
        if self._engine != "host":
            return DeviceEngine(
                self._driver, self._modules, store.engine.controller, kind=self._engine
            )
        verifies = store.config.verify != "off"
        verifier = Verifier(self._driver, self._modules) if verifies else None
        return HostEngine(self._driver, store.engine, verifier=verifier)


@contextmanager
def open_gpu() -> Iterator[tuple[Driver, Modules]]:
    """The driver and all device code.  Raises ConfigError if no GPU can be used."""
    try:
        driver = CudaDriver()
    except Unsupported as error:
        raise ConfigError(f"--gpu: {error}; leave it out to measure host memory") from error
    with closing(driver), closing(Modules(driver)) as modules:
        yield driver, modules

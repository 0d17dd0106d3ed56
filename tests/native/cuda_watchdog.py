"""Engines on a GPU with a display, as the stand-in of libcuda.so.1 plays it: a kernel that runs too
long loses the context.  Run by test_device_cuda.py in a process of its own.

Prints what became of three loads from a controller that answers no command: by the kernel that
stays, by short ones with a deadline of half a minute, and by those without the engine's own limit.
"""

from __future__ import annotations

import os

import numpy as np
from gpu.device_memory import Allocation, paged
from memory_controller import Faults, MemoryController

from tutti.errors import CudaError, Unsupported
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import DeviceEngine
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.gio_uring.iocb import Extents
from tutti.gio_uring.nvme_spec import OPCODE_READ, STATUS_TIMED_OUT

LAYERS, PAGES = 2, 4


def load(driver: CudaDriver, modules: Modules, kind: str, *, is_careless: bool = False) -> str:
    memory = Allocation(driver, LAYERS * PAGES * 4096)
    pages = paged(memory, (4096,), LAYERS, PAGES)
    with MemoryController([1 << 20]) as controller:
        controller.set_faults(Faults(stall_from=1))
        try:
            engine = DeviceEngine(driver, modules, controller, kind=kind, staging_nbytes=1 << 20)
        except Unsupported:
            return "refused"
        engine._limits_kernels = not is_careless
        extents = Extents([0], [1], [PAGES], 1, PAGES)
        numbers = np.arange(PAGES, dtype=np.uint32)
        job = engine.submit(OPCODE_READ, extents, numbers, pages, timeout_s=30.0)
        if is_careless:
            print("launch without a limit: code", code_of_loss(driver), flush=True)
            os._exit(0)  # the kernel has its half minute
        assert job.wait_layers(LAYERS, 20)
        assert (job.page_status == STATUS_TIMED_OUT).any()
        engine.close()
        return "timed out"


def code_of_loss(driver: CudaDriver) -> int:
    """The code that every call returns in the end."""
    codes: list[int] = []

    def is_lost() -> bool:
        try:
            driver.is_stream_done(0)
        except CudaError as error:
            codes.append(error.code)
        return bool(codes)

    wait_until(is_lost, 20)
    return codes[0]


def main() -> None:
    driver = CudaDriver()
    modules = Modules(driver)
    print("persistent:", load(driver, modules, "persistent"))
    print("launch:", load(driver, modules, "launch"))
    load(driver, modules, "launch", is_careless=True)


if __name__ == "__main__":
    main()

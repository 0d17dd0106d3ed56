"""What the stand-in of libcuda.so.1 refuses: run by test_device_cuda.py in a process of its own.

On a GPU some of these calls may crash, so tests/gpu leaves them out.  Prints a line for each call:
its code, or 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tutti.errors import CudaError
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.memory import HostBuffer


def code_of(call: Callable[[], object]) -> int:
    try:
        call()
    except CudaError as error:
        return error.code
    return 0


def attributes(driver: CudaDriver, order: int) -> Callable[[], None]:
    """A batch of one copy with attributes that are wrong, past what CudaDriver would pass."""
    place = driver.allocate(64)
    one = [np.array([value], np.uint64) for value in (place, place + 32, 8)]
    stream = driver.create_stream()

    def call() -> None:
        given = driver._attributes[False]
        right, given.srcAccessOrder = given.srcAccessOrder, order
        try:
            driver.copy_batch(one[0], one[1], one[2], stream)
        finally:
            given.srcAccessOrder = right

    return call


def handles(driver: CudaDriver) -> dict[str, Callable[[], object]]:
    stream, event = driver.create_stream(), driver.create_event()
    gone, past = driver.create_stream(), driver.create_event()
    driver.destroy_stream(gone)
    driver.destroy_event(past)
    green, _ = driver.create_green_context(8)
    orphan = driver.create_green_stream(green)
    driver.destroy_green_context(green)
    return {
        "a stream that was destroyed": lambda: driver.is_stream_done(gone),
        "an event that was destroyed": lambda: driver.is_event_done(past),
        "an event for a stream": lambda: driver.record_event(event, event),
        "a stream for an event": lambda: driver.stream_wait_event(stream, stream),
        "a stream of a green context that was destroyed": lambda: driver.is_stream_done(orphan),
        "a green context that was destroyed": lambda: driver.create_green_stream(green),
        "a module that there is not": lambda: driver.find_function(stream, "gio_move"),
        "a kernel that there is not": lambda: driver.launch(stream, 1, 32, [], stream),
    }


def memory(driver: CudaDriver) -> dict[str, Callable[[], object]]:
    stream = driver.create_stream()
    place, host = driver.allocate(4096), HostBuffer(8192, hugepages=False)
    driver.register_host(host.address, 4096)
    rows = np.array([[place], [host.address], [4096]], np.uint64)
    driver.copy_batch(*rows, stream)
    beyond = rows + np.array([[0], [4096], [0]], np.uint64)
    registers = host.address + 4096

    def touched() -> None:
        host.array[4096] = 1
        driver.register_io(registers, 4096)

    wrong = [attributes(driver, order) for order in (0, 1)]
    freed = driver.allocate(64)  # the last, as its place may be taken again
    driver.free(freed)
    return {
        "device memory beyond its end": lambda: driver.fill(place + 1, 0, 4096, stream),
        "device memory that was freed": lambda: driver.fill(freed, 0, 64, stream),
        "memory freed twice": lambda: driver.free(freed),
        "a word of memory that is not registered": lambda: driver.wait_value(
            stream, host.address + 4096, 0
        ),
        "a word across words": lambda: driver.write_value(stream, place + 2, 0),
        "a batch from memory that is not registered": lambda: driver.copy_batch(*beyond, stream),
        "registers that no processor touched": lambda: driver.register_io(registers, 4096),
        "memory of another device, mapped": touched,
        "and mapped twice": lambda: driver.register_io(registers, 4096),
        "no order of sources": wrong[0],
        "attributes as they should be": wrong[1],
        "a device that there is not": lambda: CudaDriver(7),
    }


def outside(driver: CudaDriver) -> dict[str, Callable[[], object]]:
    """Calls that do not make the context current."""
    stream = driver.create_stream()

    def elsewhere() -> None:
        codes = []
        thread = threading.Thread(
            target=lambda: codes.append(code_of(lambda: driver._raw("cuStreamQuery", stream)))
        )
        thread.start()
        thread.join()
        raise CudaError("on another thread", code=codes[0])

    return {
        "a call without a context": lambda: driver._raw("cuStreamQuery", stream),
        "a call on a thread without a context": elsewhere,
    }


def closed(driver: CudaDriver) -> dict[str, Callable[[], object]]:
    stream, context = driver.create_stream(), driver.context
    driver.close()

    def late() -> None:
        driver._raw("cuCtxPushCurrent", context)
        driver._raw("cuStreamQuery", stream)

    return {"a context that was released": late}


def main() -> None:
    driver = CudaDriver()
    for part in (handles, memory, outside, closed):
        for name, call in part(driver).items():
            print(code_of(call), name)


if __name__ == "__main__":
    main()

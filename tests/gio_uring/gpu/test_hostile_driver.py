"""What a driver may do to careless code, and that a stand-in does it: every trap has a test that
falls into it.  The tests of engines and linker run on the same stand-ins and fall into none.

These run on the stand-in for `Driver`; where LIBCUDA_QUEUE limits the calls in a hardware queue,
they run on the stand-in for libcuda.so.1.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.errors import CudaError
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.stream_queue import wait_until

_SOON_S = 0.3
_CODE = 702
_LIBCUDA_QUEUE = int(os.environ.get("LIBCUDA_QUEUE", "0"))


class Scene:
    """A stream that waits for a word, which only `open` stores."""

    def __init__(self, driver: StandInDriver | CudaDriver) -> None:
        self.driver = driver
        self._word = np.zeros(1, np.uint32)
        driver.register_host(self._word.ctypes.data, 4)
        self.memory = driver.allocate(64)
        self.stream, self.event = driver.create_stream(), driver.create_event()
        self.host = np.zeros(4096, np.uint8)
        self.others = [driver.create_stream() for _ in range(16)]

    def close_gate(self) -> None:
        address = self.driver.device_address(self._word.ctypes.data)
        self.driver.wait_value(self.stream, address, 1)

    def open_gate(self) -> None:
        self._word[0] = 1

    def fill(self, stream: int) -> None:
        self.driver.fill(self.memory, 1, 64, stream)

    def is_done(self, stream: int, within_s: float = 10.0) -> bool:
        return wait_until(lambda: self.driver.is_stream_done(stream), within_s)


@pytest.fixture
def scene() -> Iterator[Scene]:
    driver = CudaDriver() if _LIBCUDA_QUEUE else StandInDriver(queue_max=4, give_up_s=_SOON_S)
    made = Scene(driver)
    yield made
    made.open_gate()
    assert all(made.is_done(stream) for stream in [made.stream, *made.others])
    driver.close()


def test_a_stream_waits_for_the_wait_of_one_that_shares_its_queue(scene: Scene) -> None:
    scene.close_gate()
    for stream in scene.others:
        scene.fill(stream)
    done = [scene.is_done(stream, _SOON_S) for stream in scene.others]
    assert any(done)
    assert not all(done), "16 streams on 8 queues"
    scene.open_gate()
    assert all(scene.is_done(stream) for stream in scene.others)


def test_a_full_queue_blocks_every_thread(scene: Scene) -> None:
    scene.close_gate()
    errors: list[CudaError] = []
    begun = 0

    def overfill() -> None:
        nonlocal begun
        try:
            for _ in range(2 * (_LIBCUDA_QUEUE or 4)):
                begun += 1
                scene.fill(scene.stream)
        except CudaError as error:
            errors.append(error)

    careless = threading.Thread(target=overfill)
    careless.start()
    room = (_LIBCUDA_QUEUE or 4) - 1  # behind the wait
    assert wait_until(lambda: begun > room, 10)
    calls = 0
    while not errors:  # bounded by the time after which a stand-in gives up
        scene.driver.is_event_done(scene.event)
        calls += 1
        time.sleep(_SOON_S / 60)
    assert calls < 30, "the calls of this thread waited for the other's"
    careless.join(5)
    assert errors[0].code == _CODE
    assert begun == room + 1


CREATIONS: dict[str, Callable[[Scene], object]] = {
    "a stream": lambda scene: scene.driver.create_stream(),
    "an event": lambda scene: scene.driver.create_event(),
    "memory that is freed": lambda scene: scene.driver.free(scene.memory),
    "memory that is allocated": lambda scene: scene.driver.allocate(64),
    "memory that is pinned": lambda scene: scene.driver.register_host(scene.host.ctypes.data, 4096),
}


@pytest.mark.parametrize("name", CREATIONS)
def test_who_must_open_a_gate_makes_and_frees_nothing_before(scene: Scene, name: str) -> None:
    scene.close_gate()
    with pytest.raises(CudaError, check=lambda error: error.code == _CODE):
        CREATIONS[name](scene)
    scene.open_gate()
    assert scene.is_done(scene.stream)
    CREATIONS[name](scene)


@pytest.mark.skipif(_LIBCUDA_QUEUE > 0, reason="see native/cuda_watchdog.py")
def test_a_kernel_that_stays_loses_the_context_under_a_watchdog() -> None:
    driver = StandInDriver(watchdog_s=0.05)
    driver.staying["stays"] = lambda: lambda: False
    function = driver.find_function(driver.load_module(b"\x7fELF"), "stays")
    driver.launch(function, 1, 32, [], driver.create_stream())

    def is_lost() -> bool:
        try:
            driver.is_stream_done(0)
        except CudaError as error:
            return error.code == _CODE
        return False

    assert wait_until(is_lost, 5)
    driver.close()

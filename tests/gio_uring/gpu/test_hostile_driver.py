"""What a driver may do to careless code, and that the stand-in does it: every trap has a test that
falls into it.  The engines' own tests run on the same stand-in and fall into none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.errors import CudaError
from tutti.gio_uring.gpu.stream_queue import wait_until

_SOON_S = 0.3
_CODE = 702


class Scene:
    """A stream that waits for a word, which only `open` stores."""

    def __init__(self, driver: StandInDriver) -> None:
        self.driver = driver
        self._word = np.zeros(1, np.uint32)
        driver.register_host(self._word.ctypes.data, 4)
        self.memory = driver.allocate(64)
        self.stream, self.event = driver.create_stream(), driver.create_event()
        self.others = [driver.create_stream() for _ in range(16)]

    def close_gate(self) -> None:
        address = self.driver.device_address(self._word.ctypes.data)
        self.driver.wait_value(self.stream, address, 1)

    def open_gate(self) -> None:
        self._word[0] = 1

    def fill(self, stream: int) -> None:
        self.driver.fill(self.memory, 1, 64, stream)

    def is_done(self, stream: int) -> bool:
        return wait_until(lambda: self.driver.is_stream_done(stream), _SOON_S)


@pytest.fixture
def scene() -> Iterator[Scene]:
    driver = StandInDriver(queue_max=4, give_up_s=_SOON_S)
    made = Scene(driver)
    yield made
    made.open_gate()
    driver.close()


def test_a_stream_waits_for_the_wait_of_one_that_shares_its_queue(scene: Scene) -> None:
    scene.close_gate()
    for stream in scene.others:
        scene.fill(stream)
    done = [scene.is_done(stream) for stream in scene.others]
    assert any(done)
    assert not all(done), "16 streams on 8 queues"
    scene.open_gate()
    assert all(scene.is_done(stream) for stream in scene.others)


def test_a_full_queue_blocks_every_thread(scene: Scene) -> None:
    scene.close_gate()
    for _ in range(3):
        scene.fill(scene.stream)
    errors: list[CudaError] = []

    def overfill() -> None:
        try:
            scene.fill(scene.stream)
        except CudaError as error:
            errors.append(error)

    careless = threading.Thread(target=overfill)
    careless.start()
    assert wait_until(lambda: scene.driver.calls["cuMemsetD8Async"] == 4, 5)
    began = scene.driver.calls.get("cuEventQuery", 0)
    scene.driver.is_event_done(scene.event)  # of nothing, and only after the other call has ended
    assert scene.driver.calls["cuEventQuery"] == began + 1
    assert errors
    careless.join(5)
    assert errors[0].code == _CODE


CREATIONS: dict[str, Callable[[Scene], object]] = {
    "a stream": lambda scene: scene.driver.create_stream(),
    "an event": lambda scene: scene.driver.create_event(),
    "memory that is freed": lambda scene: scene.driver.free(scene.memory),
    "memory that is allocated": lambda scene: scene.driver.allocate(64),
}


@pytest.mark.parametrize("name", CREATIONS)
def test_who_must_open_a_gate_makes_and_frees_nothing_before(scene: Scene, name: str) -> None:
    scene.close_gate()
    with pytest.raises(CudaError, match="deadlock"):
        CREATIONS[name](scene)
    scene.open_gate()
    CREATIONS[name](scene)


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

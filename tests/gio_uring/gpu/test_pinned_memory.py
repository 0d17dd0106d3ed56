"""Pinned memory goes back to the driver before it is unmapped, whatever fails; on the stand-in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from gio_uring.cuda_stand_in import StandInDriver
from memory_controller import MemoryController

from tutti.base.units import MiB
from tutti.errors import CudaError
from tutti.gio_uring.gpu import pinned_memory
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory, TableMemory
from tutti.gio_uring.gpu.stream_queue import StreamQueue
from tutti.gio_uring.memory import HostBuffer


@pytest.fixture
def driver() -> Iterator[StandInDriver]:
    made = StandInDriver()
    yield made
    made.close()


def test_forgotten_memory_is_unpinned_while_it_is_mapped(
    driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = HostBuffer(4096, hugepages=False)
    found = weakref.ref(buffer)
    was_there: list[bool] = []
    unregister = driver.unregister_host

    def watched(address: int) -> None:
        was_there.append(found() is not None)
        unregister(address)

    monkeypatch.setattr(driver, "unregister_host", watched)
    pinned = PinnedMemory(driver, buffer)
    del buffer
    gc.collect()
    assert driver._registered == {pinned.address: 4096}
    del pinned
    gc.collect()
    assert was_there == [True]
    assert not driver._registered
    assert found() is None


def test_memory_that_is_not_unpinned_stays_mapped(
    driver: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck: list[object] = []
    monkeypatch.setattr(pinned_memory, "_STUCK", stuck)
    buffer = HostBuffer(4096, hugepages=False)
    pinned = PinnedMemory(driver, buffer)
    driver.fail["cuMemHostUnregister"] = 1
    with pytest.raises(CudaError):
        pinned.close()
    assert stuck == [buffer]


def test_new_memory_is_not_taken_for_what_was_registered_there(driver: StandInDriver) -> None:
    buffer = HostBuffer(8192, hugepages=False)
    driver.register_host(buffer.address, 8192)  # for memory that was here before
    with pytest.raises(CudaError, match="restart the process"):
        PinnedMemory(driver, buffer)
    pair = (buffer.address, 4096)  # of memory that other code may have registered
    assert PinnedMemory(driver, pair).device_address == driver.device_address(buffer.address)
    gc.collect()
    assert "cuMemHostUnregister" not in driver.calls


MAKERS: dict[str, Callable[[StandInDriver, MemoryController], object]] = {
    "cuMemAlloc": lambda driver, _: TableMemory(driver, MiB),
    "cuEventCreate": lambda driver, controller: StreamQueue(driver, controller, MiB, 2),
    "cuMemHostRegister": lambda driver, controller: StreamQueue(driver, controller, MiB, 2),
}


@pytest.mark.parametrize("call", MAKERS)
def test_what_cannot_be_made_leaves_nothing(driver: StandInDriver, call: str) -> None:
    streams = set(driver._streams)
    with MemoryController([MiB]) as controller:
        driver.fail[call] = 1
        with pytest.raises(CudaError) as caught:  # whose frames keep what was begun
            MAKERS[call](driver, controller)
        assert caught.value.call == call
        assert not driver._registered
        assert not controller._buffers
        assert set(driver._streams) == streams

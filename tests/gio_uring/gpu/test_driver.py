"""The seam to CUDA: its calls exist with these arguments, and its failures are typed.

What the calls do on a GPU is not shown here.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.errors import ConfigError, CudaError, Unsupported
from tutti.gio_uring.gpu import calls as gpu_calls
from tutti.gio_uring.gpu import driver as gpu_driver
from tutti.gio_uring.gpu.driver import CudaDriver, Driver, SmResource
from tutti.gio_uring.gpu.green_context import partition
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.memory import HostBuffer

NEEDED = "cuda-bindings (the extra device-check)"


def calls_of_the_driver() -> list[tuple[str, int]]:
    """(function, number of arguments) of every call that names a function of the driver."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(gpu_driver))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        first = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and str(first.value).startswith("cu")
        if named and node.func.attr in ("_call", "_raw"):
            found.append((first.value, len(node.args) - 1))  # type: ignore[union-attr]
    return found


def test_every_call_exists_with_these_arguments() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason=f"needs {NEEDED}")
    calls = calls_of_the_driver()
    assert len(calls) > 20
    assert all(hasattr(driver, name) for name in gpu_calls.KINDS)
    for name, count in calls:
        signature = getattr(driver, name).__doc__.strip().splitlines()[0]
        inside = re.sub(r"\[[^]]*\]", "", signature.split("(", 1)[1].rsplit(")", 1)[0])
        named = [part for part in inside.split(",") if part.strip()]
        assert len(named) == count, signature


def test_every_name_and_field_exists() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason=f"needs {NEEDED}")
    attributes = driver.CUmemcpyAttributes()
    order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.srcAccessOrder = order
    attributes.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    ours = gpu_calls.CopyAttributes(int(order), flags=gpu_calls._PREFER_OVERLAP)
    theirs = ctypes.string_at(attributes.getPtr(), ctypes.sizeof(ours))
    assert bytes(ours) == theirs
    assert int(order) == gpu_calls._SOURCE_IN_STREAM_ORDER
    results = driver.CUresult
    assert int(results.CUDA_ERROR_NOT_READY) == gpu_calls._NOT_READY
    registered = results.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    assert int(registered) == gpu_driver._ALREADY_REGISTERED
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert int(mode) == gpu_driver._OWN_CAPTURES
    sm = driver.CUdevResource().sm
    assert {"smCount", "minSmPartitionSize", "smCoscheduledAlignment"} <= set(dir(sm))
    assert hasattr(driver.CUdevResourceType, "CU_DEV_RESOURCE_TYPE_SM")
    assert hasattr(driver.CUgreenCtxCreate_flags, "CU_GREEN_CTX_DEFAULT_STREAM")


def test_arguments_are_of_the_kinds_that_cuda_bindings_takes() -> None:
    """They are converted before the driver's library is looked for, which is not there."""
    cuda = pytest.importorskip("cuda.bindings.driver", reason=f"needs {NEEDED}")
    with contextlib.suppress(RuntimeError):
        cuda.cuInit(0)
        pytest.skip("with a driver these calls would be made; tests/gpu makes them")
    driver = object.__new__(CudaDriver)
    driver._cuda, driver.context, driver._handle = cuda, 0, cuda.CUdevice(0)
    driver.device = 0
    resource = cuda.CUdevResource()
    calls: list[Callable[[], object]] = [
        lambda: driver.create_stream(-1),
        lambda: driver.destroy_stream(5),
        driver.create_event,
        lambda: driver.destroy_event(5),
        lambda: driver.register_host(1 << 40, 4096),
        lambda: driver.unregister_host(1 << 40),
        lambda: driver.device_address(1 << 40),
        lambda: driver.allocate(4096),
        lambda: driver.free(1 << 40),
        lambda: driver.load_module(b"\x7fELF"),
        lambda: driver.unload_module(5),
        lambda: driver.find_function(5, "gio_move"),
        driver.sm_resource,
        lambda: driver._raw("cuDevSmResourceSplitByCount", 1, resource, 0, 8),
        lambda: driver._raw("cuDevResourceGenerateDesc", [resource], 1),
        lambda: driver._raw("cuGreenCtxCreate", cuda.CUdevResourceDesc(), cuda.CUdevice(0), 1),
        lambda: driver.create_green_stream(5, 0),
        lambda: driver.destroy_green_context(5),
        lambda: driver._raw("cuFuncLoad", cuda.CUfunction(5)),
        lambda: driver._raw("cuCtxPushCurrent", 5),
        lambda: driver._raw("cuThreadExchangeStreamCaptureMode", cuda.CUstreamCaptureMode(1)),
        lambda: driver._raw("cuGetProcAddress", b"cuMemcpyBatchAsync", 13000, 0),
        lambda: driver.architecture,
    ]
    for call in calls:
        with pytest.raises((Unsupported, RuntimeError), match=r"libcuda|NVIDIA driver"):
            call()


def test_the_stand_in_offers_what_the_protocol_asks_for() -> None:
    for kind in (StandInDriver, CudaDriver):
        for name, member in inspect.getmembers(Driver):
            if name.startswith("_") or not inspect.isfunction(member):
                continue
            theirs = list(inspect.signature(getattr(kind, name)).parameters)
            assert theirs == list(inspect.signature(member).parameters), name


#: How the functions look that are called by their addresses, without what they return.
_P, _U64, _U32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(_U64),),
    "cuCtxPushCurrent": (_P,),
    "cuCtxPopCurrent": (_P,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cuStreamWaitValue32": (_P, _U64, _U32, _U32),
    "cuStreamWriteValue32": (_P, _U64, _U32, _U32),
    "cuMemcpyAsync": (_U64, _U64, _U64, _P),
    "cuMemcpyBatchAsync": (_P, _P, _P, _U64, _P, _P, _U64, _P),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _U64, _P),
    "cuEventRecord": (_P, _P),
    "cuStreamWaitEvent": (_P, _P, _U32),
    "cuLaunchKernel": (_P, *(_U32,) * 7, _P, ctypes.POINTER(_P), _P),
    "cuEventQuery": (_P,),
    "cuStreamQuery": (_P,),
}


class FakeBindings(ModuleType):
    """cuda.bindings.driver of a machine with one device, whose answers a test sets.

    log: functions that were called; arguments: of those that were called by their addresses.
    """

    def __init__(self) -> None:
        super().__init__("driver")
        self.log: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.current = 7  # another device's context, made current by the caller
        self.mode = 0  # of the thread: no other thread may capture a graph
        self.missing = set[str]()
        self.functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(partial(self.called, name))
            for name, types in PROTOTYPES.items()
        }
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (0, 3),
            "cuDevicePrimaryCtxRetain": (0, 1234),
            "cuDriverGetVersion": (0, 12080),
            "cuGetErrorName": (0, b"CUDA_ERROR_SOMETHING"),
            "cuGetErrorString": (0, b"something"),
            "cuDeviceGetAttribute": (0, 9),
        }
        self.CUresult = self.CUstreamCaptureMode = int
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        )

    def called(self, name: str, *arguments: Any) -> int:
        """A function, by its address."""
        if name == "cuThreadExchangeStreamCaptureMode":
            self.mode, arguments[0][0] = arguments[0][0], self.mode
            return 0
        if name == "cuCtxGetCurrent":
            arguments[0][0] = self.current
        self.arguments.append(arguments)
        return int(getattr(self, name)(*arguments)[0])

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuThreadExchangeStreamCaptureMode":
                former, self.mode = self.mode, arguments[0]
                return 0, former
            if name == "cuGetProcAddress" and name not in self.answers:
                asked = arguments[0].decode()
                place = ctypes.cast(self.functions[asked], _P).value
                return 0, 0 if asked in self.missing else place, 0
            self.log.append(name)
            if name == "cuEventQuery" and self.mode == 0:
                return (900,)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            if name == "cuCtxGetCurrent":
                return 0, self.current
            if name == "cuCtxPushCurrent":
                self.current = arguments[0]
            if name == "cuCtxPopCurrent":
                self.current = 7
            return self.answers.get(name, (0,))

        return call


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    fake = FakeBindings()
    package = ModuleType("cuda.bindings")
    package.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    return fake


ENTERED, LEFT = ["cuCtxGetCurrent", "cuCtxPushCurrent"], ["cuCtxPopCurrent"]


def test_calls_run_in_the_devices_context_and_leave_the_callers(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    for call, name in (
        (lambda: driver.copy(1, 2, 3, 4), "cuMemcpyAsync"),
        (driver.create_event, "cuEventCreate"),
    ):
        bindings.answers["cuEventCreate"] = (0, 5)
        bindings.current = 7
        bindings.log.clear()
        call()
        assert bindings.log == [*ENTERED, name, *LEFT]
        assert bindings.current == 7
        bindings.current = 1234
        bindings.log.clear()
        call()
        assert bindings.log == ["cuCtxGetCurrent", name]
    assert driver.architecture == "sm_99"
    assert driver.version == "12.8"


def test_calls_together_are_made_at_the_end_in_their_order(bindings: FakeBindings) -> None:
    bindings.answers["cuDriverGetVersion"] = (0, 13000)
    driver = CudaDriver()
    bindings.log.clear()
    bindings.arguments.clear()
    with driver.together(), driver.together():
        driver.wait_value(5, 1 << 40, 1)
        driver.copy(11, 12, 13, 5)
        driver.fill(21, 22, 23, 5)
        driver.launch(31, 4, 32, [(1 << 50, ctypes.c_void_p), (2, ctypes.c_uint32)], 5)
        driver.record_event(41, 5)
        driver.stream_wait_event(6, 41)
        driver.write_value(6, 1 << 41, 9)
        assert not bindings.log, "nothing so far"
    assert bindings.log == [
        *ENTERED,
        *("cuStreamWaitValue32", "cuMemcpyAsync", "cuMemsetD8Async", "cuLaunchKernel"),
        *("cuEventRecord", "cuStreamWaitEvent", "cuStreamWriteValue32"),
        *LEFT,
    ]
    _, _, waited, copied, filled, launched, recorded, followed, wrote, _ = bindings.arguments
    assert (waited, wrote) == ((5, 1 << 40, 1, 0), (6, 1 << 41, 9, 0))
    assert (copied, filled) == ((11, 12, 13, 5), (21, 22, 23, 5))
    assert (recorded, followed) == ((41, 5), (6, 41, 0))
    assert (*launched[:9], launched[10]) == (31, 4, 1, 1, 32, 1, 1, 0, 5, None)
    bindings.log.clear()
    with contextlib.suppress(ZeroDivisionError), driver.together():
        driver.copy(1, 2, 3, 4)
        _ = 1 // 0
    assert not bindings.log
    bindings.answers["cuEventRecord"] = (719,)

    def fail() -> None:
        with driver.together():
            driver.copy(1, 2, 3, 4)
            driver.record_event(5, 4)
            driver.copy(1, 2, 3, 4)

    with pytest.raises(CudaError, match="cuEventRecord") as e:
        fail()
    assert e.value.code == 719
    assert bindings.log[:5] == [*ENTERED, "cuMemcpyAsync", "cuEventRecord", *LEFT]
    driver.copy(1, 2, 3, 4)
    assert bindings.log[-2] == "cuMemcpyAsync", "at once again"


def test_a_kernel_finds_its_arguments(bindings: FakeBindings) -> None:
    found: list[int] = []

    def launched(*arguments: Any) -> tuple[int]:
        places = arguments[9]
        found.append(ctypes.c_uint64.from_address(places[0]).value)
        found.append(ctypes.c_uint32.from_address(places[1]).value)
        return (0,)

    driver = CudaDriver()
    bindings.cuLaunchKernel = launched
    arguments = [(1 << 50, ctypes.c_void_p), (2, ctypes.c_uint32)]
    driver.launch(31, 4, 32, arguments, 5)
    with driver.together():
        driver.launch(31, 4, 32, arguments, 5)
    assert found == [1 << 50, 2] * 2


def test_a_context_that_cannot_be_entered_is_named(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    bindings.answers["cuCtxPushCurrent"] = (201,)
    for call in (lambda: driver.copy(1, 2, 3, 4), lambda: driver.is_event_done(5)):
        bindings.current = 7
        with pytest.raises(CudaError, match="cuCtxPushCurrent") as e:
            call()
        assert e.value.code == 201


def test_a_driver_without_a_function_says_so(bindings: FakeBindings) -> None:
    bindings.missing.add("cuStreamWaitValue32")
    with pytest.raises(Unsupported, match="no cuStreamWaitValue32; install an NVIDIA driver"):
        CudaDriver()


def test_a_graph_that_another_thread_captures_is_not_in_the_way(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    assert driver.is_event_done(5)
    bindings.answers["cuStreamQuery"] = (700,)
    with pytest.raises(CudaError):
        driver.is_stream_done(5)
    assert bindings.mode == 0, "the caller's again"


def test_an_error_names_its_call(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    bindings.answers["cuStreamWaitValue32"] = (801,)
    with pytest.raises(CudaError, match=r"cuStreamWaitValue32 failed: CUDA_ERROR_SOMETHING") as e:
        driver.wait_value(1, 2, 3)
    assert (e.value.call, e.value.code) == ("cuStreamWaitValue32", 801)
    assert bindings.current == 7


def test_a_result_of_a_newer_driver_is_an_error_like_others(bindings: FakeBindings) -> None:
    def unknown(*_: Any) -> None:
        raise ValueError("12345 is not a valid CUresult")  # as cuda-bindings 13.5 does

    driver = CudaDriver()
    bindings.cuEventCreate = bindings.CUresult = unknown
    with pytest.raises(CudaError, match=r"12345.* as new as the driver"):
        driver.create_event()
    bindings.answers["cuEventRecord"] = (12345,)
    with pytest.raises(CudaError, match="cuEventRecord failed: result 12345") as e:
        driver.record_event(5, 6)
    assert e.value.code == 12345

    def wrong(*_: Any) -> None:
        raise ValueError("an argument")

    bindings.cuEventCreate = wrong
    with pytest.raises(ValueError, match="an argument"):
        driver.create_event()


def test_what_is_not_ready_is_no_error(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    assert driver.is_event_done(5)
    bindings.answers["cuEventQuery"] = (600,)
    assert not driver.is_event_done(5)
    bindings.answers["cuStreamQuery"] = (700,)
    with pytest.raises(CudaError, match="restart the process"):
        driver.is_stream_done(5)


def test_memory_that_is_registered_is_accepted(bindings: FakeBindings) -> None:
    driver = CudaDriver()
    assert driver.register_host(4096, 8192)
    bindings.answers["cuMemHostRegister"] = (712,)
    bindings.answers["cuMemHostGetDevicePointer"] = (0, 4096)
    assert not driver.register_host(4096, 8192)
    bindings.answers["cuMemHostGetDevicePointer"] = (1,)
    with pytest.raises(CudaError, match="cuMemHostGetDevicePointer"):
        driver.register_host(4096, 8192)  # only a part of it is


def test_an_old_driver_has_no_batch_copy(bindings: FakeBindings) -> None:
    assert not CudaDriver().has_copy_batch
    bindings.answers["cuDriverGetVersion"] = (0, 13000)
    bindings.missing.add("cuMemcpyBatchAsync")
    assert not CudaDriver().has_copy_batch
    bindings.missing.clear()
    assert CudaDriver().has_copy_batch


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu_is_that_of_its_pci_device(
    bindings: FakeBindings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    node: int | None,
) -> None:
    if text is not None:
        (tmp_path / "0000:c5:00.0").mkdir()
        (tmp_path / "0000:c5:00.0/numa_node").write_text(text)
    monkeypatch.setattr(gpu_driver, "PCI_DEVICES", tmp_path)
    bindings.answers["cuDeviceGetPCIBusId"] = (0, b"0000:C5:00.0\0\0\0")
    assert CudaDriver().numa_node == node


def test_a_long_batch_is_cut_into_calls(
    bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_calls, "BATCH_MAX", 4)
    bindings.answers["cuDriverGetVersion"] = (0, 13000)
    driver = CudaDriver()
    flags = 1  # prefer overlap
    calls: list[tuple[list[int], ...]] = []

    def take(*arguments: int) -> tuple[int]:
        *columns, count, attributes, first, kinds, stream = arguments
        given = gpu_calls.CopyAttributes.from_address(attributes)
        assert (given.srcAccessOrder, given.flags, kinds, stream) == (1, flags, 1, 5)
        assert ctypes.c_size_t.from_address(first).value == 0
        calls.append(tuple(list((ctypes.c_uint64 * count).from_address(c)) for c in columns))
        return (0 if count else 1,)

    bindings.cuMemcpyBatchAsync = take
    table = np.arange(30, dtype=np.uint64).reshape(3, 10)
    for columns in (table, table.repeat(2, axis=1)[:, ::2], table[:, :0]):
        calls.clear()
        with driver.together():
            driver.copy_batch(columns[0], columns[1], columns[2], 5)
        assert all(len(call[0]) <= 4 for call in calls)
        for k in range(3):
            assert [v for call in calls for v in call[k]] == columns[k].tolist()
    flags = 0
    driver.copy_batch(table[0], table[1], table[2], 5, is_local=True)


def test_a_machine_without_a_driver_says_so(bindings: FakeBindings) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("no libcuda.so.1")

    bindings.cuInit = missing
    with pytest.raises(Unsupported, match="install an NVIDIA driver"):
        CudaDriver()


def test_pinned_memory_is_unpinned_by_who_pinned_it() -> None:
    driver = StandInDriver()
    whole = HostBuffer(16384, hugepages=False)
    first = PinnedMemory(driver, whole)
    again = PinnedMemory(driver, whole.array[4096:8192])
    assert again.device_address == first.to_device(whole.address + 4096)
    again.close()
    assert "cuMemHostUnregister" not in driver.calls
    first.close()
    first.close()
    assert driver.calls["cuMemHostUnregister"] == 1
    driver.close()


def test_a_partition_is_what_the_device_splits_by() -> None:
    driver = StandInDriver(sms=SmResource(132, 8, 8))
    made = partition(driver, 9)
    assert (made.sms, made.is_partition, made.reason) == (16, True, "")
    made.create_stream()
    made.close()
    made.close()
    assert driver.calls["cuGreenCtxDestroy"] == 1
    assert partition(driver, 1).sms == 8
    for wrong in (0, 131):
        with pytest.raises(ConfigError):
            partition(driver, wrong)
    driver.close()


def test_a_refused_partition_is_the_whole_device() -> None:
    driver = StandInDriver()
    driver.fail["cuGreenCtxCreate"] = 1
    whole = partition(driver, 8)
    assert (whole.sms, whole.is_partition) == (132, False)
    assert "refuses" in whole.reason
    assert driver.is_stream_done(whole.create_stream())
    whole.close()
    driver.close()

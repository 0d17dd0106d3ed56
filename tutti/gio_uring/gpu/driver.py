"""The interface to CUDA: exactly the driver calls that the GPU path makes.

`Driver` is the protocol; `CudaDriver` is NVIDIA's driver through cuda-bindings, for the primary
context of one device, which is also PyTorch's.  Handles and addresses are plain integers.  Every
failure is a `CudaError` with the name of the call.

Names and meanings: CUDA Driver API reference manual, 13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tutti.base.arrays import U64
from tutti.base.numa import PCI_DEVICES, node_of
from tutti.errors import CudaError, Unsupported
from tutti.gio_uring.gpu.calls import Arguments, CudaCalls

_ALREADY_REGISTERED = 712
_PCI_NBYTES = 32  # of "0000:65:00.0", with its end
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_REGISTER_PORTABLE_MAPPED = 1 | 2
_REGISTER_IO = 4  # CU_MEMHOSTREGISTER_IOMEMORY
_OWN_CAPTURES = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_WHAT_TO_DO = {
    2: "free GPU memory or make staging smaller",
    100: "no CUDA device is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES",
    209: "the cubin is for another architecture; delete the cubin cache",
    700: "a kernel touched memory that is not mapped; the context is lost, restart the process",
    719: "a kernel failed; the context is lost, restart the process",
    801: "this GPU or driver lacks the feature; choose another mover or engine",
}


@dataclass(frozen=True)
class SmResource:
    """Multiprocessors of a device: how many, the smallest partition, and its granularity."""

    count: int
    minimum: int
    granularity: int


class Driver(Protocol):
    """The CUDA calls that the GPU path needs.

    Calls that enqueue return at once as long as the stream has room; none waits for the device.
    Streams do not wait for the legacy default stream.
    """

    device: int  # CUDA's ordinal
    numa_node: int | None  # of the nearest host memory; None if unknown

    @property
    def architecture(self) -> str:
        """Target architecture for NVRTC, such as "sm_90"."""

    @property
    def has_copy_batch(self) -> bool:
        """Whether `copy_batch` works."""

    @property
    def limits_kernels(self) -> bool:
        """Whether the driver kills kernels that run for seconds, as on a GPU with a display."""

    def together(self) -> AbstractContextManager[None]:
        """A block that collects this thread's enqueueing calls, and makes them in order, in one
        native call, at its end.  Other calls are made at once.

        If a call fails, its error is raised and the calls after it are not made.  If the block
        raises, no call is made.
        """

    def create_stream(self, priority: int = 0) -> int:
        """A new stream; a lower priority goes first."""

    def destroy_stream(self, stream: int) -> None:
        """Destroys a stream on which nothing is left."""

    def is_stream_done(self, stream: int) -> bool:
        """Whether everything on the stream has ended."""

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """The stream waits until the word at a device address is >= `value` (cyclic, 32 bits)."""

    def write_value(self, stream: int, address: int, value: int) -> None:
        """The stream stores a word at a device address, after all its earlier work."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One copy between addresses of any kind."""

    def copy_batch(
        self, targets: U64, sources: U64, nbytes: U64, stream: int, *, is_local: bool = False
    ) -> None:
        """Many copies (n,), in any order; not on the default stream.

        Uses copy engines, unless is_local: both ends are in device memory, where copy engines
        reach a twentieth of the speed (NVIDIA/nccl#2177), so that the driver chooses.
        """

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """Sets bytes of device memory."""

    def create_event(self) -> int:
        """An event without timing."""

    def destroy_event(self, event: int) -> None:
        """Destroys an event."""

    def record_event(self, event: int, stream: int) -> None:
        """The event happens once all work that is on the stream now has ended."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """The stream waits until the last record of the event has happened."""

    def is_event_done(self, event: int) -> bool:
        """Whether the last record of the event has happened, or there was none."""

    def register_host(self, address: int, nbytes: int) -> bool:
        """Pins host memory for the device.  False if all of it was registered already."""

    def register_io(self, address: int, nbytes: int) -> None:
        """Maps another device's registers, which are mapped in this process, for the device."""

    def unregister_host(self, address: int) -> None:
        """Undoes `register_host` and `register_io`."""

    def device_address(self, address: int) -> int:
        """The device address of registered host memory."""

    def allocate(self, nbytes: int) -> int:
        """Allocates device memory; returns its address."""

    def free(self, address: int) -> None:
        """Frees device memory; may wait for the device."""

    def load_module(self, image: bytes) -> int:
        """Loads a cubin."""

    def unload_module(self, module: int) -> None:
        """Undoes `load_module`."""

    def find_function(self, module: int, name: str) -> int:
        """A kernel of a module, loaded completely: its first launch loads nothing."""

    def launch(
        self, function: int, grid: int, block: int, arguments: Arguments, stream: int
    ) -> None:
        """Launches `grid` blocks of `block` threads."""

    def sm_resource(self) -> SmResource:
        """The number of multiprocessors of the device and how they can be split."""

    def create_green_context(self, sms: int) -> tuple[int, int]:
        """(handle, multiprocessors) of a new green context of at least `sms` of them."""

    def create_green_pair(self, sms: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two green contexts: of at least `sms` multiprocessors, and of all others."""

    def create_green_stream(self, context: int, priority: int = 0) -> int:
        """A stream whose kernels run on a green context's multiprocessors."""

    def destroy_green_context(self, context: int) -> None:
        """Destroys a green context; its streams must have been destroyed."""


class CudaDriver(CudaCalls):
    """NVIDIA's driver.

    Raises Unsupported when cuda-bindings or the driver is not installed, CudaError when the device
    does not exist.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise Unsupported(
                "cuda-bindings is not installed; in a clone of this project:"
                " pip install -e '.[cuda]'"
            ) from error
        self._cuda: Any = driver
        self.device = device
        self._own_captures = driver.CUstreamCaptureMode(_OWN_CAPTURES)
        self.context = 0  # the first calls run without one
        self._call("cuInit", 0)
        self._handle = self._call("cuDeviceGet", device)
        super().__init__(self._find, int(self._call("cuDriverGetVersion")), self._check)
        self.context = int(self._call("cuDevicePrimaryCtxRetain", self._handle))
        address = _decode(self._call("cuDeviceGetPCIBusId", _PCI_NBYTES, self._handle))
        self.numa_node = node_of(PCI_DEVICES / address.rstrip("\0").lower())

    def _find(self, name: str, version: int) -> int:
        found = self._call("cuGetProcAddress", name.encode(), version, 0)
        return int(found[0] or 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a function in the device's context; returns None, a result, or a tuple of them."""
        with self._current():
            return self._raw(name, *arguments)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the context current, and restores the caller's afterwards.

        Sets a thread-local capture mode: otherwise a query would end the capture of a graph by
        another thread (pytorch/pytorch#104487).
        """
        if not self.context:
            yield
            return
        foreign = int(self._raw("cuCtxGetCurrent")) != self.context
        if foreign:
            self._raw("cuCtxPushCurrent", self.context)
        try:
            code, former = self._answer("cuThreadExchangeStreamCaptureMode", self._own_captures)
            try:
                yield
            finally:
                if code == 0:
                    self._answer("cuThreadExchangeStreamCaptureMode", former)
        finally:
            if foreign:
                self._raw("cuCtxPopCurrent")

    def _raw(self, name: str, *arguments: Any) -> Any:
        code, *values = self._answer(name, *arguments)
        self._check(name, code)
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def _answer(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What a function returns: its result code and its values."""
        try:
            result, *values = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # cuda-bindings: no driver, or a driver without the function
            raise Unsupported(
                f"{name}: {error}; install an NVIDIA driver of CUDA 13.0 or newer"
            ) from error
        except ValueError as error:  # a result code that only a newer cuda-bindings knows
            if "CUresult" not in str(error):
                raise
            raise CudaError(
                f"{name} failed: {error}; install a cuda-bindings as new as the driver", call=name
            ) from error
        return int(result), *values

    def _check(self, name: str, code: int) -> None:
        if code == 0:
            return
        remedy = _WHAT_TO_DO.get(code, "see the CUDA driver API reference manual")
        raise CudaError(f"{name} failed: {self._describe(code)}; {remedy}", call=name, code=code)

    def _describe(self, code: int) -> str:
        try:
            result = self._cuda.CUresult(code)
        except ValueError:  # a code that only a newer cuda-bindings knows
            return f"result {code}"
        _, word = self._cuda.cuGetErrorName(result)
        _, text = self._cuda.cuGetErrorString(result)
        return f"{_decode(word)}, {_decode(text)}"

    @property
    def architecture(self) -> str:
        attributes = self._cuda.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", which, self._handle)
            for which in (
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"sm_{major}{minor}"

    @property
    def limits_kernels(self) -> bool:
        which = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT
        return bool(self._call("cuDeviceGetAttribute", which, self._handle))

    @property
    def version(self) -> str:
        """The CUDA version of the driver, such as "13.0"."""
        number = int(self._call("cuDriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def create_stream(self, priority: int = 0) -> int:
        return int(self._call("cuStreamCreateWithPriority", _NON_BLOCKING, priority))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def register_host(self, address: int, nbytes: int) -> bool:
        try:
            self._call("cuMemHostRegister", address, nbytes, _REGISTER_PORTABLE_MAPPED)
        except CudaError as error:
            if error.code != _ALREADY_REGISTERED:
                raise
            self.device_address(address)
            self.device_address(address + nbytes - 1)
            return False
        return True

    def register_io(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister", address, nbytes, _REGISTER_PORTABLE_MAPPED | _REGISTER_IO)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def device_address(self, address: int) -> int:
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def load_module(self, image: bytes) -> int:
        return int(self._call("cuModuleLoadData", image))

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def find_function(self, module: int, name: str) -> int:
        function = self._call("cuModuleGetFunction", module, name.encode())
        self._call("cuFuncLoad", function)
        return int(function)

    def _sms(self) -> Any:
        kind = self._cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return self._call("cuDeviceGetDevResource", self._handle, kind)

    def sm_resource(self) -> SmResource:
        sm = self._sms().sm
        # A driver that reports no granularity rounds by itself.
        steps = (max(1, int(n)) for n in (sm.minSmPartitionSize, sm.smCoscheduledAlignment))
        return SmResource(int(sm.smCount), *steps)

    def create_green_context(self, sms: int) -> tuple[int, int]:
        groups, _, _ = self._call("cuDevSmResourceSplitByCount", 1, self._sms(), 0, sms)
        return self._green(groups[0])

    def create_green_pair(self, sms: int) -> tuple[tuple[int, int], tuple[int, int]]:
        groups, _, rest = self._call("cuDevSmResourceSplitByCount", 1, self._sms(), 0, sms)
        return self._green(groups[0]), self._green(rest)

    def _green(self, resource: Any) -> tuple[int, int]:
        description = self._call("cuDevResourceGenerateDesc", [resource], 1)
        flag = int(self._cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = self._call("cuGreenCtxCreate", description, self._handle, flag)
        return int(context), int(resource.sm.smCount)

    def create_green_stream(self, context: int, priority: int = 0) -> int:
        return int(self._call("cuGreenCtxStreamCreate", context, _NON_BLOCKING, priority))

    def destroy_green_context(self, context: int) -> None:
        self._call("cuGreenCtxDestroy", context)

    def close(self) -> None:
        """Releases the primary context; a second call does nothing."""
        context, self.context = self.context, 0
        if context:
            self._raw("cuDevicePrimaryCtxRelease", self._handle)


def _decode(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)

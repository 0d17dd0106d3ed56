"""Device code: compiled by NVRTC to cubins for this machine's GPU, cached on disk, loaded once.

Cubins, not PTX: they load on every driver of the same major version, and the driver compiles
nothing while a kernel waits.  All functions are loaded when the engine starts: loading one later
could wait for a kernel that waits for the loader.

The name of a cubin's file is a hash of all sources, options, the architecture and NVRTC's version.
The file is written under another name and renamed.  It contains its own hash: a damaged one is
compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.base.cache_folder import cache_folder
from tutti.base.process import Owned
from tutti.errors import CudaError, Unsupported
from tutti.gio_uring.gpu.driver import Driver

_log = logging.getLogger(__name__)

#: Kernels of kernels/device/kernels.cu.
KERNELS = (
    "gio_submit_word",
    "gio_drain_word",
    "gio_resident_word",
    "gio_persistent_word",
    "gio_submit_mmio",
    "gio_drain_mmio",
    "gio_resident_mmio",
    "gio_persistent_mmio",
    "gio_move",
    "gio_verify",
)

_MAGIC = b"TUTTICUB"
_DIGEST_NBYTES = 32
_SUFFIXES = (".h", ".cuh", ".cu")


class CubinCache:
    """Cubins on disk.  Any number of processes may share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        """A cubin, or None if there is none or it is damaged."""
        try:
            content = self._path(name).read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + _DIGEST_NBYTES
        cubin = content[head:]
        if content[: len(_MAGIC)] != _MAGIC or not cubin:
            return None
        return cubin if hashlib.sha256(cubin).digest() == content[len(_MAGIC) : head] else None

    def write(self, name: str, cubin: bytes) -> None:
        """Stores a cubin; if the folder is not writable, the next start compiles again."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
                os.replace(temporary, self._path(name))
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            _log.warning("cubins are not kept in %s: %s", self.folder, error)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.cubin"


def _own_cache() -> CubinCache | None:
    """The cache of this user, in `cache_folder`; None for a user who has none."""
    try:
        return CubinCache(cache_folder() / "cubins")
    except OSError as error:
        _log.warning("cubins are not kept: %s", error)
        return None


class DeviceSource:
    """Sources in one folder: the program, and all files that it may include.

    root: holds `include/` and `device/`.
    """

    #: The file to compile, relative to root.
    program = "device/kernels.cu"

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or _shipped()

    def text(self) -> str:
        """The program.  Raises Unsupported when the package was installed without it."""
        try:
            return (self.root / self.program).read_text()
        except OSError as error:
            raise Unsupported(
                f"the device code is not there ({error}); reinstall the package"
            ) from error

    def include_folders(self) -> list[str]:
        """Folders that are searched for includes."""
        return [str(self.root / "include"), str((self.root / self.program).parent)]

    def digest(self) -> bytes:
        """Names and contents of all files that could be included."""
        total = hashlib.sha256()
        for folder in ("include", "device"):
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in _SUFFIXES:
                    content = path.read_bytes()
                    name = path.relative_to(self.root).as_posix()
                    total.update(f"{name}\0{len(content)}\0".encode() + content)
        return total.digest()


def _shipped() -> Path:
    """The folder of the package `tutti.kernels`, which has the sources."""
    spec = importlib.util.find_spec("tutti.kernels")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        raise Unsupported("the device code is not installed; reinstall the package")
    return Path(places[0])


def compile_cubin(
    source: DeviceSource, architecture: str, *, cache: CubinCache | None = None
) -> bytes:
    """Compiles `source` for one architecture, or reads the cubin from the cache.

    Raises Unsupported without cuda-bindings or NVRTC, CudaError with NVRTC's log.
    """
    compiler = _Nvrtc()
    every = [f"--gpu-architecture={architecture}", "-std=c++17"]
    words = "\0".join([*every, compiler.version(), source.program])
    name = hashlib.sha256(source.digest() + words.encode()).hexdigest()
    cubin = cache.read(name) if cache is not None else None
    if cubin is None:
        every += [f"-I{folder}" for folder in source.include_folders()]
        cubin = compiler.compile(source.text(), source.program, every)
        if cache is not None:
            cache.write(name, cubin)
    return cubin


class _Nvrtc:
    """NVRTC through cuda-bindings; it needs neither a driver nor a GPU."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise Unsupported(
                "cuda-bindings is not installed; in a clone of this project:"
                " pip install -e '.[cuda]'"
            ) from error
        self._nvrtc: Any = nvrtc

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            result, *values = getattr(self._nvrtc, name)(*arguments)
        except RuntimeError as error:  # cuda-bindings found no library
            raise Unsupported(f"{name}: {error}; install nvidia-cuda-nvrtc") from error
        if int(result) != 0:
            _, text = self._nvrtc.nvrtcGetErrorString(result)
            said = text.decode() if isinstance(text, bytes) else str(text)
            raise CudaError(
                f"{name} failed: {said}; see NVRTC's manual", call=name, code=int(result)
            )
        return values[0] if len(values) == 1 else values

    def version(self) -> str:
        major, minor = self._call("nvrtcVersion")
        return f"{major}.{minor}"

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        program = self._call("nvrtcCreateProgram", text.encode(), name.encode(), 0, [], [])
        try:
            encoded = [option.encode() for option in options]
            try:
                self._call("nvrtcCompileProgram", program, len(encoded), encoded)
            except CudaError as error:
                raise CudaError(
                    f"the device code does not compile: {self._log(program)}",
                    call=error.call,
                    code=error.code,
                ) from error
            into = bytes(int(self._call("nvrtcGetCUBINSize", program)))
            self._call("nvrtcGetCUBIN", program, into)
            return into
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def _log(self, program: Any) -> str:
        into = bytes(int(self._call("nvrtcGetProgramLogSize", program)))
        self._call("nvrtcGetProgramLog", program, into)
        return into.rstrip(b"\0").decode(errors="replace").strip()


class Modules(Owned):
    """The package's device code on one device, with every kernel loaded completely.

    Raises what `compile_cubin` and the driver raise.
    """

    def __init__(
        self, driver: Driver, *, source: DeviceSource | None = None, cache: CubinCache | None = None
    ) -> None:
        self._driver = driver
        cubin = compile_cubin(
            source or DeviceSource(), driver.architecture, cache=cache or _own_cache()
        )
        self._module = driver.load_module(cubin)
        try:
            self._functions: Mapping[str, int] = {
                name: driver.find_function(self._module, name) for name in KERNELS
            }
        except BaseException:
            driver.unload_module(self._module)
            raise

    def __getitem__(self, name: str) -> int:
        return self._functions[name]

    def close(self) -> None:
        """Unloads the code; no kernel of it may run.  A second call does nothing."""
        module, self._module = self._module, 0
        if module:
            self._driver.unload_module(module)

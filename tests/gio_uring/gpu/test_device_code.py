"""Cubins: compiled by NVRTC where it is installed, and a cache that no damage gets through."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.errors import CudaError, Unsupported
from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu.device_code import (
    KERNELS,
    CubinCache,
    DeviceSource,
    Modules,
    compile_cubin,
)

ROOT = Path(__file__).parents[3] / "kernels"
NEEDED = "cuda-bindings and nvidia-cuda-nvrtc==13.0.88 (the extra device-check)"


class CountingCompiler:
    """Stands in for NVRTC."""

    compiled: ClassVar[list[tuple[str, tuple[str, ...]]]] = []

    def version(self) -> str:
        return "13.0"

    def compile(self, text: str, name: str, options: Sequence[str]) -> bytes:
        self.compiled.append((text, tuple(options)))
        return b"\x7fELF" + f"{len(self.compiled)}".encode() * 100


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    CountingCompiler.compiled = []
    monkeypatch.setattr(device_code, "_Nvrtc", CountingCompiler)
    return CountingCompiler.compiled


@pytest.fixture
def source(tmp_path: Path) -> DeviceSource:
    for name, text in (("include/a.h", "int a;"), ("device/kernels.cu", "int b;")):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    return DeviceSource(tmp_path / "src")


def test_a_cubin_is_compiled_once_for_each_key(
    compiler: list[tuple[str, tuple[str, ...]]], source: DeviceSource, tmp_path: Path
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    first = compile_cubin(source, "sm_90", cache=cache)
    assert compile_cubin(source, "sm_90", cache=cache) == first
    assert len(compiler) == 1
    assert "--gpu-architecture=sm_90" in compiler[0][1]
    compile_cubin(source, "sm_80", cache=cache)
    (source.root / "include/a.h").write_text("int c;")
    assert compile_cubin(source, "sm_90", cache=cache) != first
    assert len(compiler) == 3
    assert not [p for p in cache.folder.iterdir() if p.suffix != ".cubin"], "nothing half written"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_cubin_is_compiled_again(
    compiler: list[tuple[str, tuple[str, ...]]], source: DeviceSource, tmp_path: Path, damage: str
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    compile_cubin(source, "sm_90", cache=cache)
    (path,) = cache.folder.iterdir()
    content = bytearray(path.read_bytes())
    content[60] ^= 1
    whole = path.read_bytes()
    damaged = {"cut": whole[:-1], "flip": bytes(content), "empty": b"", "other": b"x" * 500}
    path.write_bytes(damaged[damage])
    compile_cubin(source, "sm_90", cache=cache)
    assert len(compiler) == 2
    compile_cubin(source, "sm_90", cache=cache)
    assert len(compiler) == 2


def test_a_folder_that_cannot_be_written_only_costs_time(
    compiler: list[tuple[str, tuple[str, ...]]], source: DeviceSource, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cubins")
    compile_cubin(source, "sm_90", cache=cache)
    compile_cubin(source, "sm_90", cache=cache)
    assert len(compiler) == 2


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("{}/given", "given/tutti"),
        ("relative", "home/.cache/tutti"),
        ("", "home/.cache/tutti"),
    ],
)
def test_the_cache_lies_where_caches_lie(
    compiler: list[tuple[str, tuple[str, ...]]],
    source: DeviceSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    where: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", given.format(tmp_path))
    Modules(StandInDriver(), source=source).close()
    (cubin,) = tmp_path.rglob("*.cubin")
    assert cubin.parent == tmp_path / where / "cubins"


def test_a_user_without_a_home_folder_compiles_each_time(
    compiler: list[tuple[str, tuple[str, ...]]],
    source: DeviceSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)  # no user's
    for _ in range(2):
        Modules(StandInDriver(), source=source).close()
    assert len(compiler) == 2
    assert "set XDG_CACHE_HOME" in caplog.text


def test_missing_sources_are_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="reinstall"):
        DeviceSource(tmp_path).text()


def test_a_missing_compiler_is_unsupported(
    source: DeviceSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("libnvrtc.so.13 is not found")  # as cuda-bindings does

    class WithoutLibrary(device_code._Nvrtc):
        def __init__(self) -> None:
            self._nvrtc = SimpleNamespace(nvrtcVersion=missing, nvrtcCreateProgram=missing)

    monkeypatch.setattr(device_code, "_Nvrtc", WithoutLibrary)
    with pytest.raises(Unsupported, match="install nvidia-cuda-nvrtc"):
        compile_cubin(source, "sm_90")


def test_everything_is_loaded_at_the_start(
    compiler: list[tuple[str, tuple[str, ...]]], source: DeviceSource, tmp_path: Path
) -> None:
    driver = StandInDriver()
    modules = Modules(driver, source=source, cache=CubinCache(tmp_path / "c"))
    assert driver.calls["cuModuleGetFunction"] == len(KERNELS)
    assert modules["gio_move"]
    modules.close()
    modules.close()
    assert driver.calls["cuModuleUnload"] == 1
    driver.fail["cuModuleGetFunction"] = 2
    with pytest.raises(CudaError):
        Modules(driver, source=source, cache=CubinCache(tmp_path / "c"))
    assert driver.calls["cuModuleUnload"] == 2
    driver.close()


@pytest.mark.parametrize(
    "architecture",
    [*(pytest.param(f"sm_{n}", marks=pytest.mark.slow) for n in (80, 100)), "sm_90"],
)
def test_the_device_code_compiles_and_holds_every_kernel(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason=f"needs {NEEDED}")
    cubin = compile_cubin(DeviceSource(ROOT), architecture)
    assert cubin[:4] == b"\x7fELF"
    for name in KERNELS:
        assert name.encode() in cubin


def test_a_compiler_error_shows_its_log(source: DeviceSource) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason=f"needs {NEEDED}")
    (source.root / "device/kernels.cu").write_text("this does not compile\n")
    with pytest.raises(CudaError, match=r"kernels\.cu\(1\): error") as caught:
        compile_cubin(source, "sm_90")
    assert caught.value.call == "nvrtcCompileProgram"

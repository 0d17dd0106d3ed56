"""Builds the native library, compiles the scheduler, and maps the folders below the package.

The library has a C interface and no Python.h: `tutti.native` loads `tutti/_native.so` with ctypes.
The modules of COMPILED are compiled by mypyc as they are.  Their sources stay beside them, so one
wheel serves every Python 3: one that it was not built with interprets them, three times as slow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# kernels, bench and integration are not import names of Tutti: other distributions use them.
PACKAGE_FOLDERS = {
    "tutti": "tutti",
    "tutti.bench": "bench",
    "tutti.docs": "docs",  # help texts and errors name its pages
    "tutti.integration": "integration",
    "tutti.kernels": "kernels",
}
#: Modules whose own work in Python is what a decision costs (`tutti bench decisions`).  No class
#: of theirs inherits from Owned, which is interpreted: mypyc, which follows no imports, would lay
#: its fields over Owned's list of weak references.
COMPILED = [
    f"tutti/scheduler/{name}.py"
    for name in (
        *("estimates", "event", "load_changes", "loads_and_writes", "measured_speed", "policy"),
        *("profile_curves", "read_order", "room", "state", "state_changes", "write_order"),
    )
]
COMPILE_FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


NATIVE = "tutti._native"
#: Where a build leaves the debug symbols of what it stripped.  A wheel is built in a folder that
#: goes away, so `make wheel` names another.
DEBUG_FOLDER = os.environ.get("TUTTI_DEBUG_FOLDER", "build/debug")


class BuildShared(build_ext):
    """Builds the native library as a plain shared library instead of an extension module."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # the library and the compiled modules side by side

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        if ext.name == NATIVE and not self.inplace and shutil.which("objcopy"):
            split_symbols(self.get_ext_fullpath(ext.name))

    def copy_extensions_to_source(self) -> None:
        """Makes them newer than their sources, even where nothing was to be built: tests ask."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            Path(self.get_ext_filename(ext.name)).touch()

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_native"):
            return fullname.replace(".", "/") + ".so"
        return str(super().get_ext_filename(fullname))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return [] if ext.name == NATIVE else list(super().get_export_symbols(ext))


def split_symbols(library: str) -> None:
    """Moves debug symbols to a file that gdb finds by the library's debug link."""
    os.makedirs(DEBUG_FOLDER, exist_ok=True)
    symbols = os.path.join(DEBUG_FOLDER, os.path.basename(library) + ".debug")
    subprocess.run(["objcopy", "--only-keep-debug", library, symbols], check=True)
    subprocess.run(["objcopy", "--strip-unneeded", library], check=True)
    subprocess.run(["objcopy", f"--add-gnu-debuglink={symbols}", library], check=True)


class AnyPython(bdist_wheel):
    """Tags the wheel by platform alone: the library knows no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def packages() -> list[str]:
    """Import names of every package, sub-packages included."""
    found = []
    for name, folder in PACKAGE_FOLDERS.items():
        found += [name, *(f"{name}.{child}" for child in find_packages(folder))]
    return found


def native_library() -> Extension:
    """The shared library; a changed header rebuilds it."""
    return Extension(
        NATIVE,
        sources=sorted(glob("kernels/native/*.cpp")),
        depends=sorted(glob("kernels/**/*.h", recursive=True)),
        include_dirs=["kernels/include"],
        language="c++",
        extra_compile_args=COMPILE_FLAGS,
        extra_link_args=["-pthread"],
    )


def compiled_modules() -> list[Extension]:
    """COMPILED; nothing without mypyc or Python.h: then they are interpreted.

    What an earlier build left in the tree is removed: it would be imported instead of its source.
    """
    current = {Path(path).stem for path in COMPILED} | {"compiled__mypyc"}
    try:
        from mypyc.build import mypycify
    except ImportError:
        current.clear()
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        current.clear()
    for old in Path("tutti/scheduler").glob("*.so"):
        if old.name.split(".")[0] not in current:
            old.unlink()
    if not current:
        print("without mypy and Python.h the scheduler stays interpreted, three times as slow")
        return []
    options = ["--config-file=", "--follow-imports=skip"]
    modules: list[Extension] = mypycify(
        [*options, *COMPILED], opt_level="2", debug_level="0", group_name="tutti.scheduler.compiled"
    )
    return modules


setup(
    packages=packages(),
    package_dir=PACKAGE_FOLDERS,
    ext_modules=[native_library(), *compiled_modules()],
    cmdclass={"build_ext": BuildShared, "bdist_wheel": AnyPython},
)

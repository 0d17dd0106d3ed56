"""The native library that the package loads, built with a sanitizer, and programs run over it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native.programs import HERE, KERNELS

SOURCES = KERNELS / "native"
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
# GCC tells that its thread sanitizer does not know fences; what they order is not checked.
SANITIZERS = {
    "tsan": ["-fsanitize=thread", "-Wno-tsan"],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
RUNTIMES = {"tsan": ["libtsan.so"], "asan": ["libasan.so", "libubsan.so"]}
# A finding ends the process with SIGABRT; leaks, which CPython has many of, are read from the log.
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1",
    "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=1:exitcode=0:quarantine_size_mb=16:"
    'stack_trace_format="    #%n %F %L (%m)"',
    "UBSAN_OPTIONS": "abort_on_error=1:print_stacktrace=1",
}
TIMEOUT_S = 300


def build_library(folder: Path, sanitizer: str, edits: dict[str, tuple[str, str]]) -> Path:
    """The library of all of kernels/native, from `folder` where nothing has changed since.

    edits: by the name of a source, a text in it and what stands there instead: to plant mistakes.
    """
    compiler = os.environ.get("CXX", "g++")
    texts = {path.name: path.read_text() for path in sorted(SOURCES.glob("*.cpp"))}
    for name, (old, new) in edits.items():
        assert texts[name].count(old) == 1, f"{name} has no such place: {old}"
        texts[name] = texts[name].replace(old, new)
    headers = b"".join(path.read_bytes() for path in sorted(KERNELS.rglob("*.h")))
    command = [compiler, *FLAGS, *SANITIZERS[sanitizer]]
    with (folder / f"library-{sanitizer}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        objects = [
            folder / f"{name}-{sanitizer}-{_digest(command, headers, text)}.o"
            for name, text in texts.items()
        ]
        missing = [
            pair for pair in zip(texts.items(), objects, strict=True) if not pair[1].exists()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda pair: _compile(command, *pair[0], pair[1]), missing))
        library = folder / f"native-{sanitizer}-{_digest(command, b'', str(objects))}.so"
        if not library.exists():
            _run([*command, "-shared", *map(str, objects), "-o", str(library)])
        if not edits:
            _remove_old(folder, sanitizer, {library, *objects})
    return library


def _digest(command: Sequence[str], headers: bytes, text: str) -> str:
    return hashlib.sha256(" ".join(command).encode() + headers + text.encode()).hexdigest()[:16]


def _compile(command: Sequence[str], name: str, text: str, target: Path) -> None:
    source = target.with_suffix(".cpp")
    source.write_text(f'#line 1 "{name}"\n{text}')
    fresh = target.with_suffix(".new")
    included = [f"-I{KERNELS / 'include'}", f"-I{SOURCES}"]
    _run([*command, *included, "-c", str(source), "-o", str(fresh)])
    source.unlink()
    fresh.replace(target)


def _run(command: Sequence[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert made.returncode == 0, made.stderr


def _remove_old(folder: Path, sanitizer: str, kept: set[Path]) -> None:
    for old in [*folder.glob(f"*.cpp-{sanitizer}-*.o"), *folder.glob(f"native-{sanitizer}-*.so")]:
        if old not in kept:
            old.unlink(missing_ok=True)


def runtimes(sanitizer: str) -> list[str]:
    """Paths of the sanitizer's libraries, which have to be there before Python's; or a skip."""
    found = []
    for name in RUNTIMES[sanitizer]:
        command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        if not os.path.isabs(path.strip()):
            pytest.skip(f"the compiler has no {name}")
        found.append(path.strip())
    return found


def run_program(
    name: str, arguments: Sequence[object], library: Path, sanitizer: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program of this folder over a library; the sanitizer reports on stderr."""
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(runtimes(sanitizer)),
        "TUTTI_NATIVE_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent))),
    }
    command = [sys.executable, str(HERE / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )


def leaks_of(library: Path, report: str) -> list[str]:
    """The leaks in a report whose memory the library asked for: the others are CPython's."""
    return [part for part in report.split("\n\n") if "leak of" in part and library.name in part]

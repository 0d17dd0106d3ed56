"""Compiles the native test programs and talks to them, a line at a time."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
HEADERS = KERNELS / "include"
#: What programs include besides headers, by the first word of their names: kernels, controllers.
KERNEL_FOLDERS = {
    "controller": [KERNELS / "native"],
    "device": [KERNELS / "device", KERNELS / "native"],
}
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZERS = {
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
    "fast": ["-O2"],  # after -O1 of FLAGS, and without a sanitizer
    "library": ["-fPIC", "-shared"],  # to be loaded into Python, without a sanitizer
}
# What the sanitizers do when they find something: a status that nothing else exits with.
SANITIZER_EXIT = 66
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": f"exitcode={SANITIZER_EXIT}:quarantine_size_mb=16",
    "UBSAN_OPTIONS": f"exitcode={SANITIZER_EXIT}:print_stacktrace=1",
    "TSAN_OPTIONS": f"exitcode={SANITIZER_EXIT}",
}
COMPILE_TIMEOUT_S = 100
CLOSE_TIMEOUT_S = 30


def fingerprint(command: list[str], headers: Path, folders: list[Path]) -> str:
    """Digest of a compilation: its command and every file that it may read."""
    version = subprocess.run(
        ["g++", "--version"], capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S
    )
    digest = hashlib.sha256(" ".join(command).encode() + version.stdout)
    own = [p for f in folders for p in f.iterdir() if p.suffix in SOURCE_SUFFIXES]
    for path in sorted([*headers.rglob("*.h"), *own]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compile_program(
    folder: Path, name: str, sanitizer: str, headers: Path = HEADERS, system: Sequence[str] = ()
) -> Path:
    """Compiles `name`.cpp into `folder`, unless what it was compiled from is still the same.

    system: folders of headers of other packages.
    """
    folders = [HERE, *KERNEL_FOLDERS.get(name.split("_")[0], [])]
    command = ["g++", *FLAGS, *SANITIZERS[sanitizer], f"-I{headers}"]
    command += [f"-I{included}" for included in folders]
    command += [f"-isystem{included}" for included in system]
    command.append(str(HERE / f"{name}.cpp"))
    program = folder / f"{name}-{sanitizer}-{fingerprint(command, headers, folders)}"
    if program.exists():
        return program
    # Other workers may build the same program: the last rename wins, and all are equal.
    fresh = program.with_suffix(f".{os.getpid()}")
    made = subprocess.run(
        [*command, "-o", str(fresh)], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
    )
    assert made.returncode == 0, f"{name}.cpp does not compile:\n{made.stderr}"
    fresh.replace(program)
    for old in folder.glob(f"{name}-{sanitizer}-*"):
        if not old.name.startswith(program.name):
            old.unlink(missing_ok=True)
    return program


class Program:
    """A test program that answers every line of input with one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *words: object) -> list[int]:
        """The numbers that the program answers. When it died, its report is the failure, and the
        next question starts it again."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        line = " ".join(str(word) for word in words)
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            self._process = None
            _, report = process.communicate(timeout=CLOSE_TIMEOUT_S)
            pytest.fail(f"the program died on: {line}\n{report}")
        return [int(word) for word in answer.split()]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                [str(self._path)], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
            )
        return self._process

    def close(self) -> None:
        """Ends the program and checks that the sanitizers found nothing, leaks included."""
        if self._process is not None:
            _, report = self._process.communicate(timeout=CLOSE_TIMEOUT_S)
            assert self._process.returncode == 0, report


Build = Callable[..., Path]
Start = Callable[[str], Program]

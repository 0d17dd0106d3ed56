"""Processes that find the stand-in of libcuda.so.1 where they look for NVIDIA's driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: On a machine that does other things too; a minute where it does not.
TIMEOUT_S = 300
NEEDED = "the extra device-check"


def headers_of_cuda() -> str:
    """The folder with the cuda.h of CUDA 13."""
    pytest.importorskip("cuda.bindings.driver", reason=f"needs cuda-bindings ({NEEDED})")
    pytest.importorskip("cuda.bindings.nvrtc", reason=f"needs NVRTC ({NEEDED})")
    pathfinder = pytest.importorskip("cuda.pathfinder", reason=f"needs cuda-pathfinder ({NEEDED})")
    folder = pathfinder.find_nvidia_header_directory("cudart")
    found = Path(folder or ".") / "cuda.h"
    text = found.read_text() if found.exists() else ""
    if not re.search(r"#define CUDA_VERSION 13\d\d\d$", text, re.MULTILINE):
        pytest.skip(f"needs cuda.h of CUDA 13, from nvidia-cuda-runtime ({NEEDED})")
    return str(found.parent)


def environment_with(library: Path, folder: Path) -> dict[str, str]:
    """Of a process that finds `library` through a link in `folder`."""
    (folder / "libcuda.so.1").symlink_to(library)
    paths = [str(TESTS), *sys.path]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONSAFEPATH": "1",
        "XDG_CACHE_HOME": str(library.parent),
    }


def attempt(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Runs Python with a stand-in: its exit code, and what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stdout + done.stderr


def run(words: list[str], environment: dict[str, str]) -> str:
    code, text = attempt(words, environment)
    assert code == 0, text
    return text


def run_tests(environment: dict[str, str], seed: int, *words: str) -> str:
    """Runs tests for a GPU; returns pytest's summary."""
    options = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--seed={seed}"]
    return run([*options, *words], environment)

"""The product's own CudaDriver and cuda-bindings on a stand-in of libcuda.so.1, without a GPU.

The tests for a GPU run on it as they are, in processes that find it instead of a driver: handles,
contexts, addresses and the form of every argument are checked, kernels run on fibers.  It says
nothing of a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from native.programs import Build

TESTS = Path(__file__).parents[1]
#: On a machine that does other things too; a minute where it does not.
TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)
NEEDED = "the extra device-check"
#: Options, and how many pass.  Left out: what needs PyTorch, and what takes long and is tested on
#: fibers elsewhere.
SUITES = {
    "test_driver.py": ([], 14),
    "test_host_engine.py": (["-k", "not torch"], 7),
    "test_device_engines.py": (["-k", "not (every_length or faults)"], 15),
    "test_store_engines.py": ([], 12),
}
REFUSALS = """
400 a stream that was destroyed
400 an event that was destroyed
400 an event for a stream
400 a stream for an event
709 a stream of a green context that was destroyed
201 a green context that was destroyed
400 a module that there is not
400 a kernel that there is not
1 device memory beyond its end
1 device memory that was freed
1 memory freed twice
1 a word of memory that is not registered
1 a word across words
1 a batch from memory that is not registered
0 memory of another device, mapped
712 and mapped twice
1 no order of sources
1 attributes that begin late
0 attributes as they should be
101 a device that there is not
201 a call without a context
201 a call on a thread without a context
709 a context that was given back
"""


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


@pytest.fixture
def environment(build: Build, tmp_path: Path) -> dict[str, str]:
    """Of a process that finds the stand-in where it looks for NVIDIA's driver."""
    library = build("device_cuda", "library", system=[headers_of_cuda()])
    (tmp_path / "libcuda.so.1").symlink_to(library)
    paths = [str(TESTS), *sys.path]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONSAFEPATH": "1",
        "XDG_CACHE_HOME": str(library.parent),
    }


def run(words: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SUITES)
def test_tests_for_a_gpu_pass(name: str, environment: dict[str, str], seed: int) -> None:
    options, count = SUITES[name]
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--seed={seed}"]
    out = run([*words, f"tests/gpu/{name}", *options], environment)
    assert f"{count} passed" in out, out


def test_what_is_wrong_has_the_drivers_code(environment: dict[str, str]) -> None:
    found = run([str(TESTS / "native/cuda_refusals.py")], environment)
    assert found.splitlines() == REFUSALS.split("\n")[1:-1]


def test_the_first_benchmark_runs(environment: dict[str, str], tmp_path: Path) -> None:
    sizes = ["--batch", "2MiB", "--layers", "4", "--staging", "16MiB"]
    options = [*sizes, "--pairs", "1", "--round-s", "0.001"]
    program = ["-m", "tutti.bench.gpu.shards", "--out", str(tmp_path / "out")]
    run([*program, *options, "ceiling"], environment)
    content = json.loads((tmp_path / "out/ceiling.json").read_text())
    assert content["complete"]
    assert "not_run" not in json.dumps(content["rows"])
    assert [row["right"] for row in content["rows"] if "right" in row] == [True] * 6

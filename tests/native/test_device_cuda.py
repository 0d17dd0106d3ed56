"""The product's own CudaDriver and cuda-bindings on a stand-in of libcuda.so.1, without a GPU.

The tests for a GPU run on it as they are, in processes that find it instead of a driver: handles,
contexts, addresses and the form of every argument are checked, kernels run on fibers.  It says
nothing of a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from native.stand_in import TESTS, TIMEOUT_S, run, run_tests

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)
#: Options, hardware queues of all streams, and how many pass.  Left out: what needs PyTorch, and
#: what takes long and is tested on fibers elsewhere.
SUITES = {
    "test_driver.py": ([], 8, 14),
    "test_host_engine.py": (["-k", "not torch"], 1, 7),
    "test_device_engines.py": (["-k", "not (every_length or faults)"], 8, 15),
    "test_store_engines.py": ([], 1, 19),
    "test_bandwidth.py": ([], 8, 5),
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
1 registers that no processor touched
0 memory of another device, mapped
712 and mapped twice
1 no order of sources
0 attributes as they should be
101 a device that there is not
201 a call without a context
201 a call on a thread without a context
709 a context that was released
"""


@pytest.mark.parametrize("name", SUITES)
def test_tests_for_a_gpu_pass(name: str, environment: dict[str, str], seed: int) -> None:
    options, queues, count = SUITES[name]
    shared = {**environment, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    out = run_tests(shared, seed, f"tests/gpu/{name}", *options)
    assert f"{count} passed" in out, out


def test_what_is_wrong_has_the_drivers_code(environment: dict[str, str]) -> None:
    found = run([str(TESTS / "native/cuda_refusals.py")], environment)
    assert found.splitlines() == REFUSALS.split("\n")[1:-1]


def test_careless_code_hangs(environment: dict[str, str], seed: int) -> None:
    short = {"STAND_IN_GIVE_UP_MS": "300", "LIBCUDA_QUEUE": "1024"}
    out = run_tests({**environment, **short}, seed, "tests/gio_uring/gpu/test_hostile_driver.py")
    assert "7 passed, 1 skipped" in out, out


def test_a_watchdog_ends_long_kernels_and_engines_have_none(environment: dict[str, str]) -> None:
    watched = {**environment, "STAND_IN_WATCHDOG_MS": "4000"}
    assert run([str(TESTS / "native/cuda_watchdog.py")], watched).splitlines() == [
        "persistent: refused",
        "launch: timed out",
        "launch without a limit: code 702",
    ]


def test_the_first_contact_is_kept_in_one_tar(environment: dict[str, str], tmp_path: Path) -> None:
    sizes = "--batch 4MiB --layers 4 --staging 16MiB --pairs 1 --round-s 0.001"
    program = [str(TESTS / "gpu/first_contact.py"), "--out", str(tmp_path / "out")]
    run([*program, "--bench", sizes, "--steps", "probes", "ceiling"], environment)
    shutil.rmtree(tmp_path / "out")
    # Goes on from the tar, where nothing is left to do.
    again = run([*program, "--steps", "probes", "ceiling"], environment)
    assert "ended" not in again
    found = {
        n: json.loads((tmp_path / f"out/bench/{n}.json").read_text()) for n in ("probes", "ceiling")
    }
    for content in found.values():
        assert content["complete"]
        assert "not_run" not in json.dumps(content["rows"])
    assert [row["right"] for row in found["ceiling"]["rows"] if "right" in row] == [True] * 6
    full, alone, *copies = found["probes"]["rows"]
    assert full["the_next_call_blocked"]
    assert full["another_threads_call_blocked"]
    assert alone["streams_that_waited"] == 4, "every eighth of 32"
    assert [row["nbytes"] for row in copies] == [1 << 20, 4 << 20]

"""Runs the GPU tests in shards of at most eight minutes.

    python tests/gpu/shards.py --out DIR

Every test is a process of its own, so that one that hangs or loses its context costs no other; some
run at once.  A shard's JSON in DIR is written after every test; a test that passed is not run
again, so a run that was cut goes on where it stopped.  The last shard repeats the kernels' tests
under compute-sanitizer's memcheck, where that is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARDS = {
    "driver": ["tests/gpu/test_driver.py"],
    "host_engine": ["tests/gpu/test_host_engine.py"],
    "device_engines": ["tests/gpu/test_device_engines.py"],
    "store_engines": ["tests/gpu/test_store_engines.py"],
    "bandwidth": ["tests/gpu/test_bandwidth.py"],
    "torch": ["tests/gpu/test_torch.py"],
    "linker": ["tests/gpu/test_linker.py"],
    # A tool may wait for every launch, so the kernel that stays is left out.
    "memcheck": [
        "tests/gpu/test_device_engines.py",
        *("-k", "(travel and launch or dies) and not persistent"),
    ],
}
#: Of a test, and of one under a tool; waits of tests are 30 s at most.
TEST_S, TOOL_S = 60, 150
COLLECT_S = 60
#: Tests at once: most of their time goes into the start of a process and its context.
JOBS = min(8, max(1, (os.cpu_count() or 1) // 2))
TAIL = 40
SHOWN = 12


def run(command: list[str], timeout_s: float) -> tuple[int, str]:
    """(exit code, output) of a command and all that it starts; 124 when it was killed."""
    with subprocess.Popen(
        command,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate(timeout=10)
            return 124, f"{text}\nkilled after {timeout_s:g} s"
        return process.returncode, text


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", *arguments]


def tests_of(name: str) -> list[str]:
    """The shard's tests; raises RuntimeError when they cannot be listed."""
    code, text = run(pytest("--collect-only", *SHARDS[name]), COLLECT_S)
    found = [line.strip() for line in text.splitlines() if "::" in line]
    if code != 0 or not found:
        raise RuntimeError(f"the tests cannot be collected:\n{text}")
    return found


def outcome_of(code: int, text: str) -> str:
    if code == 0:
        return "passed" if " passed" in text else "skipped"
    return "hung" if code == 124 else "failed"


def run_test(test: str, name: str) -> dict[str, Any]:
    """Runs one test and returns its outcome."""
    command, timeout_s = pytest(test), TEST_S
    if name == "memcheck":
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            return {"outcome": "skipped", "why": "compute-sanitizer is not installed"}
        # cuda-bindings asks for functions of newer drivers, which is an error to the tool.
        options = ["--report-api-errors", "no", "--error-exitcode", "9"]
        command = [tool, "--tool", "memcheck", *options, *command]
        timeout_s = TOOL_S
    began_s = time.monotonic()
    code, text = run(command, timeout_s)
    lines = text.splitlines()
    result: dict[str, Any] = {"outcome": outcome_of(code, text), "code": code}
    result["elapsed_s"] = time.monotonic() - began_s
    if result["outcome"] == "skipped":
        result["why"] = next((line for line in lines if line.startswith("SKIPPED")), "")
    elif result["outcome"] != "passed":
        result["tail"] = lines[-TAIL:]
        print("\n".join(lines[-SHOWN:]), flush=True)
    return result


def run_shard(name: str, out: Path, until_s: float) -> bool:
    """Runs the tests of a shard that did not pass yet.  False when one failed or is left."""
    path = out / f"{name}.json"
    tests: dict[str, dict[str, Any]] = json.loads(path.read_text())["tests"] if has(path) else {}
    result: dict[str, Any] = {"shard": name, "passed": False, "tests": tests}
    try:
        names = tests_of(name)
    except RuntimeError as error:
        result["not_run"] = str(error)
        names = []
    left = [test for test in names if tests.get(test, {}).get("outcome") != "passed"]

    def in_time(test: str) -> dict[str, Any] | None:
        return run_test(test, name) if time.monotonic() < until_s else None

    with ThreadPoolExecutor(JOBS) as pool:
        for test, outcome in zip(left, pool.map(in_time, left), strict=True):
            if outcome is None:
                result["not_run"] = "there was no time left; run it again for the other tests"
                continue
            tests[test] = outcome
            print(f"{outcome['outcome']}: {test}", flush=True)
            write(path, result)
    outcomes = [tests.get(test, {}).get("outcome") for test in names]
    result["passed"] = "passed" in outcomes and set(outcomes) <= {"passed", "skipped"}
    if outcomes and set(outcomes) == {"skipped"}:
        result["not_run"] = "every test was skipped"
    write(path, result)
    print(f"== {name}:", "passed" if result["passed"] else result.get("not_run", "FAILED"))
    return bool(names) and set(outcomes) <= {"passed", "skipped"}


def has(path: Path) -> bool:
    """Whether a shard was run by this runner."""
    return path.exists() and "tests" in json.loads(path.read_text())


def write(path: Path, result: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/gpu-test"))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no test after so long")
    parser.add_argument("shards", nargs="*", default=list(SHARDS), help=", ".join(SHARDS))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + args.minutes * 60 - TEST_S
    good = [run_shard(name, args.out, until_s) for name in args.shards]  # all, whatever fails
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

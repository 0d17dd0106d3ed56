"""Runs the GPU tests in shards of at most eight minutes; each writes its JSON when it ends.

    python tests/gpu/shards.py --out DIR

A shard whose JSON in DIR says that it passed is not run again, so a run that was cut goes on where
it stopped.  The last shard repeats the kernels' tests under compute-sanitizer's memcheck, where
that is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHARD_TIMEOUT_S = 480
SHARDS = {
    "host_engine": ["test_host_engine.py"],
    "device_engines": ["test_device_engines.py"],
    # A tool may wait for every launch, so the kernel that stays is left out.
    "memcheck": ["test_device_engines.py", "-k", "(travel and launch or dies) and not persistent"],
}


def command(name: str) -> list[str] | None:
    """What to run, from the repository's root; None where the tool is missing."""
    file, *options = SHARDS[name]
    run = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", f"tests/gpu/{file}", *options]
    if name != "memcheck":
        return run
    tool = shutil.which("compute-sanitizer")
    return None if tool is None else [tool, "--tool", "memcheck", "--error-exitcode", "9", *run]


def run_shard(name: str, out: Path) -> bool:
    """Runs one shard and writes what became of it."""
    what = command(name)
    result: dict[str, object] = {"shard": name}
    if what is None:
        result |= {"passed": False, "not_run": "compute-sanitizer is not installed"}
    else:
        began_s = time.monotonic()
        try:
            done = subprocess.run(
                what, cwd=HERE.parents[1], capture_output=True, text=True, timeout=SHARD_TIMEOUT_S
            )
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, text = 124, str(error)
        ran = " passed" in text
        if code == 0 and not ran:
            result["not_run"] = "every test was skipped; the tail says why"
        result |= {
            "passed": code == 0 and ran,
            "code": code,
            "elapsed_s": time.monotonic() - began_s,
            "tail": text.splitlines()[-40:],
        }
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(name, "passed" if result["passed"] else result.get("not_run", "FAILED"), flush=True)
    return bool(result["passed"]) or "not_run" in result


def passed(path: Path) -> bool:
    return path.exists() and bool(json.loads(path.read_text()).get("passed"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-test"))
    parser.add_argument("shards", nargs="*", default=list(SHARDS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    left = [name for name in args.shards if not passed(args.out / f"{name}.json")]
    results = [run_shard(name, args.out) for name in left]  # a failure does not stop the others
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

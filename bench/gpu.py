"""Measures the GPU path; needs an NVIDIA GPU.  One shard at a time, each below eight minutes.

    python -m tutti.bench.gpu --out DIR            # all that DIR does not hold yet
    python -m tutti.bench.gpu --out DIR ceiling    # these alone, again

Every case writes DIR/NAME.json when it ends, so a run that was cut goes on where it stopped.  The
first, `ceiling`, says in less than four minutes whether it works, is right, and how fast it can be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tutti.bench import gpu_cases, gpu_overlap
from tutti.bench.environment import describe
from tutti.bench.gpu_cases import Case, Plan
from tutti.bench.gpu_rig import Machine
from tutti.errors import ConfigError, TuttiError
from tutti.gio_uring.gpu_device_engine import KINDS
from tutti.gio_uring.gpu_driver import CudaDriver, Driver
from tutti.gio_uring.gpu_modules import Modules
from tutti.terminal import progress
from tutti.units import parse_nbytes

_SMI = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,pcie.link.gen.current,power.limit"


def first(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Is it right, and how fast is the ceiling."""
    return {"round_trip": gpu_cases.round_trip(machine, plan)} | gpu_cases.ceiling(machine, plan)


CASES: dict[str, Case] = {
    "ceiling": first,
    "scatter": gpu_cases.scatter,
    "pipeline": gpu_overlap.pipeline,
    "interference": gpu_overlap.interference,
    "multiprocessors": gpu_cases.multiprocessors,
    "digests": gpu_overlap.digests,
    "engines": partial(gpu_cases.engine, "host"),
    "files": gpu_cases.files,
}
CASES |= {kind: partial(gpu_cases.engine, kind) for kind in KINDS}


def describe_gpu() -> dict[str, str]:
    """GPU, driver and clocks as nvidia-smi reports them; nothing where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(_SMI.split(","), values, strict=False))


def run_case(name: str, machine: Machine, plan: Plan, out: Path, label: str = "") -> dict[str, Any]:
    """Runs a case and writes its JSON, whatever became of it."""
    began_s = time.monotonic()
    try:
        result = CASES[name](machine, plan)
    except Exception as error:  # whatever it is, the other cases' results must not be lost
        result = {"not_run": f"{type(error).__name__}: {error}"}
        if not isinstance(error, TuttiError):
            result["traceback"] = traceback.format_exc().splitlines()[-12:]
    content = {
        "case": name,
        "label": label,
        "gpu": describe_gpu(),
        "environment": describe(plan.folder),
        "elapsed_s": time.monotonic() - began_s,
        "result": result,
    }
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".{name}.json.new"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, out / f"{name}.json")
    return content


def cases_to_run(wanted: list[str], out: Path) -> list[str]:
    """The named ones, or all that have no result yet: those that were not tried come first."""
    unknown = set(wanted) - set(CASES)
    if unknown:
        raise ConfigError(f"no case is called {min(unknown)}; there are {', '.join(CASES)}")
    if wanted:
        return wanted
    states = {name: _state(out / f"{name}.json") for name in CASES}
    return [name for state in ("new", "failed") for name in CASES if states[name] == state]


def _state(path: Path) -> str:
    """What became of a case: "new", "failed" or "done"."""
    if not path.exists():
        return "new"
    return "failed" if "not_run" in json.loads(path.read_text())["result"] else "done"


def machine_of(driver: Driver) -> Machine:
    """The GPU with the device code of this package."""
    return Machine(driver, Modules(driver))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tutti.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", default="bench/results/gpu", help="(default: %(default)s)")
    parser.add_argument("--dir", default=".", help="for the file of `files` (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="rounds (default: %(default)s)")
    parser.add_argument("--round", default="8GiB", help="moved in a round (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no case after so long")
    args = parser.parse_args(arguments)
    out = Path(args.out)
    began_s = time.monotonic()
    try:
        names = cases_to_run(args.cases, out)
        machine = machine_of(CudaDriver())
        plan = Plan(progress, Path(args.dir), args.pairs, round_nbytes=parse_nbytes(args.round))
        for name in names:
            if time.monotonic() - began_s > args.minutes * 60:
                print(f"{name} and what follows are left for the next run")
                break
            content = run_case(name, machine, plan, out)
            why = content["result"].get("not_run", "done")
            print(f"{name}: {content['elapsed_s']:.0f} s, {why}", flush=True)
            if "traceback" in content["result"]:
                print("the GPU may be in a bad state: run this again for the cases that are left")
                return 1
        machine.close()
    except TuttiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

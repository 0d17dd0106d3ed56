"""Measures the GPU path; needs an NVIDIA GPU.  One shard at a time, each below eight minutes.

    python -m tutti.bench.gpu.shards --out DIR            # all that DIR does not have yet
    python -m tutti.bench.gpu.shards --out DIR ceiling    # these alone, again

Every case has its own process, so that one that hangs or loses its context costs one row and no
other case.  DIR/NAME.json is written after every row; an interrupted run continues after the last
row.  The first case, `probes`, shows how the driver handles waits.  `ceiling` shows in less than
four minutes whether the path works, whether its results are right, and its speed.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from tutti.base.terminal import progress
from tutti.base.units import parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.gpu import cases as gpu_cases
from tutti.bench.gpu import digests as gpu_digests
from tutti.bench.gpu import files as gpu_files
from tutti.bench.gpu import overlap as gpu_overlap
from tutti.bench.gpu import probes as gpu_probes
from tutti.bench.gpu.cases import Case, RoundPlan, Row
from tutti.bench.gpu.facts import clocks, describe_gpu, describe_host
from tutti.bench.gpu.report import line_of
from tutti.bench.gpu.rig import GpuUnderTest
from tutti.bench.writable import options
from tutti.errors import ConfigError, CudaError, TuttiError
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.driver import CudaDriver, Driver

CASES: dict[str, Case] = {
    "probes": gpu_probes.probes,
    "ceiling": gpu_cases.first,
    "scatter": gpu_cases.scatter,
    "pipeline": gpu_overlap.pipeline,
    "interference": gpu_overlap.interference,
    "multiprocessors": gpu_cases.multiprocessors,
    "digests": gpu_digests.digests,
    "files": gpu_files.files,
    "cpu-time": gpu_cases.cpu_time,
    "interpreter": gpu_cases.interpreter,
    "engines": partial(gpu_cases.engine, "host"),
}
CASES |= {kind: partial(gpu_cases.engine, kind) for kind in KINDS}

#: Limit of a row: a longer one counts as hanging, and its process is ended.
_ROW_S = 75
#: Least time left to start a case, and most starts of a case in one run.
_LEFT_S, _TRIES = 20, 6
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Codes of CUresult that the context returns from every later call.
_LOST = {700, 702, 710, 714, 715, 716, 717, 718, 719, 721}


def run_case(
    name: str, machine: GpuUnderTest, plan: RoundPlan, out: Path, commit: str = ""
) -> dict[str, Any]:
    """Runs the rows of a case that have no result yet; its JSON is written after each of them."""
    content = _begun(name, machine, plan, out, commit)
    rows = content["rows"]
    known = {row["name"] for row in rows}
    try:
        for row in CASES[name](machine, plan):
            if row.name in known:
                continue
            if time.monotonic() > plan.until_s:
                content["stopped"] = "there was no time left; run it again for the other rows"
                break
            content["running"] = row.name
            _write(content, out)
            rows.append(_run_row(row))
            del content["running"]
            _write(content, out)
            print(line_of(rows[-1]), flush=True)
            if rows[-1].get("cuda_error") in _LOST:
                content["stopped"] = "the context is lost"
                break
        else:
            content["complete"] = True
    except Exception as error:  # a case that cannot list its rows
        content |= {"stopped": _why(error), "failed": True}
        if not isinstance(error, TuttiError):
            content["traceback"] = traceback.format_exc().splitlines()[-12:]
    _write(content, out)
    return content


def _begun(
    name: str, machine: GpuUnderTest, plan: RoundPlan, out: Path, commit: str
) -> dict[str, Any]:
    """The facts of a case's JSON, and the rows of an interrupted run."""
    machine_facts = describe(plan.folder) | ({"commit": commit} if commit else {})
    begun = _read(out / f"{name}.json")
    goes_on = begun.get("machine", {}).get("commit") == machine_facts["commit"]
    return {
        "benchmark": "gpu",
        "case": name,
        "complete": False,
        "gpu": describe_gpu(),
        "host": describe_host(machine.driver.numa_node),
        "cuda": machine.facts,
        "machine": machine_facts,
        "rows": begun["rows"] if goes_on and not begun.get("complete") else [],
    }


def _run_row(row: Row) -> dict[str, Any]:
    """Runs a row; an error becomes part of its result, because other rows must not be lost."""
    began_s = time.monotonic()
    result: dict[str, Any] = {"name": row.name}
    faulthandler.dump_traceback_later(_ROW_S, exit=True)
    try:
        result |= row.work()
    except Exception as error:
        result["not_run"] = _why(error)
        codes = [e.code for e in _chain(error) if isinstance(e, CudaError)]
        if codes:
            result["cuda_error"] = codes[-1]
        elif not isinstance(error, TuttiError):
            result["traceback"] = traceback.format_exc().splitlines()[-12:]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return result | {"elapsed_s": time.monotonic() - began_s, "clocks_after": clocks()}


def _chain(error: BaseException) -> list[BaseException]:
    """An error and those in whose handling it was raised, the first one last."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    return chain


def _why(error: BaseException) -> str:
    """Text of the first error and those it caused, such as failures of close()."""
    return ", then ".join(f"{type(e).__name__}: {e}" for e in reversed(_chain(error)))


def _read(path: Path) -> dict[str, Any]:
    """A case's JSON; {} where there is none."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _write(content: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".{content['case']}.json.new"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, out / f"{content['case']}.json")


def cases_to_run(wanted: list[str], out: Path) -> list[str]:
    """The named cases, or all without a complete result, failed ones last."""
    unknown = set(wanted) - set(CASES)
    if unknown:
        raise ConfigError(f"no case is called {min(unknown)}; there are {', '.join(CASES)}")
    if wanted:
        return wanted
    states = {name: _state(_read(out / f"{name}.json")) for name in CASES}
    left = [name for name in CASES if states[name] in ("new", "cut")]
    return left + [name for name in CASES if states[name] == "failed"]


def _state(content: dict[str, Any]) -> str:
    """State of a case: "new", "cut" (interrupted), "failed" or "done"."""
    if not content:
        return "new"
    if content["complete"]:
        return "done"
    return "failed" if content.get("failed") else "cut"


def machine_of(driver: Driver) -> GpuUnderTest:
    """The GPU with the package's device code, or without it if it cannot be loaded."""
    try:
        return GpuUnderTest(driver, Modules(driver))
    except TuttiError as error:
        return GpuUnderTest(driver, None, why_no_modules=f"{type(error).__name__}: {error}")


def _run_here(name: str, args: argparse.Namespace) -> int:
    """Runs one case in this process, which is killed when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    out = Path(args.out)
    until_s = time.monotonic() + args.minutes * 60
    faulthandler.dump_traceback_later(_ROW_S, exit=True)  # a driver that does not answer
    try:
        plan = RoundPlan(
            progress,
            Path(args.dir),
            args.pairs,
            args.round_s,
            batch_nbytes=parse_nbytes(args.batch),
            layers=args.layers,
            staging_nbytes=parse_nbytes(args.staging),
            file_nbytes=parse_nbytes(args.file),
            until_s=until_s,
        )
        machine = machine_of(CudaDriver())
        run_case(name, machine, plan, out, commit=args.commit)
        faulthandler.dump_traceback_later(_ROW_S / 5, exit=True)
        machine.close()
    except TuttiError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def _run_apart(name: str, argv: list[str], out: Path, left_s: float) -> dict[str, Any]:
    """Runs a case in its own process, restarted after a row that ended it; returns its JSON."""
    until_s = time.monotonic() + left_s
    path = out / f"{name}.json"
    queues = "8" if name == "probes" else "32"  # SGLang's value, and one without sharing
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} | os.environ
    for _ in range(_TRIES):
        left_s = until_s - time.monotonic()
        if left_s < _LEFT_S:
            break
        command = [sys.executable, "-m", "tutti.bench.gpu.shards", "--here", name, *argv]
        try:
            done = subprocess.run(
                [*command, "--minutes", str(left_s / 60)], env=env, timeout=left_s + _ROW_S / 2
            )
            how = f"its process ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            how = "its process was killed, as the time was over"
        content = _read(path)
        row = content.pop("running", None)
        if row is not None:
            content["rows"].append({"name": row, "not_run": how})
            _write(content, out)
        elif content.get("stopped") != "the context is lost":
            break
    return _read(path)


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m tutti.bench.gpu.shards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = options(parser)
    option("cases", None, ", ".join(CASES), nargs="*", metavar="CASE")
    option("--out", "bench/results/gpu", "folder of the results")
    option("--dir", ".", "folder for the file of the case `files`")
    option("--file", "4GiB", "size of that file")
    option("--batch", "256MiB", "bytes of a transfer")
    option("--layers", 8, "layers of a transfer")
    option("--staging", "256MiB", "staging of an engine")
    option("--pairs", 7, "pairs of rounds")
    option("--round-s", 0.15, "length of a round, seconds")
    option("--commit", "", "commit of the code, where git is missing")
    option("--minutes", 8.0, "start no row after this time")
    option("--go-on", False, "keep earlier rows of these cases")
    option("--here CASE", None, "run one case in this process")
    args = parser.parse_args(words)
    if args.here:
        code = _run_here(args.here, args)
        sys.stdout.flush()
        os._exit(code)  # a context that is stuck is not waited for
    out, began_s = Path(args.out), time.monotonic()
    try:
        names = cases_to_run(args.cases, out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in () if args.go_on else args.cases:
        (out / f"{name}.json").unlink(missing_ok=True)
    is_whole = True
    for name in names:
        left_s = args.minutes * 60 - (time.monotonic() - began_s)
        if left_s < _LEFT_S:
            print(f"{name} and what follows are left for the next run", flush=True)
            return 1
        content = _run_apart(name, words, out, left_s)
        is_whole = is_whole and bool(content.get("complete"))
        why = "done" if content.get("complete") else content.get("stopped", "no result")
        print(f"== {name}: {why}, {time.monotonic() - began_s:.0f} s", flush=True)
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())

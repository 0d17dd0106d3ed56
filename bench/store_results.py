"""Measures every result of the store in one run, from one commit: `make bench`.

    python -m tutti.bench.store_results --dir /mnt/nvme --out bench/results

Each result has a command; they run one after the other, so use a machine with no other work. A
result replaces the old one only if its command succeeded in time and measured everything. Otherwise
the old result stays, and the reason is printed and added to the manifest `store-run.json`, which is
updated after each step. A run of some results (`--only`) does not write it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.base.terminal import table
from tutti.bench.environment import describe
from tutti.bench.peers.fio_peers import FIO
from tutti.bench.writable import options
from tutti.errors import ConfigError

MANIFEST = "store-run"
_END_S = 20.0
_REASON_MAX = 200


@dataclass(frozen=True)
class Result:
    """One result: a module with its arguments, in which {out}, {trace}, {dirs} (all folders) and
    {dir} (the first one) are replaced.

    prints: the command prints the result; otherwise it writes NAME.json into {out}.
    sglang: runs with the Python that has SGLang.  limit_s: time after which the step is killed.
    picture: subject of NAME.png, for a step that draws one for the page.
    """

    name: str
    words: str
    limit_s: float
    prints: bool = False
    sglang: bool = False
    picture: str = ""


def _compare(name: str, limit_s: float, more: str = "") -> Result:
    words = "tutti.bench.compare.run --dir {dirs} --out {out} --allow-sysctl --pairs 7 "
    return Result(name, f"{words}{name} {more}", limit_s)


_SAME_PAGES = (
    "tutti.cli bench peers --dir {dirs} --json --allow-sysctl --peers hicache-tutti"
    " hicache-tutti-unverified hicache-nixl lmcache-fs-native file-per-page fio-hugepages"
    " fio-hugepages-4-pages"
)

#: The longest steps last.  Limits are about twice the time of a step on two processors and a disk
#: of 3 GB/s; all steps together take about 100 minutes there, and 140 on a slower disk.
STEPS = (
    _compare("bandwidth-fio", 480, "--seconds 1"),
    _compare("files", 600, "--size 2GiB --seconds 1 --only direct"),
    _compare("layerwise-fio", 420, "--seconds 1"),
    _compare("cpu-verify", 300, "--size 2GiB --seconds 0.7"),
    Result("replay", "tutti.cli replay --trace {trace} --shape 4x16KiB --capacity 1GiB 3GiB 9GiB"
         " --floor --dir {dirs} --json", 720, prints=True),
    Result("window", "tutti.cli bench window --dir {dirs} --json", 400, prints=True),
    Result("short", "tutti.cli bench short --dir {dirs} --json", 120, prints=True),
    Result("threads", "tutti.cli bench threads --json", 300, prints=True),
    Result("slack-file", "tutti.cli bench slack --json --workloads --dir {dir} --rounds 40", 400,
         prints=True),
    Result("decisions", "tutti.cli bench decisions --dir {dir} --json", 180, prints=True),
    # Of Llama-3-8B on one of 8 ranks, so that the bytes of the longest prompt fit here.
    Result("contexts", "tutti.cli bench bandwidth --dir {dirs} --json --shapes 32x32KiB --prewrite"
         " --phases store retrieve --capacity 5GiB --memory 4GiB"
         " --contexts 1024 2048 4096 8192 16384 32768 65536 131072", 240, prints=True),
    _compare("churned", 240, "--seconds 1"),
    _compare("bandwidth-memory", 180, "--memory huge --size 2GiB --seconds 1"),
    _compare("fio-memory", 120, "--seconds 1 --size 2GiB"),
    Result("residency", "tutti.cli bench residency --dir {dir} --working-set 1GiB --rounds 4"
         " --out {out}/residency.json", 600),
    Result("residency-moving", "tutti.cli bench residency --dir {dir} --working-set 512MiB --moving"
         " --seconds 5 --rounds 4 --out {out}/residency-moving.json", 1300),
    # Objects of many slices are in bandwidth-fio, with their CPU time.
    _compare("cpu-fio", 240, "--seconds 1 --only 1x256KiB"),
    _compare("index-latency", 120),
    _compare("index", 240),
    Result("ring", "tutti.cli bench ring --json", 120, prints=True),
    _compare("digest", 60),
    Result("profile", "tutti.cli profile --medium {dirs} --out {out}/profile.json", 240,
         picture="speed over bytes and slice size, and the estimated times of layers"),
    Result("agent", "tutti.cli bench agent --dir {dirs} --rounds 1000 --json", 120, prints=True),
    Result("second-tier", "tutti.cli bench second-tier --dir {dirs} --json", 300, prints=True),
    Result("submit", "tutti.cli bench submit --pages 128 16384 --repeats 101 --json", 240,
         prints=True),
    Result("paths", "tutti.cli bench paths --dir {dir} --out {out}/paths.json", 600,
         picture="reads of each path and size of block over the depth: GB/s, and p99"),
    Result("peers", "tutti.cli bench peers --dir {dirs} --json", 2000, prints=True, sglang=True),
    Result("peers-same-pages", f"{_SAME_PAGES} --host-pages thp", 1500, prints=True, sglang=True),
    Result("peers-collapse", f"{_SAME_PAGES} --host-pages collapse", 1700, prints=True,
         sglang=True),
)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Places and programs for the measurements.

    python, sglang: commands that run a module, the second one with SGLang's packages.  Steps that
    need a missing one, or a missing trace, are skipped.
    """

    folders: Sequence[str]
    out: Path
    trace: str | None = None
    python: Sequence[str] = (sys.executable,)
    sglang: Sequence[str] = ()


def main(arguments: Sequence[str]) -> int:
    """Measures, and returns the exit code: 1 when a result could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = options(parser)
    option("--dir", ["."], "folders, each on one of the drives to measure")
    option("--out", "bench/results", "folder of the results", Path)
    option("--trace", None, "trace of requests for the replay, in Mooncake's format")
    option("--sglang", "", "command of the Python that has SGLang")
    option("--minutes", 180.0, "limit in all (%(default)s)")
    option("--only NAME", None, "measure only these", nargs="+")
    args = parser.parse_args(arguments)
    places = Places(args.dir, args.out, args.trace, sglang=shlex.split(args.sglang))
    try:
        manifest = run(places, only=args.only, limit_s=args.minutes * 60)
    except ConfigError as error:
        print(f"tutti.bench.store_results: {error}", file=sys.stderr)
        return 3
    rows = [(d["name"], d["outcome"], round(d["seconds"], 1)) for d in manifest["steps"]]
    print(table(("result", "outcome", "s"), rows))
    return 0 if all(d["outcome"] == "measured" for d in manifest["steps"]) else 1


def run(
    places: Places,
    *,
    only: Sequence[str] | None = None,
    limit_s: float = 3300.0,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Measures the steps, and writes their results and the manifest.

    Raises ConfigError for unknown names, and for a checkout with changes, because its numbers could
    not be distinguished from those of its commit.
    """
    unknown = sorted(set(only or ()) - {step.name for step in STEPS})
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        raise ConfigError(f"{unknown[0]} is not a result of the store; choose from {known}")
    machine = describe(places.folders[0])
    commit = str(machine["commit"])
    if commit.endswith("+dirty") or commit == "unknown":
        raise ConfigError(f"the checkout is {commit}; commit what has changed, then measure")
    steps: list[dict[str, Any]] = []
    for left in sorted(file for folder in places.folders for file in Path(folder).glob("*.tutti")):
        log(f"{left} is there: a step whose pool has this name will not be measured")
    manifest = {"benchmark": MANIFEST, "steps": steps, "machine": machine}
    if only is None:
        _save(manifest, places.out)  # the old one would not match the new results
    end_s = time.monotonic() + limit_s
    for step in STEPS:
        if only is None or step.name in only:
            log(f"{step.name} ...")
            begin_s = time.monotonic()
            outcome = _measure(step, places, commit, end_s - begin_s)
            facts = {"name": step.name, "outcome": outcome, "commit": commit}
            steps.append({**facts, "seconds": time.monotonic() - begin_s})
            if only is None:
                _save(manifest, places.out)
            log(f"{step.name}: {outcome}")
    return manifest


def _save(manifest: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    part.replace(out / f"{MANIFEST}.json")


def _measure(step: Result, places: Places, commit: str, left_s: float) -> str:
    """Runs a step; returns "measured", or the reason why it was not."""
    if "{trace}" in step.words and places.trace is None:
        return "not measured: it takes a trace (--trace)"
    if step.sglang and not places.sglang:
        return "not measured: it takes the Python that has SGLang (--sglang)"
    if left_s <= 0:
        return "not measured: the time for all results was over"
    limit_s = min(step.limit_s, left_s)
    with tempfile.TemporaryDirectory(prefix="store-results-") as made:
        words = words_of(step, places, made)
        python = places.sglang if step.sglang else places.python
        done = _run([*python, "-m", *words], limit_s)
        if done is None:
            return f"not measured: no end in {limit_s:.0f} s"
        if step.prints and done.returncode == 0:
            (Path(made) / f"{step.name}.json").write_text(done.stdout)
        return _take(step, Path(made), places.out, done, commit)


def words_of(step: Result, places: Places, out: str) -> list[str]:
    """The command of a step, after Python's -m."""
    facts = {"dir": places.folders[0], "out": out, "trace": places.trace}
    return [
        filled
        for word in step.words.split()
        for filled in (places.folders if word == "{dirs}" else [word.format(**facts)])
    ]


def _run(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str] | None:
    """Runs a command in a session of its own, so that all of it can be killed; None if it was."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Lets a command remove its files and end, then kills the rest of it."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def _take(
    step: Result, made: Path, out: Path, done: subprocess.CompletedProcess[str], commit: str
) -> str:
    """Moves a complete result of this commit to its place, with its picture.

    Without a new picture, the old one is removed, because it shows other numbers.
    """
    file = made / f"{step.name}.json"
    if done.returncode != 0 or not file.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"not measured: {(lines or ['no result was written'])[-1][-_REASON_MAX:]}"
    result = json.loads(file.read_text())
    if (found := result["machine"]["commit"]) != commit:
        return f"not measured: the checkout became {found} meanwhile"
    if lacking := _lacking(result):
        return f"not measured: {'; '.join(lacking)}"
    shutil.copyfile(file, out / file.name)
    if step.picture:
        picture = out / f"{step.name}.png"
        picture.unlink(missing_ok=True)
        if (made / picture.name).exists():
            shutil.copyfile(made / picture.name, picture)
    return "measured"


def _lacking(result: dict[str, Any]) -> list[str]:
    """The missing parts of a result: peers that could not run, cells without numbers.

    Rows of fio may be missing, since fio is only a reference and the result has the reason; but not
    all rows.
    """
    lacking = {name: why for name, why in result.get("skipped", {}).items() if name not in FIO}
    cells = result.get("cells")
    if isinstance(cells, dict):
        without = {name: cell for name, cell in cells.items() if "not_measured" in cell}
        lacking |= {
            name: cell["not_measured"]
            for name, cell in without.items()
            if cell.get("of") != "fio" or len(without) == len(cells)
        }
    return [f"{name}: {why}" for name, why in lacking.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

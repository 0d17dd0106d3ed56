"""Measures every result of the store in one run, from one commit: `make bench`.

    python -m tutti.bench.store_results --dir /mnt/nvme --out bench/results

Each result is a command of its own, one after the other, so run this on a machine with no other
work. A result replaces the old one only if its command succeeded; what could not be measured is
listed with the reason, here and in the manifest `store-run.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.bench.environment import describe
from tutti.errors import ConfigError
from tutti.terminal import table

MANIFEST = "store-run"
_STEP_S = 3600.0
_REASON_MAX = 200


@dataclass(frozen=True)
class Step:
    """One result: a module with its arguments, in which {dir}, {out} and {trace} are filled in.

    prints: the result is what the command prints; otherwise it writes NAME.json into {out}.
    """

    name: str
    words: str
    prints: bool = False


def _compare(name: str, more: str = "") -> Step:
    words = "tutti.bench.compare.run --dir {dir} --out {out} --allow-sysctl --pairs 7 "
    return Step(name, f"{words}{name} {more}")


STEPS = (
    _compare("bandwidth-fio", "--seconds 1.5"),
    _compare("bandwidth-memory", "--memory huge --size 2GiB --seconds 1"),
    _compare("layerwise-fio", "--seconds 1.5"),
    _compare("churned", "--seconds 1.5"),
    _compare("cpu-fio", "--seconds 1.5 --only 256KiB"),
    _compare("cpu-verify", "--size 2GiB --seconds 0.7"),
    _compare("digest"),
    _compare("files", "--size 2GiB --seconds 1 --only direct"),
    _compare("fio-memory", "--seconds 1 --size 2GiB"),
    _compare("index"),
    Step("ring", "tutti.cli bench ring --json", prints=True),
    Step("paths", "tutti.cli bench paths --dir {dir} --out {out}/paths.json"),
    Step("residency", "tutti.cli bench residency --dir {dir} --working-set 1GiB --rounds 4"
         " --out {out}/residency.json"),
    Step("profile", "tutti.cli profile --medium {dir} --out {out}/profile.json"),
    Step("peers", "tutti.cli bench peers --dir {dir} --json", prints=True),
    Step("replay", "tutti.cli replay --trace {trace} --shape 4x16KiB --capacity 1GiB 3GiB 9GiB"
         " --dir {dir} --json", prints=True),
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """One step: "measured", or the reason why it was not."""

    name: str
    outcome: str
    commit: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Measures, and returns the exit code: 1 when a result could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=".", help="on the drive to measure")
    parser.add_argument("--out", default="bench/results", type=Path, help="(%(default)s)")
    parser.add_argument("--trace", help="trace of requests for the replay, in Mooncake's format")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these results")
    args = parser.parse_args(arguments)
    manifest = run(args.dir, args.out, trace=args.trace, only=args.only)
    rows = [(d["name"], d["outcome"], round(d["seconds"], 1)) for d in manifest["steps"]]
    print(table(("result", "outcome", "s"), rows))
    return 0 if all(d["outcome"] == "measured" for d in manifest["steps"]) else 1


def run(
    folder: str,
    out: Path,
    *,
    trace: str | None = None,
    only: Sequence[str] | None = None,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Measures the steps, and writes their results and the manifest to ``out``.

    Raises ConfigError for names that are no results, and for a checkout with changes, whose numbers
    could not be told from those of its commit.
    """
    unknown = sorted(set(only or ()) - {step.name for step in STEPS})
    if unknown:
        known = ", ".join(step.name for step in STEPS)
        raise ConfigError(f"{unknown[0]} is not a result of the store; choose from {known}")
    machine = describe(folder)
    commit = str(machine["commit"])
    if commit.endswith("+dirty") or commit == "unknown":
        raise ConfigError(f"the checkout is {commit}; commit what has changed, then measure")
    steps = []
    for step in STEPS:
        if only is None or step.name in only:
            log(f"{step.name} ...")
            steps.append(_measure(step, folder, out, trace, commit))
            log(f"{step.name}: {steps[-1].outcome}")
    manifest = {
        "benchmark": MANIFEST,
        "steps": [asdict(step) for step in steps],
        "machine": machine,
    }
    (out / f"{MANIFEST}.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _measure(step: Step, folder: str, out: Path, trace: str | None, commit: str) -> Done:
    begin_s = time.monotonic()
    if "{trace}" in step.words and trace is None:
        return Done(step.name, "not measured: it takes a trace (--trace)", commit, 0.0)
    with tempfile.TemporaryDirectory(prefix="store-results-") as made:
        words = [word.format(dir=folder, out=made, trace=trace) for word in step.words.split()]
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words], capture_output=True, text=True, timeout=_STEP_S
            )
        except subprocess.TimeoutExpired:
            return Done(step.name, f"not measured: no end in {_STEP_S:g} s", commit, _STEP_S)
        if step.prints and done.returncode == 0:
            (Path(made) / f"{step.name}.json").write_text(done.stdout)
        outcome = _take(step, Path(made), out, done, commit)
    return Done(step.name, outcome, commit, time.monotonic() - begin_s)


def _take(
    step: Step, made: Path, out: Path, done: subprocess.CompletedProcess[str], commit: str
) -> str:
    """Moves a result to its place if it is one of this commit."""
    result = made / f"{step.name}.json"
    if done.returncode != 0 or not result.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return f"not measured: {(lines or ['no result was written'])[-1][-_REASON_MAX:]}"
    found = json.loads(result.read_text())["machine"]["commit"]
    if found != commit:
        return f"not measured: the checkout became {found} meanwhile"
    for file in sorted(made.iterdir()):
        shutil.copyfile(file, out / file.name)
    return "measured"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Fuzzes every target for a while and records the result: `python tests/fuzz/run.py --help`.

Each target runs in a process of its own under Atheris, which is led by what the readers cover. A
case that takes 10 s counts as a hang.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
HANG_S = 10
MEMORY_MIB = 3072
#: What is instrumented: the rest of the package would only cost time.
READERS = [
    *("tutti.medium", "tutti.scheduler", "tutti.bench.traces", "tutti.node.messages"),
    *("tutti.gio_uring.drives.identify", "tutti.pool.members", "tutti.transfers.recovery"),
]
LEFTOVERS = ("crash-", "timeout-", "oom-")


def fuzz_one(name: str, seconds: int, seed: int) -> dict[str, Any]:
    """Cases and findings of one target; found inputs are printed as hexadecimal."""
    with tempfile.TemporaryDirectory() as folder:
        found, new = Path(folder) / "found", Path(folder) / "corpus"
        found.mkdir()
        new.mkdir()
        command = [
            *(sys.executable, __file__, "--target", name, str(new), str(CORPUS / name)),
            *(f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={HANG_S}"),
            *(f"-rss_limit_mb={MEMORY_MIB}", f"-artifact_prefix={found}/", "-print_final_stats=1"),
            *("-max_len=4096", "-close_fd_mask=1"),
        ]
        start_s = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds * 4 + 300, errors="replace"
        )
        cases = re.search(r"stat::number_of_executed_units: *(\d+)", done.stderr)
        reached = re.findall(r"cov: (\d+)", done.stderr)
        findings = [
            {"input": path.read_bytes().hex(), "report": done.stderr[-3000:]}
            for path in found.iterdir()
            if path.name.startswith(LEFTOVERS)
        ]
        if done.returncode != 0 and not findings:
            findings.append({"input": "", "report": done.stderr[-3000:]})
        return {
            "cases": int(cases.group(1)) if cases else 0,
            "seconds": round(time.monotonic() - start_s, 1),
            "covered": int(reached[-1]) if reached else 0,
            "corpus": len(list((CORPUS / name).iterdir())),
            "findings": findings,
        }


def under_atheris(name: str, arguments: list[str]) -> None:
    """The process of one target; does not return."""
    import atheris

    with atheris.instrument_imports(include=READERS):
        from fuzz import targets

    targets.run(name, bytes(8))  # what is made once is not a slow case

    def one(data: bytes) -> None:
        targets.run(name, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the readers of untrusted bytes.")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets (default 600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the result")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets side by side")
    parser.add_argument("--only", action="append", help="a target; may be repeated")
    options = parser.parse_args()
    from fuzz.targets import TARGETS

    from tutti.bench.environment import describe

    names = options.only or list(TARGETS)
    seconds = max(1, options.seconds // len(names))

    def fuzz(name: str) -> dict[str, Any]:
        result = fuzz_one(name, seconds, options.seed)
        print(name, *(f"{key}: {value}" for key, value in result.items()), flush=True)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        results = dict(zip(names, pool.map(fuzz, names), strict=True))
    result = {
        "benchmark": "fuzz",
        "machine": describe(),
        "seed": options.seed,
        "seconds_each": seconds,
        "hang_s": HANG_S,
        "cases": sum(one["cases"] for one in results.values()),
        "findings": sum(len(one["findings"]) for one in results.values()),
        "targets": results,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['cases']} cases, {result['findings']} findings")
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    if sys.argv[1:2] == ["--target"]:
        under_atheris(sys.argv[2], sys.argv[3:])
    sys.exit(main())

"""The first minutes on a machine with a GPU: tests and measurements in the order of what they tell.

    python tests/gpu/first_contact.py --out DIR --minutes 9

It ends in time, whatever hangs.  Everything lies in DIR, and after each step in DIR.tar, too; with
a DIR, or a tar of an earlier run, it goes on behind what was done.  A process of its own compiles
the kernels and keeps the GPU's context, so that no step pays for these.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = [sys.executable, str(Path(__file__).with_name("shards.py"))]
BENCH = [sys.executable, "-m", "tutti.bench.gpu.shards"]
#: (program, shard or case); the whole bench is what is left of it.
STEPS = [
    (TESTS, "driver"),
    (BENCH, "probes"),
    (BENCH, "ceiling"),
    (TESTS, "host_engine"),
    (BENCH, "scatter"),
    (BENCH, "pipeline"),
    (TESTS, "bandwidth"),
    (TESTS, "store_engines"),
    (TESTS, "device_engines"),
    (TESTS, "torch"),
    (TESTS, "linker"),
    (TESTS, "memcheck"),
    *((BENCH, case) for case in ("launch", "resident", "persistent", "engines", "digests")),
    *((BENCH, case) for case in ("interference", "multiprocessors", "files")),
    *((BENCH, case) for case in ("cpu-time", "interpreter")),
]
HOLDER = """
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import CudaDriver
driver = CudaDriver()
Modules(driver).close()
print("compiled", flush=True)
input()
"""
#: Steps are not begun with less, and are killed so long after their time.
LEFT_S, GRACE_S = 25, 45
#: The steps go on without the code after that, and each compiles it.
COMPILE_S = 120


@contextmanager
def context_held() -> Iterator[None]:
    """Keeps the context, and has the kernels' code compiled once for all steps."""
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=pipe, stdout=pipe)
    try:
        select.select([holder.stdout], [], [], COMPILE_S)
        yield
    finally:
        holder.kill()
        holder.wait(10)


def keep(out: Path) -> None:
    """Writes the tar as a whole, beside the folder."""
    fresh = out.with_suffix(".new")
    with tarfile.open(fresh, "w") as tar:
        tar.add(out, arcname=out.name)
    os.replace(fresh, out.with_suffix(".tar"))


def is_done(log: Path) -> bool:
    return log.exists() and log.read_text().endswith("\nended with 0\n")


def run_step(command: list[str], name: str, out: Path, left_s: float, extra: list[str]) -> None:
    """One step, its output in a log; the runners go on behind what they did before."""
    bench = command is BENCH
    log = out / f"{'bench' if bench else 'test'}-{name}.log"
    if is_done(log):
        return
    folder = out / ("bench" if bench else "tests")
    minutes = str(max(0.1, (left_s - GRACE_S) / 60))
    words = [
        "--out",
        str(folder),
        "--minutes",
        minutes,
        *(["--go-on", *extra] if bench else []),
        name,
    ]
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [*command, *words], stdout=file, stderr=subprocess.STDOUT, timeout=left_s
            ).returncode
            file.write(f"\nended with {code}\n")
        except subprocess.TimeoutExpired:
            file.write("\nkilled, as the time was over\n")
    print(f"{log.stem}: {log.read_text().splitlines()[-1]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/first-contact"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--steps", nargs="+", help="these alone, by name")
    parser.add_argument("--bench", default="", help="options of the measurements, in one word")
    args = parser.parse_args(arguments)
    until_s = time.monotonic() + args.minutes * 60
    tar = args.out.with_suffix(".tar")
    if tar.exists() and not args.out.exists():
        with tarfile.open(tar) as earlier:
            earlier.extractall(args.out.parent, filter="data")
    args.out.mkdir(parents=True, exist_ok=True)
    with context_held():
        for command, name in STEPS:
            left_s = until_s - time.monotonic()
            if left_s < LEFT_S:
                print(f"no time for {name} and what follows; run it again", flush=True)
                return 1
            if args.steps is None or name in args.steps:
                run_step(command, name, args.out, left_s, args.bench.split())
                keep(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

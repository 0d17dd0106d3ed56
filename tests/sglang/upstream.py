"""Runs SGLang's own tests of HiCache and of linkers over Tutti, as far as they run on a CPU.

usage: upstream.py [--source CHECKOUT] [--out FILE]

They are no part of SGLang's package: without --source the tag of the installed version is fetched
with git. Tests that use the backend `file` get Tutti (`in_place_of_file`); all of them run with
Tutti's plugin loaded. Prints a table; exit 1 when a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
URL = "https://github.com/sgl-project/sglang"
FOLDERS = ("test/registered/hicache", "test/registered/unit/mem_cache")
#: Which files are about storage, by their text.
ABOUT = re.compile(r"hicache|cache_linker|CacheLinker|storage_backend", re.IGNORECASE)
COLUMNS = ("passed", "failed", "skipped", "over Tutti")
_FILE_S = 600


def get(folder: Path) -> Path:
    """A checkout of the installed version's tag, these folders alone."""
    tag = "v" + metadata.version("sglang")
    clone = ["git", "clone", "-q", "--depth=1", f"--branch={tag}", "--filter=blob:none", "--sparse"]
    for command in ([*clone, URL, str(folder)], ["git", "sparse-checkout", "set", *FOLDERS]):
        place = folder if command[1] == "sparse-checkout" else None
        if subprocess.run(command, cwd=place).returncode:
            sys.exit(f"{tag} of {URL} cannot be had here: pass a checkout of it with --source")
    return folder


def chosen(source: Path) -> tuple[list[Path], int]:
    """The files for a CPU that are about storage, and how many such files are for other devices."""
    found = [file for folder in FOLDERS for file in sorted((source / folder).rglob("test_*.py"))]
    if not found:
        sys.exit(f"{source} has no tests in {' or '.join(FOLDERS)}: is it a checkout of SGLang?")
    about = [file for file in found if ABOUT.search(file.read_text())]
    cpu = [file for file in about if re.search(r"^register_cpu_ci\(", file.read_text(), re.M)]
    return cpu, len(about) - len(cpu)


def run(file: Path, report: Path) -> Counter[str]:
    """Runs one file in a process of its own; how many tests ended how."""
    places = [str(HERE), str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    options = ["-q", "-p", "in_place_of_file", "-p", "no:cacheprovider", "--rootdir", file.parent]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", file.name]
    report.unlink(missing_ok=True)
    try:
        subprocess.run(list(map(str, command)), cwd=file.parent, env=environment, timeout=_FILE_S)
    except subprocess.TimeoutExpired:
        return Counter(failed=1)
    ends: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        over = case.find("./properties/property[@name='tutti']")
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        end = "failed" if failed else "skipped" if skipped else "passed"
        ends[end] += 1
        ends["over Tutti"] += end == "passed" and over is not None and over.get("value") != "0"
    return ends or Counter(failed=1)


def table(rows: dict[str, Counter[str]], elsewhere: int) -> str:
    """The results as Markdown."""
    head = ["test file", *COLUMNS]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    lines += [" | ".join([f"`{n}`", *(str(ends[c]) for c in COLUMNS)]) for n, ends in rows.items()]
    text = "\n".join(f"| {line} |" for line in lines)
    return (
        f"{text}\n\nNot run: {elsewhere} files about storage that are for GPUs or other devices.\n"
    )


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a checkout of SGLang's repository")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = args.source or get(Path(scratch) / "sglang")
        files, elsewhere = chosen(source.resolve())
        rows = {file.name: run(file, Path(scratch) / "report.xml") for file in files}
    text = table(rows, elsewhere)
    print(text)
    if args.out:
        args.out.write_text(text)
    return int(any(ends["failed"] for ends in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Runs SGLang's own tests of HiCache and of linkers over Tutti, as far as they run on a CPU.

usage: upstream.py [--source CHECKOUT] [--out FILE]

They are not part of SGLang's package: without --source the tag of the installed version is fetched
with git. Tests that use the backend `file` get Tutti (`in_place_of_file`); all of them run with
Tutti's plugin loaded. A file with failures runs again without Tutti, because tests of another
version than the installed one fail by themselves. Prints a table; exit 1 when a test fails with
Tutti only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
URL = "https://github.com/sgl-project/sglang"
FOLDERS = ("test/registered/hicache", "test/registered/unit/mem_cache")
#: Which files are about storage, by their text.
ABOUT = re.compile(r"hicache|cache_linker|CacheLinker|storage_backend", re.IGNORECASE)
COLUMNS = ("passed", "over Tutti", "skipped", "fails with Tutti only", "fails without Tutti too")
#: The name of the test that stands for a file that cannot be imported or does not end.
WHOLE = "the whole file"
_FILE_S = 300


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


def run(file: Path, report: Path, only: set[str] | None = None) -> dict[str, str]:
    """Runs one file in a process of its own; tests with their ends.

    only: runs these tests, without Tutti.
    """
    places = [str(HERE), str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    options = ["-q", "-p", "in_place_of_file", "-p", "no:cacheprovider", "--rootdir", file.parent]
    options += [] if only is None else ["--without-tutti"]
    tests = [file.name] if only is None or WHOLE in only else sorted(only)
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests]
    report.unlink(missing_ok=True)
    try:
        subprocess.run(list(map(str, command)), cwd=file.parent, env=environment, timeout=_FILE_S)
    except subprocess.TimeoutExpired:
        return {WHOLE: "failed"}
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    return {name_of(case, file): end_of(case) for case in cases} or {WHOLE: "failed"}


def name_of(case: ElementTree.Element, file: Path) -> str:
    """What pytest takes as the name of one test."""
    if not case.get("classname"):
        return WHOLE
    _, *classes = str(case.get("classname")).split(".")
    return "::".join([file.name, *classes, str(case.get("name"))])


def end_of(case: ElementTree.Element) -> str:
    """How a test ended."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    if case.find("skipped") is not None:
        return "skipped"
    over = case.find("./properties/property[@name='tutti']")
    return "passed" if over is None or over.get("value") == "0" else "over Tutti"


def compare(file: Path, report: Path) -> dict[str, int]:
    """How many tests of a file ended how; its columns are those of the table."""
    ends = run(file, report)
    failed = {name for name, end in ends.items() if end == "failed"}
    without = run(file, report, failed) if failed else {}
    both = {name for name in failed if without.get(name, "failed") == "failed"}
    over = sum(end == "over Tutti" for end in ends.values())
    return {
        "passed": over + sum(end == "passed" for end in ends.values()),
        "over Tutti": over,
        "skipped": sum(end == "skipped" for end in ends.values()),
        "fails with Tutti only": len(failed - both),
        "fails without Tutti too": len(both),
    }


def table(rows: dict[str, dict[str, int]], elsewhere: int) -> str:
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
        rows = {}
        for file in files:
            rows[file.name] = compare(file, Path(scratch) / "report.xml")
            if args.out:  # a run that is stopped keeps what it has
                args.out.write_text(table(rows, elsewhere))
    print(table(rows, elsewhere))
    ours = any(ends["fails with Tutti only"] for ends in rows.values())
    return int(ours or not any(ends["passed"] for ends in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

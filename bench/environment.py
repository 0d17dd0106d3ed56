"""Describes the machine and software behind a result, without host names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tutti
from tutti.machine import machine_facts, scheduler_form


def describe(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The machine, the software, the commit and the command line, for JSON.

    directory: the pool's folder, whose disk and file system are described.
    """
    return {
        **machine_facts(directory),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tutti": tutti.__version__,
        "scheduler": scheduler_form(),
        "commit": commit_of(Path(__file__).resolve().parent),
        "command": command_line(sys.argv),
    }


def command_line(arguments: list[str]) -> str:
    """The command with paths cut to their last part."""
    return " ".join(Path(a).name if os.sep in a else a for a in arguments)


def commit_of(folder: Path) -> str:
    """The commit of a folder's checkout, with "+dirty" for changes; "unknown" without a checkout.

    Changes of results and pages do not count, so that a run may replace them one by one.
    """
    code = (":/", ":(top,exclude)bench/results", ":(top,exclude)docs")
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+dirty" if dirty else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()

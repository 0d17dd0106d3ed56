"""Reads small files of /proc and /sys, and the mounts from one of them (mountinfo, proc(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """One mount. number: major:minor of the device. source: the argument of mount(8)."""

    number: str
    point: str
    kind: str
    source: str


def text_of(path: Path) -> str:
    """Content of a small file in /proc or /sys; "" if it does not exist."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """All mounts; one that covers another comes after it. Empty if the file cannot be read."""
    try:
        text = os.fsdecode((root / "proc/self/mountinfo").read_bytes())
    except OSError:
        return []
    mounts = []
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")  # right: type, source, options
        fields, facts = left.split(" "), right.split(" ")
        if len(fields) >= 5 and len(facts) >= 2:
            mounts.append(Mount(fields[2], _unescaped(fields[4]), facts[0], _unescaped(facts[1])))
    return mounts


def filesystem_of(path: str | os.PathLike[str], root: Path = Path("/")) -> str:
    """The type of the file system that a path is on: that of the longest mount point above it."""
    place = Path(os.path.realpath(path))
    longest, kind = 0, "unknown"
    for mount in read_mounts(root):
        point = Path(mount.point)
        if place.is_relative_to(point) and len(point.parts) >= longest:
            longest, kind = len(point.parts), mount.kind
    return kind


def _unescaped(text: str) -> str:
    """Decodes octal escapes: mountinfo writes a space as backslash 040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

"""Loop devices over files of zeros: block devices for tests, which need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tutti.base.units import MiB

Loop = Callable[..., str]


@contextlib.contextmanager
def loop_devices(folder: Path) -> Iterator[Loop]:
    """Yields what makes one, of (nbytes, block_nbytes); skips the test where there are none."""
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    made: list[str] = []

    def make(nbytes: int = 32 * MiB, block_nbytes: int = 512) -> str:
        image = folder / f"image{len(made)}"
        with image.open("wb") as file:
            file.truncate(nbytes)
        words = ["losetup", "-f", "--show", f"-b{block_nbytes}", str(image)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode:
            pytest.skip(f"no loop devices: {done.stderr.strip()}")
        made.append(done.stdout.strip())
        return made[-1]

    try:
        yield make
    finally:
        for device in made:
            subprocess.run(["losetup", "-d", device], check=True, timeout=30)

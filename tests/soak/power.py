"""Losses of power: what the log of a pool's writes allows to be left of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from crash.power_log import DAMAGES
from crash.test_power_loss import Life, Recording, blank, checked, some_cut, some_steps

from tutti.gio_uring.controller_file import uring_refusal

LIVES = 3
IMAGES = 8  # of each life


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """A pool that lives, loses its power, and lives on with what was left."""
    rng = np.random.default_rng(seed)
    durability = str(rng.choice(["process", "flush"]))
    executor = "threads" if rng.random() < 0.4 or uring_refusal() else "uring"
    life = Life(durability, blank(int(rng.integers(1, 3))), frozenset(), set(), set())
    for _ in range(LIVES):
        steps = some_steps(rng)
        Recording(life, folder, executor, rng).run(steps)
        tally["operations"] += len(steps)
        for number in range(IMAGES):
            checked(life, some_cut(life, rng), DAMAGES[number % len(DAMAGES)], rng)
            tally["power losses"] += 1
        life = checked(life, some_cut(life, rng), DAMAGES[int(rng.integers(len(DAMAGES)))], rng)
        tally["power losses"] += 1

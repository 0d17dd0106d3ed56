"""Rings without a drive: every command is checked on both sides."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
from native.programs import ENVIRONMENT, compile_program
from soak.oracle import Finding

CACHE = Path(__file__).parents[2] / "build" / "soak"
CASES = 64
COMMANDS_MAX = 100_000  # of each submitter
DEPTHS = (2, 4, 8, 16, 32, 64)
CHANCES = (0.04, 0.06, 0.1, 0.2, 0.2, 0.4)
BURSTS = (1, 4, 16, 64)  # most shared accesses of one fiber before the next is drawn
EPISODE_MAX_S = 300
FAITHFUL = 0
THREAD_CASES = 8
THREAD_COMMANDS_MAX = 1_000_000  # of all submitters: the program gives itself a minute


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """Seeded schedules one after another, most of them at full speed, some under the sanitizers."""
    del folder
    rng = np.random.default_rng(seed)
    checked = rng.random() < 0.1
    CACHE.mkdir(parents=True, exist_ok=True)
    program = compile_program(CACHE, "ring_fiber", "asan" if checked else "fast")
    uneven = rng.random() < 0.2
    most = COMMANDS_MAX // 20 if checked or uneven else COMMANDS_MAX
    weight_bits, burst_max = 11 if uneven else rng.integers(1, 4), rng.choice(BURSTS)
    lines = []
    for _ in range(CASES):
        depth, submitters = int(rng.choice(DEPTHS, p=CHANCES)), int(rng.integers(1, 5))
        commands = int(10 ** rng.uniform(1, np.log10(most)))
        case = int(rng.integers(2**63))
        lines.append(f"{depth} {submitters} {commands} {case} {FAITHFUL} {rng.integers(3)}")
    done = subprocess.run(
        [str(program), str(weight_bits), str(burst_max)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=EPISODE_MAX_S,
        env=ENVIRONMENT,
    )
    answers = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    tally["ring commands"] += sum(answer[2] for answer in answers)
    tally["ring schedules"] += len(answers)
    tally[f"ring schedules in bursts up to {burst_max}"] += len(answers)
    tally["ring schedules under sanitizers"] += len(answers) * checked
    for line, answer in zip(lines, answers, strict=False):
        if answer[0] != 0:
            raise Finding(f"fault {answer[0]} of ring_fiber: {line}")
    if done.returncode or len(answers) != len(lines):
        raise Finding(f"ring_fiber ended with {done.returncode}: {done.stderr[-2000:]}")


def run_threads(seed: int, folder: Path, tally: Counter[str]) -> None:
    """The same ring under real threads, whose meetings the kernel decides and no seed repeats."""
    del folder
    rng = np.random.default_rng(seed)
    CACHE.mkdir(parents=True, exist_ok=True)
    program = compile_program(CACHE, "ring_stress", "fast")
    for _ in range(THREAD_CASES):
        depth, submitters = 2 ** int(rng.integers(4, 11)), int(rng.integers(1, 4))
        commands = int(rng.integers(1, THREAD_COMMANDS_MAX // submitters))
        words = [depth, submitters, commands, int(rng.integers(2**63)), FAITHFUL, rng.integers(3)]
        case = " ".join(str(word) for word in words)
        done = subprocess.run(
            [str(program), *case.split()],
            capture_output=True,
            text=True,
            timeout=EPISODE_MAX_S,
        )
        if done.returncode:
            raise Finding(f"ring_stress {case}: {done.stdout} {done.stderr[-2000:]}")
        tally["ring commands of threads"] += int(done.stdout.split()[1])

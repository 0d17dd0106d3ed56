"""A process that is killed loses nothing that was acknowledged and serves nothing else."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crash.objects import (
    check_books,
    check_usable,
    load_present,
    make_files,
    when_unlocked,
)
from crash.victim import Request, encode

import tutti.store
from store.pools import LAYOUT
from tutti.gio_uring.controller_file import uring_refusal
from tutti.medium.geometry import Geometry

TESTS = 4  # each with
CAMPAIGNS = 5  # pools, each of which sees
VICTIMS = 14
KILLS = 50  # that every test has to achieve; some victims end before their time
STEPS = 10
KILL_POINTS = ("open", "put", "put", "load", "clear", "clear", "close")
DELAY_MAX_S = {"open": 0.08}


class Zygote:
    """`victim.py`, waiting for requests."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("victim.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def run(self, request: Request) -> tuple[list[str], bool]:
        """What the victim said and whether it was killed; fails when it hung or saw an error."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode(request))
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], request.deadline_s * 2)
        assert ready, f"no answer about {request}"
        answer = json.loads(process.stdout.readline())
        said: list[str] = answer["said"]
        assert not answer["hung"], f"{request} hung after {said[-1:]}"
        errors = [line for line in said if line.startswith("error")]
        assert not errors, f"{request}: {errors[0]}"
        status = answer["status"]
        assert status in (0, signal.SIGKILL), f"{request} ended with {status}"
        return said, status != 0

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


class Expectation:
    """What the pool has to hold, may hold, and must never hold again."""

    def __init__(self, *, evicts: bool) -> None:
        self.evicts = evicts
        self.must: set[bytes] = set()
        self.may: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.clearing = False

    def hear(self, said: list[str]) -> str:
        """Takes in what a victim said; returns what it was doing when it died."""
        doing = ""
        for line in said:
            words = line.split()
            doing = words[0] if words[1] == "begins" else ""
            keys = {bytes.fromhex(word) for word in words[2:]}
            if words[:2] == ["put", "begins"]:
                self.may |= keys
            elif words[:2] == ["put", "ends"] and not self.evicts:
                self.must |= keys
            elif words[:2] == ["clear", "ends"]:
                self._forget()
        self.clearing = doing == "clear"
        return doing

    def _forget(self) -> None:
        self.gone |= self.may
        self.must, self.may = set(), set()

    def check(self, present: set[bytes], damaged: set[bytes]) -> None:
        """What was found must fit; from then on it is exactly what the pool holds."""
        assert not damaged, "a killed process leaves every record with its data"
        assert not present & self.gone, "an object came back after a clear"
        if self.clearing and not present:
            self._forget()
        assert self.must <= present, f"{len(self.must - present)} acknowledged objects are lost"
        self.gone |= self.may - present
        self.may = present
        self.must = set() if self.evicts else set(present)
        self.clearing = False

    def stored(self, keys: list[bytes]) -> None:
        self.may |= set(keys)
        if not self.evicts:
            self.must |= set(keys)


class Campaign:
    """One pool and those who die on it."""

    def __init__(self, folder: Path, seed: int, zygote: Zygote) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.zygote = zygote
        self.executor = "threads" if seed % 2 or uring_refusal() else "uring"
        self.durability = "flush" if seed % 8 > 5 else "process"
        evicts = seed % 4 >= 2
        self.expected = Expectation(evicts=evicts)
        self.geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 8 if evicts else 64)
        self.paths = [str(folder / f"member{i}") for i in range(1 + seed % 3 // 2)]
        make_files(self.paths, self.geometry)
        self.slots = self.geometry.slots * len(self.paths)

    def kill_one(self) -> str:
        """Lets one victim work and die; returns what it was doing, "ended" if it lived."""
        rng, expected = self.rng, self.expected
        known = sorted(expected.may)
        room = self.slots // 2 - len(expected.may) - 4
        point = KILL_POINTS[int(rng.integers(len(KILL_POINTS)))]
        request = Request(
            paths=self.paths,
            executor=self.executor,
            durability=self.durability,
            seed=int(rng.integers(2**32)),
            steps=int(rng.integers(1, STEPS + 1)),
            room=-1 if expected.evicts else max(0, room),
            known=[key.hex() for key in known[:20]],
            kill_at=f"{point} begins",
            kill_count=int(rng.integers(1, 4)) if point in ("put", "load") else 1,
            kill_delay_s=float(rng.random() ** 2 * DELAY_MAX_S.get(point, 0.004)),
        )
        said, killed = self.zygote.run(request)
        doing = expected.hear(said)
        return doing if killed else "ended"

    def check(self) -> None:
        """Opens the pool, and finds it as it has to be, and usable."""
        expected = self.expected
        opened = when_unlocked(lambda: tutti.store.open(self.paths, LAYOUT, executor=self.executor))
        with opened as store:
            store.wait_recovered(20)
            check_books(store)
            expected.check(*load_present(store, sorted(expected.may | expected.gone)))
            assert store.stats()["slots"]["quarantined"] == 0
            if len(expected.may) + 3 < self.slots // 2:
                fresh = [self.rng.bytes(16) for _ in range(3)]
                check_usable(store, fresh)
                expected.stored(fresh)
            check_books(store)


@pytest.mark.parametrize("part", range(TESTS))
def test_killed_processes(part: int, zygote: Zygote, tmp_path: Path, seed: int) -> None:
    doing: Counter[str] = Counter()
    for number in range(part * CAMPAIGNS, (part + 1) * CAMPAIGNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        campaign = Campaign(folder, seed + number, zygote)
        print(f"campaign with seed {seed + number}, {campaign.executor}, {campaign.durability}")
        for _ in range(VICTIMS):
            doing[campaign.kill_one()] += 1
            # Now and then the next one opens what the last one left, and dies on it.
            if campaign.expected.clearing or campaign.rng.random() < 0.7:
                campaign.check()
        campaign.check()
        for path in campaign.paths:
            Path(path).unlink()
    print(f"killed while: {dict(doing)}")
    assert sum(doing.values()) - doing["ended"] >= KILLS
    assert min(doing[what] for what in ("put", "clear")) > 0, "kills miss their aim"

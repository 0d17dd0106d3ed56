"""A minute of the soak, and proof that its oracle notices what it is there for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from memory_controller import Faults
from soak import agents, kills
from soak.oracle import Finding, Oracle
from soak.traffic import PAGES, Room, Shared, Traffic

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, opened

pytestmark = pytest.mark.crash

SECONDS = 55
KEYS = [bytes([n]) * 16 for n in range(4)]


@pytest.mark.timeout(600)
def test_a_minute_of_everything(tmp_path: Path, seed: int) -> None:
    """Without the linker, whose stress has tests of its own, and the agents below."""
    counts = soaked(tmp_path, seed, SECONDS, "--without", "linker", "agents")
    for what in ("operations", "bytes verified", "kills", "torn copies", "power losses"):
        assert counts[what] > 0, f"a minute without {what}"
    assert counts["ring commands"] > 0
    assert sum(n for name, n in counts.items() if name.startswith("faults ")) > 0


@pytest.mark.timeout(600)
def test_agents_and_clients_are_killed_under_traffic(tmp_path: Path, seed: int) -> None:
    counts = soaked(tmp_path, seed, 1, "--only", "agents")  # one episode, however long it takes
    events = ("agents killed", "clients killed", "agents stopped")
    assert sum(counts[event] for event in events) == agents.KILLS
    assert counts["pools of agents checked"] == 1
    assert counts["bytes verified"] > 0


def soaked(folder: Path, seed: int, seconds: int, *options: str) -> Counter[str]:
    """What a soak without findings has counted."""
    out = folder / "soak.json"
    command = [sys.executable, "-m", "soak", *options, "--dir", str(folder)]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return Counter(json.loads(out.read_text())["counts"])


def stored(oracle: Oracle, keys: list[bytes]) -> None:
    oracle.put_ends(oracle.put_begins(keys), keys, acknowledged=True)


def cleared(oracle: Oracle) -> None:
    oracle.clear_begins()
    oracle.clear_ends(done=True)


def test_what_was_acknowledged_must_be_there() -> None:
    oracle = Oracle(keeps=True)
    begun = oracle.put_begins(KEYS[:1])
    oracle.looked(oracle.look_begins(), KEYS[0], present=False)
    oracle.put_ends(begun, KEYS[:1], acknowledged=True)
    with pytest.raises(Finding, match="acknowledged"):
        oracle.looked(oracle.look_begins(), KEYS[0], present=False)
    with pytest.raises(Finding, match="1 of 1 acknowledged"):
        oracle.settle([])


def test_what_was_cleared_must_not_come_back() -> None:
    oracle = Oracle(keeps=False)
    stored(oracle, KEYS[:2])
    cleared(oracle)
    with pytest.raises(Finding, match="after a clear"):
        oracle.looked(oracle.look_begins(), KEYS[0], present=True)
    with pytest.raises(Finding, match="1 cleared and 0 unknown"):
        oracle.settle(KEYS[:1])
    stored(oracle, KEYS[:1])
    oracle.settle(KEYS[:1])


def test_a_clear_that_was_interrupted_is_whole_or_nothing() -> None:
    for left, fits in ((KEYS, True), ([], True), (KEYS[:1], False)):
        oracle = Oracle(keeps=True)
        stored(oracle, KEYS)
        oracle.clear_begins()
        if fits:
            oracle.settle(left)
            assert oracle.must() == frozenset(left)
        else:
            with pytest.raises(Finding, match="3 of 4 acknowledged"):
                oracle.settle(left)


def test_what_a_death_in_a_clear_leaves_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every time: the oracle knows of one clear that may have happened, and not of two."""
    campaign = kills.Campaign(1, tmp_path, Counter())
    monkeypatch.setattr(campaign, "_victim", lambda: campaign.oracle.follow(["clear_begins"]))
    checks: list[bool] = []

    def check(*_: object, torn: bool) -> None:
        checks.append(torn)
        campaign.oracle.settle([])

    monkeypatch.setattr(campaign, "_check", check)
    campaign.run()
    assert len(checks) == kills.VICTIMS + 1


def test_an_order_that_nobody_saw_is_not_judged() -> None:
    oracle = Oracle(keeps=True)
    stored(oracle, KEYS[:1])
    begun = oracle.look_begins()
    cleared(oracle)
    for present in (False, True):  # the look-up may have come before the clear or after it
        oracle.looked(begun, KEYS[0], present=present)


def test_another_process_follows() -> None:
    oracle, follower = Oracle(keeps=True), Oracle(keeps=True)
    oracle.tell = follower.follow
    stored(oracle, KEYS[:2])
    cleared(oracle)
    stored(oracle, KEYS[2:])
    oracle.damaged(KEYS[3:])
    assert follower.must() == oracle.must() == frozenset(KEYS[2:3])


def work(groups: int, oracle: Oracle, seed: int, faults: Faults, **config: object) -> None:
    images = formatted(LAYOUT, replace(GEOMETRY, groups=groups))
    controller = controller_of(images)
    with opened(images, controller=controller, **config) as store:
        controller.set_faults(faults)
        memory = store.allocate_memory(PAGES, hugepages=False)
        shared = Shared([], Room(None))
        traffic = Traffic(store, oracle, memory, 0, np.random.default_rng(seed), shared)
        for _ in range(300):
            traffic.step()


def test_wrong_bytes_are_noticed(seed: int) -> None:
    with pytest.raises(Finding, match="other bytes"):
        work(8, Oracle(keeps=False), seed, Faults(seed=seed, lost_ppm=500_000), verify="off")


def test_lost_objects_are_noticed(seed: int) -> None:
    with pytest.raises(Finding, match="acknowledged"):
        work(4, Oracle(keeps=True), seed, Faults())

"""A real server on CPU records what its scheduler was told; the simulator decides the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from server_modes import Mode, again, at_once, both_modes, prompts
from sglang_server import Server
from test_linker_profile import event_of

from tutti.bench.simulate.hardware import drive_names, machine
from tutti.bench.slack.run import policy_of
from tutti.bench.slack.server import LayeredServer, Noise
from tutti.machine import machine_facts
from tutti.profiles.at_open import model_like
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.policy import SlackPolicy
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import GPUS
from tutti.scheduler.trace import line, read, replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POOLS = {"hicache": "kv", "linker": "linker"}


def _slow_profile(folder: Path) -> str:
    """Of this machine and the tiny model, and a medium so slow that all waits for a decision."""
    document = estimated_document(
        model_like("tiny", 4, 2048), GPUS["H100"], machine=machine_facts(folder)
    )
    for rows in (document["io"][kind] for kind in ("read", "write", "both")):
        rows[:] = [[*row[:2], *(5_000 * us for us in row[2:])] for row in rows]
    path = folder / "profile.json"
    path.write_text(json.dumps(document))
    return str(path)


@both_modes
def test_a_servers_trace_is_replayed_by_the_policy_and_by_the_simulator(
    mode: Mode, tiny_model: Path, tmp_path: Path, seed: int
) -> None:
    asked = prompts(seed, 4)
    options: dict[str, Any] = {"profile": _slow_profile(tmp_path), "scheduler_trace": str(tmp_path)}
    if mode.name == "linker":
        options["recompute_us_per_token"] = 1e6  # else what is believed slow is not loaded
    arguments = mode.arguments(tmp_path / "pools", **options)
    with Server(tiny_model, tmp_path / "log", arguments) as server:
        computed = [server.ask(prompt) for prompt in asked]
        mode.served(computed, again(server, asked), 592)
        server.flush()
        at_once(server, [*asked, *prompts(seed + 1, 8)])  # loads and writes meet
        server.settle()
        server.stop()
    recorded = read(tmp_path / f"{POOLS[mode.name]}-tp0-pp0-cp0-dp0.trace")
    limits, profile, lines = recorded
    text = "".join(lines)
    for event in ("WriteKnown", "PagesWritten", "LoadKnown", "LoadGone", "StepBegan"):
        assert f'"event":"{event}"' in text
    if mode.name == "linker":
        assert re.search(r'"reads":\[{"name":"\d+:ahead ', text), "read-ahead was decided, too"
        assert re.search(r'"asked_ns":[1-9]', text), "by the age of the requests"
    assert '"reads":' in text and '"writes":' in text, "not all of it was issued as it came"

    assert list(replay(lines, SlackPolicy(limits), profile)) == lines
    assert list(replay(lines, ImmediatePolicy(limits), profile)) != lines, "it was decided by slack"

    # `bench slack` gives its server a policy by name, and the profile that the policy believes in.
    truth = machine(drive_names()[0], "H100")
    policy, _ = policy_of("slack", truth, limits)
    simulated = LayeredServer(truth, [], policy, profile, noise=Noise(), seed=seed)
    events = [event_of(one) for one in lines]
    assert [line(event, simulated.scheduler.take(event)) for event in events] == lines

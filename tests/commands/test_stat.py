"""Commands that ask an agent: `tutti stat`, `tutti sglang doctor`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node.agents import LAYOUT, RunningAgent
from waiting import wait_until

from store.pools import fill, some_keys
from tutti.base.units import format_nbytes
from tutti.cli import main
from tutti.errors import ChecksumMismatch
from tutti.node.called_operations import OPERATIONS


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    running = RunningAgent(tmp_path / "agent")
    yield running
    running.stop()


def test_totals(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    with agent.connect() as store:
        assert main(["stat", f"unix:{agent.path}"]) == 0
        assert "amplification" not in capsys.readouterr().out, "nothing is stored"
        memory = store.allocate_memory(4)
        fill(memory, range(4), rng)
        keys = some_keys(rng, 8)
        store.put(keys[:4], range(4)).wait(30)
        assert store.match(keys) == 4
        assert main(["stat", f"unix:{agent.path}"]) == 0
        shown = capsys.readouterr().out
        assert main(["stat", f"unix:{agent.path}", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
    lines = dict(line.split("  ", 1) for line in shown.splitlines())
    assert lines["hits"].strip() == "50.0%"
    assert lines["errors"].strip() == "0"
    assert "<" in lines["store p99"]
    assert lines["load p99"].strip() == "-"
    assert result["stored"] == 4
    # The client wrote the pages, and the agent their records.
    assert result["bytes_written"] >= 4 * LAYOUT.object_nbytes
    assert result["written_today_nbytes"] == result["bytes_written"] > 0
    assert lines["written today"].strip().startswith(format_nbytes(result["bytes_written"]))
    ratio = result["bytes_written_per_byte_stored"]
    assert lines["amplification"].strip() == f"{ratio:.3f} bytes written per byte" and ratio > 1


def test_an_interval_shows_what_happened_in_it(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    """Look-ups before the first line are not in it."""
    keys = some_keys(rng, 8)
    with agent.connect() as store:
        memory = store.allocate_memory(4)
        fill(memory, range(4), rng)
        store.put(keys[:4], range(4)).wait(30)
        store.match(keys)
        stop = threading.Event()

        def look_up() -> None:
            while not stop.is_set():
                store.match(keys[:4])

        busy = threading.Thread(target=look_up)
        busy.start()
        try:
            assert main(["stat", f"unix:{agent.path}", "--watch", "0.5", "--count", "2"]) == 0
        finally:
            stop.set()
            busy.join()
    headings, *rows, last = capsys.readouterr().out.splitlines()
    assert headings.split()[:3] == ["time", "used", "hits"]
    assert max(map(len, (headings, *rows))) <= 120
    assert [row.split()[2] for row in rows] == ["100.0%"] * 2
    assert last == "2 intervals"


def test_intervals_as_json_are_one_object(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.connect().close()  # which makes the pool
    words = ["stat", f"unix:{agent.path}", "--watch", "0.1", "--count", "2", "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"intervals": 2}
    assert "load p99" in said.err, "the lines go there"


def test_a_reader_of_intervals_that_goes_away(agent: RunningAgent) -> None:
    agent.connect().close()  # which makes the pool
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tutti.cli", "stat", f"unix:{agent.path}", "--watch", "0.1"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_restart_of_the_agent_is_an_interval_from_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    rng, agents = np.random.default_rng(seed), [RunningAgent(tmp_path / "agent")]
    path = agents[0].path
    with agents[0].connect() as store:
        fill(store.allocate_memory(4), range(4), rng)
        store.put(some_keys(rng, 4), range(4)).wait(30)

    def sleep(interval_s: float) -> None:
        if len(agents) == 1:
            agents[0].stop()
            agents.append(RunningAgent(tmp_path / "agent"))
            wait_until(lambda: bool(agents[1].agent.sessions))
        time.sleep(interval_s)

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic, strftime=time.strftime)
    monkeypatch.setattr("tutti.commands.stat.time", clock)
    try:
        assert main(["stat", f"unix:{path}", "--watch", "0.5", "--count", "3"]) == 0
    finally:
        for agent in agents:
            agent.stop()
    _, *rows, _ = capsys.readouterr().out.splitlines()
    assert "away" not in rows[-1]
    assert not [row for row in rows if re.search(r"-\d", row)]


def test_a_damaged_page_is_one_error(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    with agent.connect() as store:
        memory, keys = store.allocate_memory(2), some_keys(rng, 1)
        (content,) = fill(memory, [0], rng)
        store.put(keys, [0]).wait(30)
        (pool,) = agent.folder.glob("*.tutti")
        at = pool.read_bytes().index(content[:4096])
        with pool.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[0] ^ 1]))
        with pytest.raises(ChecksumMismatch):
            store.load(keys, [1]).wait(30)
        wait_until(lambda: store.stats()["quarantined"] == 1)
        assert main(["stat", f"unix:{agent.path}"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["errors"].strip() == "1"


def test_counters_that_take_longer_than_a_look_up(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = OPERATIONS["stats"]

    def late(*arguments: Any) -> Any:
        time.sleep(1.2)
        return read(*arguments)

    agent.connect().close()  # which makes the pool
    monkeypatch.setitem(OPERATIONS, "stats", late)  # type: ignore[arg-type]
    assert main(["stat", f"unix:{agent.path}"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert (lines["used"].strip(), lines["clients"].strip()) == ("0.0%", "1")
    assert main(["stat", f"unix:{agent.path}", "--watch", "0.1", "--count", "1"]) == 0
    assert "away" not in capsys.readouterr().out
    found = doctor(capsys, f"unix:{agent.path}")
    assert "slots of its pool are free" in found["agent"][1]


def test_an_agent_that_stops_answering_is_away(
    agent: RunningAgent, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters of its last answer are not shown as today's."""
    agent.connect().close()  # which makes the pool
    read, calls = OPERATIONS["stats"], iter(range(100))

    def late(*arguments: Any) -> Any:
        if next(calls) > 0:  # the first is asked for when the command connects
            time.sleep(1.0)
        return read(*arguments)

    monkeypatch.setitem(OPERATIONS, "stats", late)  # type: ignore[arg-type]
    monkeypatch.setattr("tutti.commands.stat.ANSWER_S", 0.2)
    assert main(["stat", f"unix:{agent.path}", "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["type"] == "AgentLost"
    assert "is away" in said.err


def test_what_is_not_an_agent_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", "/tmp/pool.tutti"]) == 2
    assert "unix:SOCKET" in capsys.readouterr().err
    assert main(["stat", "unix:/nowhere", "--count", "3"]) == 2
    assert "--watch" in capsys.readouterr().err
    assert main(["stat", "unix:/nowhere", "--watch", "1e10"]) == 2
    assert "--watch is 10000000000.0; pass 0 to 86400 seconds" in capsys.readouterr().err
    assert main(["stat", "unix:/nowhere"]) == 3


def doctor(capsys: pytest.CaptureFixture[str], *paths: str) -> dict[str, tuple[str, str]]:
    main(["sglang", "doctor", "--json", "--path", *paths])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return {finding["what"]: (finding["verdict"], finding["text"]) for finding in findings}


def test_the_doctor_asks_the_agent(
    agent: RunningAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"unix:{agent.path}"
    assert doctor(capsys, path)["agent"][0] == "ok", "its folder is empty yet"
    with agent.connect():
        found = doctor(capsys, path)
    assert found["agent"][0] == "ok"
    assert "slots of its pool are free" in found["agent"][1]
    assert "disk" not in found, "that of this folder says nothing about the agent's"
    verdict, text = doctor(capsys, f"unix:{tmp_path}/nowhere")["agent"]
    assert (verdict, "tutti serve" in text) == ("fails", True)
    assert main(["sglang", "doctor", "--path", path, str(tmp_path)]) == 2
    assert "as the only path" in capsys.readouterr().err

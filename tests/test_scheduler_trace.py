"""Traces of the scheduler in files: what the option of SGLang records, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node.agents import running
from test_sglang_front_door import IDENTITY, SHAPE

from tutti.base.units import MiB
from tutti.errors import ConfigError, ProfileError
from tutti.integration.sglang.identity import ParallelRank, layout_of, open_store
from tutti.integration.sglang.options import HICACHE, parse_options
from tutti.interface import Store
from tutti.scheduler.event import Tick
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.profile import TableProfile, estimated_document
from tutti.scheduler.roofline import DENSE_MODELS, GPUS
from tutti.scheduler.state import NOTHING
from tutti.scheduler.trace import TraceFile, read, replay

WAIT_S = 60.0
PROFILE = TableProfile(estimated_document(DENSE_MODELS["llama-3.1-8b"], GPUS["H100"]))
LAYOUT = layout_of(SHAPE, IDENTITY, ParallelRank())
NAME = "kv-tp0-pp0-cp0-dp0.trace"


def opened(path: Path | str, **options: Any) -> Store:
    parsed = parse_options({"path": str(path), "capacity": "64MiB", **options}, HICACHE)
    return open_store(LAYOUT, "kv", 64 * MiB, parsed, ParallelRank())[0]


def moved(store: Store) -> None:
    """Some puts, and loads of them."""
    store.allocate_memory(4)
    for number in range(4):
        keys = np.full((4, 16), number, np.uint8)
        keys[:, 0] = np.arange(4)
        store.put(keys, np.arange(4)).wait(WAIT_S)
        store.load(keys, np.arange(4)).wait(WAIT_S)
    store.stats()  # takes what was noted and not decided on


@pytest.mark.parametrize("by_agent", [False, True])
def test_what_a_store_records_replays(tmp_path: Path, by_agent: bool) -> None:
    if by_agent:
        with (
            running(tmp_path / "agent") as agent,
            opened(f"unix:{agent.path}", scheduler_trace=str(tmp_path)) as store,
        ):
            moved(store)
    else:
        with opened(tmp_path / "pools", scheduler_trace=str(tmp_path)) as store:
            moved(store)
    recorded = read(tmp_path / NAME)
    text = "".join(recorded.lines)
    assert text.count('"event":"WriteKnown"') == text.count('"event":"LoadKnown"') == 4
    assert recorded.limits.pressing_pages, "a store's own"
    again = replay(recorded.lines, SlackPolicy(recorded.limits), recorded.profile)
    assert list(again) == recorded.lines


def test_a_trace_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile=off disables"):
        opened(tmp_path / "pools", scheduler_trace=str(tmp_path), profile="off")
    with pytest.raises(ConfigError, match="choose a folder that exists"):
        opened(tmp_path / "pools", scheduler_trace=str(tmp_path / "none"))


def test_a_file_is_bounded_and_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.trace"
    limits = Limits(locked_pages=7, pressing_pages=3)
    head = path.stat().st_size if TraceFile(path, limits, PROFILE) else 0
    record = TraceFile(path, limits, PROFILE, head + 100)
    for at_ns in range(10):
        record(Tick(at_ns), NOTHING)
    recorded = read(path)
    assert path.stat().st_size <= head + 100
    assert 2 <= len(recorded.lines) < 10
    assert caplog.text.count("is full") == 1
    assert recorded.limits == limits
    assert recorded.profile.document == PROFILE.document
    path.write_bytes(path.read_bytes()[:-5])
    assert read(path).lines == recorded.lines[:-1], "the last one is not whole"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\n",
        b"[]\n",
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b'{"kind":"tutti trace","schema":2}\n',
        b'{"kind":"tutti trace","schema":3,"limits":{},"profile":{}}\n',
        b'{"kind":"tutti trace","schema":2,"limits":{"x":1},"profile":{}}\n',
        b'{"kind":"tutti trace","schema":2,"limits":[],"profile":{}}\n',
        b'{"kind":"tutti trace","schema":2,"limits":{"margin":"x"},"profile":{}}\n',
        b'{"kind":"tutti trace","schema":2,"limits":{},"profile":[]}\n',
        b'{"kind":"tutti trace","schema":2,"limits":{},"profile":{}}\n',
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.trace"
    path.write_bytes(content)
    with pytest.raises((ConfigError, ProfileError)):
        read(path)
    path.unlink()
    with pytest.raises(ConfigError, match="record the trace again"):
        read(path)


def test_a_trace_without_turns_of_read_ahead_is_refused(tmp_path: Path) -> None:
    """It was recorded before loads had an age: replayed, it would be decided otherwise."""
    path = tmp_path / "a.trace"
    TraceFile(path, Limits(), PROFILE)
    assert read(path).lines == []
    path.write_text(path.read_text().replace('"schema":2', '"schema":1'))
    with pytest.raises(ConfigError, match=r"another kind or schema than 2.*record the trace again"):
        read(path)

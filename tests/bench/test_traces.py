"""Traces: Mooncake's format, what is refused, the generator, and the keys of blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tutti import cli
from tutti.bench.belady import unlimited
from tutti.bench.traces import (
    BLOCK_TOKENS,
    Synthetic,
    TraceRequest,
    block_keys,
    generate,
    parse_trace,
    reach,
    read_trace,
)
from tutti.errors import ConfigError

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 12]}
FINGERPRINT = bytes(range(16))


def line(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line()}\n\n{line(timestamp=9)}\n{line(timestamp=11)}\n")
    first, second = read_trace(path, limit=2)
    assert first == TraceRequest(5, 600, 7, (0, 12))
    assert second.timestamp_ms == 9
    assert parse_trace([first.to_json()]) == [first]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        '{"timestamp": 1}',
        line(timestamp=-1),
        line(input_length=True),
        line(input_length="600"),
        line(output_length=1.5),
        line(hash_ids=[0]),
        line(hash_ids=[0, -1]),
        line(hash_ids=[0, 2**64]),
        line(hash_ids=[0, "1"]),
        line(hash_ids=None),
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_refused_with_its_number(bad: str) -> None:
    with pytest.raises(ConfigError, match="line 3 "):
        parse_trace([line(), "", bad])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timestamp", ["replay", "--trace", "{trace}", "--dir", "{folder}"]),
        ("output_length", ["bench", "eviction", "--trace", "{trace}"]),
        ("hash_ids", ["simulate", "--workload", "mooncake", "--data", "{trace}"]),
    ],
    ids=["replay", "eviction", "simulate"],
)
def test_a_trace_with_a_gap_is_refused_by_every_command(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gap = {key: value for key, value in GOOD.items() if key != name}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{line()}\n{json.dumps(gap)}\n{line(timestamp=9)}\n")
    assert cli.main([word.format(trace=trace, folder=tmp_path) for word in words]) == 2
    assert "line 2 of the trace lacks one of" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        parse_trace([])
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="cannot read the trace binary"):
        read_trace(tmp_path / "binary")


def test_the_generator_depends_on_its_seed_alone() -> None:
    config = Synthetic(requests=30, seed=4)
    assert generate(config) == generate(config)
    assert generate(config) != generate(replace(config, seed=5))


def test_generated_requests_are_a_trace() -> None:
    requests = generate(Synthetic(requests=60))
    assert parse_trace(r.to_json() for r in requests) == requests
    times = [r.timestamp_ms for r in requests]
    assert times == sorted(times)


def test_the_generator_is_about_as_reusable_as_it_says() -> None:
    requests = generate(Synthetic(requests=1500, seed=2))
    count = unlimited([r.hash_ids for r in requests])
    assert 0.30 < count.prefix_hit_rate < 0.45
    assert 18 < count.references / len(requests) < 30


def test_a_block_id_stands_for_its_whole_prefix() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in generate(Synthetic(requests=200, seed=3)):
        for place, block in enumerate(request.hash_ids):
            prefix = request.hash_ids[:place]
            assert before.setdefault(block, prefix) == prefix


@pytest.mark.parametrize(
    "bad",
    [
        {"requests": 0},
        {"requests": 10**6 + 1},
        {"continue_chance": 1.0},
        {"gap_ms": -1.0},
        {"open_conversations": 0},
    ],
)
def test_impossible_generators_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Synthetic(**bad)


def test_reach_stops_at_the_end_of_the_prompt() -> None:
    request = TraceRequest(0, 600, 1, (0, 1))
    assert [reach(request, blocks) for blocks in range(3)] == [0, BLOCK_TOKENS, 600]


def test_block_keys() -> None:
    keys = block_keys(FINGERPRINT, (3, 2**64 - 1))
    expected = xxhash.xxh3_128_digest(FINGERPRINT + (3).to_bytes(8, "little"))
    assert keys.shape == (2, 16)
    assert keys[0].tobytes() == expected
    paged = block_keys(FINGERPRINT, (3, 4), pages_per_block=4)
    assert paged.shape == (8, 16)
    assert paged[0].tobytes() == expected
    assert len(np.unique(paged, axis=0)) == 8

"""Requests that `bench slack` generates, writes and reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.bench.simulate.hardware import drive_names, machine
from tutti.bench.slack.workload import KINDS, generate, recorded, write_requests
from tutti.errors import ConfigError

TRUTH = machine(drive_names()[0], "H100")


@pytest.mark.parametrize("name", KINDS)
def test_a_workload_is_the_same_for_its_seed(name: str) -> None:
    requests = generate(name, TRUTH, 20, 7)
    assert requests == generate(name, TRUTH, 20, 7)
    assert requests != generate(name, TRUTH, 20, 8)
    assert all(r.hit_tokens % 64 == 0 and r.new_tokens >= 64 for r in requests)


def test_recorded_requests(tmp_path: Path) -> None:
    requests, path = generate("chat", TRUTH, 5, 1), tmp_path / "requests.jsonl"
    write_requests(requests, path)
    assert recorded(path) == requests


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense\n",
        "[]\n",
        '{"arrival_ns": 1}\n',
        '{"arrival_ns": -1, "hit_tokens": 0, "new_tokens": 1, "out_tokens": 1}\n',
        '{"arrival_ns": 1, "hit_tokens": 0, "new_tokens": 0, "out_tokens": 1}\n',
    ],
)
def test_what_is_no_recording(tmp_path: Path, text: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"requests\.jsonl"):
        recorded(path)

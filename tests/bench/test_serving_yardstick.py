"""SGLang's own clients as yardsticks: what is counted, and what is skipped by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.bench.summary import render
from tutti.bench.yardsticks import serving

METRICS = """
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 1000.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 24.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 3.0e+02
sglang:num_requests_total{model_name="m"} 9.0
"""


def test_tokens_count_by_where_their_kv_was() -> None:
    counted = serving.read_counters(METRICS)
    assert counted == {"prompt": 1024, "device": 200, "host": 0, "storage": 300, "total": 0}
    before = dict.fromkeys(counted, 0.0) | {"prompt": 24.0, "device": 100.0}
    assert serving.hits(before, counted) == {
        "prompt_tokens": 1000,
        "device_tokens": 100,
        "host_tokens": 0,
        "storage_tokens": 300,
        "total_tokens": 0,
        "hit_rate": 0.4,
    }
    assert serving.hits(counted, counted)["hit_rate"] == 0.0


def test_the_table_names_what_failed_and_what_was_skipped(tmp_path: Path) -> None:
    tokens = serving.hits(
        dict.fromkeys(serving.read_counters(""), 0.0), serving.read_counters(METRICS)
    )
    asked = tokens | {"requests": 36, "completed": 36, "median_ttft_ms": 50.0}
    lost = tokens | {"requests": 24, "passed": False, "lost": "Round 1, client 0: cached_tokens=0"}
    turns = tokens | {"requests": 24, "completed": 24, "passed": True}
    result = {
        "benchmark": "serving",
        "settings": {"note": "CPU"},
        "systems": {
            "hbm": {"first": asked, "again": asked, "turns": lost},
            "tutti-linker": {"first": asked, "again": asked, "turns": turns},
        },
        "skipped": {"lmcache": "lmcache is not installed"},
        "machine": {"command": "c"},
    }
    (tmp_path / "serving.json").write_text(json.dumps(result))
    page = render("<!-- result: serving -->\n<!-- end -->\n", tmp_path)
    assert "| hbm | multi-turn test | **fails** |" in page
    assert "| tutti-linker | multi-turn test | 24 of 24 |" in page
    assert "hbm fails SGLang's multi-turn test: Round 1, client 0: cached_tokens=0" in page
    assert "skipped lmcache: lmcache is not installed" in page and "note CPU" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rate", "0"], "must be positive"),
        (["--dir", "/none/at/all"], "is not a directory"),
        (["--bench-multiturn", "/none/at/all.py"], "sgl-project/sglang"),
    ],
)
def test_what_is_not_there_is_named(
    words: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: name)
    assert serving.main(["--model", "m", "--dir", str(tmp_path), *words]) == 3
    assert told in capsys.readouterr().err


def test_a_python_without_sglang_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    assert serving.main(["--model", "m", "--dir", str(tmp_path)]) == 3
    assert "sglang is not installed" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: name)
    out = tmp_path / "serving.json"
    words = ["--model", "m", "--dir", str(tmp_path), "--out", str(out), "--systems", "hbm"]
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert serving.main(words) == 0
    assert "skipped hbm: hbm does not start" in capsys.readouterr().out
    assert json.loads(out.read_text())["systems"] == {}

"""SGLang's own clients as yardsticks: what is counted, and what is skipped by name."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.summary import render
from tutti.bench.ttft.http import ServerError
from tutti.bench.yardsticks import serving
from tutti.bench.yardsticks.serving_steps import STEPS, Target, found_by_all, steps_of
from tutti.bench.yardsticks.sglang_clients import Clients

METRICS = """
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 1000.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 24.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 3.0e+02
sglang:evicted_tokens_total{cache_type="UnifiedRadixCache",tp_rank="0"} 640.0
sglang:evicted_tokens_total{cache_type="UnifiedRadixCache",tp_rank="1"} 640.0
tutti:evicted_objects_total{mode="linker",pool="kv",rank="tp0"} 7.0
tutti:evicted_objects_total{mode="linker",pool="kv",rank="tp1"} 5.0
sglang:num_requests_total{model_name="m"} 9.0
"""


def test_tokens_count_by_where_their_kv_was() -> None:
    counted = serving.read_counters(METRICS)
    places = {"prompt": 1024, "device": 200, "host": 0, "storage": 300, "total": 0}
    assert counted == places | {"evicted_tokens": 640, "evicted_objects": 12}
    before = dict.fromkeys(counted, 0.0) | {"prompt": 24.0, "device": 100.0}
    assert serving.hits(before, counted) == {
        "prompt_tokens": 1000,
        "device_tokens": 100,
        "host_tokens": 0,
        "storage_tokens": 300,
        "total_tokens": 0,
        "evicted_tokens": 640,
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
    server = {"tp_size": 2}
    hbm = [{"server": server, "first": asked, "again": asked, "turns": lost}]
    once = {"server": server, "first": asked, "again": asked, "turns": turns}
    linker = [once | {"first": asked | {"median_ttft_ms": ms}} for ms in (70.0, 10.0, 30.0)]
    small = [{"server": server | {"evicted_objects": 88}, "first": asked, "again": asked}]
    result = {
        "benchmark": "serving",
        "settings": {"note": "CPU"},
        "systems": {
            "hbm": serving.medians(hbm),
            "tutti-linker": serving.medians(linker),
            "tutti-linker, 8MiB": serving.medians(small),
        },
        "skipped": {"lmcache": "lmcache is not installed"},
        "machine": {"command": "c"},
    }
    (tmp_path / "serving.json").write_text(json.dumps(result))
    page = render("<!-- result: serving -->\n<!-- end -->\n", tmp_path)
    assert "| hbm | multi-turn test | **fails** |" in page
    assert "| tutti-linker | multi-turn test | 24 of 24 |" in page
    assert "hbm fails SGLang's multi-turn test: Round 1, client 0: cached_tokens=0" in page
    assert "skipped, lmcache: lmcache is not installed" in page and "note CPU" in page
    medians = r"\| tutti-linker \| bench_serving \| [^\n]*\| 30 \|"
    assert re.search(medians, page), "the median of its passes"
    assert "ranks of a server: 2; medians of 3 passes (fewer: hbm 1; tutti-linker, 8MiB 1)" in page
    assert "tutti-linker, 8MiB: the pool evicted 88 objects" in page


def test_a_system_that_finds_less_than_is_possible_is_named() -> None:
    def step(tokens: int) -> dict[str, Any]:
        sources = dict.fromkeys(serving.SOURCES, 0) | {"host": tokens}
        return {f"{name}_tokens": n for name, n in sources.items()} | {"possible_tokens": 512}

    def cell(*again: int) -> dict[str, Any]:
        return {
            "server": {},
            "again": step(again[0]),
            "passes": [{"first": step(64), "again": step(tokens)} for tokens in again],
        }

    cells = {
        "tutti-linker": cell(512, 512),
        "tutti-linker, 8MiB": cell(128),
        "hicache-file": cell(512, 448, 512),
        "hbm": cell(0),
        "hicache-nixl": cell(576),
    }
    assert serving.hit_notes({"systems": cells}) == [
        "found all that is possible: tutti-linker",
        "hicache-file found, in tokens: the same after a flush 448 of 512",
        "hbm (no SSD tier) found, in tokens: the same after a flush 0 of 512",
        "hicache-nixl found, in tokens: the same after a flush 576 of 512",
    ]


def test_what_is_possible_is_whole_pages_but_the_last_token() -> None:
    long, other = list(range(10)), [*range(6), *range(100, 106)]
    # Nothing; a page, as the last token is computed; the page that both share; twice two pages.
    assert found_by_all([long, long[:8], other, other, long], 4) == 0 + 4 + 4 + 8 + 8
    assert found_by_all([long, long], 64) == 0


def test_bench_multiturn_asks_the_same_again_after_a_flush(tmp_path: Path) -> None:
    script, asked = tmp_path / "multiturn.py", tmp_path / "asked"
    script.write_text(
        "import json, sys\n"
        f"open({str(asked)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "summary = {'total_requests': 6, 'median_ttft': 0.25, 'throughput': 2.0}\n"
        "with open(sys.argv[sys.argv.index('--log-file') + 1], 'a') as log:\n"
        "    log.write(json.dumps({'summary': summary}) + '\\n')\n"
    )
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    words = ["--clients", "2", "--rounds", "3", "--bench-multiturn", str(script)]
    args = parser.parse_args(["--model", "m", *words])
    with closing(Clients(tmp_path)) as clients:
        steps = steps_of(Target(1, clients, tmp_path, tmp_path / "texts.json", args), small=False)
        assert list(steps) == list(STEPS), "each of them after a flush"
        first, again = (steps[name]() for name in ("bench_multiturn", "bench_multiturn_again"))
    one, other = (json.loads(line) for line in asked.read_text().splitlines())
    assert one == other and one[one.index("--max-parallel") + 1] == "1"
    # Turns of 256 tokens and 8 of an answer: 256, 520 and 784 tokens in pages of 64.
    assert first.pop("possible_tokens") == 2 * (256 + 512)
    assert again.pop("possible_tokens") == 2 * (192 + 512 + 768)
    assert first == again and again["completed"] == again["requests"] == 6


def test_a_test_that_failed_in_one_pass_has_failed() -> None:
    passed = {"server": {}, "turns": {"requests": 4, "completed": 4, "passed": True}}
    lost = {"server": {}, "turns": {"requests": 4, "passed": False, "lost": "Round 2"}}
    turns = serving.medians([passed, lost, passed])["turns"]
    assert turns == {"requests": 4, "passed": False, "lost": "Round 2"}


def test_passes_rotate_and_small_storages_come_last() -> None:
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    args = parser.parse_args(["--model", "m", "--passes", "2", "--small-capacity", "8MiB"])
    plan = serving.plan_of(["hbm", "hicache-file", "tutti-linker"], args)
    assert [cell.title for cell in plan] == [
        *("hbm", "hicache-file", "tutti-linker"),
        *("hicache-file", "tutti-linker", "hbm"),
        *("hicache-file, 8MiB", "tutti-linker, 8MiB"),
    ]
    assert [cell.capacity for cell in plan] == ["1GiB"] * 6 + ["8MiB"] * 2


def test_clients_answer_more_than_once_and_name_what_failed(tmp_path: Path) -> None:
    """Any module and any function will do: SGLang's are in tests/sglang."""
    (tmp_path / "broken.py").write_text("print('Round 1'); assert False, 'lost'")
    with closing(Clients(tmp_path)) as clients:
        asked = {"function": "textwrap.shorten", "given": {}}
        assert clients.ask(asked)["error"] == "TypeError"
        asked = {"function": "textwrap.shorten", "given": {"text": "a b", "width": 9}}
        assert clients.ask(asked)["value"] == "a b"
        answer = clients.ask({"program": str(tmp_path / "broken.py"), "words": []})
        assert (answer["error"], answer["said"]) == ("AssertionError", "Round 1\n")
        with pytest.raises(ServerError, match=r"broken\.py failed: AssertionError: lost"):
            clients.program(str(tmp_path / "broken.py"))
        (tmp_path / "dies.py").write_text("import os; os.write(2, b'no more'); os._exit(1)")
        with pytest.raises(ServerError, match="clients ended: no more"):
            clients.program(str(tmp_path / "dies.py"))
        assert clients.ask(asked)["value"] == "a b", "a new process"


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
    assert "skipped, hbm: hbm does not start" in capsys.readouterr().out
    assert json.loads(out.read_text())["systems"] == {}

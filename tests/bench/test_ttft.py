"""TTFT sweeps: what the numbers mean, which rates are tried, and what survives a bad end."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stand_in_server import standing_in

from tutti.base.terminal import progress
from tutti.bench.figures.data import read_csv
from tutti.bench.traces import Synthetic, generate
from tutti.bench.ttft import run as ttft
from tutti.bench.ttft.arrivals import arrival_times_s
from tutti.bench.ttft.client import Record
from tutti.bench.ttft.http import NotStreaming, ServerError
from tutti.bench.ttft.metrics import (
    inter_token_ms,
    latencies_ms,
    mean_interval,
    parse_slo,
    summarise,
)
from tutti.bench.ttft.output import REQUESTS, RESULT, Output, read_result
from tutti.bench.ttft.sglang_client import read_point
from tutti.bench.ttft.sweep import Point, Stopped, Sweep, attained, by_rate, mean_ttft_within
from tutti.cli import main
from tutti.errors import ConfigError, Unsupported

SLO = parse_slo("ttft:1000")
SMALL = ["--workload", "leval-synthetic", "--tasks", "tpo", "--scale", "0.01", "--requests", "12"]
QUICK = [*SMALL, "--settle-s", "0", "--timeout-s", "20"]


def record(number: int, due_s: float, first_s: float, last_s: float, **facts: Any) -> Record:
    tokens = [(first_s, 1), (last_s, 11)]
    found = Record(number, "t", due_s, due_s + 0.5, tokens, last_s, input_tokens=100)
    for name, value in facts.items():
        setattr(found, name, value)
    return found


def failure(number: int, due_s: float) -> Record:
    return Record(number, "t", due_s, due_s, [], due_s + 1, error="status 500: no")


def measured(url: str, *argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ttft.add_arguments(parser)
    return ttft.run(parser.parse_args(["--url", url, *QUICK, *argv]), progress)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = record(0, due_s=2.0, first_s=3.0, last_s=4.0)
    assert latencies_ms(one) == pytest.approx(
        {"ttft": 1000.0, "ttft_sent": 500.0, "tpot": 100.0, "e2e": 2000.0}
    )
    assert inter_token_ms(one) == pytest.approx([100.0] * 10), "an event of ten tokens"


def test_failures_miss_every_slo_and_have_no_latency() -> None:
    records = [record(i, i, i + 0.5, i + 1.0) for i in range(6)]
    records += [record(6, 6, 8.5, 9), failure(7, 7)]
    slos = [SLO, parse_slo("ttft:1000,tpot:10")]
    point = summarise(records, slos)
    assert (point["requests"], point["failed"]) == (8, 1)
    assert point["errors"] == {"status 500: no": 1}
    assert point["ttft_ms"]["mean"] == pytest.approx((6 * 500 + 2500) / 7)
    assert point["slo"]["ttft:1000"]["attainment"] == pytest.approx(6 / 8)
    assert point["slo"]["ttft:1000,tpot:10"]["attainment"] == 0
    assert point["slo"]["ttft:1000"]["goodput"] == pytest.approx(6 / point["duration_s"])
    assert point["duration_s"] == pytest.approx(9)
    later = summarise(records, [SLO], warmup=6, planned=9)
    assert (later["requests"], later["partial"]) == (2, True)
    nothing = summarise([failure(0, 0)], [SLO])
    assert nothing["ttft_ms"] is None and nothing["cached"]["hit_rate"] is None


def test_hits_by_place() -> None:
    records = [
        record(0, 0, 1, 2, cached={"device": 10, "host": 0, "storage": 40}),
        record(1, 0, 1, 2, cached={"device": 0, "host": 20, "storage": 0}),
        failure(2, 0),
    ]
    cached = summarise(records, [])["cached"]
    assert cached["hit_rate"] == pytest.approx(70 / 200)
    assert (cached["storage_tokens"], cached["prompt_tokens"]) == (40, 200)


def test_a_growing_queue_is_unstable_and_a_steady_one_is_not() -> None:
    def served(rate: float, busy_s: float) -> bool:
        free_s, records = 0.0, []
        for number in range(100):
            due_s = number / rate
            free_s = max(free_s, due_s) + busy_s
            records.append(record(number, due_s, free_s, free_s))
        return bool(summarise(records, [])["unstable"])

    assert served(rate=2.0, busy_s=0.7)
    assert not served(rate=1.0, busy_s=0.7)
    assert not served(rate=1.0, busy_s=0.99)


@pytest.mark.parametrize("servers", [1, 8])
def test_stability_is_judged_right_of_random_queues(servers: int, seed: int) -> None:
    """400 Poisson arrivals, log-normal service: 0.7 and 1.4 times what the servers can do."""

    def unstable(load: float, run: int) -> bool:
        rng = random.Random(run)
        free_s, records = [0.0] * servers, []
        for number, due_s in enumerate(arrival_times_s(400, load * servers, run)):
            free_s.sort()
            free_s[0] = max(free_s[0], due_s) + rng.lognormvariate(-0.125, 0.5)
            records.append(record(number, due_s, free_s[0], free_s[0]))
        return bool(summarise(records, [])["unstable"])

    runs = range(seed, seed + 20)
    assert sum(unstable(0.7, run) for run in runs) <= 1
    assert sum(unstable(1.4, run) for run in runs) >= 19


@pytest.mark.parametrize("text", ["", "ttft", "ttft:0", "ttft:x", "hits:1", "ttft:1,", "ttft:inf"])
def test_what_is_no_slo(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an SLO"):
        parse_slo(text)


def test_intervals_of_few_values_are_student_s() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["high"] - 2.0 == pytest.approx(4.303 * 1.0 / 3**0.5)
    assert mean_interval([5.0]) == {"mean": 5.0, "low": 5.0, "high": 5.0, "n": 1}


class Model:
    """A server whose TTFT is 100 / (1 - rate / limit) ms; beyond the limit its queue grows.

    There it even looks quick: a short run of an unstable server says nothing.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.asked: list[float] = []

    def __call__(self, rate: float, seed: int) -> Point:
        self.asked.append(rate)
        within = rate < self.limit
        ttft_ms = 100 / (1 - rate / self.limit) if within else 1.0
        return {
            "requests": 10,
            "failed": 0,
            "partial": False,
            "unstable": not within,
            "ttft_ms": {"mean": ttft_ms + seed, "p99": ttft_ms},
            "itl_ms": None,
            "tpot_ms": None,
            "cached": {"hit_rate": 0.5},
            "slo": {"ttft:1000": {"attainment": 1.0 if ttft_ms < 1000 else 0.0, "goodput": rate}},
            **dict.fromkeys(("input_tokens_per_s", "output_tokens_per_s"), rate),
            "request_throughput": rate,
        }


@pytest.mark.parametrize("limit", [0.11, 0.9, 2.0, 7.3, 31.0])
def test_the_highest_rate_is_found_by_bisection(limit: float) -> None:
    model = Model(limit)
    sweep = Sweep(model, [1, 2, 3])
    for rate in (0.5, 1.0):
        sweep.at(rate)
    found = sweep.max_rate(mean_ttft_within(1000), tolerance=0.05, rate_max=64)
    right = 0.9 * limit  # where the model's TTFT is a second
    assert found["rate"] <= right * 1.01 and found["fails_at"] >= right * 0.99
    assert found["fails_at"] / found["rate"] <= 1.05
    again = len(model.asked)
    assert sweep.max_rate(attained("ttft:1000"), tolerance=0.05, rate_max=64)["rate"] > 0
    assert len(model.asked) - again <= 3, "what was measured is not measured again"
    assert len(model.asked) == 3 * len(set(model.asked)), "three seeds each"


def test_a_limit_that_is_never_reached_or_never_met() -> None:
    sweep = Sweep(Model(1000.0), [1])
    sweep.at(1.0)
    found = sweep.max_rate(mean_ttft_within(1000), tolerance=0.05, rate_max=10.123456)
    assert found == {"rate": 10.12, "fails_at": None, "at_least": True}
    never = Sweep(Model(0.001), [1])
    never.at(1.0)
    assert never.max_rate(mean_ttft_within(1000), tolerance=0.05, rate_max=8)["rate"] is None


def test_what_a_stopped_measurement_found_is_kept() -> None:
    model = Model(10)

    def measure(rate: float, seed: int) -> Point:
        if seed == 2:
            raise Stopped({**model(rate, seed), "partial": True}, "the server is gone")
        return model(rate, seed)

    sweep = Sweep(measure, [1, 2, 3])
    with pytest.raises(Stopped):
        sweep.at(1.0)
    assert [(p["seed"], p["partial"]) for p in sweep.points] == [(1, False), (2, True)]
    (row,) = by_rate(sweep.points)
    assert row["partial"] and row["seeds"] == 2 and row["requests"] == 20


def test_a_sweep_of_a_server_that_streams(tmp_path: Path) -> None:
    cached = {"device": 0, "host": 0, "storage": 30}
    argv = ["--rates", "100", "200", "--seeds", "1", "2", "--out", str(tmp_path / "out")]
    with standing_in(first_s=0.002, cached=cached) as server:
        result = measured(server.url, *argv, "--slo", "ttft:5000", "--system", "stand-in")
    assert not result["partial"] and result["stopped"] == ""
    assert [row["rate"] for row in result["rates"]] == [100, 200]
    assert [row["seeds"] for row in result["rates"]] == [2, 2]
    assert result["rates"][0]["requests"] == 2 * 11, "a tenth is warm-up"
    assert result["rates"][0]["slo"]["ttft:5000"]["attainment"]["mean"] == 1
    assert read_result(tmp_path / "out") == json.loads(json.dumps(result))
    text = gzip.decompress((tmp_path / "out" / REQUESTS).read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 4 * 12
    due = [line["due_ms"] for line in lines if line["rate"] == 100 and line["seed"] == 1]
    other = [line["due_ms"] for line in lines if line["rate"] == 200 and line["seed"] == 1]
    assert sorted(due) == pytest.approx([2 * at for at in sorted(other)], abs=0.01)
    assert "stand-in" in ttft.report(result)
    assert server.script.calls.count("POST /flush_cache") == 4


def test_a_trace_is_replayed_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = generate(Synthetic(requests=20, seed=3, tokens_max=20_000))
    trace.write_text("".join(request.to_json() + "\n" for request in requests))
    argv = ["--workload", "mooncake", "--data", str(trace), "--tasks", "--requests", "20"]
    argv += ["--rates", "100", "--seeds", "1", "--arrivals", "trace", "--out", str(tmp_path / "o")]
    with standing_in() as server:
        result = measured(server.url, *argv)
    assert result["arrivals"] == "trace" and not result["partial"]
    text = gzip.decompress((tmp_path / "o" / REQUESTS).read_bytes()).decode()
    due_ms = sorted(json.loads(line)["due_ms"] for line in text.splitlines())
    assert due_ms[-1] == pytest.approx(190, abs=0.01), "20 requests at 100 a second"
    first, last = requests[0].timestamp_ms, requests[-1].timestamp_ms
    wanted = [190 * (r.timestamp_ms - first) / (last - first) for r in requests]
    assert due_ms == pytest.approx(wanted, abs=0.01)
    with standing_in() as server, pytest.raises(ConfigError, match="--arrivals poisson"):
        measured(server.url, "--arrivals", "trace", "--rates", "100", "--seeds", "1")


def test_cold_points_share_no_token_with_each_other() -> None:
    with standing_in() as server:
        measured(server.url, "--rates", "500", "1000", "--seeds", "1")
        measured(server.url, "--rates", "500", "--seeds", "1")
        starts = {tuple(body["input_ids"][:4]) for body in server.script.requests[1:]}
    assert len(starts) == 3 + 1, "three points, and the probe of the second run"


def test_a_populated_start_computes_every_document_once() -> None:
    with standing_in() as server:
        result = measured(server.url, "--rates", "500", "--seeds", "1", "--start", "populated")
    asked = server.script.requests
    documents = result["workload"]["documents"]
    assert len(asked) == 1 + documents + 12
    alone = {tuple(body["input_ids"]) for body in asked[1 : 1 + documents]}
    assert len(alone) == documents
    for body in asked[1 + documents :]:
        assert any(tuple(body["input_ids"][: len(one)]) == one for one in alone)


def test_a_populated_start_needs_a_server_that_computes() -> None:
    with (
        standing_in(dies_after=1) as server,
        pytest.raises(ServerError, match="no document could be computed"),
    ):
        measured(server.url, "--rates", "500", "--seeds", "1", "--start", "populated")
    with standing_in(dies_after=6) as server, pytest.raises(ServerError, match="no document"):
        measured(server.url, "--requests", "60", "--start", "populated")


def test_prefixes_are_stored_first_and_asked_for_then(tmp_path: Path) -> None:
    argv = ["--prefix-tokens", "0", "64", "--total-tokens", "100", "--repeats", "2"]
    with standing_in() as server:
        result = measured(server.url, *argv, "--out", str(tmp_path / "out"))
    asked = server.script.requests[1:]
    assert [len(body["input_ids"]) for body in asked] == [100, 100, 64, 100, 64, 100]
    assert asked[2]["input_ids"] == asked[3]["input_ids"][:64] != asked[4]["input_ids"]
    assert [row["prefix_tokens"] for row in result["rows"]] == [0, 64]
    assert read_result(tmp_path / "out")["benchmark"] == "ttft-prefix"
    with standing_in() as server, pytest.raises(ConfigError, match="--total-tokens"):
        measured(server.url, "--prefix-tokens", "100", "--total-tokens", "100")


def test_bad_servers_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ServerError, match="no server answers"):
        measured("http://127.0.0.1:1")
    with standing_in(mode="plain") as server, pytest.raises(NotStreaming):
        measured(server.url)
    with standing_in(mode="refuse") as server, pytest.raises(ServerError, match="status 400"):
        measured(server.url)


@pytest.mark.parametrize("place", ["server_info", "models"])
def test_a_shorter_context_is_refused_before_anything_is_measured(place: str) -> None:
    def told(tokens: int) -> dict[str, Any]:
        if place == "server_info":
            return {"info": {"context_length": tokens}}
        return {"info": {}, "model_tokens": tokens}

    with standing_in(**told(16)) as server:
        with pytest.raises(ConfigError, match="longer than 16 tokens"):
            measured(server.url, "--rates", "500", "--seeds", "1")
        assert not server.script.requests
    with standing_in(**told(4096)) as server:  # prefixes have lengths of their own
        with pytest.raises(ConfigError, match="context is 4096 tokens"):
            measured(server.url, "--prefix-tokens", "64")
        assert len(server.script.requests) == 1, "the probe alone"


def test_a_server_that_dies_leaves_a_partial_result(tmp_path: Path) -> None:
    argv = ["--rates", "200", "400", "--seeds", "1", "--out", str(tmp_path / "out")]
    with standing_in(dies_after=16) as server:
        code = main(["bench", "ttft", "--url", server.url, *QUICK, *argv])
    result = read_result(tmp_path / "out")
    assert code == 3 and result["partial"] and "gone" in result["stopped"]
    assert [point["partial"] for point in result["points"]] == [False, True]
    assert "PARTIAL" in ttft.report(result)


def test_a_server_that_dies_between_points_leaves_what_it_gave(tmp_path: Path) -> None:
    with standing_in() as server:

        def end(number: int) -> None:
            if number == 1 + 12 + 11:  # the last request of the second point
                threading.Timer(0.7, server.stop).start()

        server.script.on_request = end
        argv = ["--rates", "200", "400", "800", "--seeds", "1", "--settle-s", "2"]
        result = measured(server.url, *argv, "--out", str(tmp_path / "out"))
        assert "no server answers" in result["stopped"] and result["partial"]
        assert len(result["points"]) == 2
        assert read_result(tmp_path / "out")["partial"]
    with standing_in(dies_after=4) as server:
        argv = ["--prefix-tokens", "0", "64", "--total-tokens", "100", "--repeats", "2"]
        result = measured(server.url, *argv)
    assert result["partial"] and result["rows"][0]["failed"] == 0
    assert "PARTIAL" in ttft.report(result)


def test_an_interrupt_leaves_a_partial_result(tmp_path: Path) -> None:
    def interrupt(number: int) -> None:
        if number == 5:
            time.sleep(1)  # the others end meanwhile, on a busy machine as well
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    argv = ["--rates", "20", "--seeds", "1", "2", "--out", str(tmp_path / "out")]
    with standing_in(on_request=interrupt) as server:
        code = main(["bench", "ttft", "--url", server.url, *QUICK, *argv])
    result = read_result(tmp_path / "out")
    assert code == 130 and result["stopped"] == "interrupted"
    (point,) = result["points"]
    assert point["partial"] and 0 < point["requests"] < 12


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_keeps_the_result_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    failing = Output(out)
    failing.make_folder()
    failing.result({"benchmark": "ttft", "partial": False})
    (out / f"{RESULT}.new").symlink_to("/dev/full")
    failing.result({"benchmark": "ttft", "partial": False, "more": 1})
    assert "No space left" in failing.failed
    assert read_result(out) == {"benchmark": "ttft", "partial": False}, "the one before stays"
    failing.result({"benchmark": "ttft", "partial": False})
    assert read_result(out)["partial"] and "No space" in read_result(out)["output"]


# A limit on the size of files stands in for a disk: the first point's requests fit, no two do.
FULL_AT_NBYTES = 14_000
ON_A_FULL_DISK = f"""
import resource, sys
from tutti.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({FULL_AT_NBYTES}, {FULL_AT_NBYTES}))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_fills_during_a_sweep_keeps_whole_points(tmp_path: Path) -> None:
    argv = ["--rates", "800", "--seeds", "1", "2", "3", "--out", str(tmp_path), "--json"]
    with standing_in() as server:
        command = ["bench", "ttft", "--url", server.url, *QUICK, "--requests", "400", *argv]
        done = subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK, *command], capture_output=True, timeout=60
        )
    assert done.returncode == 3, done.stderr.decode()
    printed = json.loads(done.stdout)
    assert len(printed["points"]) == 3 and "File too large" in printed["output"]
    assert "PARTIAL" in ttft.report(printed)
    kept = read_result(tmp_path)
    assert kept["partial"] and kept["output"] == printed["output"]
    lines = gzip.decompress((tmp_path / REQUESTS).read_bytes()).decode().splitlines()
    assert {json.loads(line)["seed"] for line in lines} == {1} and len(lines) == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == [REQUESTS, RESULT]


def test_results_of_other_arrivals_are_not_compared(tmp_path: Path) -> None:
    paths = []
    variants: tuple[Sequence[str], ...] = ((), (), ("--workload-seed", "9"), ("--seeds", "1", "2"))
    with standing_in() as server:
        for number, more in enumerate(variants):
            paths.append(tmp_path / str(number))
            argv = ["--rates", "500", "--seeds", "1", "--system", f"s{number}", *more]
            measured(server.url, *argv, "--out", str(paths[-1]))
    stem = tmp_path / "both"
    compared = measured("unused", "--compare", str(paths[0]), str(paths[1]), "--out", str(stem))
    assert "both.csv" in compared["files"] and "both.csv" in ttft.report(compared)
    assert [row["system"] for row in read_csv(tmp_path / "both.csv", "rate")] == ["s0", "s1"]
    assert [row["system"] for row in compared["rows"]] == ["s0", "s1"]
    assert compared["rows"][0]["ttft_ratio"] == 1
    assert "s1" in ttft.report(compared)
    with pytest.raises(ConfigError, match="other prompts"):
        measured("unused", "--compare", str(paths[0]), str(paths[2]))
    with pytest.raises(ConfigError, match="other seeds"):
        measured("unused", "--compare", str(paths[0]), str(paths[3]))
    with pytest.raises(ConfigError, match="same --system"):
        measured("unused", "--compare", str(paths[0]), str(paths[0]))
    with pytest.raises(ConfigError, match="holds a result already"):
        Output(paths[0])


def test_results_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RESULT).write_text("{")
    folder, missing = tmp_path / "folder", tmp_path / "missing"
    folder.mkdir()
    for path, why in (
        (missing, f"{missing}: No such file or directory; give a result.json"),
        (folder, f"{folder / RESULT}: No such file or directory; give a result.json"),
        (tmp_path, f"{tmp_path / RESULT}: Expecting property name"),
    ):
        assert main(["bench", "ttft", "--compare", str(path), str(path)]) == 2
        assert f"tutti: cannot read {why}" in capsys.readouterr().err


def test_the_line_of_sglang_s_client_is_read(tmp_path: Path) -> None:
    line = {
        "errors": ["", "", "boom"],
        "ttfts": [0.5, 1.5, 0.0],
        "itls": [[0.1, 0.1], [0.3], []],
        "output_lens": [3, 2, 0],
        "duration": 4.0,
        "request_throughput": 0.5,
        "input_throughput": 10.0,
        "output_throughput": 1.0,
        "cache_report": {
            "total_prompt_tokens": 200,
            "total_cached_tokens": 150,
            "device_cached_tokens": 50,
            "host_cached_tokens": None,
            "storage_cached_tokens": 100,
        },
    }
    path = tmp_path / "out.jsonl"
    path.write_text('{"older": 1}\n' + json.dumps(line) + "\n")
    point = read_point(path, [SLO, parse_slo("tpot:150")])
    assert (point["requests"], point["failed"]) == (3, 1)
    assert point["ttft_ms"]["mean"] == pytest.approx(1000)
    assert point["tpot_ms"]["max"] == pytest.approx(300)
    assert point["slo"]["ttft:1000"] == {"goodput": 0.25, "attainment": pytest.approx(1 / 3)}
    assert point["cached"]["hit_rate"] == 0.75 and point["cached"]["storage_tokens"] == 100
    path.write_text("{}\n")
    with pytest.raises(ServerError, match="left no result"):
        read_point(path, [SLO])


def test_sglang_s_client_is_missing_by_name(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'sglang'\" >&2; exit 1\n"
    )
    fake.chmod(0o755)
    with standing_in() as server, pytest.raises(Unsupported, match="lacks the module 'sglang'"):
        measured(server.url, "--client", "sglang", "--sglang-python", str(fake))

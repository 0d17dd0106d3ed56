"""Replay over a small pool: hits, bytes, damage, and the command's own functions."""

from __future__ import annotations

import argparse
import bisect
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from store.pools import formatted, opened
from tutti.base.terminal import progress
from tutti.base.units import MiB
from tutti.bench import engine_alone, replay
from tutti.bench.pool_file import temporary_pool
from tutti.bench.replay import Replayer
from tutti.bench.shape import KvPageShape
from tutti.bench.traces import Synthetic, TraceRequest, block_keys, generate
from tutti.errors import ConfigError, MediumError
from tutti.medium.geometry import Geometry
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

SHAPE = KvPageShape(2, 16384)
LAYOUT = SHAPE.layout(512)
TRACE = "TUTTI_TRACE"


def store_of(slots: int, verify: str = "always") -> ObjectStore:
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, slots // 4)
    return opened(formatted(LAYOUT, geometry), verify=verify, pin_lookups=1)


def requests_of(*lengths: int) -> list[TraceRequest]:
    """Requests that share their beginnings."""
    return [TraceRequest(i, n * 512, 1, tuple(range(n))) for i, n in enumerate(lengths)]


def play(store: ObjectStore, requests: list[TraceRequest]) -> Replayer:
    replayer = Replayer(store, pages=5, page_size=512, hugepages=False)
    for request in requests:
        replayer.play(request)
    return replayer


def test_what_was_put_hits_and_is_right() -> None:
    with store_of(32) as store:
        # 12 blocks go through 5 pages of memory in windows.
        replayer = play(store, requests_of(12, 12, 7, 14))
        result = replayer.summary()
    assert (replayer.blocks, replayer.hit_blocks) == (45, 12 + 7 + 12)
    assert replayer.loaded_pages == 31
    assert result["token_hit_rate"] == pytest.approx(31 / 45)
    assert result["wrong"] == result["evicted"] == result["lost"] == 0
    assert result["put"]["nbytes"] == 14 * LAYOUT.object_nbytes
    assert result["load"]["operations"] == 3 + 2 + 3
    json.dumps(result)


def test_pages_smaller_than_a_block() -> None:
    layout = SHAPE.layout(256)
    geometry = Geometry(layout.layers, layout.segments, 4096, 4, 8)
    with opened(formatted(layout, geometry)) as store:
        replayer = Replayer(store, pages=5, page_size=256, hugepages=False)
        for request in requests_of(4, 6):
            replayer.play(request)
        assert (replayer.hit_blocks, replayer.blocks, replayer.loaded_pages) == (4, 10, 8)
        assert replayer.wrong == 0


def test_damage_is_found_by_the_replay_itself() -> None:
    with store_of(32, verify="off") as store:
        replayer = play(store, requests_of(8))
        assert replayer.hit_blocks == 0
        damage(store)
        replayer.play(requests_of(8)[0])
    assert replayer.wrong == 1
    assert replayer.hit_blocks == 8


def test_damage_that_the_store_finds_is_a_miss() -> None:
    with store_of(32) as store:
        replayer = play(store, requests_of(8))
        damage(store)
        first, second = requests_of(8, 8)
        replayer.play(first)
        after_damage = replayer.hit_blocks
        replayer.play(second)
        assert replayer.summary()["mismatches"] == 1
    assert replayer.wrong == 0
    assert after_damage < 8
    assert replayer.hit_blocks == after_damage + 8


def damage(store: ObjectStore) -> None:
    """Flips a bit in the first slice of the first slot."""
    medium = store.controller.medium(1)  # type: ignore[attr-defined]
    medium[store.geometry.groups_offset + 100] ^= 4


def test_damage_is_found_by_the_engine_alone(tmp_path: Path) -> None:
    config, pool = StoreConfig(pin_lookups=1), [str(tmp_path / "pool")]
    with temporary_pool(pool, LAYOUT, 8 * MiB, config=config) as store, ExitStack() as stack:
        replayer = play(store, requests_of(5, 5))
        options = {"executor": "auto", "hugepages": False}
        alone = engine_alone.EngineAlone(store, pool, replayer.memory, **options)
        stack.callback(alone.close)
        keys = block_keys(store.layout.fingerprint, tuple(range(5)), 1)
        alone.again(keys)
        assert alone.meters[engine_alone.VERIFIED].nbytes == 5 * LAYOUT.object_nbytes
        alone._turn = 0
        replayer.memory.segment(2, 1, 0)[9] ^= 1
        with pytest.raises(MediumError, match="the engine alone"):
            alone.again(keys)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return parser.parse_args(given)


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(r.to_json() for r in requests_of(6, 9, 3)))
    shape = ("--shape", "2x16KiB", "--pages", "4", "--dir", str(tmp_path))
    sizes = ("--capacity", "6MiB", "12MiB", "--profile", "auto", "off")
    args = arguments("--trace", str(trace), *sizes, *shape)
    result = replay.run(args, progress)
    json.dumps(result)
    assert result["wrong"] == 0
    for run in result["runs"]:
        assert run["block_hit_rate"] == run["unlimited_hit_rate"] == pytest.approx(9 / 18)
    assert [run["scheduled"] for run in result["runs"]] == [True, False] * 2
    assert arguments().profile == ["auto"], "as tutti.open"
    text = replay.report(result)
    assert "50.0 %" in text and "put, at once" in text
    assert "every byte right" in text
    result["wrong"] = 3
    assert "WRONG BYTES in 3 pages" in replay.report(result)
    assert list(tmp_path.iterdir()) == [trace], "the pool was left behind"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_floor_is_fio_and_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_FLOOR_NBYTES", 64 * MiB)  # fio counts milliseconds
    shape = ("--shape", "1x32KiB", "--dir", str(tmp_path), "--capacity", "16MiB", "--floor")
    result = replay.run(arguments("--requests", "40", *shape), progress)
    run = result["runs"][0]
    assert run["load"]["fio_cpu_s_per_gb"] > 0 and run["put"]["fio_cpu_s_per_gb"] > 0
    verified, _, many = (run["engine"][kind] for kind in engine_alone.KINDS)
    assert 0 < verified["operations"] <= run["load"]["operations"] // 3 + 1
    assert many["nbytes"] == many["operations"] * 64 * 32768
    calls = [row[1] for row in replay.speed_rows(result)]
    assert calls[:2] == ["load", "engine alone"] and calls[-1] == "put" and len(calls) == 5
    assert "of the goal of 0.6 to the rest" in replay.notes_of(result)[0]
    del run["engine"]
    assert len(replay.speed_rows(result)) == 2 and not replay.notes_of(result), "as results before"
    assert list(tmp_path.iterdir()) == []


def test_synthetic_requests(tmp_path: Path) -> None:
    shape = ("--shape", "1x32KiB", "--dir", str(tmp_path), "--capacity", "16MiB")
    result = replay.run(arguments("--requests", "8", "--seed", "5", *shape), progress)
    assert (result["trace"], result["requests"], result["wrong"]) == ("synthetic", 8, 0)


def own_lru(trace: list[tuple[int, ...]], capacity: int) -> float:
    """Share of blocks before the first miss of their request; written for this test alone."""
    used: dict[int, None] = {}  # in the order of use
    hits = 0
    for request in trace:
        whole = True
        for block in request:
            whole = whole and block in used
            hits += whole
            used.pop(block, None)
            used[block] = None
            if len(used) > capacity:
                del used[next(iter(used))]
    return hits / sum(map(len, trace))


def own_belady(trace: list[tuple[int, ...]], capacity: int) -> float:
    """The most hits of any policy: evicts what is used again last, and may keep nothing of it."""
    stream = [block for request in trace for block in request]
    uses: dict[int, list[int]] = {}
    for place, block in enumerate(stream):
        uses.setdefault(block, []).append(place)
    kept: list[tuple[int, int]] = []  # next use and block, sorted
    hits = 0
    for place, block in enumerate(stream):
        if kept and kept[0] == (place, block):  # none is used again before now
            hits += 1
            del kept[0]
        later = bisect.bisect_right(uses[block], place)
        next_use = uses[block][later] if later < len(uses[block]) else len(stream)
        bisect.insort(kept, (next_use, block))
        del kept[capacity:]
    return hits / len(stream)


def generated_trace(folder: Path) -> Path:
    requests = generate(Synthetic(requests=120, seed=6, message_median=1500, tokens_max=16_000))
    trace = folder / "trace.jsonl"
    trace.write_text("\n".join(r.to_json() for r in requests))
    return trace


def published_trace(folder: Path) -> Path:
    """A trace that is not part of this project; docs/benchmarks.md says where there is one."""
    if TRACE not in os.environ:
        pytest.skip(f"{TRACE} does not name a trace, such as Mooncake's synthetic_trace.jsonl")
    return Path(os.environ[TRACE])


@pytest.mark.parametrize("trace_in", [generated_trace, published_trace])
def test_hits_of_a_trace_against_lru_and_belady_of_its_own(
    tmp_path: Path, trace_in: Callable[[Path], Path]
) -> None:
    """The pool is compared with policies that share no code with it, nor with tutti.bench."""
    trace = trace_in(tmp_path)
    blocks = [tuple(json.loads(line)["hash_ids"]) for line in trace.read_text().splitlines()]
    distinct = len({block for request in blocks for block in request})
    capacities = [f"{int(share * distinct) * 16}KiB" for share in (0.1, 0.3)]
    args = ("--trace", str(trace), "--dir", str(tmp_path), "--shape", "1x16KiB", "--pages", "64")
    result = replay.run(arguments(*args, "--capacity", *capacities), progress)
    for run in result["runs"]:
        slots = run["capacity_objects"]
        lru, best = own_lru(blocks, slots), own_belady(blocks, slots)
        assert run["lru_hit_rate"] == pytest.approx(lru)
        assert run["minimum_hit_rate"] == pytest.approx(best)
        assert run["evicted"] > 0, "the pool is too large for the trace"
        assert 0.75 * lru <= run["block_hit_rate"] <= best, (lru, run["block_hit_rate"], best)
    hits = [run["block_hit_rate"] for run in result["runs"]]
    assert hits == sorted(hits) and result["wrong"] == 0
    assert (result["trace"], result["requests"]) == (trace.stem, len(blocks))


def test_unacceptable_arguments(tmp_path: Path) -> None:
    place = ("--dir", str(tmp_path))
    for bad in (("--page-size", "500"), ("--shape", "none")):
        with pytest.raises(ConfigError):
            replay.run(arguments("--requests", "2", *bad, *place), progress)
    with pytest.raises(ConfigError, match="not a directory"):
        replay.run(arguments("--requests", "2", "--dir", str(tmp_path / "absent")), progress)

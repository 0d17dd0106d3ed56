"""The bandwidth and ring commands on small pools; nothing here looks at a speed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from store.pools import formatted, opened
from tutti.base.terminal import progress
from tutti.bench import bandwidth, pool_file, ring
from tutti.bench.compare.churn import churn
from tutti.bench.file_per_object import FilePerObject
from tutti.bench.pool_workload import Limit, PoolWorkload
from tutti.bench.shape import KvPageShape
from tutti.commands.bench import report_of
from tutti.errors import CapacityError, ConfigError, PoolExists
from tutti.medium.geometry import Geometry
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

SHAPE = KvPageShape(2, 16384)
OBJECT_NBYTES = SHAPE.object_nbytes
SMALL = ("--shapes", "2x16KiB", "--capacity", "6MiB", "--batch", "128KiB", "--gib", "0.0002")


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bandwidth.add_arguments(parser)
    return parser.parse_args(given)


def test_every_phase(tmp_path: Path) -> None:
    args = arguments(*SMALL, "--memory", "4MiB", "--dir", str(tmp_path), "--prewrite")
    result = bandwidth.run(args, progress)
    json.dumps(result)
    assert [row["phase"] for row in result["rows"]] == list(bandwidth.PHASES)
    assert result["wrong"] == 0
    store, retrieve, layerwise, mixed = result["rows"]
    asked_nbytes = int(0.0002 * 2**30)
    for row in (store, retrieve):
        assert asked_nbytes <= row["nbytes"] < asked_nbytes + row["batch_pages"] * OBJECT_NBYTES
    assert mixed["nbytes"] >= 2 * asked_nbytes
    assert layerwise["nbytes"] >= layerwise["prefix_pages"] * OBJECT_NBYTES > 0
    assert retrieve["mean_run_length"] >= 1
    text = report_of(bandwidth, result)
    assert "2x16KiB" in text
    assert "WRONG" not in text
    assert "WRONG BYTES in 2 pages" in report_of(bandwidth, result | {"wrong": 2})
    assert not list(tmp_path.iterdir()), "the pool was left behind"


def test_context_lengths(tmp_path: Path) -> None:
    """Each is a prompt of its own, stored and loaded one at a time."""
    words = ("--contexts", "128", "512", "--phases", "store", "retrieve", "--dir", str(tmp_path))
    result = bandwidth.run(arguments(*SMALL, "--memory", "2MiB", *words), progress)
    rows = [(row["context_tokens"], row["phase"], row["batch_pages"]) for row in result["rows"]]
    assert rows == [
        (128, "store", 2),
        (128, "retrieve", 2),
        (512, "store", 8),
        (512, "retrieve", 8),
    ]
    assert result["wrong"] == 0
    assert "512 tokens a prompt" in report_of(bandwidth, result)
    with pytest.raises(ConfigError, match="less than two such prompts"):
        bandwidth.run(arguments(*SMALL, "--contexts", "65536", "--dir", str(tmp_path)), progress)


@pytest.mark.parametrize("pointers", ["sgl", "prp"])
def test_the_engine_is_the_one_that_was_asked_for(
    pointers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    engine = pool_file.Engine

    def noted(*arguments: object, **options: object) -> object:
        made.append(options)
        return engine(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pool_file, "Engine", noted)
    words = ("--depth", "16", "--pointers", pointers, "--dir", str(tmp_path))
    result = bandwidth.run(arguments(*SMALL, "--memory", "2MiB", *words), progress)
    assert made == [{"depth": 16, "use_sgl": pointers == "sgl"}]
    assert result["wrong"] == 0
    assert result["rows"][0]["nbytes"] > 0
    with pytest.raises(ConfigError, match="power of two"):
        bandwidth.run(arguments(*SMALL, "--depth", "12", "--dir", str(tmp_path)), progress)


def test_a_phase_alone_fills_the_pool_first(tmp_path: Path) -> None:
    args = arguments(*SMALL, "--phases", "retrieve", "--path", str(tmp_path / "a"))
    (row,) = bandwidth.run(args, progress)["rows"]
    assert row["phase"] == "retrieve"
    assert row["nbytes"] > 0


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "bandwidth.tutti"
    precious.write_text("precious")
    with pytest.raises(PoolExists, match="overwrites nothing"):
        bandwidth.run(arguments(*SMALL, "--dir", str(tmp_path)), progress)
    assert precious.read_text() == "precious"


def test_too_little_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--memory"):
        bandwidth.run(arguments(*SMALL, "--memory", "32KiB", "--dir", str(tmp_path)), progress)


def store_of(slots: int, verify: str = "always") -> ObjectStore:
    layout = SHAPE.layout()
    geometry = Geometry(layout.layers, layout.segments, 4096, 4, slots // 4)
    return opened(formatted(layout, geometry), verify=verify)


def test_wrong_bytes_are_counted() -> None:
    with store_of(32, verify="off") as store:
        workload = PoolWorkload(store, batch_pages=4, inflight=2, load_pages=8, hugepages=False)
        workload.fill(8)
        medium = store.controller.medium(1)  # type: ignore[attr-defined]
        medium[store.geometry.groups_offset + 5] ^= 1
        workload.retrieve_phase(Limit(None, 8 * OBJECT_NBYTES))
    assert workload.wrong == 1


def test_an_empty_pool_has_nothing_to_retrieve() -> None:
    with store_of(32) as store:
        workload = PoolWorkload(store, batch_pages=4, inflight=2, load_pages=8, hugepages=False)
        with pytest.raises(CapacityError):
            workload.retrieve_phase(Limit(None, OBJECT_NBYTES))
        with pytest.raises(CapacityError):
            workload.prefix(8)


def test_churn_evicts_and_leaves_the_pool_usable() -> None:
    with store_of(64) as store:
        workload = PoolWorkload(store, batch_pages=4, inflight=2, load_pages=8, hugepages=False)
        churn(workload, 200 * OBJECT_NBYTES, seed=1, progress=progress)
        assert store.stats()["stored"] == 200
        assert store.stats()["evicted"] > 0
        workload.fill(8)
        prefix = workload.prefix(8)
        assert len(prefix) == 2
        result = workload.layerwise_phase(Limit(None, 8 * OBJECT_NBYTES), prefix)
    assert result["prefix_pages"] == 8
    assert workload.wrong == 0


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_per_object(direct: bool, tmp_path: Path) -> None:
    pool = HostMemory.allocate(SHAPE.layout(), 4, hugepages=False)
    files = FilePerObject(tmp_path / "objects", pool, direct=direct, objects_max=6)
    with pytest.raises(CapacityError, match="store_phase first"):
        files.retrieve_phase(Limit(None, OBJECT_NBYTES))
    files.store_phase(Limit(None, 9 * OBJECT_NBYTES))
    assert len(list((tmp_path / "objects").iterdir())) == 6
    assert files.retrieve_phase(Limit(None, 8 * OBJECT_NBYTES))["nbytes"] == 8 * OBJECT_NBYTES
    assert files.wrong == 0
    victim = tmp_path / "objects" / f"{8:08x}"
    victim.write_bytes(np.random.default_rng(0).bytes(OBJECT_NBYTES))
    files.retrieve_phase(Limit(None, 6 * OBJECT_NBYTES))
    assert files.wrong == 1
    files.close()
    assert not list(tmp_path.iterdir())


def test_rings() -> None:
    parser = argparse.ArgumentParser()
    ring.add_arguments(parser)
    small = ["--commands", "2000", "--repeats", "2", "--depths", "8", "--batches", "1", "4"]
    result = ring.run(parser.parse_args(small), progress)
    json.dumps(result)
    assert [(row["depth"], row["batch"]) for row in result["rows"]] == [(8, 1), (8, 4)]
    assert all(row["commands_per_s"]["low"] > 0 for row in result["rows"])
    assert result["source"] == "emulated"
    assert "emulated: reads of" in ring.report(result)
    assert "no bytes are moved" in ring.report(result)
    for bad in (["--commands", "0"], ["--block", "1000"], ["--depths", "7"]):
        with pytest.raises(ConfigError):
            ring.run(parser.parse_args([*small, *bad]), progress)

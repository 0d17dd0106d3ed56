"""MLPerf Storage's KV-cache benchmark on Tutti: the adapter, by the runner, on a small stand-in.

The stand-in has the modules, names and output of kv_cache that the runner depends on, and a
workload of its own: it writes entries of odd sizes, reads them, deletes one and reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tutti.bench.summary import render
from tutti.bench.yardsticks import run as yardsticks
from tutti.bench.yardsticks.backends import PAGE_NBYTES, Counted, DirectEntries, PoolEntries
from tutti.bench.yardsticks.round import SYSTEMS
from tutti.errors import CapacityError, PoolClosed

MiB = 1 << 20
BACKENDS = """
from collections import namedtuple
import numpy as np

class StorageBackend:
    IOTiming = namedtuple("IOTiming", "total device host")

class NVMeBackend(StorageBackend):
    def __init__(self, base_path=None):
        self.stored = {}

    def write(self, key, data):
        self.stored[key] = data.tobytes()
        return self.IOTiming(0.002, 0.001, 0.001)

    def read(self, key):
        return np.frombuffer(self.stored[key], np.uint8), self.IOTiming(0.002, 0.001, 0.001)

    def delete(self, key):
        self.stored.pop(key, None)
"""
CLI = """
import argparse, json
import numpy as np
from kv_cache import cache
from kv_cache.backends import StorageBackend

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--seed", type=int)
    args, _ = parser.parse_known_args()
    backend = cache.NVMeBackend(base_path=None)
    assert isinstance(backend, StorageBackend)
    rng, sizes, hits = np.random.default_rng(args.seed), (1, 4097, 1 << 20, (130 << 20) + 77), 0
    times = []
    for number, size in enumerate(sizes):
        timing = backend.write(f"entry_{number}", rng.integers(0, 255, size, np.uint8))
        times.append(timing.total)
    backend.delete("entry_1")
    for number in range(len(sizes)):
        hits += 1  # before the read, whatever becomes of it
        try:
            backend.read(f"entry_{number}")
        except Exception:
            pass
    stats = {"storage_tokens_processed": 1000, "cache_hits": hits}
    for name, done in (("read", "read"), ("write", "written")):
        stats[f"tier_storage_kv_bytes_{done}_gb"] = sum(sizes) / 1024**3
        stats[f"storage_{name}_p95_ms"] = max(times) * 1000
    summary = {"total_requests": 4, "elapsed_time": 0.5, "cache_stats": stats}
    with open(args.output, "w") as file:
        json.dump({"summary": summary}, file)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "checkout/kv_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "backends.py").write_text(BACKENDS)
    (package / "cache.py").write_text("from kv_cache.backends import NVMeBackend\n")
    (package / "cli.py").write_text(CLI)
    monkeypatch.setitem(yardsticks.REVISIONS, yardsticks._tree(package), "stand-in")
    return package.parent


def test_rounds_count_what_the_benchmark_does_not(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--kv-cache", str(checkout), "--dir", str(tmp_path), "--out", str(out)]
    assert yardsticks.main([*words, "--rounds", "1", "--capacity", "256MiB"]) == 0
    result = json.loads(out.read_text())
    assert result["yardstick"]["revision"] == "stand-in"
    for system in SYSTEMS:
        (found,) = result["systems"][system]["rounds"]
        assert (found["hits"], found["reads"], found["misses"]) == (4, 3, 1), "a hit was no read"
        assert found["read_nbytes"] == 1 + MiB + 130 * MiB + 77
        assert found["write_nbytes"] == found["read_nbytes"] + 4097
        assert (found["writes"], found["deletes"], found["errors"]) == (4, 1, 0)
        assert found["wrong"] == 0 and found["write_p95_ms"] > 0
        assert found["cached_tokens_per_s"] == 2000
    assert not list(tmp_path.glob("tutti-kv-cache-*")), "entries are removed"
    assert "| direct | 2000 |" in render("<!-- result: out -->\n<!-- end -->", tmp_path)


def test_a_benchmark_that_is_missing_or_another_is_refused(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--dir", str(tmp_path), "--out", str(tmp_path / "out.json")]
    assert yardsticks.main(["--kv-cache", str(tmp_path / "nothing"), *where]) == 3
    said = capsys.readouterr().err
    assert "has no package kv_cache; name the folder kv_cache_benchmark of https://" in said
    with (checkout / "kv_cache/cli.py").open("a") as file:
        file.write("# changed\n")
    assert yardsticks.main(["--kv-cache", str(checkout), *where]) == 3
    assert "is another version" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("system", ["tutti", "direct"])
def test_wrong_bytes_and_failures_are_counted(tmp_path: Path, system: str) -> None:
    folder = str(tmp_path)
    entries: Any = (  # without a profile a put is not cut, so that one too large has no slot
        PoolEntries(_timing, folder, 16 * PAGE_NBYTES, profile=None)
        if system == "tutti"
        else DirectEntries(_timing, folder, "process")
    )
    backend = Counted(entries, folder)
    ones = np.ones(3 * PAGE_NBYTES // 2 - 10, np.uint16)
    backend.write("a", ones)
    backend.write("b", ones)
    assert np.array_equal(backend.read("a")[0].view(np.uint16), ones)
    entries.write("b", ones + 1)  # as if another entry had come under its name
    backend.read("b")
    with pytest.raises(KeyError):
        backend.read("c")
    if system == "tutti":
        with pytest.raises(CapacityError, match="had no slot"):
            backend.write("large", np.zeros(64 * PAGE_NBYTES, np.uint8))
    backend.clear()
    counts = backend.finish()
    assert (counts.writes, counts.reads, counts.wrong, counts.misses) == (2, 2, 1, 1)
    assert counts.errors == (system == "tutti") and bool(counts.first_error) == bool(counts.errors)
    with pytest.raises(PoolClosed):
        backend.read("a")


def _timing(total: float, device: float, host: float) -> SimpleNamespace:
    return SimpleNamespace(total=total, device=device, host=host)

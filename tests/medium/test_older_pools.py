"""A pool of every format there has been: opened, or refused with what to do; never misread.

golden/pool-v1.gz was written by the first version of the format: two objects of known bytes,
closed cleanly. Each later version of the format adds a file here.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tutti import native, store
from tutti.errors import PoolMismatch
from tutti.medium.layout import KVLayout
from tutti.medium.superblock import SUPERBLOCK_DTYPE

GOLDEN = Path(__file__).parent / "golden"
LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="golden", weights="v1")
KEYS = [bytes([number + 1]) * 16 for number in range(2)]


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(LAYOUT.object_nbytes)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.tutti"
    path.write_bytes(gzip.decompress((GOLDEN / "pool-v1.gz").read_bytes()))
    path.chmod(0o600)
    return path


def test_a_pool_of_version_1_is_read(pool: Path) -> None:
    with store.open(pool, layout=LAYOUT) as opened:
        memory = opened.allocate_memory(2)
        assert opened.match(KEYS) == 2
        opened.load(KEYS, range(2)).wait()
        assert [memory.read(page) for page in range(2)] == [content(0), content(1)]


def test_a_pool_of_version_1_takes_new_objects(pool: Path) -> None:
    with store.open(pool, layout=LAYOUT) as opened:
        opened.allocate_memory(1).write(0, content(7))
        opened.put([b"n" * 16], [0]).wait()
    with store.open(pool, layout=LAYOUT) as opened:
        assert opened.match([*KEYS, b"n" * 16]) == 3


@pytest.mark.parametrize("version", [0, 2])
def test_a_pool_of_another_version_is_refused_with_what_to_do(pool: Path, version: int) -> None:
    raw = bytearray(pool.read_bytes())
    for start in (0, 4096):
        block = np.frombuffer(raw[start : start + 4096], SUPERBLOCK_DTYPE).copy()
        block["version"] = version
        native.records_seal(block)
        raw[start : start + 4096] = block.tobytes()
    pool.write_bytes(raw)
    with pytest.raises(PoolMismatch, match="format a new pool"):
        store.open(pool)

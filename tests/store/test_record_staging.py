"""Staging of slot records: as large as a pool's objects need, and loads, voids and pins of more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tutti
from store.pools import GEOMETRY, fill, formatted, left_by, opened, some_keys
from tutti.base.units import MiB
from tutti.errors import CapacityError
from tutti.medium.layout import KVLayout
from tutti.pool import record_table

N = 200


def test_more_records_than_a_block_holds(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_table, "_BLOCK_OBJECTS_NBYTES", 0)
    keys, pages = some_keys(rng, N), np.arange(N)
    store = opened(formatted(geometry=replace(GEOMETRY, group_slots=16, groups=16)))
    assert store._writer.batch_pages < N // 3, "a put takes several batches"
    memory = store.allocate_memory(N)
    contents = fill(memory, range(N), rng)
    assert store.put(keys, pages).wait(20).stored == N
    with opened(left_by(store, clean=True)) as again:  # it knows no digests
        memory = again.allocate_memory(N)
        ticket = again.load(keys, pages)
        ticket.wait(20)
        assert [memory.read(page) for page in range(N)] == contents
        assert again.catalogue.pin(keys) == N
        assert again.catalogue.unpin(keys) == N
        assert again.catalogue.delete(keys) == N
        assert again.match(keys) == 0
        assert again.put(keys, pages).wait(20).stored == N, "their slots were voided"


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("call", ["load", "pin"])
def test_records_whose_transfer_cannot_begin_take_no_staging(
    seed: int, monkeypatch: pytest.MonkeyPatch, call: str, failing: int
) -> None:
    """A load reads them in two blocks, a pin reads them and writes them again."""
    monkeypatch.setattr(record_table, "_BLOCK_OBJECTS_NBYTES", 0)
    keys, pages = some_keys(np.random.default_rng(seed), 100), np.arange(100)
    images = formatted(geometry=replace(GEOMETRY, group_slots=16, groups=16))
    with opened(images, digest_cache_nbytes=0) as store:
        store.allocate_memory(100)
        store.put(keys, pages).wait(20)
        table = (store._loader if call == "load" else store.catalogue)._table
        begin, blocks, calls = table._jobs.start, len(table._free), itertools.count(1)

        def start(*request: Any, **options: Any) -> Any:
            if next(calls) == failing:
                raise CapacityError("no memory; a test said so")
            return begin(*request, **options)

        monkeypatch.setattr(table._jobs, "start", start)
        begun: Callable[[], object] = partial(store.load, keys, pages)
        if call == "pin":
            begun = partial(store.catalogue.pin, keys[:32])
        with pytest.raises(CapacityError, match="a test said so"):
            begun()
        assert store._core.wait_quiet(5)
        wait_until(lambda: len(table._free) == blocks)


def test_large_objects_take_little_staging(tmp_path: Path) -> None:
    sizes = []
    for page_size in (64, 1):
        layout = KVLayout.mha(
            layers=32, kv_heads=8, head_dim=128, page_size=page_size, dtype="bfloat16", model="m"
        )
        path = tmp_path / f"{page_size}.tutti"
        with tutti.open(path, layout, "64MiB") as store:
            parts = (store._writer, store._loader, store._reclaimer, store.catalogue)
            sizes.append(sum(part._table._buffer.nbytes for part in parts))
    assert sizes[0] < 4 * MiB < sizes[1] <= 52 * MiB

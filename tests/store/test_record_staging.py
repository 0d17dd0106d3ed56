"""Staging of slot records: as large as a pool's objects need, and loads, voids and pins of more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tutti
from store.pools import GEOMETRY, fill, formatted, images_of, opened, some_keys
from tutti.base.units import MiB
from tutti.medium.layout import KVLayout
from tutti.pool import record_table

N = 200


def test_more_records_than_a_block_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_table, "_BLOCK_OBJECTS_NBYTES", 0)
    rng = np.random.default_rng(seed)
    keys, pages = some_keys(rng, N), np.arange(N)
    store = opened(formatted(geometry=replace(GEOMETRY, group_slots=16, groups=16)))
    assert store._writer.batch_pages < N // 3, "a put takes several batches"
    memory = store.allocate_memory(N)
    contents = fill(memory, range(N), rng)
    assert store.put(keys, pages).wait(20).stored == N
    controller, close = store.controller, store.controller.close
    controller.close = lambda: None  # type: ignore[method-assign]
    store.close()
    images = images_of(controller)
    close()
    with opened(images) as again:  # it knows no digests
        memory = again.allocate_memory(N)
        ticket = again.load(keys, pages)
        ticket.wait(20)
        assert [memory.read(page) for page in range(N)] == contents
        assert again.catalogue.pin(keys) == N
        assert again.catalogue.unpin(keys) == N
        assert again.catalogue.delete(keys) == N
        assert again.match(keys) == 0
        assert again.put(keys, pages).wait(20).stored == N, "their slots were voided"


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

"""Short parts of several puts that are written as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scheduler.drive import Linear
from waiting import wait_until

import tutti
from store.policies import OneByOne
from store.pools import LAYOUT, some_keys
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.put_request import PutPart
from tutti.transfers.store_config import StoreConfig


def test_a_put_that_finds_no_space_cuts_no_other_that_is_written_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "pool"
    tutti.format([path], LAYOUT, 3 << 20)
    config = StoreConfig(schedule=Schedule(Linear(), policy=OneByOne), timeout_s=2.0)
    with tutti.open([path], LAYOUT, config=config) as store:
        store.allocate_memory(4)
        slots = store.stats()["capacity_objects"]
        held = some_keys(rng, slots)
        for key in held:
            assert store.put(key[None], [0]).wait(10).stored == 1
        wait_until(lambda: store.present(held).sum() < slots)  # there is a reserve
        assert store.present(held, pin="held").any()
        parts: list[PutPart] = []
        write = store._writer.put
        with monkeypatch.context() as patch:
            patch.setattr(store._writer, "put", lambda given: parts.extend(given))
            patch.setattr(store._queue, "_short", 1)  # each page is a part, which starts at once
            short = store.put(some_keys(rng, 2), [0, 1])
            wait_until(lambda: len(parts) == 2)
            long = store.put(some_keys(rng, slots), np.full(slots, 2))
            wait_until(lambda: len(parts) == 2 + slots)
        first, last, *others = parts
        assert write([first, *others]) is None
        wait_until(lambda: long.done)
        store.unpin("held")
        assert write([last]) is None
        assert (short.wait(10).stored, short.wait(10).dropped) == (2, 0)
        assert long.wait(10).stored > 0 and long.wait(10).dropped > 0

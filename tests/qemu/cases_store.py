"""In the guest: pools on drives, from format to clear, and a load that meets a bad block."""

from __future__ import annotations

import numpy as np
import pytest
from crash.objects import as_rows, check_books, content_of, live

from qemu.cases_drive import FAULTY, ODD, USUAL
from qemu.inside import Drives
from store.pools import GEOMETRY, LAYOUT
from tutti.errors import MediumError
from tutti.gio_uring.controller_vfio import VfioController
from tutti.medium.geometry import Geometry
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig


def format_pool(drives: Drives, place: int, names: list[str], geometry: Geometry) -> None:
    with drives.open(place) as controller, opened_io(controller) as (engine, io):
        engine.flush([1]).wait_released(20)  # the faulty drive's first one fails
        Members.format(io, engine, names, LAYOUT, geometry)


def opened(
    drives: Drives, place: int, names: list[str], durability: str, **options: object
) -> ObjectStore:
    controller = VfioController(drives.bdfs[place], **options)  # type: ignore[arg-type]
    config = StoreConfig(durability=durability, timeout_s=30.0)
    store = ObjectStore(controller, names, config=config)
    store.wait_recovered(30)
    return store


@pytest.mark.parametrize(
    ("place", "use_sgl", "durability"),
    [
        (USUAL, True, "flush"),
        (USUAL, False, "process"),
        (ODD, True, "process"),
        (ODD, False, "flush"),
    ],
)
def test_a_pool_on_a_drive(
    drives: Drives, seed: int, place: int, use_sgl: bool, durability: str
) -> None:
    names = ["first", "second"] if place == USUAL else ["only"]
    lba_nbytes = 4096 if place == USUAL else 512
    geometry = Geometry(LAYOUT.layers, LAYOUT.segments, lba_nbytes, 4, 6)
    format_pool(drives, place, names, geometry)
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(16) for _ in range(16)]
    for life in range(2):
        store = opened(drives, place, names, durability, use_sgl=use_sgl)
        live(store, keys, life)
        store.close()


def test_a_bad_block_costs_one_object(drives: Drives, seed: int) -> None:
    format_pool(drives, FAULTY, ["faulty"], GEOMETRY)
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(16) for _ in range(8)]
    store = opened(drives, FAULTY, ["faulty"], "process")
    pool = store.allocate_memory(16, hugepages=False)
    for page, key in enumerate(keys):
        pool.write(page, content_of(key))
    assert store.put(as_rows(keys), np.arange(8)).wait(30).stored == 8
    ticket = store.load(as_rows(keys), np.arange(8, 16))
    with pytest.raises(MediumError, match="unrecovered read"):
        ticket.wait(30)
    assert ticket.wait_settled(30)
    bad = ticket.failed().tolist()
    good = [i for i in range(8) if i not in bad]
    assert 1 <= len(bad) <= GEOMETRY.group_slots
    rows = as_rows([keys[i] for i in good])
    store.load(rows, np.arange(8, 8 + len(good))).wait(30)
    assert all(pool.read(8 + at) == content_of(keys[i]) for at, i in enumerate(good))
    check_books(store)
    store.close()

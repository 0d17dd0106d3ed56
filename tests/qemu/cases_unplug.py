"""In the guest: a drive is unplugged while a store loads from it and from another one."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from crash.objects import as_rows, content_of

from qemu.inside import OUT, Drives
from store.pools import GEOMETRY, LAYOUT
from tutti.errors import DeviceGone, TuttiError
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.controller_vfio import VfioController
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

KEYS = 40
NAMES = ["left", "right"]
DEADLINE_S = 60.0


def span(drives: Drives) -> SpanController:
    return SpanController([VfioController(bdf) for bdf in drives.bdfs])


def format_pool(drives: Drives) -> None:
    with span(drives) as controller, opened_io(controller) as (engine, io):
        Members.format(io, engine, NAMES, LAYOUT, GEOMETRY)


def gone_after_loads(store: ObjectStore, controller: SpanController, keys: list[bytes]) -> int:
    """Loads until a load fails; returns how many did not."""
    rows, pages = as_rows(keys), np.arange(len(keys))
    deadline_s = time.monotonic() + DEADLINE_S
    for count in range(100_000):
        if count == 3:
            (OUT / "loading").touch()
        try:
            store.load(rows, pages).wait(30)
        except DeviceGone:
            return count
        assert time.monotonic() < deadline_s, "the drive was not unplugged"
    raise AssertionError("the drive was not unplugged")


def test_unplugged_under_load(drives: Drives, seed: int) -> None:
    format_pool(drives)
    rng = np.random.default_rng(seed)
    controller = span(drives)
    assert controller.info.namespace_nlb == (2048, 2048)
    store = ObjectStore(controller, NAMES, config=StoreConfig(timeout_s=20.0))
    store.wait_recovered(30)
    pool = store.allocate_memory(KEYS, hugepages=False)
    keys = [rng.bytes(16) for _ in range(KEYS)]
    for page, key in enumerate(keys):
        pool.write(page, content_of(key))
    assert store.put(as_rows(keys), np.arange(KEYS)).wait(30).stored == KEYS
    assert gone_after_loads(store, controller, keys) >= 3
    [gone] = controller.gone
    assert {d.identity.serial for d in controller.drives if d.is_gone} == {"right"}
    # The device is back with the kernel: its remover waited until this process had closed it.
    deadline_s = time.monotonic() + DEADLINE_S
    while (Path("/sys/bus/pci/devices") / gone).exists():
        assert time.monotonic() < deadline_s, "the kernel still waits for the drive"
        time.sleep(0.05)
    served = 0
    for page, key in enumerate(keys):
        try:
            store.load(as_rows([key]), [page]).wait(30)
        except TuttiError:
            continue
        assert pool.read(page) == content_of(key)
        served += 1
    # Groups of the pool take turns on the drives, so about half of the objects are left.
    assert KEYS // 4 <= served < KEYS
    lost = {number for number, drive in enumerate(controller.drives) if drive.is_gone}
    assert (store.members.lost, store.stats()["missing_members"]) == (lost, 1)
    more = [rng.bytes(16) for _ in range(4)]
    assert store.put(as_rows(more), np.arange(4)).wait(30).stored == 4
    store.close()
    (OUT / "served").write_text(str(served))

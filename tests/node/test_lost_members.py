"""An agent's pool of several drives, one of which has left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from node.agents import LAYOUT, WAIT_S, running

import tutti
from store.pools import put_some, some_keys
from tutti.gio_uring import shared_file
from tutti.gio_uring.nvme_spec import STATUS_DEVICE_GONE


def test_clients_use_the_drives_that_are_left(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that connect later, too, although the other drive's file cannot be opened again."""
    members = [str(tmp_path / f"{name}.tutti") for name in "ab"]
    tutti.open(members, LAYOUT, "32MiB", profile=None).close()
    with running(tmp_path / "agent", paths=members) as agent:
        service = agent.pools.open("", 0)
        geometry, index = service.store.geometry, service.core.index
        n = 2 * geometry.group_slots
        with agent.connect(profile=None) as first, agent.connect(profile=None) as kept:
            keys = put_some(first, rng, n)
            slots = index.find(keys)
            is_lost = slots < geometry.slots
            assert 0 < np.count_nonzero(is_lost) < n, "the objects are on both drives"
            gone = slots[is_lost]
            status = np.full(gone.size, STATUS_DEVICE_GONE, np.uint32)
            with service.core.lock:
                service.store._reclaimer.faults.of_load(gone, status)
            reopen = shared_file.reopen

            def refuse(fds: Sequence[int], place: int) -> list[int]:
                assert service._fds[0] not in fds, "the file of the drive that has left"
                return reopen(fds, place)

            monkeypatch.setattr(shared_file, "reopen", refuse)
            with agent.connect(profile=None) as late:
                for store in (kept, late):
                    assert (store.present(keys) == ~is_lost).all()
                    store.allocate_memory(n)
                    left = keys[~is_lost]
                    store.load(left, np.arange(len(left))).wait(WAIT_S)
                    assert store.put(some_keys(rng, 8), np.arange(8)).wait(WAIT_S).stored == 8
                    assert store.stats()["missing_members"] == 1

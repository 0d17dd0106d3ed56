"""Commands from slots at once, against those of the runs that numpy finds."""

from __future__ import annotations

import numpy as np
import pytest

from store import pools
from tutti.gio_uring.iocb import CutStruct, Extents


def test_commands_of_slots_are_those_of_their_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with pools.opened(pools.formatted(members=2)) as store:
        core = store._core
        nlb = core.geometry.slice_nlb
        for _ in range(200):
            size = int(rng.integers(0, 40))
            slots = rng.integers(0, core.index.slots, size)
            if rng.integers(2):
                slots.sort()
            found = core.extents(slots)
            plain = Extents(found.slba, found.nsid, found.count, nlb)
            cut = CutStruct(nlb, 4096, int(rng.integers(1, 4 * nlb)), int(rng.integers(1, 4)))
            assert (found.commands(cut) == plain.commands(cut)).all()
        for wrong in (-1, core.index.slots, 2**40):
            with pytest.raises(ValueError, match="outside of the pool"):
                core.extents(np.array([0, wrong])).commands(CutStruct(nlb, 4096, nlb, 1))

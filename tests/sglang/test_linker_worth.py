"""Hits that are computed sooner than they are loaded, by the server's own prefills."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
from linker_engine import FlatProfile, Rig, names
from test_linker_profile import Batch

from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct.model_steps import STEPS
from tutti.scheduler.loads_and_writes import Phase


class SlowDrive(FlatProfile):
    """A drive that was measured, and computing that was not."""

    estimated = ("compute",)

    def read_us(self, nbytes: int) -> float:
        return nbytes * 100.0


def test_closing_in_a_step_leaves_later_steps_in_order(tmp_path: Path) -> None:
    with Rig(tmp_path):
        STEPS.launched(Batch(Phase.PREFILL))
    with Rig(tmp_path):
        STEPS.launched(Batch(Phase.DECODE))
        STEPS.processed()
        assert not STEPS._steps


def test_hits_that_compute_sooner_are_left_to_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prefills that waited for no load tell how fast the model computes here."""
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (SlowDrive(), "measured"))
    monkeypatch.setattr(STEPS, "prefills", deque(maxlen=15))
    monkeypatch.setattr(STEPS, "prefills_seen", 0)
    with Rig(tmp_path) as rig:
        rig.stored(8)
        for tokens, index in ((70, -1), (2048, 3), *(((2048, -1),) * 5)):
            assert rig.lookup(names(8)) == 8, "short ones, and those with loads, say nothing"
            batch = Batch(Phase.PREFILL, index)
            batch.extend_num_tokens = tokens
            STEPS.launched(batch)
            STEPS.processed()
        assert rig.lookup(names(8)) == 0
        assert rig.stored_pool.metrics.snapshot()["refused_pages"] == 8
        tries = [rig.lookup(names(8), f"r{number}") for number in range(256)]
        assert tries.count(8) == 9, "now and then one is loaded, as the drive may be faster now"


def test_ranks_try_the_same_requests(tmp_path: Path) -> None:
    """SGLang loads only what all ranks offer, and each has refused another number of hits."""
    options: dict[str, Any] = {"recompute_us_per_token": 1e-6, "read_ahead_share": 0.0}
    with Rig(tmp_path / "0", **options) as one, Rig(tmp_path / "1", **options) as other:
        for rig in (one, other):
            rig.stored(8)
            assert rig.restore(names(8), range(20, 28)), "the medium is measured"
        assert one.lookup(names(8)) == 0
        tries = {(one.lookup(names(8), f"r{i}"), other.lookup(names(8), f"r{i}")) for i in range(9)}
        assert tries == {(0, 0), (8, 8)}

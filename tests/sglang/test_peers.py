"""`tutti bench peers` with SGLang's real controller, host pools and backends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tutti.bench.peers.peer import BATCH_PAGES, PeerPlan
from tutti.bench.peers.run import PeerClient
from tutti.bench.peers.same_memory import WAYS
from tutti.errors import MediumError


@pytest.mark.parametrize(
    "name", ["hicache-tutti", pytest.param("hicache-file", marks=pytest.mark.slow)]
)
def test_sglangs_controller_stores_loads_and_is_checked(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang's controller imports kernels that no wheel has for the CPU.
    paths = [str(Path(__file__).parent / "stand_in"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    plan = PeerPlan(str(tmp_path), 2, "page_first", 2)
    worker = PeerClient(name, plan)
    try:
        for batch in range(2):
            assert worker.ask("store", batch)["nbytes"] == plan.batch_nbytes
        assert worker.ask("load", 0)["wall_s"] > 0
        if name == "hicache-tutti":  # what was read is compared there
            assert [set(turn) for turn in worker.ask("ways", 1, 3, 4)["turns"]] == 2 * [set(WAYS)]
        assert worker.ask("exists", 0, 1)["pages"] == 2 * BATCH_PAGES
        with pytest.raises(MediumError, match="only 0 of 128 pages"):
            worker.ask("load", 5)
    finally:
        worker.end()

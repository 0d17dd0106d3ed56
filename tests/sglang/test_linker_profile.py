"""TuttiLinker with a profile: its writes yield to reads as a scheduler says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here")

import linker_engine as engine
from linker_engine import Rig, names, wait_for

from tutti.errors import ProfileError
from tutti.integration.sglang import shelves as shelves_module
from tutti.machine import machine_facts
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import GPUS, ModelShape


class FlatProfile:
    """A machine on which everything takes a little."""

    interference = 4.0

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return 100.0

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return 1000.0

    def read_us(self, nbytes: int) -> float:
        return nbytes / 1000

    def write_us(self, nbytes: int) -> float:
        return nbytes / 500


def test_with_a_profile_the_scheduler_launches_what_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        Rig(tmp_path / "none", profile=str(tmp_path / "missing.json"))
    monkeypatch.setattr(shelves_module, "served_profile", lambda *_: FlatProfile())
    with Rig(tmp_path, profile="profile.json", backlog_share=0.1) as rig:
        rig.fill(13)
        want = rig.content(range(24))
        for start in range(0, 24, 4):
            assert rig.offload(names(24)[start : start + 4], range(start, start + 4))
        wait_for(lambda: rig.linker.num_completed_offloads() == 6)
        assert all(rig.linker.pop_completed_offload() for _ in range(6))
        wait_for(lambda: rig.lookup(names(24)) == 24)
        assert rig.restore(names(24), range(30, 54))
        assert rig.content(range(30, 54)) == want
        scheduler = rig.shelf.store.scheduler
        wait_for(lambda: scheduler.counters()["read_nbytes"] > 0)
        assert scheduler.counters()["written_pages"] == 24
        assert scheduler.counters()["dropped_pages"] == 0


@pytest.mark.parametrize("foreign", ["", "machine", "model"])
def test_a_foreign_profile_is_replaced_by_estimates(
    tmp_path: Path, foreign: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv_nbytes = 2 * engine.LAYERS * 4096 // engine.PAGE * (2 if foreign == "model" else 1)
    model = ModelShape("small", engine.LAYERS, 1e9, 4096, kv_nbytes, 2e9)
    machine = {**machine_facts(tmp_path), **({"cpu": "another"} if foreign == "machine" else {})}
    file = tmp_path / "profile.json"
    document = {**estimated_document(model, GPUS["H100"], machine=machine), "mark": "the file's"}
    file.write_text(json.dumps(document))
    with Rig(tmp_path / "pools" / "new", profile=str(file)) as rig:
        rig.fill(15)
        assert rig.store(names(4), range(4))
        used = rig.shelf.store.scheduler._profile
        assert bool(used.warnings) == bool(foreign)
        assert used.document.get("mark") == (None if foreign else "the file's")
    assert bool([r for r in caplog.records if "not used" in r.message]) == bool(foreign)
    file.write_text(json.dumps({**document, "model": {"name": "nameless"}}))
    with pytest.raises(ProfileError, match="says nothing of its model"):
        Rig(tmp_path / "none", profile=str(file))

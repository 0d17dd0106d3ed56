"""How many pieces the linker reads ahead at once: chosen by trials, and again after a plan.

The medium's speed is a pause on a clock of its own, behind which each read is over.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from linker_engine import Rig, ahead_pages, names, wait_for

from tutti.base.pipeline import TRIALS
from tutti.integration.sglang.direct import read_ahead as reader

PAGES = 40  #: four whole pieces
PAUSE_S = 0.2


class Medium:
    """Reads take a pause each: at the same time, or one after another.

    Only the thread that reads ahead calls it.
    """

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, *, parallel: bool) -> None:
        self._load = rig.stored_pool.store.load
        self._parallel = parallel
        self.now_s = self._free_s = time.monotonic()
        self.under_way = self.most = 0
        monkeypatch.setattr(rig.stored_pool.store, "load", self.load)
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def load(self, *arguments: Any, **options: Any) -> Any:
        ticket = self._load(*arguments, **options)
        self._free_s = PAUSE_S + (self.now_s if self._parallel else max(self.now_s, self._free_s))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return Late(self, ticket, self._free_s)


class Late:
    """A ticket that settles later."""

    def __init__(self, medium: Medium, ticket: Any, there_s: float) -> None:
        self._medium, self._ticket, self._there_s = medium, ticket, there_s
        self._is_counted = True

    def wait_settled(self, timeout_s: float) -> bool:
        self._medium.now_s = max(self._medium.now_s, self._there_s)
        if self._is_counted:
            self._is_counted = False
            self._medium.under_way -= 1
        return bool(self._ticket.wait_settled(timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)


def read_ahead(rig: Rig) -> None:
    """All pages are read ahead, and forgotten."""
    before = ahead_pages(rig.linker)
    assert rig.lookup(names(PAGES)) == PAGES
    wait_for(lambda: ahead_pages(rig.linker) == before + PAGES)
    rig.linker.ahead.reset()


@pytest.mark.parametrize(
    ("parallel", "chosen", "pieces"), [(True, "cross", 2), (False, "intra", 1)]
)
def test_two_pieces_at_once_where_that_is_faster(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    parallel: bool,
    chosen: str,
    pieces: int,
) -> None:
    caplog.set_level(logging.INFO, "tutti")
    with Rig(tmp_path) as rig:
        want = rig.stored(PAGES)
        rig.wipe()
        medium = Medium(rig, monkeypatch, parallel=parallel)
        for _ in range(3):
            read_ahead(rig)
        ((path, found),) = rig.linker.stats()["kv"]["read_ahead"].items()
        assert path == "direct"
        assert (found["overlap"], found["decided"]) == (chosen, True), found
        assert [len(found[f"{way}_gb_per_s"]) for way in ("intra", "cross")] == [TRIALS, TRIALS]
        assert medium.most == 2, "that was tried"
        (line,) = [r.getMessage() for r in caplog.records if "pieces ahead" in r.getMessage()]
        assert f"kv (direct) reads {pieces} pieces" in line and f"'overlap': '{chosen}'" in line
        medium.most = 0
        read_ahead(rig)
        assert medium.most == pieces
        assert rig.linker.metrics.snapshot()["ahead_pieces/direct"] == pieces
        assert rig.lookup(names(PAGES)) == PAGES
        rig.check_restored(names(PAGES), range(20, 60), want)


def test_a_detached_linker_has_no_stats(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        assert rig.linker.stats()["kv"]["drives"]
        rig.linker.detach()
        assert rig.linker.stats() == {}


def test_a_new_plan_of_residency_is_tried_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(PAGES)
        store = rig.stored_pool.store
        if not store.controller.direct:
            pytest.skip("no direct I/O here")
        for _ in range(3):
            read_ahead(rig)
        assert rig.linker.stats()["kv"]["read_ahead"]["direct"]["decided"]
        direct = rig.linker.metrics.snapshot()["ahead_pieces/direct"]
        store.residency.replan(budget_nbytes=1 << 30)
        read_ahead(rig)
        ((path, found),) = rig.linker.stats()["kv"]["read_ahead"].items()
        assert path == "page cache"
        assert not found["decided"]
        gauges = rig.linker.metrics.snapshot()
        assert gauges["ahead_pieces/direct"] == direct, "the other path has a gauge of its own"
        assert gauges["ahead_pieces/page cache"] in (1, 2)

"""How the GPU engine `host` overlaps reads and copies: chosen by trials, and again after a plan.

On a stand-in for the CUDA driver: no GPU is involved, and what is slow moves a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gio_uring.gpu.test_host_engine import (
    Rig,
    memory_of,
    rig_over_file,
    rig_over_memory,
    round_trip,
)
from memory_controller import Faults
from waiting import wait_until

from store.pools import LAYOUT
from tutti.base.pipeline import TRIALS, Overlap, PipelineChooser
from tutti.errors import DeviceTimeout
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.gpu import overlap

#: Loads until the choice is made.
LOADS = 1 + 2 * TRIALS
PAUSE_S = 0.05


class Clock:
    """Trials are measured by it.  Only what is slow moves it, not a busy machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(overlap, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds

    def reach(self, there_s: float) -> None:
        self.now_s = max(self.now_s, there_s)


def slow_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that copies costs as much for one layer as for all."""
    copy_batch, clock = rig.driver.copy_batch, Clock(monkeypatch)

    def late(*arguments: Any, **options: Any) -> None:
        clock.pass_by(PAUSE_S)
        copy_batch(*arguments, **options)

    monkeypatch.setattr(rig.driver, "copy_batch", late)


def slow_medium(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer after layer arrives late, and is copied in a part of that time."""
    wait_value, copies, load = rig.driver.wait_value, rig.driver._copies, rig.store.load
    began_s, clock = 0.0, Clock(monkeypatch)

    def begin(*arguments: Any, **options: Any) -> Any:
        nonlocal began_s
        began_s = clock.now_s
        return load(*arguments, **options)

    def late(stream: int, address: int, value: int) -> None:
        wait_value(stream, address, value)
        there_s = began_s + PAUSE_S * (1 + address % 128 // 8)  # the layer's word, see LayerWords
        rig.driver.call(stream, lambda: clock.reach(there_s))

    def by_bytes(rows: Any, stream: int) -> None:
        copies(rows, stream)
        layers = sum(n for _, _, n in rows) / (8 * sum(LAYOUT.segments))
        rig.driver.call(stream, lambda: clock.pass_by(PAUSE_S / 2 * layers))

    monkeypatch.setattr(rig.driver, "wait_value", late)
    monkeypatch.setattr(rig.driver, "_copies", by_bytes)
    monkeypatch.setattr(rig.store, "load", begin)


@contextmanager
def eight_pages(seed: int) -> Iterator[tuple[Rig, Any, list[bytes]]]:
    """A store over memory with eight pages: their keys and contents."""
    rng = np.random.default_rng(seed)
    with rig_over_memory(verify="off", timeout_s=30.0) as rig:
        keys, contents = rig.stored(rng, 8)
        yield rig, keys, contents


def load(rig: Rig, keys: Any, contents: list[bytes]) -> int:
    """Loads into other pages, and compares; the batches of copies that it took."""
    before, pages = rig.driver.calls["cuMemcpyBatchAsync"], range(8, 8 + len(keys))
    rig.store.load(keys, list(pages)).wait(10)
    calls = rig.driver.calls["cuMemcpyBatchAsync"] - before
    assert [rig.pool.read(page) for page in pages] == contents
    wait_until(rig.gpu._loads.is_idle, "the read is measured")
    return calls


def overlaps(rig: Rig) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = rig.store.stats()["gpu_overlaps"]
    return found


@pytest.mark.parametrize(
    ("slow", "chosen", "calls"), [(slow_copies, "cross", 1), (slow_medium, "intra", LAYOUT.layers)]
)
def test_slow_copies_choose_cross_and_a_slow_medium_intra(
    seed: int, monkeypatch: pytest.MonkeyPatch, slow: Any, chosen: str, calls: int
) -> None:
    with eight_pages(seed) as (rig, keys, contents):
        slow(rig, monkeypatch)
        taken = [load(rig, keys, contents) for _ in range(LOADS)]
        assert taken == [LAYOUT.layers] * (1 + TRIALS) + [1] * TRIALS
        ((name, found),) = overlaps(rig).items()
        assert name.startswith("direct, up to")
        assert (found["overlap"], found["decided"]) == (chosen, True), found
        assert [len(found[f"{way}_gb_per_s"]) for way in ("intra", "cross")] == [TRIALS, TRIALS]
        assert rig.store.stats()["gpu_cross_overlaps"] == (chosen == "cross")
        assert load(rig, keys, contents) == calls, "as it was chosen"


def test_a_late_look_measures_the_whole_of_a_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with eight_pages(seed) as (rig, keys, contents):
        slow_copies(rig, monkeypatch)
        watch = rig.gpu._loads.watch

        def late(*arguments: Any) -> None:
            time.sleep(PAUSE_S)  # the read is over by then
            watch(*arguments)

        monkeypatch.setattr(rig.gpu._loads, "watch", late)
        for _ in range(LOADS):
            load(rig, keys, contents)
        (found,) = overlaps(rig).values()
        fastest = sum(map(len, contents)) / PAUSE_S / 1e9
        assert found["cross_gb_per_s"] == pytest.approx([fastest] * TRIALS)
        assert found["intra_gb_per_s"] == pytest.approx([fastest / LAYOUT.layers] * TRIALS)


def test_reads_that_are_over_at_the_first_look_are_no_trial(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with eight_pages(seed) as (rig, keys, contents):
        load(rig, keys, contents)  # the warm-up
        watched: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(rig.gpu._loads, "watch", lambda *arguments: watched.append(arguments))
            memory_of(rig).set_faults(Faults(stall_from=2))
            tickets = [rig.store.load(keys, list(pages)) for pages in (range(8, 16), range(16, 24))]
            memory_of(rig).set_faults(None)
            memory_of(rig).release()
            for ticket in tickets:
                ticket.wait(10)
        for arguments in watched:
            rig.gpu._loads.watch(*arguments)
        wait_until(rig.gpu._loads.is_idle, "the reads are looked at")
        (found,) = overlaps(rig).values()
        assert len(found["intra_gb_per_s"]) == 1, "the first one's, whose start is known"


def test_a_new_plan_of_residency_is_tried_again(seed: int, tmp_path: Path) -> None:
    with rig_over_file(tmp_path / "pool.tutti") as rig:
        controller = rig.controller
        assert isinstance(controller, FileController)
        if not controller.direct:
            pytest.skip(f"no direct I/O here: {controller.members[0].buffered_reason}")
        keys, contents = rig.stored(np.random.default_rng(seed), 8)
        for _ in range(LOADS):
            load(rig, keys, contents)
        ((name, found),) = overlaps(rig).items()
        assert name.startswith("direct, ")
        assert found["decided"]
        rig.store.residency.replan(budget_nbytes=1 << 30)
        assert load(rig, keys, contents) == LAYOUT.layers
        ((name, found),) = overlaps(rig).items()
        assert name.startswith("page cache, ")
        assert not found["decided"]
        for _ in range(LOADS - 1):
            load(rig, keys, contents)
        assert all(found["decided"] for found in overlaps(rig).values())
        assert controller.path_of([1], [0]) == "direct", "tables"
        assert controller.path_of([1, 1], [0, controller.buffered[0].slba]) == "both"


@pytest.mark.parametrize("kind", ["batch", "plain", "aliased", "full"])
@pytest.mark.parametrize("ways", [[Overlap.CROSS], list(Overlap)])
def test_pages_come_back_whole_and_layer_by_layer_in_turns(
    seed: int, monkeypatch: pytest.MonkeyPatch, kind: str, ways: list[Overlap]
) -> None:
    turns = cycle(ways)
    monkeypatch.setattr(PipelineChooser, "overlap", property(lambda _: next(turns)))
    with rig_over_memory(
        seed=seed,
        plain=kind == "plain",
        has_copy_batch=kind != "plain",
        queues=1 if kind in ("aliased", "full") else 8,
        queue_max=4 if kind == "full" else 1024,
    ) as rig:
        round_trip(rig, np.random.default_rng(seed))
        round_trip(rig, np.random.default_rng(seed + 1))


def test_a_whole_read_that_fails_lets_its_streams_go_and_is_no_trial(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineChooser, "overlap", Overlap.CROSS)
    with rig_over_memory(timeout_s=1.0, verify="off") as rig:
        keys, contents = rig.stored(rng, 8)
        load(rig, keys, contents)  # the warm-up
        memory_of(rig).set_faults(Faults(stall_from=2))
        ticket = rig.store.load(keys, list(range(8, 16)))
        stream = rig.driver.create_stream()
        ticket.order_stream(stream, 0)
        with pytest.raises(DeviceTimeout):
            ticket.wait(10)
        wait_until(lambda: rig.driver.is_stream_done(stream), "a stream still waits")
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        assert ticket.wait_settled(10)
        wait_until(rig.gpu._loads.is_idle, "the queue is free")
        (found,) = overlaps(rig).values()
        assert found["cross_gb_per_s"] == []
        assert load(rig, keys, contents) == 1

"""The breaker of a pool's reads is closed by an object that was read from this pool since then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from linker_engine import Rig, ahead_pages, names, wait_for
from linker_states import StatesRig
from memory_controller import Faults
from test_linker_stress import stores_in_memory

from store.pools import images_of
from tutti.errors import DeviceTimeout
from tutti.integration.sglang.direct import maintenance
from tutti.integration.sglang.direct import open_pools as open_pools_module

#: One failure opens it; it is probed as often as the thread looks, each time for a moment.
OPTIONS: dict[str, Any] = {
    "breaker_failures": 1,
    "breaker_pause_s": 0.01,
    "timeout_s": 0.2,
    "load_timeout_s": 0.3,
    "read_ahead_share": 0.0,
}
#: How often the thread looks that probes; and several looks, which a probe may make longer.
LOOK_S, PROBES_S = 0.05, 1.0


def rig_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *images: Any, **options: Any) -> Rig:
    """Over a medium in memory, which begins as one of the images."""
    monkeypatch.setattr(open_pools_module, "open_store", stores_in_memory([], *images))
    monkeypatch.setattr(maintenance, "_EVERY_S", LOOK_S)
    return Rig(folder, **{**OPTIONS, **options})


def hang(rig: Rig) -> None:
    rig.stored_pool.store.controller.set_faults(Faults(stall_from=1))


@contextmanager
def restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[tuple[Rig, list[bytes]]]:
    """A linker that has stored nothing, and four pages of the one before."""
    with rig_of(folder / "first", monkeypatch) as rig:
        want = rig.stored(4)
        images = images_of(rig.stored_pool.store.controller)
    with rig_of(folder / "second", monkeypatch, images, **options) as rig:
        wait_for(lambda: len(rig.stored_pool.store) == 4)
        wait_for(lambda: rig.stored_pool.store.stats()["slots"].get("unproven", 0) == 0)
        hang(rig)
        yield rig, want


def stays_open(rig: Rig) -> None:
    """For several probes a look-up finds nothing, so that no request fails."""
    until_s = time.monotonic() + PROBES_S
    while time.monotonic() < until_s:
        assert rig.lookup(names(4)) == 0, "nothing was read since the load that failed"
        time.sleep(0.01)


def recovers(rig: Rig, want: list[bytes]) -> None:
    """The medium answers again, and a probe reads an object."""
    rig.stored_pool.store.controller.recover()
    wait_for(lambda: rig.lookup(names(4)) == 4)
    rig.check_restored(names(4), range(20, 24), want)


def test_offloads_that_were_not_stored_close_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(tmp_path, monkeypatch) as rig:
        want = rig.stored(4)
        hang(rig)
        assert not rig.restore(names(4), range(20, 24)), "503"
        for number in range(10):
            assert rig.offload(names(4, str(number)), range(4 * number, 4 * number + 4))
        stays_open(rig)
        recovers(rig, want)


def test_after_a_restart_what_failed_to_load_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restarted(tmp_path, monkeypatch) as (rig, want):
        assert rig.lookup(names(4)) == 4
        assert not rig.restore(names(4), range(20, 24)), "503"
        stays_open(rig)
        recovers(rig, want)


def test_after_a_restart_what_failed_to_be_read_ahead_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restarted(tmp_path, monkeypatch, read_ahead_share=0.5) as (rig, want):
        assert rig.lookup(names(4)) == 4
        wait_for(lambda: not rig.stored_pool.reads.closed)
        stays_open(rig)
        recovers(rig, want)


def test_requests_try_when_all_that_was_known_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restarted(tmp_path, monkeypatch) as (rig, _):
        assert not rig.restore(names(4), range(20, 24)), "503"
        rig.stored_pool.store.controller.recover()
        rig.linker.clear()
        wait_for(lambda: rig.stored_pool.reads.closed)


def test_pages_that_were_read_ahead_close_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(tmp_path, monkeypatch, read_ahead_share=0.5) as rig:
        want = rig.stored(4)
        assert rig.store(names(4, "other"), range(4, 8))
        assert rig.lookup(names(4)) == 4
        wait_for(lambda: ahead_pages(rig.linker) == 4)
        hang(rig)
        assert rig.lookup(names(4, "other"), "other") == 4
        wait_for(lambda: not rig.stored_pool.reads.closed)
        assert rig.restore(names(4), range(20, 24)), "all of it was staged before"
        stays_open(rig)
        recovers(rig, want)


#: A prefix of four pages ends with one state.
AT, WINDOWS = {"kv": range(4), "mamba": [1]}, {"mamba": 1}


def test_a_pool_that_can_be_read_closes_nothing_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "_EVERY_S", LOOK_S)
    options = {"breaker_failures": 1, "breaker_pause_s": 0.01, "read_ahead_share": 0.0}
    with StatesRig(tmp_path, "mamba", **options) as rig:
        rig.fill(1)
        transfers = rig.transfers(names(4), AT, WINDOWS)
        assert rig.store(transfers)
        kv, states = (rig.linker.stored_pools[name] for name in ("kv", "mamba"))

        def unanswered(*_: object, **__: object) -> None:
            raise DeviceTimeout("made up")

        with monkeypatch.context() as patch:
            patch.setattr(states.store, "load", unanswered)
            assert rig.linker.lookup("r", transfers) == [4]
            assert not rig.restore(transfers), "503"
            wait_for(lambda: kv.reads.closed)
            until_s = time.monotonic() + PROBES_S
            while time.monotonic() < until_s:
                assert rig.linker.lookup("r", transfers) == [], "its states cannot be read"
                time.sleep(0.01)
        wait_for(lambda: rig.linker.lookup("r", transfers) == [4])
        assert rig.restore(transfers)


def test_a_pool_that_can_be_written_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def unanswered(*_: object, **__: object) -> None:
        calls.append(1)
        raise DeviceTimeout("made up")

    with StatesRig(tmp_path, "mamba", breaker_failures=2, breaker_pause_s=600.0) as rig:
        rig.fill(1)
        kv, states = (rig.linker.stored_pools[name].store for name in ("kv", "mamba"))
        monkeypatch.setattr(states, "put", unanswered)
        for number in range(5):
            assert not rig.store(rig.transfers(names(4, str(number)), AT, WINDOWS))
        assert len(calls) == 2, "its medium is left alone after two failures"
        assert kv.stats()["stored"] == 20

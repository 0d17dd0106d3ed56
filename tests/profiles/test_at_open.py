"""The profile of a pool is found: cached, measured or estimated, and a start never fails for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loop_devices import loop_devices
from manual_clock import ManualClock
from waiting import wait_idle

import tutti
from tutti.base.units import MiB
from tutti.errors import ConfigError, DeviceTimeout, PoolInUse, ProfileError
from tutti.gio_uring.drives.block_device import Devices
from tutti.machine import machine_facts
from tutti.medium.layout import KVLayout
from tutti.pool.pool_format import is_labelled, label
from tutti.profiles import at_open
from tutti.profiles.at_open import find_profile, media_of, model_of
from tutti.profiles.medium_timing import Medium
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.profile import estimated_document
from tutti.scheduler.roofline import DENSE_MODELS, GPUS
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="found"
)
#: Before the fixture below gives a busy machine more time.
TIMES = {name: getattr(at_open, name) for name in ("BUDGET_S", "_WRITTEN_S", "_ROUNDS_S")}


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each measurement, which is not given up on a busy machine."""
    monkeypatch.setattr(at_open, "_ROUNDS_S", 0.0)
    monkeypatch.setattr(at_open, "_WRITTEN_S", 60.0)
    monkeypatch.setattr(at_open, "BUDGET_S", 60.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tutti"


def opened(folder: Path, **options: Any) -> ObjectStore:
    return tutti.open(str(folder / "pool.tutti"), LAYOUT, "16MiB", **options)


def moves(store: ObjectStore) -> None:
    """A put and a load through the store as it was opened."""
    rng = np.random.default_rng(1)
    memory = store.allocate_memory(8)
    content = rng.bytes(LAYOUT.object_nbytes)
    memory.write(0, content)
    keys = rng.integers(0, 256, (4, 16), np.uint8)
    assert store.put(keys, np.arange(4)).wait(30).stored == 4
    store.load(keys, np.arange(4, 8)).wait(30)
    assert memory.read(4) == content
    assert store.catalogue.delete(keys) == 4


def test_a_pool_is_scheduled_by_default_and_the_second_start_measures_nothing(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tutti.profiles")
    sources = []
    for _ in range(2):
        with opened(tmp_path) as store:
            moves(store)
            wait_idle(store.scheduler)
            stats = store.stats()
            sources.append(stats["profile"])
            assert stats["scheduler"]["written_pages"] == 4
            assert stats["scheduler"]["read_nbytes"] > 0
    assert sources == ["measured", "cache"]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"], "one line a start"
    assert "from the cache" in caplog.text
    (entry,) = cache.glob("*.json")
    assert json.loads(entry.read_text())["io"]["estimated"] is False
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"cache", "pool.tutti"}, "the file of the measurement is gone"


def test_off_is_one_option(tmp_path: Path, cache: Path) -> None:
    for off in (None, "off"):
        with opened(tmp_path, profile=off) as store:
            moves(store)
            assert store.stats()["profile"] == "off"
            assert store.scheduler is None
    assert not cache.exists(), "nothing was measured"


def test_the_disk_behind_a_link_is_measured(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Path] = []

    def medium(paths: list[str], *_: Any, **__: Any) -> None:
        measured.extend(Path(path).parent for path in paths)
        raise DeviceTimeout("the medium does not answer")

    monkeypatch.setattr(at_open, "Medium", medium)
    (tmp_path / "disk").mkdir()
    (tmp_path / "pool.tutti").symlink_to(tmp_path / "disk" / "pool.tutti")
    with opened(tmp_path) as store:
        moves(store)
    assert measured == [tmp_path / "disk"]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"[" * 100_000, b'{"facts": {}, "io": {}}', b"io"],
    ids=["empty", "torn", "list", "deep", "foreign", "rows"],
)
def test_a_damaged_cache_costs_a_measurement(
    tmp_path: Path, cache: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(LAYOUT)
    assert find_profile("auto", [tmp_path], model)[1] == "measured"
    (entry,) = cache.glob("*.json")
    if damage == b"io":
        content = json.loads(entry.read_text())
        content["io"]["read"][0][2] = -1.0
        damage = json.dumps(content).encode()
    entry.write_bytes(damage)
    assert find_profile("auto", [tmp_path], model)[1] == "measured"
    assert "is not used" in caplog.text
    assert find_profile("auto", [tmp_path], model)[1] == "cache", "it was mended"


def test_a_cache_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert find_profile("auto", [tmp_path], model_of(LAYOUT))[1] == "measured"
    assert "writable" in caplog.text


def test_a_user_without_a_home_folder_opens_a_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)  # no user's, as in a container
    for _ in range(2):
        with opened(tmp_path) as store:
            moves(store)
            assert store.stats()["profile"] == "measured"
    assert "name another one by XDG_CACHE_HOME" in caplog.text


def test_a_medium_that_cannot_be_measured_is_estimated(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(medium: Medium, *point: Any) -> list[float]:
        raise DeviceTimeout("the medium does not answer")

    monkeypatch.setattr(Medium, "time_us", late)
    with opened(tmp_path) as store:
        moves(store)
        assert store.stats()["profile"] == "estimated"
    assert "does not answer" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(at_open, "_FILE_NBYTES", 1 << 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert find_profile("auto", [tmp_path], model_of(LAYOUT))[1] == "estimated"
    assert "no room" in caplog.text
    assert find_profile("auto", [], model_of(LAYOUT))[1] == "estimated", "a drive"


def test_a_slow_medium_is_not_waited_for(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(at_open, "_WRITTEN_S", -1.0)
    assert find_profile("auto", [tmp_path], model_of(LAYOUT))[1] == "estimated"
    assert "too slow" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("written_mb_per_s", "mb_per_s", "source"),
    [
        (3000, 3000, "measured"),
        (300, 100, "measured"),
        (45, 45, "measured"),
        (1000, 12, "estimated"),  # as a drive whose fast cache is full
        (1000, 8, "estimated"),  # its last transfer alone takes more than a second
        (5, 5, "estimated"),
    ],
)
def test_a_medium_is_measured_for_two_seconds_at_most(
    written_mb_per_s: float,
    mb_per_s: float,
    source: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the clock of a medium of this speed: how long the test takes does not matter."""
    clock = ManualClock()

    class MediumOfSpeed(Medium):
        def __init__(self, *words: Any, wrote: Callable[[int, int], None], **more: Any) -> None:
            def slowly(done: int, total: int) -> None:
                clock.advance((done - self.done) / written_mb_per_s / 1e6)
                self.done = done
                wrote(done, total)

            self.done = 0
            super().__init__(*words, wrote=slowly, **more)

        def time_us(self, direction: str, nbytes: int, slice_nbytes: int) -> list[float]:
            transfers = 2 if direction == "both" else 1
            took_us = transfers * nbytes / mb_per_s
            clock.advance(took_us / 1e6)
            return [took_us] * transfers

    for name, seconds in TIMES.items():
        monkeypatch.setattr(at_open, name, seconds)
    monkeypatch.setattr(at_open, "time", SimpleNamespace(monotonic=lambda: clock.now_ns() / 1e9))
    monkeypatch.setattr(at_open, "Medium", MediumOfSpeed)
    with opened(tmp_path) as store:
        assert store.stats()["profile"] == source
    assert 0 < clock.now_ns() <= 2_000_000_000


def test_a_file_is_used_where_it_is_of_this_machine(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = machine_facts(tmp_path)
    document = estimated_document(DENSE_MODELS["llama-3.1-8b"], GPUS["H100"], machine=machine)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(document))
    with opened(tmp_path, profile=file) as store:
        moves(store)
        assert store.stats()["profile"] == "file"
    file.write_text(json.dumps({**document, "machine": {**machine, "cpu": "another"}}))
    with opened(tmp_path, profile=str(file)) as store:
        moves(store)
        assert store.stats()["profile"] == "measured"
    assert "cpu was 'another'" in caplog.text


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    with loop_devices(tmp_path) as make:
        yield make(64 * MiB)


def test_a_device_is_measured_before_its_pool_is_opened(
    device: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tutti.profiles")
    tutti.format(device, LAYOUT, "24MiB")
    for source in ("measured", "cache"):
        with tutti.open(device) as store:
            moves(store)
            assert store.stats()["profile"] == source
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"], "one line a start"
    assert len(list(cache.glob("*.json"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another user"))
    with tutti.open(device) as store:
        moves(store)
        assert store.stats()["profile"] == "measured", "behind the pool, which was used"
        with pytest.raises(PoolInUse):
            tutti.open(device)


def test_a_device_is_measured_where_the_given_profile_is_of_another(
    device: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tutti.format(device, LAYOUT, "24MiB")
    file = tmp_path / "profile.json"
    for facts, source in (({}, "file"), ({"disk": "another"}, "measured")):
        machine = {**machine_facts(device), **facts}
        known = estimated_document(DENSE_MODELS["llama-3.1-8b"], GPUS["H100"], machine=machine)
        file.write_text(json.dumps(known))
        with tutti.open(device, profile=file) as store:
            moves(store)
            assert store.stats()["profile"] == source
    assert "disk was 'another'" in caplog.text


def test_a_labelled_device_is_measured_and_stays_labelled(device: str, cache: Path) -> None:
    """As SGLang's linker does: it has a profile before it makes its pool."""
    label([device])
    assert find_profile("auto", media_of([device])[0], model_of(LAYOUT))[1] == "measured"
    assert is_labelled(device)
    assert not Devices().inspect(Path(device).name).holds
    with tutti.open(device, LAYOUT, "24MiB") as store:
        moves(store)
        assert store.stats()["profile"] == "cache"


def test_a_used_pool_that_fills_its_device_is_estimated(
    device: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tutti.format(device, LAYOUT, "63MiB")
    with tutti.open(device, profile=None) as store:
        moves(store)
        assert store.stats()["profile"] == "off"
    with tutti.open(device) as store:
        moves(store)
        assert store.stats()["profile"] == "estimated"
    assert "estimated profile" in caplog.text
    assert "has no room to be measured" in caplog.text
    assert not list(cache.glob("*.json"))


def test_drives_through_vfio_have_different_names() -> None:
    one, other = (machine_facts(f"nvme:0000:0{i}:00.0")["disk"] for i in (3, 4))
    assert one != other
    assert machine_facts("nvme:0000:03:00.0/ns2")["disk"] == one


def test_choices_that_mean_nothing_are_refused(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        opened(tmp_path, profile=tmp_path / "missing.json")
    assert not list(tmp_path.glob("*.tutti")), "a refusal leaves nothing"
    with opened(tmp_path, profile=None), pytest.raises(ProfileError, match="cannot read"):
        opened(tmp_path, profile=tmp_path / "missing.json")  # known before the pool is in use
    with pytest.raises(ConfigError, match="profile is 7"):
        opened(tmp_path, profile=7)
    schedule = Schedule(find_profile("auto", [tmp_path], model_of(LAYOUT))[0])
    with pytest.raises(ConfigError, match="pass only one"):
        opened(tmp_path, profile=None, config=StoreConfig(schedule=schedule))
    with opened(tmp_path, config=StoreConfig(schedule=schedule)) as store:
        assert store.stats()["profile"] == "given"
    assert os.listdir(cache)

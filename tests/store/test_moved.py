"""Files that are renamed, removed, replaced or truncated while their pool is open."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crash.objects import load_present, make_files, put_objects

import tutti.store
from store.pools import GEOMETRY
from tutti.errors import MediumError, PoolCorrupt, PoolMoved, PoolNotFound, TuttiError
from tutti.gio_uring.controller_file import FileController

KEYS = [bytes([i]) * 16 for i in range(1, 9)]


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def folder_renamed(path: Path) -> None:
    path.parent.rename(path.parent.with_name("other"))


def truncated(path: Path) -> None:
    os.truncate(path, GEOMETRY.groups_offset)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


EVENTS: list[Callable[[Path], None]] = [
    renamed,
    removed,
    replaced,
    folder_renamed,
    truncated,
    emptied,
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "pool"
    make_files([str(path)], GEOMETRY)
    return path


@pytest.mark.parametrize("event", EVENTS)
def test_before_the_next_acknowledgement(path: Path, event: Callable[[Path], None]) -> None:
    store = tutti.store.open(path, durability="flush")
    put_objects(store, KEYS[:4])
    event(path)
    for _ in range(2):
        with pytest.raises(PoolMoved, match="renamed, removed, replaced or truncated"):
            put_objects(store, KEYS[4:])
    with pytest.raises(PoolMoved, match="while it was open"):
        store.close()
    store.close()


@pytest.mark.parametrize("durability", ["process", "flush"])
@pytest.mark.parametrize("event", EVENTS)
def test_at_close(path: Path, event: Callable[[Path], None], durability: str) -> None:
    """Everything else is ended all the same: the next opening has the pool to itself."""
    store = tutti.store.open(path, durability=durability)
    put_objects(store, KEYS[:4])
    event(path)
    with pytest.raises(PoolMoved, match="while it was open"):
        store.close()
    found = next((p for p in (path, *path.parents[1].glob("*/elsewhere")) if p.exists()), None)
    found = found or next(path.parents[1].glob("other/pool"), None)
    expected: type[TuttiError] | None = {
        removed: PoolNotFound,
        truncated: PoolCorrupt,
        emptied: TuttiError,
    }.get(event)
    if expected is not None:
        with pytest.raises(expected):
            tutti.store.open(found or path)
        return
    assert found is not None
    with tutti.store.open(found) as again:  # not closed cleanly, so each object is verified
        again.wait_recovered(10)
        present, damaged = load_present(again, KEYS[:4])
        assert (present, damaged) == (set(KEYS[:4]), set())


def test_a_file_that_is_back(path: Path) -> None:
    with tutti.store.open(path, durability="flush") as store:
        renamed(path)
        with pytest.raises(PoolMoved):
            put_objects(store, KEYS[:4])
        path.with_name("elsewhere").rename(path)
        put_objects(store, KEYS[4:])
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS[4:]), set())


def test_a_file_system_that_does_not_answer_for_a_moment(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a soft NFS mount: puts fail while the place of the file is unknown; later ones go on."""

    def fail(_: object) -> None:
        raise MediumError("fstat: Input/output error")

    with tutti.store.open(path, durability="flush") as store:
        with monkeypatch.context() as patched:
            patched.setattr(store.controller, "check_places", fail)
            with pytest.raises(MediumError, match="internal error"):
                put_objects(store, KEYS[:4])
        put_objects(store, KEYS[4:])
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS[4:]), set())


def test_one_of_several_members(tmp_path: Path) -> None:
    paths = [tmp_path / f"member{i}" for i in range(3)]
    make_files([str(path) for path in paths], GEOMETRY)
    store = tutti.store.open(paths, durability="flush")
    paths[1].unlink()
    with pytest.raises(PoolMoved):
        put_objects(store, KEYS)
    with pytest.raises(PoolMoved, match="member1 was removed"):
        store.close()


def test_a_file_system_that_does_not_answer_costs_its_member_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As XFS after a shutdown: also fstat fails.  Each flush that finds it says the same."""
    paths = [tmp_path / f"member{i}" for i in range(2)]
    make_files([str(path) for path in paths], GEOMETRY)

    def fail() -> None:
        raise MediumError("fstat: Input/output error")

    with tutti.store.open(paths, durability="flush") as store:
        assert isinstance(store.controller, FileController)
        with monkeypatch.context() as patched:
            patched.setattr(store.controller.members[1], "check_place", fail)
            for first in range(0, 16, 4):  # a group each, in turns on the members
                with contextlib.suppress(MediumError):
                    put_objects(store, [bytes([first + i]) * 16 for i in range(1, 5)])
            slots = np.flatnonzero(store._core.index.resident())
        assert slots.size >= 4
        assert (slots < GEOMETRY.slots).all()
    assert caplog.text.count("fstat: Input/output error") == 1


def test_a_relative_path_after_a_change_of_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with tutti.store.open("pool", durability="flush") as store:
        monkeypatch.chdir(tmp_path)
        put_objects(store, KEYS)

"""Folders that several users can write: no user can redirect or serve another's pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from crash.objects import make_files

import tutti.store
from store.pools import GEOMETRY, LAYOUT
from tutti import cli
from tutti.base.units import KiB
from tutti.errors import ConfigError, PoolExists, PoolUntrusted
from tutti.gio_uring.file_creation import allocate_file
from tutti.medium.layout import KVLayout

NOBODY = 65534
UNUSABLE = 3
NAMED = KVLayout.mha(4, 2, 64, 16, "bfloat16", model="tiny")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def link(place: Path, target: Path, uid: int = NOBODY) -> None:
    place.symlink_to(target)
    os.lchown(place, uid, uid)


def makers(path: Path) -> tuple[Callable[[], object], ...]:
    """The ways to a new pool."""
    return (
        lambda: tutti.store.format(path, NAMED, "64MiB"),
        lambda: tutti.store.format(path, NAMED, "64MiB", force=True),
        lambda: tutti.store.open(path, NAMED, "64MiB"),
    )


def test_a_link_of_another_user(shared: Path, tmp_path: Path) -> None:
    """As if the file did not exist: it would be made where the link says."""
    victim = tmp_path / "victim"
    link(shared / "pool", victim)
    for make in makers(shared / "pool"):
        with pytest.raises(PoolUntrusted, match="name the file that is meant"):
            make()
    assert not victim.exists()


def test_a_folder_that_another_user_links(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    link(shared / "pools", tmp_path / "private")
    for make in makers(shared / "pools" / "pool"):
        with pytest.raises(PoolUntrusted, match=r"pools is a symbolic link of user 65534"):
            make()
    assert not any((tmp_path / "private").iterdir())


def test_a_link_to_a_file_that_exists(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    link(shared / "pool", victim)
    with pytest.raises(PoolUntrusted):
        tutti.store.format(shared / "pool", NAMED, "64MiB", force=True)
    assert victim.read_bytes() == b"precious"


def test_links_of_ones_own(shared: Path, tmp_path: Path) -> None:
    """Also several, relative ones and those of a folder's owner, who decides what is in it."""
    (shared / "own").symlink_to("further")
    (shared / "further").symlink_to(tmp_path / "pool")
    assert allocate_file(shared / "own", KiB, may_exist=False)
    assert (tmp_path / "pool").stat().st_size == KiB
    for name in ("own", "further"):
        with pytest.raises(PoolExists):
            allocate_file(shared / name, KiB, may_exist=False)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    link(home / "pools", shared)
    allocate_file(home / "pools" / ".." / "shared" / "more", KiB)
    assert (shared / "more").exists()


def test_links_in_a_circle(shared: Path) -> None:
    (shared / "a").symlink_to("b")
    (shared / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="symbolic links"):
        tutti.store.format(shared / "a", NAMED, "64MiB")


@pytest.mark.parametrize(
    ("uid", "mode", "remedy"),
    [(NOBODY, 0o600, "chown"), (NOBODY, 0o666, "chown"), (0, 0o666, "chmod o-w")],
)
def test_a_file_that_another_user_can_change(
    shared: Path, uid: int, mode: int, remedy: str
) -> None:
    path = shared / "pool"
    make_files([str(path)], GEOMETRY)
    os.chown(path, uid, uid)
    path.chmod(mode)
    before = path.read_bytes()
    with pytest.raises(PoolUntrusted, match=remedy):
        tutti.store.open(path)
    with pytest.raises(PoolUntrusted, match=remedy):
        tutti.store.format(path, NAMED, "64MiB", force=True)
    assert cli.main(["format", str(path), "--capacity", "64MiB", "--model", "llama-3.1-8b"]) != 0
    assert cli.main(["fsck", str(path)]) == 0, "a check changes nothing"
    assert path.read_bytes() == before
    with tutti.open(path, LAYOUT, config=tutti.StoreConfig(any_owner=True)) as store:
        assert store.layout == LAYOUT


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660, 0o644])
def test_a_file_that_only_its_owner_and_a_group_can_change(shared: Path, mode: int) -> None:
    path = shared / "pool"
    make_files([str(path)], GEOMETRY)
    path.chmod(mode)
    tutti.store.open(path).close()

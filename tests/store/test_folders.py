"""Pools whose members are folders: every command finds one pool file in each folder."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.objects import put_objects
from loop_devices import loop_devices
from test_bad_input import output_as_nobody
from test_sglang_front_door import IDENTITY, SHAPE

import tutti
from store.pools import LAYOUT
from tutti import cli
from tutti.base.units import MiB
from tutti.bench.pool_file import pool_paths
from tutti.errors import (
    CapacityError,
    ConfigError,
    MemberMissing,
    MemberSwapped,
    PoolExists,
    PoolNotFound,
)
from tutti.integration.sglang.identity import ParallelRank, layout_of, open_store
from tutti.integration.sglang.options import HICACHE, parse_options
from tutti.pool.places import pool_file
from tutti.resize import resize
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

CAPACITY = 24 * MiB
KEYS = [bytes([i]) * 16 for i in range(8)]
SHAPED = ["--model=m", "--layers=4", "--kv-heads=2", "--head-dim=64", "--page-size=16"]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / name) for name in "ab"]
    for folder in made:
        os.mkdir(folder)
    return made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A file system of its own, of 32 MiB."""
    with loop_devices(tmp_path) as make:
        device, folder = make(32 * MiB), tmp_path / "small"
        subprocess.run(["mkfs.ext4", "-q", device], check=True, timeout=60)
        folder.mkdir()
        if subprocess.run(["mount", device, str(folder)], capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
        try:
            yield str(folder)
        finally:
            # Lazily, because a ring releases its files some time after it was closed.
            subprocess.run(["umount", "-l", device], check=True, timeout=30)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def files(folders: list[str]) -> list[str]:
    return [os.path.join(folder, pool_file(LAYOUT)) for folder in folders]


def test_two_folders_are_one_pool_of_two_files(small: str, tmp_path: Path) -> None:
    """On two file systems.  Without a layout, and by its files, it is the same pool."""
    folders = [str(tmp_path / "new") + "/", small]
    with tutti.open(folders, LAYOUT, CAPACITY) as store:
        assert store.members.count == 2
        put_objects(store, KEYS)
        uuid = store.members.uuid
    assert all(os.stat(file).st_mode & 0o777 == 0o600 for file in files(folders))
    assert os.stat(os.path.dirname(files(folders)[1])).st_mode & 0o777 == 0o700
    for paths in (folders, files(folders), [folders[0], files(folders)[1]]):
        with tutti.open(paths) as store:
            assert store.members.uuid == uuid
            assert store.present(KEYS).all()
    with pytest.raises(PoolExists, match="--force"):
        tutti.format(folders, LAYOUT, CAPACITY)
    tutti.format(folders, LAYOUT, CAPACITY, force=True)
    with tutti.open(folders, LAYOUT) as store:
        assert not store.present(KEYS).any()


def test_one_of_two_file_systems_is_too_small(small: str, folders: list[str]) -> None:
    paths = [folders[0], small]
    with pytest.raises(CapacityError, match=r"no room for .* in .*small.*free space"):
        tutti.open(paths, LAYOUT, 128 * MiB)
    assert not os.listdir(folders[0])
    assert os.listdir(small) == ["lost+found"]


def test_every_command_takes_folders(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    made = run(capsys, "format", *(f"{f}/" for f in folders), "--capacity=24MiB", *SHAPED)
    paths = made["paths"]
    assert isinstance(paths, list)
    assert all(os.path.isfile(path) for path in paths)
    with tutti.open(folders) as store:
        put_objects(store, KEYS)
    assert run(capsys, "info", *folders)["objects"] == len(KEYS)
    assert run(capsys, "resize", *folders, "--capacity=48MiB")["kept"] == len(KEYS)
    assert run(capsys, "fsck", *folders)["verified"] == len(KEYS)
    assert run(capsys, "ls", folders[0], "--member", folders[1])
    assert [os.listdir(os.path.dirname(p)) for p in paths] == [[os.path.basename(p)] for p in paths]
    doctor = ["sglang", "doctor", "--path", *folders, "--capacity=24MiB", "--json"]
    capsys.readouterr()
    cli.main(doctor)  # which fails where no SGLang is installed
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert len([finding for finding in findings if finding["what"] == "pool"]) == 2


def test_a_pool_of_sglangs_only_rank_is_found(folders: list[str]) -> None:
    rank = ParallelRank()
    layout = layout_of(SHAPE, IDENTITY, rank)
    options = parse_options({"path": folders, "capacity": "64MiB"}, HICACHE)
    server, where = open_store(layout, "kv", 64 * MiB, options, rank)
    assert isinstance(server, ObjectStore)
    uuid = server.members.uuid
    server.close()
    for given in (None, layout):
        with tutti.open(folders, given) as store:
            assert store.members.uuid == uuid
    shutil.copy(where.split(", ")[0], Path(where.split(", ")[0]).with_name("other.tutti"))
    for given in (None, layout):
        with pytest.raises(ConfigError, match=r"several pools; pass the files of one: .*kv-tp0"):
            tutti.open(folders, given)


def test_folders_without_a_pool(folders: list[str], tmp_path: Path) -> None:
    for path in (folders, folders[0], str(tmp_path / "none") + "/"):
        for layout in (None, LAYOUT):
            with pytest.raises(PoolNotFound, match="correct the path, or make"):
                tutti.open(path, layout)
    with pytest.raises(PoolNotFound, match="has no pool"):
        resize(folders, CAPACITY)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert not any(map(os.listdir, folders))


def test_a_folder_whose_file_is_gone(folders: list[str]) -> None:
    tutti.open(folders, LAYOUT, CAPACITY).close()
    shutil.rmtree(os.path.dirname(files(folders)[0]))
    with pytest.raises(MemberMissing, match="restore it"):
        tutti.open(folders, LAYOUT, CAPACITY)
    assert not os.listdir(folders[0])
    with tutti.open(folders[1], config=StoreConfig(degraded=True)) as store:
        assert store.members.present == [1]


def test_two_names_of_one_folder(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders[0])
    for other in (f"{folders[0]}/", str(tmp_path / "link"), f"{folders[1]}/../a"):
        with pytest.raises(MemberSwapped, match="given twice"):
            tutti.open([folders[0], other], LAYOUT, CAPACITY)
    with pytest.raises(MemberSwapped, match="given twice"):
        tutti.open([folders[0], files(folders)[0]], LAYOUT, CAPACITY)
    assert not any(map(os.listdir, folders))


def test_a_folder_that_is_not_writable() -> None:
    layout = "tutti.KVLayout.mha(4, 2, 64, 16, 'bfloat16', model='test-model')"
    call = f"tutti.store.open(sys.argv[1], {layout}, '64MiB')"
    said = output_as_nobody(call, Path("/usr"))
    assert "ConfigError cannot make the folder /usr/test-model-" in said
    assert "give this user the right to write there" in said


def test_missing_parents_are_not_made(tmp_path: Path) -> None:
    """Neither of a file that is called as a folder's would be, nor of a folder."""
    deep = tmp_path / "none" / "deep"
    for path in (str(deep / pool_file(LAYOUT)), f"{deep}/", str(deep / "one.tutti")):
        for capacity in (CAPACITY, "900TiB"):
            with pytest.raises(PoolNotFound, match=r"the folder .*none.* does not exist; create"):
                tutti.open(path, LAYOUT, capacity)
    assert not list(tmp_path.iterdir())


def test_a_new_pool_in_a_folder_is_told_once(
    folders: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drive may not be mounted there."""
    for _ in range(2):
        tutti.open(folders, LAYOUT, CAPACITY).close()
    tutti.open(tmp_path / "one.tutti", LAYOUT, CAPACITY).close()
    (told,) = [text for text in caplog.messages if "made a new pool in" in text]
    assert all(file in told for file in files(folders))


def test_a_pool_is_not_made_beside_another(
    folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = Path(files(folders)[0])
    other = own.with_name("kv-tp0-pp0-cp0-dp0.tutti")
    own.parent.mkdir()
    other.write_bytes(bytes(50))
    for has_own in (False, True):
        if has_own:
            own.touch()
        for force in (False, True):
            with pytest.raises(PoolExists, match=f"{other.name} is there, another pool"):
                tutti.format(folders, LAYOUT, CAPACITY, force=force)
    assert other.read_bytes() == bytes(50)
    words = ["format", folders[1], "--capacity=24MiB", *SHAPED]
    (path,) = run(capsys, *words)["paths"]  # type: ignore[misc]
    renamed = Path(path).rename(Path(path).with_name(other.name))
    before = renamed.read_bytes()
    assert cli.main([*words, "--force"]) == 3
    assert renamed.read_bytes() == before


def test_a_new_folder_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def noted(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    tutti.format(f"{tmp_path}/new/", LAYOUT, CAPACITY)
    assert {str(tmp_path), f"{tmp_path}/new"} <= synced


def test_a_bench_makes_no_folder(tmp_path: Path) -> None:
    for args in ({"path": [f"{tmp_path}/new/"]}, {"path": None, "dir": [f"{tmp_path}/new"]}):
        with pytest.raises(ConfigError, match="is not a directory; make it"):
            pool_paths(argparse.Namespace(**args), "bench")

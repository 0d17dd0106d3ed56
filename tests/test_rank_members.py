"""Which rank has which folder, file or device; and what opens a server's pools there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from node.agents import running
from test_sglang_front_door import IDENTITY, SHAPE

from tutti.base.units import MiB
from tutti.cli import main
from tutti.commands import members
from tutti.errors import ConfigError, MemberMissing, MemberSwapped
from tutti.integration.sglang import rank_members
from tutti.integration.sglang.identity import ParallelRank, layout_of, open_store
from tutti.integration.sglang.options import HICACHE, LINKER, parse_options
from tutti.integration.sglang.rank_members import share
from tutti.pool.places import Place, PlaceKind
from tutti.store import ObjectStore

LAYOUT = layout_of(SHAPE, IDENTITY, ParallelRank())
DRIVES = [f"nvme:0000:0{i}:00.0" for i in range(1, 5)]


def opened(
    paths: Sequence[str],
    rank: ParallelRank | None = None,
    mode: str = HICACHE,
    **options: object,
) -> ObjectStore:
    parsed = parse_options({"path": list(paths), "capacity": "64MiB", **options}, mode)
    rank = rank or ParallelRank()
    layout = layout_of(SHAPE, IDENTITY, rank)
    store, _ = open_store(layout, "kv", 64 * MiB, parsed, rank)
    assert isinstance(store, ObjectStore)
    return store


def test_folders_serve_every_rank_and_devices_one_each(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    shares = share([DRIVES[0], folders[0], DRIVES[1], folders[1]], 2)
    for rank in (0, 1):
        assert shares.of(rank, "m/kv", is_kv=True) == [DRIVES[rank]]
        assert shares.of(rank, "m/swa", is_kv=False) == [f"{f}/m/swa" for f in folders]
    assert share(folders, 8).of(7, "m/kv", is_kv=True) == [f"{f}/m/kv" for f in folders]
    with pytest.raises(ConfigError, match="add a folder"):
        share(DRIVES, 2).of(0, "m/swa", is_kv=False)


@pytest.mark.parametrize(("drives", "ranks"), [(1, 2), (3, 2), (4, 8)])
def test_a_rank_without_a_member(drives: int, ranks: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{drives} files and devices for {ranks} ranks"):
        share(DRIVES[:drives], ranks)
    files = [str(tmp_path / f"{i}.tutti") for i in range(drives)]
    with pytest.raises(ConfigError, match="make partitions"):
        opened(files, ParallelRank(tp_size=ranks))
    assert not any(tmp_path.iterdir())


def test_a_place_of_two_ranks() -> None:
    with pytest.raises(MemberSwapped, match="given twice"):
        share([DRIVES[0], DRIVES[0]], 2)


def test_ranks_share_the_drives_of_one_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = dict(zip(DRIVES, (1, 0, 1, 0), strict=True))
    monkeypatch.setattr(
        rank_members, "place_of", lambda path: Place(path, PlaceKind.DEVICE, nodes.get(path))
    )
    dealt = share(DRIVES, 2).dealt
    assert [[place.path for place in places] for places in dealt] == [
        [DRIVES[1], DRIVES[3]],
        [DRIVES[0], DRIVES[2]],
    ]


@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 1), (None,) * 4])
@pytest.mark.parametrize("missing", DRIVES)
def test_a_missing_device_leaves_the_shares_of_other_ranks(
    nodes: Sequence[int | None],
    missing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {path: node for path, node in zip(DRIVES, nodes, strict=True) if path != missing}
    monkeypatch.setattr(rank_members, "exists", found.__contains__)
    monkeypatch.setattr(
        rank_members, "place_of", lambda path: Place(path, PlaceKind.DEVICE, found.get(path))
    )
    words = ["sglang", "command", "--model", "m", "--capacity", "1TiB", "--path", *DRIVES]
    assert main([*words, "--option", "degraded=true", "--json", "--", "--tp", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["dealt"] == [[path] for path in DRIVES]


def test_every_rank_has_a_place_of_its_own_on_its_node() -> None:
    for nodes in (1, 2):
        places = [
            ParallelRank(tp, 4, pp, 2, nodes=nodes).place_on_node
            for pp in range(2)
            for tp in range(4)
        ]
        assert places == [(i % (8 // nodes), 8 // nodes) for i in range(8)]
    groups = {
        ParallelRank(tp, 2, cp_rank=cp, cp_size=2, dp_rank=dp, dp_size=2).place_on_node
        for tp in range(2)
        for cp in range(2)
        for dp in range(2)
    }
    assert groups == {(i, 8) for i in range(8)}


@pytest.mark.parametrize("kind", ["folders", "files"])
def test_a_pool_lies_on_all_its_members(tmp_path: Path, kind: str) -> None:
    end = "" if kind == "folders" else ".tutti"
    paths = [str(tmp_path / f"{name}{end}") for name in "ab"]
    for _ in range(2):
        with opened(paths) as store:
            assert store.members.count == 2
    found = sorted(tmp_path.rglob("*.tutti"))
    assert len(found) == 2
    assert {file.parent == tmp_path for file in found} == {kind == "files"}
    both = (
        [opened(paths, ParallelRank(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
        if (kind == "folders")
        else []
    )
    assert [store.members.count for store in both] == [2] * len(both)
    for store in both:
        store.close()


def test_a_folder_that_is_made_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drive may not be mounted there."""
    folder = tmp_path / "mount" / "tutti"
    for _ in range(2):
        opened([str(folder)]).close()
    (warning,) = [text for text in caplog.messages if "new folder" in text]
    assert str(folder) in warning and "mount it first" in warning


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    opened(paths).close()
    shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    with pytest.raises(MemberMissing, match="does not exist"):
        opened(paths)
    assert not (tmp_path / "b").exists(), "a folder was made where a drive is mounted"
    with opened(paths, degraded=True) as store:
        assert store.members.present == [0]
    shutil.move(tmp_path / "elsewhere", tmp_path / "b")
    with opened(paths) as store:
        assert store.members.present == [0, 1]


@pytest.mark.parametrize("path", [[], [""], ["a", 1], {}, 7])
def test_paths_that_are_none(path: object) -> None:
    with pytest.raises(ConfigError, match="path"):
        parse_options({"path": path, "capacity": "1GiB"}, HICACHE)


def test_a_socket_is_given_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it alone"):
        opened([str(tmp_path), "unix:/run/tutti"])


def test_settings_of_an_agents_pools_are_the_agents(tmp_path: Path) -> None:
    with running(tmp_path / "agent") as agent:
        path = [f"unix:{agent.path}"]
        with pytest.raises(ConfigError, match="verify, eviction: the agent at"):
            opened(path, verify="off", eviction="lru")
        own = {"path": path, "capacity": "64MiB", "profile": "off"}
        open_store(LAYOUT, "kv", 64 * MiB, parse_options(own, HICACHE), ParallelRank())[0].close()
        with pytest.raises(ConfigError, match="pin_lookups, pin_share: the agent at"):
            opened(path, None, LINKER, pin_share=0.25, pin_lookups=7)


def test_the_command_prints_the_shares(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "exists", lambda path: True)
    words = ["sglang", "command", "--model", "m", "--capacity", "1TiB", "--path", *DRIVES]
    assert main([*words, "/mnt/a", "--", "--tp", "2"]) == 0
    said = capsys.readouterr().out
    assert f"rank 1 of a node: {DRIVES[2]}, {DRIVES[3]} for its KV pool" in said
    assert "every rank: a file in each of /mnt/a for its other pools" in said
    label = f"# tutti format {' '.join(DRIVES)} --for-server"
    assert f"# Label each device once before the first start; this erases it:\n{label}" in said
    assert "(NUMA node" not in said, "of drives that are not in this machine"
    assert main([*words, "--json", "--", "--tp-size=4", "--nnodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["dealt"] == [DRIVES[:2], DRIVES[2:]]
    assert main([*words, "--json", "--", "--tensor-parallel", "2"]) == 0, "as SGLang takes it"
    assert json.loads(capsys.readouterr().out)["dealt"] == [DRIVES[:2], DRIVES[2:]]
    assert main([*words, "--", "--tp", "3"]) == 2
    assert "4 files and devices for 3 ranks" in capsys.readouterr().err
    assert main([*words, "--", "--tp", "many"]) == 2
    capsys.readouterr()
    for threads, code in ((2, 0), (3, 2)):
        option = f"--option=service_threads={threads}"
        assert main([*words, option, "--", "--tp", "2"]) == code
    assert "the KV pool of a rank has 2 of these paths" in capsys.readouterr().err


def test_the_command_prints_the_rule_and_the_numa_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(members, "exists", lambda path: True)
    nodes = dict(zip(DRIVES, (1, 0, 1, 0), strict=True))
    monkeypatch.setattr(
        rank_members, "place_of", lambda path: Place(path, PlaceKind.DEVICE, nodes[path])
    )
    words = ["sglang", "command", "--model", "m", "--capacity", "1TiB", "--path", *DRIVES]
    assert main([*words, "--", "--tp", "2"]) == 0
    said = capsys.readouterr().out
    own = f"{DRIVES[1]} (NUMA node 0), {DRIVES[3]} (NUMA node 0)"
    assert f"rank 0 of a node: {own} for its KV pool" in said
    assert "by NUMA node, then as given; the GPUs' nodes are not considered" in said


def test_doctor_takes_several_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["sglang", "doctor", "--path", str(tmp_path / "a"), str(tmp_path / "b"), DRIVES[0]])
    said = " ".join(capsys.readouterr().out.split())
    assert "are on one file system" in said
    assert DRIVES[0] in said
    main(["sglang", "doctor", "--path", str(tmp_path), str(tmp_path)])
    assert "given twice" in capsys.readouterr().out


def test_a_node_needs_room_for_its_own_ranks_only(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    capacity = disk.f_bavail * disk.f_frsize * 3 // 2
    where = ["--path", str(tmp_path / "pools"), "--capacity", str(capacity)]
    arguments = ["sglang", "command", "--model", "m", *where, "--"]
    assert main([*arguments, "--tp", "2"]) == 3
    assert main([*arguments, "--tp", "2", "--nnodes", "2"]) == 0

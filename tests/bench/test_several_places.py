"""Benchmarks over several members: folders, and loop devices that are blank again afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_devices import loop_devices

from tutti import cli
from tutti.base.units import MiB
from tutti.bench import short
from tutti.gio_uring.drives.device_content import contents
from tutti.pool.pool_format import is_labelled

SMALL = {
    "bandwidth": "bench bandwidth --shapes 2x16KiB --seconds 0.05 --capacity 24MiB --batch 1MiB"
    " --memory 8MiB",
    "replay": "replay --requests 20 --capacity 24MiB --shape 1x32KiB --pages 64 --page-size 512",
    "window": "bench window --layers 2 --slice 16KiB --pages 1 3 --rounds 2 --warm 0.1 --compute 1",
    "profile": "profile --sizes 1MiB --slices 64KiB --repeats 1 --file-size 8MiB",
    "short": "bench short --calls 2 --rounds 3 --capacity 48MiB",
    "agent": "bench agent --rounds 3 --pages 16 --batch 4 --clients 0 --capacity 32MiB",
}
ON_DEVICES = [command for command in SMALL if command != "window"]


@pytest.fixture(autouse=True)
def _few_calls_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bench short` measures there is the same wherever the members are."""
    monkeypatch.setattr(short, "_WARM", 1)
    monkeypatch.setattr(short, "_PAGES", (1,))
    monkeypatch.setattr(short, "_CALLS_NBYTES", 256 * MiB)


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[str]]:
    with loop_devices(tmp_path) as make:
        yield [make(), make()]


def run(capsys: pytest.CaptureFixture[str], words: list[str]) -> dict[str, object]:
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def members(result: dict[str, object]) -> object:
    facts = result.get("medium") or (result.get("runs") or [result])[0]  # type: ignore[index]
    return facts["members"]  # type: ignore[index]


def words_of(command: str, where: list[str], tmp_path: Path) -> list[str]:
    words = [*SMALL[command].split(), "--medium" if command == "profile" else "--dir", *where]
    return [*words, "--out", str(tmp_path / "out.json")] if command == "profile" else words


@pytest.mark.parametrize("command", SMALL)
def test_two_folders(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert members(run(capsys, words_of(command, list(map(str, folders)), tmp_path))) == 2
    assert not any(any(folder.iterdir()) for folder in folders)


@pytest.mark.parametrize("command", ON_DEVICES)
def test_two_devices(
    command: str, devices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert members(run(capsys, words_of(command, devices, tmp_path))) == 2
    for device in devices:
        raw = Path(device).read_bytes()
        assert not contents(lambda offset, nbytes, raw=raw: raw[offset : offset + nbytes], len(raw))


@pytest.mark.parametrize("command", ON_DEVICES)
def test_a_device_that_holds_anything(
    command: str, devices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(devices[1]).open("r+b") as file:
        file.write(b"XFSB")
    before = Path(devices[1]).read_bytes()
    assert cli.main(words_of(command, devices, tmp_path)) == 3
    assert "XFS" in capsys.readouterr().err
    assert Path(devices[1]).read_bytes() == before
    assert len(before) == 32 * MiB


@pytest.mark.parametrize("command", ON_DEVICES)
def test_a_device_that_was_given_to_a_server(
    command: str, devices: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["format", devices[1], "--for-server"]) == 0
    words = words_of(command, devices, tmp_path)
    assert cli.main(words) == 3
    assert f"{devices[1]} holds the label of" in capsys.readouterr().err
    assert is_labelled(devices[1])
    run(capsys, [*words, "--force", str(tmp_path / "image1")])
    assert not is_labelled(devices[1]), "devices are blank afterwards"


REFUSED = {
    "bench residency --dir {}": "page cache",
    "bench peers --dir {}": "is not a directory",
    "bench window --dir {}": "four pools take turns",
    "replay --floor --dir {}": "--floor",
    "bench bandwidth --dir {} {}": "twice",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_bench_refuses_devices_before_it_writes(
    command: str, devices: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By its nature: it needs files, or several processes at a drive."""
    words = command.replace("{}", devices[0]).split()
    assert cli.main(words) in (2, 3)
    assert REFUSED[command] in capsys.readouterr().err
    assert not any(Path(devices[0]).read_bytes())

"""What is refused before a drive is written to; memory stands in for the drive."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_controller import MemoryController

import tutti
from store.pools import GEOMETRY, LAYOUT
from tutti import cli
from tutti.base.units import MiB
from tutti.errors import CapacityError, ConfigError, PoolExists
from tutti.gio_uring.engine import Engine
from tutti.pool import member_controller
from tutti.pool.block_io import BlockIo

DRIVE = "nvme:0000:03:00.0"


def test_files_and_drives_are_not_mixed(tmp_path: Path) -> None:
    names = [str(tmp_path / "file"), DRIVE]
    with pytest.raises(ConfigError, match="pass only one kind"):
        tutti.open(names, LAYOUT, "64MiB")
    with pytest.raises(ConfigError, match="pass only one kind"):
        tutti.format(names, LAYOUT, "64MiB")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["info", "fsck"])
def test_commands_take_addresses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "nvme:nonsense"]) == 2
    assert "not a drive's address" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("where", "content", "what"),
    [
        (512, b"EFI PART", "GPT"),
        (4 * MiB - 512, b"EFI PART", "backup"),
        (MiB - 1, b"x", "unknown kind"),
        (3 * MiB, b"x", "unknown kind"),
    ],
)
def test_what_is_not_blank_takes_the_serial_number(
    where: int, content: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_controller, "serial_of", lambda controller, nsid: f"S{nsid}")
    with MemoryController([4 * MiB, 4 * MiB]) as controller:
        engine = Engine(controller)
        io = BlockIo(engine)
        names = ["first", "second"]
        member_controller.check_blank(controller, io, names, False)
        controller.medium(2)[where : where + len(content)] = list(content)
        for force in (False, True, "S1", ["S1"], []):
            with pytest.raises(PoolExists, match=f"second holds .*{what}.*'S2'"):
                member_controller.check_blank(controller, io, names, force)
        for force in ("S2", ["S2"], {"S1", "S2"}):
            member_controller.check_blank(controller, io, names, force)
        controller.medium(1)[where] = 1
        with pytest.raises(PoolExists, match=r"^first holds .*; second holds .*'S1' and 'S2'"):
            member_controller.check_blank(controller, io, names, False)
        io.close()
        engine.close()


def test_a_drive_that_is_too_small() -> None:
    nbytes = GEOMETRY.member_nbytes - 4096
    with (
        MemoryController([nbytes]) as controller,
        pytest.raises(CapacityError, match=f"at most {nbytes}"),
    ):
        member_controller.check_room(controller, [DRIVE], GEOMETRY)

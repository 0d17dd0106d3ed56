"""Files for members: real blocks, clear refusals."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest

from tutti.base.units import KiB, MiB
from tutti.errors import (
    CapacityError,
    ConfigError,
    MediumError,
    PoolExists,
    PoolInUse,
    PoolNotFound,
)
from tutti.gio_uring.file_creation import allocate_file


@pytest.mark.parametrize("prewrite", [False, True])
def test_allocate_makes_real_blocks(tmp_path: Path, prewrite: bool) -> None:
    steps: list[tuple[int, int]] = []
    nbytes = 9 * MiB + 512

    def progress(done: int, total: int) -> None:
        steps.append((done, total))

    allocate_file(tmp_path / "a", nbytes, prewrite=prewrite, progress=progress)
    assert (tmp_path / "a").stat().st_size == nbytes
    assert (tmp_path / "a").stat().st_blocks * 512 >= nbytes
    assert steps == sorted(steps)
    assert steps[-1] == (nbytes, nbytes)
    assert len(steps) == (3 if prewrite else 1)
    assert not any((tmp_path / "a").read_bytes())


def test_allocate_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"q" * 10_000)
    allocate_file(tmp_path / "a", 20_000)
    assert (tmp_path / "a").read_bytes() == b"q" * 10_000 + bytes(10_000)
    allocate_file(tmp_path / "a", 5_000)
    assert (tmp_path / "a").read_bytes() == b"q" * 5_000


def test_one_of_two_makes_a_file(tmp_path: Path) -> None:
    """A link to nothing is a file that does not exist yet."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert allocate_file(tmp_path / "link", KiB, may_exist=False)
    for name in ("link", "file"):
        with pytest.raises(PoolExists, match="use --force"):
            allocate_file(tmp_path / name, 2 * KiB, may_exist=False)
    assert not allocate_file(tmp_path / "file", 2 * KiB)
    assert (tmp_path / "link").stat().st_size == 2 * KiB


def test_allocate_refuses(tmp_path: Path) -> None:
    with pytest.raises(PoolNotFound, match="folder"):
        allocate_file(tmp_path / "none" / "a", KiB)
    with (tmp_path / "locked").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PoolInUse):
            allocate_file(tmp_path / "locked", MiB, prewrite=True)
    assert (tmp_path / "locked").stat().st_size == 0


def test_a_file_that_cannot_fit_does_not_fill_the_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other pools on that file system write into space that they freed."""
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, nbytes: asked.append(nbytes))
    room = os.statvfs(tmp_path)
    for nbytes in ((room.f_bavail + (1 << 20)) * room.f_frsize, 1 << 62):
        with pytest.raises(CapacityError, match="no room for"):
            allocate_file(tmp_path / "a", nbytes)
    assert not asked
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_which_there_is_no_room_keeps_its_size(tmp_path: Path) -> None:
    """Else a larger format that fails would leave the disk full."""
    old = tmp_path / "old"
    allocate_file(old, 64 * KiB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, hard))
    reserve = os.posix_fallocate

    def in_part(fd: int, offset: int, nbytes: int) -> None:
        reserve(fd, offset, MiB // 2)  # as a disk that becomes full
        reserve(fd, offset, nbytes)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", in_part)
            with pytest.raises(CapacityError, match="no room for 2 MiB"):
                allocate_file(old, 2 * MiB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert old.stat().st_size == 64 * KiB


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_writing_once_may_end_early(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> int:
        raise kind(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", ended)
    with pytest.raises(MediumError if kind is OSError else kind, match="Input/output error"):
        allocate_file(tmp_path / "a", MiB, prewrite=True)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file nor a block device"):
        allocate_file(tmp_path / "pipe", MiB)

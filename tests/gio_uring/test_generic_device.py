"""NVMe generic devices; files stand in for them, which take no commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.controller_file import FileController, uring_refusal
from tutti.gio_uring.drives.generic_device import REQUEST_NBYTES_MAX, GenericNamespace
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.file_member import FileMember


@pytest.fixture
def member(tmp_path: Path) -> Iterator[FileMember]:
    allocate_file(tmp_path / "ng0n1", MiB)
    made = FileMember(tmp_path / "ng0n1")
    yield made
    made.close()


def become_generic(member: FileMember, lba_nbytes: int) -> None:
    nlb = member.nbytes // lba_nbytes
    member.generic = GenericNamespace(1, nlb, lba_nbytes, REQUEST_NBYTES_MAX)
    member.memory_alignment, member.offset_alignment = 4, lba_nbytes


def test_blocks_larger_than_a_pools_are_refused(member: FileMember) -> None:
    """Its commands would name other blocks than those that were meant."""
    become_generic(member, 16 * KiB)
    for lba_nbytes in (512, 4 * KiB):
        with pytest.raises(ConfigError, match=r"has blocks of 16384 bytes.* 512 or 4096"):
            FileController([member], lba_nbytes=lba_nbytes)
    assert member.direct


def test_a_namespace_without_its_block_size_is_refused(member: FileMember) -> None:
    if reason := uring_refusal():
        pytest.skip(f"io_uring is refused here: {reason}")
    become_generic(member, 4 * KiB)
    with FileController([member]) as controller:
        assert controller.executor_name == "passthrough"
    member.give_up_direct("to see the library refuse it")
    with pytest.raises(Unsupported, match="no passthrough"):
        FileController([member])

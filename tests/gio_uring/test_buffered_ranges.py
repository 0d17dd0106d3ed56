"""Two paths to one file: which blocks take which, and that they never disagree."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from nvme_host import LBA, READ, WRITE, NvmeHost

from tutti.base.units import MiB
from tutti.errors import ConfigError, MediumError, PoolMoved, Unsupported
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_file import BlockRange, FileController, _without
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.file_member import FileMember

OK = nvme.STATUS_OK
NBYTES = 4 * MiB
BLOCKS = NBYTES // LBA


@pytest.fixture
def host(executor: str, tmp_path: Path) -> Iterator[NvmeHost]:
    paths = [tmp_path / f"member{i}" for i in range(2)]
    for path in paths:
        allocate_file(path, NBYTES)
    controller = FileController(paths, executor=executor)
    if not controller.direct:
        controller.close()
        pytest.skip(f"no direct I/O here: {controller.members[0].buffered_reason}")
    made = NvmeHost(controller, depth=64)
    yield made
    made.close()
    controller.close()


def file_of(host: NvmeHost) -> FileController:
    assert isinstance(host.controller, FileController)
    return host.controller


def whole(nsid: int = 1) -> BlockRange:
    return BlockRange(nsid, 0, BLOCKS)


def drop_all(controller: FileController) -> None:
    for nsid in (1, 2):
        controller.drop(whole(nsid))
        assert controller.resident_nbytes(whole(nsid)) == 0


def transfer_all(host: NvmeHost, opcode: int, spans: list[tuple[int, int]]) -> None:
    """Spans of blocks between the medium and the same place of the buffer."""
    fills = [
        host.transfer(
            opcode, a, b - a, [host.extent(a * LBA, (b - a) * LBA)], lists=host.list_memory(i * 64)
        )
        for i, (a, b) in enumerate(spans)
    ]
    assert host.run_all(fills) == [OK] * len(spans)


def test_only_what_is_buffered_stays_in_the_page_cache(host: NvmeHost) -> None:
    controller = file_of(host)
    drop_all(controller)
    controller.set_buffered([BlockRange(1, 100, 50), BlockRange(1, 200, 10), BlockRange(2, 7, 1)])
    for opcode in (WRITE, READ):
        transfer_all(host, opcode, [(0, 250)])
        assert controller.resident_nbytes(whole()) == 60 * LBA
        assert controller.resident_nbytes(BlockRange(1, 100, 50)) == 50 * LBA
        assert controller.resident_nbytes(BlockRange(1, 200, 10)) == 10 * LBA
    assert controller.resident_nbytes(whole(2)) == 0
    assert controller.stats().buffered == 4


@pytest.mark.parametrize(("nlb", "requests", "buffered"), [(8, 3, 1), (7, 4, 2)])
def test_requests_end_at_the_border_of_a_range(
    host: NvmeHost, seed: int, nlb: int, requests: int, buffered: int
) -> None:
    """Commands are joined within a path and never across; the border may cut a command."""
    controller = file_of(host)
    model = random.Random(seed).randbytes(NBYTES)
    for at in range(0, BLOCKS, 256):
        assert host.write(at, model[at * LBA : (at + 256) * LBA]) == OK
    drop_all(controller)
    controller.set_buffered([BlockRange(1, 10, nlb)])
    before = controller.stats()
    transfer_all(host, READ, [(i, i + 2) for i in range(0, 32, 2)])
    after = controller.stats()
    assert host.data[: 32 * LBA].tobytes() == model[: 32 * LBA]
    assert after.requests - before.requests == requests
    assert after.buffered - before.buffered == buffered
    assert controller.resident_nbytes(whole()) == nlb * LBA


def test_adjacent_ranges_are_one_path(host: NvmeHost) -> None:
    controller = file_of(host)
    controller.set_buffered([BlockRange(1, 8, 8), BlockRange(1, 0, 8)])
    transfer_all(host, WRITE, [(i, i + 1) for i in range(16)])
    assert controller.stats().requests <= 2


@pytest.mark.parametrize("round_", range(2))
def test_paths_change_and_every_byte_stays_right(host: NvmeHost, seed: int, round_: int) -> None:
    """Random transfers and random plans; a model in memory knows what every block holds."""
    rng = random.Random(seed * 2 + round_)
    controller = file_of(host)
    model = np.zeros((BLOCKS, LBA), np.uint8)
    for _ in range(12):
        cuts = sorted(rng.sample(range(BLOCKS), 2 * rng.randrange(1, 6)))
        plan = [BlockRange(1, a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        rng.shuffle(plan)
        controller.set_buffered(plan)
        buffered = np.zeros(BLOCKS, np.bool_)
        for blocks in plan:
            buffered[blocks.slba : blocks.slba + blocks.nlb] = True
        # Blocks that left the page cache have nothing there, so nothing can be there twice.
        left = [BlockRange(1, int(b), 1) for b in np.flatnonzero(~buffered)[::37]]
        assert all(controller.resident_nbytes(blocks) == 0 for blocks in left)
        spans = disjoint_spans(rng)
        for a, b in spans:
            model[a:b] = np.frombuffer(rng.randbytes((b - a) * LBA), np.uint8).reshape(b - a, LBA)
            host.data[a * LBA : b * LBA] = model[a:b].reshape(-1)
        transfer_all(host, WRITE, spans)
        spans = disjoint_spans(rng)
        host.data[:] = 0xEE
        transfer_all(host, READ, spans)
        for a, b in spans:
            assert np.array_equal(host.data[a * LBA : b * LBA], model[a:b].reshape(-1))
    controller.set_buffered([])
    assert controller.resident_nbytes(whole()) == 0
    assert Path(controller.members[0].name).read_bytes() == model.tobytes()


def disjoint_spans(rng: random.Random) -> list[tuple[int, int]]:
    cuts = sorted(rng.sample(range(BLOCKS), 17))
    return [(a, min(b, a + 100)) for a, b in itertools.pairwise(cuts)]


def test_flush_makes_the_page_cache_durable(host: NvmeHost) -> None:
    """After a flush no page of the range is dirty: dropping without write-back loses nothing."""
    controller = file_of(host)
    controller.set_buffered([BlockRange(1, 0, 64)])
    content = os.urandom(64 * LBA)
    assert host.write(0, content) == OK
    assert host.flush() == OK
    member = controller.members[0]
    assert member.buffered_fd is not None
    os.posix_fadvise(member.buffered_fd, 0, 64 * LBA, os.POSIX_FADV_DONTNEED)
    assert controller.resident_nbytes(BlockRange(1, 0, 64)) == 0  # dirty pages would stay
    assert host.read(0, 64).tobytes() == content


def test_dropping_writes_back_first(host: NvmeHost) -> None:
    controller = file_of(host)
    controller.set_buffered([BlockRange(1, 0, 64)])
    content = os.urandom(64 * LBA)
    assert host.write(0, content) == OK
    controller.drop(BlockRange(1, 3, 1))
    assert controller.resident_nbytes(BlockRange(1, 3, 1)) == 0  # a dirty page would stay
    assert host.read(0, 64).tobytes() == content


def test_what_somebody_else_read_is_not_served(host: NvmeHost) -> None:
    """A direct write under pages that another reader holds, then the buffered path to them."""
    controller, blocks = file_of(host), BlockRange(1, 8, 64)
    assert host.write(8, bytes(64 * LBA)) == OK
    with (
        open(controller.members[0].name, "rb") as file,
        mmap.mmap(file.fileno(), NBYTES, prot=mmap.PROT_READ) as mapped,
    ):
        assert not any(mapped[8 * LBA : 72 * LBA])
        assert controller.resident_nbytes(blocks) == 64 * LBA
        content = os.urandom(64 * LBA)
        assert host.write(8, content) == OK
        controller.set_buffered([blocks])
        assert host.read(8, 64).tobytes() == content
        assert mapped[8 * LBA : 72 * LBA] == content
    assert controller.stats().buffered


def test_fua_writes_leave_nothing_dirty(host: NvmeHost) -> None:
    controller = file_of(host)
    controller.set_buffered([BlockRange(1, 0, 64)])
    assert host.write(0, bytes(64 * LBA), flags=nvme.FUA) == OK
    member = controller.members[0]
    assert member.buffered_fd is not None
    os.posix_fadvise(member.buffered_fd, 0, 64 * LBA, os.POSIX_FADV_DONTNEED)
    assert controller.resident_nbytes(BlockRange(1, 0, 64)) == 0


def test_unaligned_memory_needs_no_bounce_in_the_page_cache(host: NvmeHost) -> None:
    controller = file_of(host)
    controller.set_buffered([whole()])
    host.data[1 : 1 + 3 * LBA] = 9
    assert host.run(host.transfer(WRITE, 5, 3, [host.extent(1, 3 * LBA)])) == OK
    assert controller.stats().bounced == 0
    assert np.all(host.read(5, 3) == 9)


@pytest.mark.parametrize(
    "ranges",
    [
        [BlockRange(1, 0, 0)],
        [BlockRange(1, BLOCKS, 1)],
        [BlockRange(1, 1, BLOCKS)],
        [BlockRange(1, 0, 10), BlockRange(1, 9, 1)],
        [BlockRange(0, 0, 1)],
        [BlockRange(3, 0, 1)],
        [BlockRange(1, 1, 2**64 - 1)],
    ],
)
def test_bad_ranges_change_nothing(host: NvmeHost, ranges: list[BlockRange]) -> None:
    controller = file_of(host)
    drop_all(controller)
    controller.set_buffered([BlockRange(1, 3, 4)])
    with pytest.raises(ConfigError, match=r"disjoint|namespace"):
        controller.set_buffered(ranges)
    assert controller.buffered == (BlockRange(1, 3, 4),)
    transfer_all(host, WRITE, [(0, 16)])
    assert controller.resident_nbytes(whole()) == 4 * LBA


def test_residency_of_a_file_that_cannot_be_mapped(
    host: NvmeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Mock(side_effect=OSError(errno.EMFILE, "too many files")))
        with pytest.raises(MediumError, match="limits of open files"):
            file_of(host).resident_nbytes(whole())
    os.truncate(tmp_path / "member0", NBYTES // 2)
    with pytest.raises(PoolMoved, match="was truncated"):
        file_of(host).resident_nbytes(whole())


def test_files_that_are_buffered_anyway_refuse(tmp_path: Path) -> None:
    allocate_file(tmp_path / "member", NBYTES)
    member = FileMember(tmp_path / "member", direct=False)
    with FileController([member]) as controller, pytest.raises(Unsupported, match="as a whole"):
        controller.set_buffered([BlockRange(1, 0, 1)])
    member.close()


def test_a_write_back_that_fails_changes_nothing_whenever_it_fails(
    host: NvmeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = file_of(host)
    before = [BlockRange(1, 0, 64)]
    for good in range(3):
        controller.set_buffered(before)
        transfer_all(host, WRITE, [(0, 64)])
        calls, write_back = itertools.count(), FileMember.write_back

        def fails(
            member: FileMember,
            offset: int,
            nbytes: int,
            calls: Iterator[int] = calls,
            good: int = good,
            write_back: Callable[[FileMember, int, int], None] = write_back,
        ) -> None:
            if next(calls) >= good:
                raise MediumError("a bad block")
            write_back(member, offset, nbytes)

        with monkeypatch.context() as patch:
            patch.setattr(FileMember, "write_back", fails)
            try:
                controller.set_buffered([])
            except MediumError:
                assert controller.buffered == tuple(before)
            else:
                assert controller.buffered == ()


def test_the_paths_share_no_page_of_memory(tmp_path: Path) -> None:
    """Or the page would be written back over what went past it."""
    allocate_file(tmp_path / "member", NBYTES)
    with FileController([tmp_path / "member"], lba_nbytes=512) as controller:
        if not controller.direct:
            pytest.skip(f"no direct I/O here: {controller.members[0].buffered_reason}")
        for slba, nlb in ((0, 7), (4, 12), (8, 4)):
            with pytest.raises(ConfigError, match="4096"):
                controller.set_buffered([BlockRange(1, slba, nlb)])
        controller.set_buffered([BlockRange(1, 8, 16)])


def test_what_leaves_is_what_no_new_range_covers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        old, new = random_ranges(rng), random_ranges(rng)
        rng.shuffle(new)
        covered = {(r.nsid, b) for r in new for b in range(r.slba, r.slba + r.nlb)}
        expected = {(r.nsid, b) for r in old for b in range(r.slba, r.slba + r.nlb)} - covered
        pieces = _without(old, new)
        found = [(r.nsid, b) for r in pieces for b in range(r.slba, r.slba + r.nlb)]
        assert len(found) == len(set(found))
        assert set(found) == expected


def random_ranges(rng: random.Random) -> list[BlockRange]:
    ranges = []
    for nsid in (1, 2):
        cuts = sorted(rng.sample(range(40), 2 * rng.randrange(0, 6)))
        ranges += [BlockRange(nsid, a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    return ranges

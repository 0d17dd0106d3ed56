"""The file controller: how commands become requests, and what happens when files misbehave."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import random
import resource
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvme_host import LBA, READ, WRITE, Fill, NvmeHost

from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, DeviceTimeout, PoolNotFound, PoolReadOnly
from tutti.gio_uring import controller_file
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_file import FileController, RequestLimits, uring_refusal
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.file_member import FileMember
from tutti.gio_uring.memory import HostBuffer

OK = nvme.STATUS_OK
NBYTES = 4 * MiB
RECORD = struct.Struct("<4sIIIQQQ")  # RecordHeader of kernels/native/executor.h


@pytest.fixture
def path(tmp_path: Path) -> Path:
    allocate_file(tmp_path / "member", NBYTES)
    return tmp_path / "member"


class Opened:
    """Controllers with a host each, closed at the end."""

    def __init__(self) -> None:
        self.hosts: list[NvmeHost] = []

    def __call__(self, files: Any, depth: int = 32, **options: Any) -> NvmeHost:
        files = files if isinstance(files, list) else [files]
        self.hosts.append(NvmeHost(FileController(files, **options), depth))
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.close()
            host.controller.close()
        self.hosts.clear()


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    made.close()


def stats(host: NvmeHost) -> dict[str, int]:
    assert isinstance(host.controller, FileController)
    found = host.controller.stats()
    return {name: getattr(found, name) for name, _ in found._fields_}


def blocks(host: NvmeHost, opcode: int, slba: int, at: int, nlb: int = 1, **more: Any) -> Fill:
    """A transfer between the medium and block `at` of the buffer."""
    extents = [host.extent(at * LBA, nlb * LBA)]
    more.setdefault("lists", host.list_memory(at * 64, 64))
    return host.transfer(opcode, slba, nlb, extents, **more)


def fill_file(path: Path, seed: int) -> bytes:
    content = random.Random(seed).randbytes(NBYTES)
    path.write_bytes(content)
    return content


def is_tmpfs(folder: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return any(fields[1] == str(folder) and fields[2] == "tmpfs" for fields in mounts)


def test_adjacent_commands_become_one_request(
    opened: Opened, path: Path, executor: str, seed: int
) -> None:
    content = fill_file(path, seed)
    host = opened(path, executor=executor)
    # In the buffer they lie in reverse order, so the request has an extent for each.
    assert host.run_all([blocks(host, READ, 8 + i, 20 - i) for i in range(16)]) == [OK] * 16
    for i in range(16):
        assert host.data[(20 - i) * LBA :][:LBA].tobytes() == content[(8 + i) * LBA :][:LBA]
    found = stats(host)
    assert (found["commands"], found["requests"], found["joined"]) == (16, 1, 15)
    assert found["nbytes_read"] == 16 * LBA


@pytest.mark.parametrize(
    ("second", "requests"),
    [
        ({}, 1),
        ({"slba": 2}, 2),
        ({"opcode": READ}, 2),
        ({"flags": nvme.FUA}, 2),
        ({"nsid": 2}, 2),
    ],
)
def test_what_is_joined(
    opened: Opened, tmp_path: Path, path: Path, second: dict[str, int], requests: int
) -> None:
    allocate_file(tmp_path / "other", NBYTES)
    host = opened([path, tmp_path / "other"])
    first = blocks(host, WRITE, 0, 0)
    arguments = {"opcode": WRITE, "slba": 1, "at": 1} | second
    assert host.run_all([first, blocks(host, **arguments)]) == [OK, OK]  # type: ignore[arg-type]
    assert stats(host)["requests"] == requests


def test_long_commands_are_cut(opened: Opened, path: Path, executor: str, seed: int) -> None:
    content = fill_file(path, seed)
    host = opened(path, executor=executor, limits=RequestLimits(100_000))  # 24 blocks
    sizes = [3 * LBA, 100 * LBA, 40 * LBA]
    extents = [host.extent(sum(sizes[i + 1 :]), size) for i, size in enumerate(sizes)]
    assert host.run(host.transfer(READ, 5, 143, extents)) == OK
    start = 5 * LBA
    for (address, size), before in zip(extents, (0, 3 * LBA, 103 * LBA), strict=True):
        at = address - host.buffer.address
        assert host.data[at : at + size].tobytes() == content[start + before :][:size]
    assert stats(host)["requests"] == 6


def test_requests_are_long_on_large_pages_alone(
    opened: Opened, tmp_path: Path, executor: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long"
    content = random.Random(seed).randbytes(2 * MiB)
    path.write_bytes(content)
    host = opened(path, executor=executor)

    def large_nbytes(share: float, ranges: list[tuple[int, int]]) -> int:
        return math.ceil(share * sum(nbytes for _, nbytes in ranges))

    for share, is_large in ((0.0, False), (0.89, False), (0.9, True)):
        monkeypatch.setattr(controller_file, "hugepage_nbytes", partial(large_nbytes, share))
        memory = HostBuffer(4 * MiB, hugepages=False)
        memory.array[:] = 0
        with host.controller.register(memory):
            host.controller.read_page_sizes()
            assert host.controller.request_nbytes_max == (2 * MiB if is_large else 512 * KiB)
            before = stats(host)["requests"]
            halves = [(memory.address + at, MiB) for at in (0, MiB)]
            reads = [
                host.transfer(READ, i * MiB // LBA, MiB // LBA, [half])
                for i, half in enumerate(halves)
            ]
            assert host.run_all(reads) == [OK, OK]
            assert stats(host)["requests"] - before == (1 if is_large else 4)
            assert memory.array[: 2 * MiB].tobytes() == content
            # A request has at most 128 pieces of memory on pages of any size.
            before = stats(host)["requests"]
            pieces = [(memory.address + 2 * at * LBA, LBA) for at in range(256)]
            assert host.run(host.transfer(READ, 0, 256, pieces)) == OK
            assert stats(host)["requests"] - before == 2
            assert memory.array[510 * LBA :][:LBA].tobytes() == content[255 * LBA :][:LBA]
            before = stats(host)["requests"]
            joined = [
                host.transfer(
                    READ, at, 16, pieces[at : at + 16], lists=host.list_memory(at * 16, 256)
                )
                for at in range(0, 256, 16)
            ]
            assert host.run_all(joined) == [OK] * 16
            assert stats(host)["requests"] - before == 2
    host.close()
    host.controller.close()
    host.controller.read_page_sizes()  # does nothing


def test_few_requests_serve_many_commands(
    opened: Opened, path: Path, executor: str, seed: int
) -> None:
    """With two requests, commands wait half cut and nothing is lost or done twice."""
    rng = random.Random(seed)
    model = bytearray(fill_file(path, seed))
    host = opened(path, executor=executor, limits=RequestLimits(3 * LBA, 2))
    for _ in range(6):
        cuts = sorted(rng.sample(range(1, 200), 15))
        spans = list(itertools.pairwise(cuts))  # disjoint on the medium, and in memory
        writes = [rng.random() < 0.5 for _ in spans]
        host.data[: 200 * LBA] = np.frombuffer(rng.randbytes(200 * LBA), np.uint8)
        before = host.data.copy()
        fills = [
            blocks(host, WRITE if write else READ, a, a, b - a)
            for (a, b), write in zip(spans, writes, strict=True)
        ]
        rng.shuffle(fills)
        assert host.run_all(fills) == [OK] * len(fills)
        for (a, b), write in zip(spans, writes, strict=True):
            if write:
                model[a * LBA : b * LBA] = before[a * LBA : b * LBA].tobytes()
            assert host.data[a * LBA : b * LBA].tobytes() == model[a * LBA : b * LBA]
    opened.close()
    assert path.read_bytes() == model


def test_unaligned_memory_bounces(opened: Opened, path: Path, executor: str, seed: int) -> None:
    """More of them than there are bounce buffers, in both directions."""
    member = FileMember(path)
    member.close()
    if not member.direct:
        pytest.skip(f"no direct I/O here: {member.buffered_reason}")
    rng = random.Random(seed)
    model = bytearray(fill_file(path, seed))
    host = opened(path, executor=executor)
    host.data[:] = np.frombuffer(rng.randbytes(host.data.size), np.uint8)
    for opcode in (WRITE, READ):
        before = host.data.copy()
        fills, places = [], []
        for i in range(30):
            extents = [host.extent(i * 3 * LBA + 4, 100), host.extent(i * 3 * LBA + 400, LBA - 100)]
            lists = host.list_memory(i * 64, 64)
            fills.append(host.transfer(opcode, 7 * i, 1, extents, lists=lists))
            places.append([a - host.buffer.address for a, _ in extents])
        assert host.run_all(fills) == [OK] * 30
        for i, (first, second) in enumerate(places):
            moved = host.data[first : first + 100].tobytes()
            moved += host.data[second : second + LBA - 100].tobytes()
            if opcode == WRITE:
                model[7 * i * LBA : (7 * i + 1) * LBA] = moved
            assert moved == model[7 * i * LBA : (7 * i + 1) * LBA]
            before[first : first + 100] = host.data[first : first + 100]
            before[second : second + LBA - 100] = host.data[second : second + LBA - 100]
        assert np.array_equal(before, host.data), "bytes beside the extents changed"
        host.data[:] = 0
    assert stats(host)["bounced"] == 60
    opened.close()
    assert path.read_bytes() == model


def test_tmpfs_is_buffered_and_says_so(opened: Opened, executor: str) -> None:
    folder = Path("/dev/shm")
    if not is_tmpfs(folder):
        pytest.skip("/dev/shm is not a tmpfs")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        allocate_file(Path(name) / "member", NBYTES)
        host = opened(Path(name) / "member", executor=executor)
        controller = host.controller
        assert isinstance(controller, FileController)
        assert not controller.direct
        assert "direct I/O" in str(controller.members[0].buffered_reason)
        extents = [host.extent(1, 3 * LBA)]
        host.data[: 4 * LBA] = 7
        assert host.run(host.transfer(WRITE, 5, 3, extents)) == OK
        host.data[:] = 0
        assert host.run(host.transfer(READ, 5, 3, extents)) == OK
        assert np.all(host.data[1 : 1 + 3 * LBA] == 7)
        assert stats(host)["bounced"] == 0
        opened.close()


def test_deallocate_gives_blocks_back(opened: Opened, path: Path, executor: str) -> None:
    path.write_bytes(b"x" * NBYTES)
    before = path.stat().st_blocks
    host = opened(path, executor=executor)
    assert host.deallocate([(16, 64), (0, 0), (512, 128)]) == OK
    assert host.deallocate([(3, 0)]) == OK
    assert host.deallocate([(0, NBYTES // LBA + 1)]) == nvme.STATUS_LBA_OUT_OF_RANGE
    assert host.deallocate([(NBYTES // LBA, 1)]) == nvme.STATUS_LBA_OUT_OF_RANGE
    assert not host.read(16, 64).any()
    assert not host.read(512, 128).any()
    assert host.read(15, 1).tobytes() == host.read(80, 1).tobytes() == b"x" * LBA
    assert path.stat().st_size == NBYTES
    assert path.stat().st_blocks <= before - 192 * LBA // 512
    with path.open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 16 * LBA


def test_deallocate_takes_256_ranges(opened: Opened, path: Path, executor: str) -> None:
    path.write_bytes(b"x" * NBYTES)
    host = opened(path, executor=executor)
    assert host.deallocate([(2 * i, 1) for i in range(256)]) == OK
    content = path.read_bytes()
    for i in range(512):
        assert content[i * LBA : (i + 1) * LBA] == (b"x" if i % 2 else b"\0") * LBA


def records(log: Path) -> list[tuple[int, int, int, int, int, int, bytes]]:
    """(opcode, nsid, flags, offset, nbytes, covered, data) of every entry."""
    content = log.read_bytes()
    found, at = [], 0
    while at < len(content):
        magic, opcode, nsid, flags, offset, nbytes, covered = RECORD.unpack_from(content, at)
        assert magic == b"GREC"
        at += RECORD.size
        data = content[at : at + nbytes] if opcode == WRITE else b""
        at += len(data)
        found.append((opcode, nsid, flags, offset, nbytes, covered, data))
    return found


def test_recorder_logs_what_was_acknowledged(
    opened: Opened, path: Path, tmp_path: Path, executor: str, seed: int
) -> None:
    rng = random.Random(seed)
    model = bytearray(fill_file(path, seed))
    start = bytes(model)
    log = tmp_path / "log"
    with log.open("wb") as file:
        host = opened(path, executor=executor, record_fd=file.fileno())
        assert host.write(3, rng.randbytes(2 * LBA)) == OK
        assert host.write(9, rng.randbytes(LBA), flags=nvme.FUA) == OK
        assert host.flush() == OK
        host.read(0, 4)
        assert host.deallocate([(100, 2)]) == OK
        host.data[: 20 * LBA] = np.frombuffer(rng.randbytes(20 * LBA), np.uint8)
        assert host.run_all([blocks(host, WRITE, 3 * i, i, 1) for i in range(20)]) == [OK] * 20
        opened.close()
    found = records(log)
    kinds = [nvme.OPCODE_WRITE, nvme.OPCODE_WRITE, nvme.OPCODE_FLUSH]
    assert [entry[0] for entry in found[:4]] == [*kinds, nvme.OPCODE_DATASET_MANAGEMENT]
    assert [entry[2] for entry in found[:4]] == [0, 1, 0, 0]
    assert found[2][5] == 2, "the flush covers the two writes before it"
    assert len(found) == 24
    for opcode, nsid, _, offset, nbytes, _, data in found:
        assert nsid == 1
        if opcode == WRITE:
            model[offset : offset + nbytes] = data
        elif opcode == nvme.OPCODE_DATASET_MANAGEMENT:
            model[offset : offset + nbytes] = bytes(nbytes)
    assert model != start
    assert path.read_bytes() == model


@pytest.mark.parametrize("shift", [0, 4])
def test_end_of_file_fails_only_what_lies_behind_it(
    opened: Opened, path: Path, executor: str, seed: int, shift: int
) -> None:
    """Eight joined commands on a file that another process cut: each has its own status."""
    content = fill_file(path, seed)
    host = opened(path, executor=executor)
    os.truncate(path, 5 * LBA)
    fills = [host.transfer(READ, i, 1, [host.extent(2 * i * LBA + shift, LBA)]) for i in range(8)]
    assert host.run_all(fills) == [OK] * 5 + [nvme.STATUS_UNRECOVERED_READ] * 3
    for i in range(5):
        at = 2 * i * LBA + shift
        assert host.data[at : at + LBA].tobytes() == content[i * LBA : (i + 1) * LBA]
    found = stats(host)
    assert found["requests"] == 1
    assert found["repeated"] > 0


def test_end_of_file_within_an_extent(opened: Opened, path: Path, executor: str, seed: int) -> None:
    """A short transfer that stops inside the second of two commands."""
    content = fill_file(path, seed)
    host = opened(path, executor=executor)
    os.truncate(path, 5 * LBA)
    host.data[: 16 * LBA] = 0xAA
    statuses = host.run_all([blocks(host, READ, 4 * i, 8 * i, 4) for i in range(2)])
    assert statuses == [OK, nvme.STATUS_UNRECOVERED_READ]
    assert host.data[: 4 * LBA].tobytes() == content[: 4 * LBA]
    assert host.data[8 * LBA : 9 * LBA].tobytes() == content[4 * LBA : 5 * LBA]
    # Direct reads may put zeros behind the end.
    assert set(host.data[9 * LBA : 12 * LBA].tolist()) <= {0, 0xAA}
    assert np.all(host.data[12 * LBA : 16 * LBA] == 0xAA)


def test_limit_on_file_size_is_capacity_exceeded(opened: Opened, path: Path, executor: str) -> None:
    host = opened(path, executor=executor)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MiB, hard))
    try:
        statuses = host.run_all([blocks(host, WRITE, 2 * MiB // LBA - 2 + i, i) for i in range(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert statuses == [OK, OK] + [nvme.STATUS_CAPACITY_EXCEEDED] * 2


def test_reset_answers_everything(opened: Opened, path: Path, executor: str, seed: int) -> None:
    content = fill_file(path, seed)
    host = opened(path, executor=executor, limits=RequestLimits(LBA, 4))
    for turns in (0, 1):
        cids = host.submit([blocks(host, READ, 2 * i, i) for i in range(31)])
        for _ in range(turns):
            host.controller.service(0)
        host.controller.reset(20.0)
        host.data[:] = 0  # memory is the caller's again
        statuses = host.wait(cids)
        assert nvme.STATUS_ABORTED_SQ_DELETION in statuses
        assert set(statuses) <= {OK, nvme.STATUS_ABORTED_SQ_DELETION}
        assert not host.data.any()
    assert host.read(1, 2).tobytes() == content[LBA : 3 * LBA]


def test_a_wake_up_ends_one_sleep(opened: Opened, path: Path, executor: str) -> None:
    """What it was for is looked at in between: the next turn may submit and sleep at once."""
    controller = opened(path, executor=executor).controller
    controller.service(0.01)  # takes the host's queue pair, for which it was woken
    sleeper = threading.Thread(target=controller.service, args=(5.0,))
    sleeper.start()
    time.sleep(0.1)
    controller.expect_rings(True)
    sleeper.join(4)
    controller.expect_rings(False)
    begin_s = time.monotonic()
    controller.service(0.3)
    assert not sleeper.is_alive() and time.monotonic() - begin_s > 0.2


def test_a_disk_that_outlived_a_reset_is_used_again(
    opened: Opened, path: Path, executor: str, seed: int
) -> None:
    content = fill_file(path, seed)
    host = opened(path, executor=executor)
    for _ in range(20):
        cids = host.submit([blocks(host, READ, 256 * i, 256 * i, 256) for i in range(4)])
        host.controller.service(0)
        with contextlib.suppress(DeviceTimeout):  # unless all ended before the reset
            host.controller.reset(0.0)
        assert set(host.wait(cids)) <= {OK, nvme.STATUS_ABORTED_SQ_DELETION}
        assert host.read(1, 2).tobytes() == content[LBA : 3 * LBA]


def test_own_thread_serves_and_stops(opened: Opened, path: Path, executor: str, seed: int) -> None:
    content = fill_file(path, seed)
    host = opened(path, executor=executor)
    host.controller.start()
    for i in range(5):
        assert host.run_all([blocks(host, READ, i + 2 * k, k) for k in range(20)]) == [OK] * 20
        assert host.data[:LBA].tobytes() == content[i * LBA :][:LBA]
    host.controller.stop()
    host.data[:] = 0
    assert host.read(0, 1).tobytes() == content[:LBA]


def test_a_ring_that_was_made_is_taken(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the next one would be refused is asked only after a failure."""
    if reason := uring_refusal():
        pytest.skip(f"io_uring is refused here: {reason}")
    monkeypatch.setattr(controller_file, "uring_refusal", lambda: "Cannot allocate memory")
    assert opened(path, executor="uring").write(0, b"z" * LBA) == OK


def test_files_that_cannot_be_opened(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PoolNotFound, match="does not exist"):
        FileController([tmp_path / "nothing"])
    with pytest.raises(ConfigError):
        FileController([tmp_path])
    with pytest.raises(ConfigError, match="neither a file nor a block device"):
        FileController(["/dev/null"])
    with pytest.raises(ConfigError, match="pass at least one"):
        FileController([])
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(ConfigError, match="less than a block"):
        FileController([path, tmp_path / "small"])
    limits = [{"limits": RequestLimits(in_flight_max=0)}, {"limits": RequestLimits(threads=65)}]
    for wrong in ({"lba_nbytes": 1000}, {"executor": "tape"}, *limits):
        with pytest.raises(ConfigError):
            FileController([path], **wrong)  # type: ignore[arg-type]

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PoolReadOnly, match="Read-only file system"):
        FileController([path])


def test_open_files_stay_the_callers(opened: Opened, path: Path) -> None:
    with path.open("r+b", buffering=0) as file:
        host = opened([file.fileno()])
        assert isinstance(host.controller, FileController)
        assert not host.controller.direct
        member = host.controller.members[0]
        assert host.write(0, b"z" * LBA) == OK
        opened.close()
        assert os.pread(file.fileno(), 4, 0) == b"zzzz"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(member.fd)
    kept = FileMember(path, direct=False)
    opened([kept])
    opened.close()
    assert os.fstat(kept.fd).st_size == NBYTES
    kept.close()

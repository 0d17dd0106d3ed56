"""In the guest: what goes over the wire, what fails there, and a drive that leaves the kernel.

The drive `failing` has three faults in turn, see `FAULTS` in test_kernel_faults.py: each Write
Zeroes command moves it on to the next one, and behind the last one to health.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from crash.objects import as_rows, check_books, content_of, format_members
from nvme_host import LBA, NvmeHost

import tutti
from qemu.inside_kernel import BLKZEROOUT, KINDS, OUT, controllers, members, namespaces
from store.pools import GEOMETRY, LAYOUT
from tutti import cli
from tutti.base.units import MiB
from tutti.errors import (
    CapacityError,
    DeviceGone,
    KeyMissing,
    MediumError,
    PoolExists,
    PoolInUse,
    TuttiError,
)
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_file import FileController
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

OK = nvme.STATUS_OK
FAULTS = ("flush", "record", "write")
TRACING = Path("/sys/kernel/tracing")
FUA_CONTROL = 1 << 14  # of the upper half of CDW12, as the kernel prints it
DEADLINE_S = 60.0


class Command(NamedTuple):
    """One command as the kernel handed it to a drive; slba and control of reads and writes."""

    name: str
    slba: int
    control: int


@contextlib.contextmanager
def wire(serial: str) -> Iterator[list[Command]]:
    """Notes the commands of a drive's queues, which are in the list afterwards.

    Source: Linux, drivers/nvme/host/trace.h, the event nvme_setup_cmd.
    """
    if not (TRACING / "events").exists():
        subprocess.run(["mount", "-t", "tracefs", "none", TRACING], check=True)
    name = controllers()[serial].name
    form = rf" {name}: .*qid=[1-9]\d*, .*cmd=\(nvme_cmd_(\w+)(?: slba=(\d+), .*ctrl=(0x\w+))?"
    enable = TRACING / "events/nvme/nvme_setup_cmd/enable"
    commands: list[Command] = []
    (TRACING / "trace").write_text("")
    enable.write_text("1")
    try:
        yield commands
    finally:
        enable.write_text("0")
        for line in (TRACING / "trace").read_text().splitlines():
            if found := re.search(form, line):
                commands.append(Command(found[1], int(found[2] or 0), int(found[3] or "0", 16)))


def move_on() -> None:
    """One Write Zeroes command behind the pool."""
    [path] = namespaces("failing")
    with open(path, "r+b", buffering=0) as device:
        nbytes = device.seek(0, 2)
        fcntl.ioctl(device, BLKZEROOUT, struct.pack("=QQ", nbytes - LBA, LBA))


@contextlib.contextmanager
def fault(what: str) -> Iterator[None]:
    """Meanwhile the drive `failing` fails flushes, writes of records, or all writes."""
    turns = FAULTS.index(what) + 1
    for _ in range(turns):
        move_on()
    try:
        yield
    finally:
        for _ in range(len(FAULTS) + 1 - turns):
            move_on()


def filled(store: ObjectStore, keys: list[bytes]) -> HostMemory:
    pool = store.allocate_memory(2 * len(keys), hugepages=False)
    for page, key in enumerate(keys):
        pool.write(page, content_of(key))
    return pool


def some_keys(seed: int, count: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(16) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("durability", ["flush", "process"])
def test_fua_and_flush_reach_the_drive(kind: str, durability: str, seed: int) -> None:
    """Data, one Flush, then records, each with FUA; nothing of that for the weaker promise."""
    paths = members(kind, "wired")
    format_members(paths, GEOMETRY)
    keys = some_keys(seed, 8)
    with tutti.open(paths, durability=durability) as store:
        store.wait_recovered(30)
        filled(store, keys)
        with wire("wired") as commands:
            assert store.put(as_rows(keys), np.arange(8)).wait(30).stored == 8
    writes = [c for c in commands if c.name == "write"]
    table = range(GEOMETRY.table_offset // LBA, GEOMETRY.groups_offset // LBA)
    records = [c.slba in table for c in writes]
    assert any(records)
    assert not all(records)
    forced = [c.control & FUA_CONTROL != 0 for c in writes]
    if durability == "process":
        assert not any(forced)
        assert "flush" not in {c.name for c in commands}
        return
    assert forced == records
    steps = "".join("f" if c.name == "flush" else "dr"[c.slba in table] for c in commands)
    assert re.fullmatch("d+fr+", steps), steps


def verdict_on(path: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `tutti nvme list` says of a namespace."""
    capsys.readouterr()
    assert cli.main(["nvme", "list", "--json"]) == 0
    [found] = [d for d in json.loads(capsys.readouterr().out)["devices"] if d["path"] == path]
    return dict(found)


def test_a_mounted_namespace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By both of its paths, and by its serial number too; listed with the reason."""
    [path] = members("block", "left")
    [through] = members("passthrough", "left")
    free = verdict_on(path, capsys)
    assert (free["is_free"], free["generic"], free["serial"]) == (True, through, "left")
    subprocess.run(["mkfs.ext4", "-q", path], check=True)
    subprocess.run(["mount", path, tmp_path], check=True)
    try:
        assert verdict_on(path, capsys)["in_use"] == [f"mounted at {tmp_path}"]
        for name in (path, through):
            with pytest.raises(PoolInUse, match="mounted at"):
                tutti.format(name, LAYOUT, 6 * MiB, force="left")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert verdict_on(path, capsys)["holds"] == ["an ext2, ext3 or ext4 file system"]
    with pytest.raises(PoolExists, match=r"ext4 file system.*'left'"):
        tutti.format(through, LAYOUT, 6 * MiB)
    with pytest.raises(CapacityError, match="choose a smaller capacity"):
        tutti.format(through, LAYOUT, 60 * MiB, force="left")


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_flush_is_a_status(kind: str) -> None:
    with FileController(members(kind, "failing")) as controller:
        host = NvmeHost(controller)
        assert host.write(900, b"\x01" * LBA) == OK
        with fault("flush"):
            assert host.write(901, b"\x02" * LBA) == OK
            assert host.flush() == nvme.STATUS_WRITE_FAULT
        with fault("write"):
            assert host.write(902, b"\x03" * LBA, flags=nvme.FUA) == nvme.STATUS_WRITE_FAULT
        assert host.write(902, b"\x04" * LBA, flags=nvme.FUA) == OK
        assert host.flush() == OK
        assert host.read(900, 3).reshape(3, LBA)[:, 0].tolist() == [1, 2, 4]
        host.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FAULTS)
def test_a_put_that_fails_is_not_acknowledged(kind: str, what: str, seed: int) -> None:
    """Neither now nor in the next life; what was acknowledged before and after is there."""
    paths = members(kind, "failing")
    format_members(paths, GEOMETRY)
    keys = some_keys(seed, 12)
    before, failed, after = keys[:4], keys[4:8], keys[8:]
    with tutti.open(paths, durability="flush") as store:
        store.wait_recovered(30)
        filled(store, keys)
        assert store.put(as_rows(before), np.arange(4)).wait(30).stored == 4
        with fault(what):
            ticket = store.put(as_rows(failed), np.arange(4, 8))
            with pytest.raises(MediumError, match="write fault") as caught:
                ticket.wait(30)
            assert caught.value.status == nvme.STATUS_WRITE_FAULT
            assert caught.value.pages == (0, 1, 2, 3)
            assert store.match(as_rows(failed)) == 0
        assert store.put(as_rows(after), np.arange(8, 12)).wait(30).stored == 4
        check_books(store)
    with tutti.open(paths, durability="flush") as store:
        store.wait_recovered(30)
        pool = store.allocate_memory(8, hugepages=False)
        kept = before + after
        assert store.match(as_rows(failed)) == 0
        store.load(as_rows(kept), np.arange(8)).wait(30)
        assert [pool.read(page) for page in range(8)] == [content_of(key) for key in kept]


def load_for_long(store: ObjectStore, keys: list[bytes], loading: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        store.load(as_rows(keys), np.arange(len(keys), 2 * len(keys))).wait(30)
        loading.touch()


def is_served(store: ObjectStore, pool: HostMemory, key: bytes) -> bool:
    """Whether its drive is there; then its content is right."""
    try:
        store.load(as_rows([key]), [40]).wait(30)
    except (MediumError, KeyMissing):  # an error, and a miss from then on
        return False
    assert pool.read(40) == content_of(key)
    return True


@pytest.mark.parametrize(("kind", "leaving"), [*zip(KINDS, ("right", "upper"), strict=True)])
def test_a_drive_leaves_the_kernel_under_load(kind: str, leaving: str, seed: int) -> None:
    """A typed error and no hang; what lies on the other drive is served."""
    paths = [members(kind, serial)[0] for serial in ("left", leaving)]
    format_members(paths, GEOMETRY)
    keys = some_keys(seed, 40)
    store = tutti.open(paths, durability="flush")
    store.wait_recovered(30)
    pool = filled(store, keys)
    assert store.put(as_rows(keys), np.arange(40)).wait(30).stored == 40
    with pytest.raises(MediumError):  # whatever the kernel says of commands that were under way
        load_for_long(store, keys, OUT / f"loading-{leaving}")
    served = sum(is_served(store, pool, key) for key in keys)
    # Groups of the pool take turns on the drives, so about half of the objects are left.
    assert 10 <= served < 40
    with contextlib.suppress(DeviceGone):  # unless a load has found that: not that it is full
        store.put(as_rows(some_keys(seed + 1, 40)), np.arange(40)).wait(30)
    assert store.members.lost == {1}
    assert store.put(as_rows(some_keys(seed + 2, 8)), np.arange(8)).wait(30).stored == 8
    with contextlib.suppress(TuttiError):  # it cannot say on the lost drive that it is closed
        store.close()

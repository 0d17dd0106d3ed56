"""In the guest: namespaces by passthrough, their block devices, and a partition, below one pool."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from crash.objects import live
from crash.test_resize import KEYS, held, made_on
from nvme_host import LBA, READ, WRITE, NvmeHost
from parity.test_controllers import cut, gather, scatter, spread

import tutti
from qemu.benches import BENCHES, check_bench
from qemu.inside_kernel import KINDS, generic, members, namespaces, zero
from store.pools import LAYOUT
from tutti import cli
from tutti.base.units import MiB
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives.generic_device import REQUEST_NBYTES_MAX
from tutti.machine import machine_facts
from tutti.resize import resize

OK = nvme.STATUS_OK
CAPACITY = 40 * MiB
SMALL = ["--model=test-model", "--layers=2", "--kv-heads=1", "--head-dim=64", "--page-size=32"]


def test_the_executor_is_the_one_that_was_meant(controller: FileController, kind: str) -> None:
    wanted = "passthrough" if kind == "passthrough" else "uring"
    assert controller.executor_name == wanted
    assert controller.fallback_reason is None
    assert controller.direct


def test_a_device_is_called_the_same_after_a_restart() -> None:
    """By its size and model; by passthrough it is as fast as another drive."""
    (device, *_) = namespaces("pools")
    disk = str(machine_facts(device)["disk"])
    assert re.match(r"\d+ sectors, .*QEMU", disk)
    assert Path(device).name not in disk
    assert machine_facts(generic(device))["disk"] == f"{disk}, by passthrough"


@pytest.mark.parametrize("pieces", [1, 2, 256])
def test_more_than_the_kernel_takes_at_once(
    controller: FileController, host: NvmeHost, seed: int, pieces: int
) -> None:
    """A megabyte on ordinary pages and on hugepages, in one piece and in pages."""
    rng = random.Random(seed)
    content = rng.randbytes(MiB)
    for opcode in (WRITE, READ):
        extents = scatter(rng, host, cut(rng, MiB, pieces, LBA), 0)
        if opcode == WRITE:
            spread(host, extents, content)
        assert host.run(host.transfer(opcode, 1, MiB // LBA, extents)) == OK
    assert gather(host, extents) == content
    assert controller.stats().requests >= 2 * MiB // REQUEST_NBYTES_MAX


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_512_bytes_and_odd_sizes(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    with FileController(members(kind, "odd"), lba_nbytes=512) as controller:
        host = NvmeHost(controller)
        assert controller.info.namespace_nlb == (16391, 1001)
        for nsid, size in ((1, 16391), (2, 1001)):
            for slba, nlb in ((0, 1), (size - 1, 1), (size - 200, 200), (3, 255)):
                content = rng.randbytes(nlb * 512)
                host.data[: len(content)] = np.frombuffer(content, np.uint8)
                near, far = host.extent(0, nlb * 512), host.extent(MiB + 12, nlb * 512)
                assert host.run(host.transfer(WRITE, slba, nlb, [near], nsid=nsid)) == OK
                assert host.run(host.transfer(READ, slba, nlb, [far], nsid=nsid)) == OK
                assert gather(host, [far]) == content
        host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_injected_errors_hit_what_they_touch(kind: str) -> None:
    with FileController(members(kind, "faulty")) as controller:
        host = NvmeHost(controller)
        fills = [host.transfer(READ, i, 1, [host.extent(i * LBA, LBA)]) for i in range(96, 104)]
        statuses = host.run_all(fills)
        bad = nvme.STATUS_UNRECOVERED_READ
        assert statuses == [bad if i == 100 else OK for i in range(96, 104)]
        fill = host.transfer(WRITE, 200, 1, [host.extent(0, LBA)])
        assert host.run(fill) == nvme.STATUS_WRITE_FAULT
        host.close()


def test_deallocated_blocks_read_zeros(controller: FileController, host: NvmeHost) -> None:
    assert host.write(0, b"\x05" * 64 * LBA) == OK
    assert host.deallocate([(4, 8), (32, 16)]) == OK
    blocks = host.read(0, 64).reshape(64, LBA)
    gone = [*range(4, 12), *range(32, 48)]
    assert not blocks[gone].any()
    assert (np.delete(blocks, gone, axis=0) == 5).all()


def places() -> dict[str, list[str]]:
    """What a pool can lie on, by a name."""
    blocks = namespaces("pools")
    return {
        "generic": [generic(path) for path in blocks],
        "block": blocks,
        "partition": [namespaces("parted")[0] + "p1"],
    }


@pytest.mark.parametrize(
    ("place", "durability"),
    [
        ("generic", "flush"),
        ("generic", "process"),
        ("block", "flush"),
        ("partition", "process"),  # which is a block device as well
    ],
)
def test_a_pool_lives_through_two_lives(place: str, durability: str, seed: int) -> None:
    paths = places()[place]
    for path in paths:
        zero(path.replace("/dev/ng", "/dev/nvme"))
    rng = np.random.default_rng(seed)
    keys = [rng.bytes(16) for _ in range(16)]
    tutti.store.format(paths, LAYOUT, CAPACITY)
    for life in range(2):
        with tutti.open(paths, durability=durability) as store:
            live(store, keys, life)
    assert cli.main(["fsck", *paths]) == 0


@pytest.mark.parametrize("place", ["generic", "partition"])
def test_a_pool_changes_its_size(place: str, tmp_path: Path) -> None:
    paths = places()[place]
    for path in paths:
        zero(path.replace("/dev/ng", "/dev/nvme"))
    made_on(paths, 24 * MiB)
    for capacity in (CAPACITY, 24 * MiB):
        assert resize(paths, capacity, through=str(tmp_path)).kept == len(KEYS)
        with tutti.open(paths) as store:
            assert held(store) == KEYS


@pytest.mark.parametrize(
    ("place", "name"), [*(("generic", name) for name in BENCHES), ("block", "bandwidth")]
)
def test_benches(place: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = places()[place]
    for path in paths:
        zero(path.replace("/dev/ng", "/dev/nvme"))
    check_bench(name, paths, tmp_path, capsys)


def test_each_drive_is_forced_by_its_own_number(capsys: pytest.CaptureFixture[str]) -> None:
    serials = ["usual", "pools"]
    blocks = [namespaces(serial)[0] for serial in serials]
    for path in blocks:
        zero(path)
        with open(path, "r+b", buffering=0) as device:
            device.write(b"XFSB".ljust(LBA, b"\0"))
    words = ["format", *map(generic, blocks), "--capacity", "12MiB", *SMALL]
    for named in ([], ["usual"], ["pools"]):
        assert cli.main([*words, *(f"--force={serial}" for serial in named)]) == 3
        said = capsys.readouterr().err
        assert [s for s in serials if repr(s) in said] == [s for s in serials if s not in named]
    assert cli.main([*words, *(f"--force={serial}" for serial in serials)]) == 0

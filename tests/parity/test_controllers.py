"""What every controller must do alike: data, refusals, and a queue full of commands."""

from __future__ import annotations

import ctypes
import itertools
import random

import numpy as np
import pytest
from gio_uring.command_ring import simple_command, transfer_command
from nvme_host import (
    LBA,
    NAMESPACES,
    PRP,
    READ,
    SGL,
    WRITE,
    NvmeHost,
    chain,
)

from tutti.base.units import KiB
from tutti.errors import ConfigError
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller import HAS_DEALLOCATE, HAS_PRP, NativeController
from tutti.gio_uring.memory import HostBuffer

OK = nvme.STATUS_OK


def pattern(rng: random.Random, nbytes: int) -> np.ndarray:
    return np.frombuffer(rng.randbytes(nbytes), np.uint8)


def cut(rng: random.Random, nbytes: int, pieces: int, unit: int) -> list[int]:
    """Sizes of at most `pieces` pieces, multiples of `unit`, that make up `nbytes`."""
    marks = sorted(rng.sample(range(1, nbytes // unit), min(pieces - 1, nbytes // unit - 1)))
    bounds = [0, *(mark * unit for mark in marks), nbytes]
    return [b - a for a, b in itertools.pairwise(bounds)]


def scatter(
    rng: random.Random, host: NvmeHost, sizes: list[int], gap: int
) -> list[tuple[int, int]]:
    """Extents of the buffer with these sizes, in random order, none adjacent."""
    places = []
    offset = gap
    for size in rng.sample(sizes, len(sizes)):
        places.append(host.extent(offset, size))
        offset += size + gap
    by_size = {size: [p for p in places if p[1] == size] for size in set(sizes)}
    return [by_size[size].pop() for size in sizes]


def gather(host: NvmeHost, extents: list[tuple[int, int]]) -> bytes:
    base = host.buffer.address
    return b"".join(host.data[a - base : a - base + n].tobytes() for a, n in extents)


def spread(host: NvmeHost, extents: list[tuple[int, int]], content: bytes) -> None:
    at = 0
    for address, nbytes in extents:
        start = address - host.buffer.address
        host.data[start : start + nbytes] = np.frombuffer(content[at : at + nbytes], np.uint8)
        at += nbytes


def test_describes_itself(controller: NativeController) -> None:
    info = controller.info
    assert info.lba_nbytes == LBA
    assert info.namespace_nlb == tuple(n // LBA for n in NAMESPACES)
    assert info.namespaces == len(NAMESPACES)
    assert info.mdts_nbytes >= 64 * KiB
    assert info.sgl_descriptors >= 64
    assert info.flags & HAS_PRP
    assert info.depth_max >= 64


@pytest.mark.parametrize("unit", [1, 4, 512, 4096])
def test_sgl_scatters_and_gathers(host: NvmeHost, seed: int, unit: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        nlb = rng.randrange(1, 33)
        slba = rng.randrange(NAMESPACES[0] // LBA - nlb)
        content = rng.randbytes(nlb * LBA)
        for opcode in (WRITE, READ):
            sizes = cut(rng, nlb * LBA, rng.randrange(1, 40), unit)
            extents = scatter(rng, host, sizes, unit * rng.randrange(1, 3))
            if opcode == WRITE:
                spread(host, extents, content)
            before = host.data.copy()
            assert host.run(host.transfer(opcode, slba, nlb, extents)) == OK
            assert gather(host, extents) == content
            inside = np.zeros(host.data.size, bool)
            for address, nbytes in extents:
                inside[address - host.buffer.address :][:nbytes] = True
            assert np.array_equal(host.data[~inside], before[~inside]), "wrote outside the extents"


@pytest.mark.parametrize("per_segment", [1, 2, 7])
def test_sgl_segment_chains(host: NvmeHost, seed: int, per_segment: int) -> None:
    rng = random.Random(seed)
    nlb = 16
    content = rng.randbytes(nlb * LBA)
    for opcode in (WRITE, READ):
        extents = scatter(rng, host, cut(rng, nlb * LBA, 20, 512), 512)
        if opcode == WRITE:
            spread(host, extents, content)

        def fill(sqe: nvme.Sqe, opcode: int = opcode, extents: list = extents) -> None:
            transfer_command(sqe, opcode, 2, 5, nlb)
            chain(host, extents, per_segment)(sqe)

        assert host.run(fill) == OK
    assert gather(host, extents) == content


@pytest.mark.parametrize("offset", [0, 512, 4092])
@pytest.mark.parametrize("nlb", [1, 2, 3, 32, 256])
def test_prp(host: NvmeHost, seed: int, nlb: int, offset: int) -> None:
    rng = random.Random(seed)
    nbytes = nlb * LBA
    content = rng.randbytes(nbytes)
    # A list that starts at the end of a page must chain to the next one.
    lists = host.list_memory(offset=4096 - 16, nbytes=8192)
    for opcode in (WRITE, READ):
        first = LBA - offset
        sizes = [first, *[LBA] * ((nbytes - first) // LBA)]
        sizes += [nbytes - sum(sizes)] if nbytes > sum(sizes) else []
        pages = rng.sample(range(1, 1000), len(sizes))
        extents = [host.extent(page * LBA, size) for page, size in zip(pages, sizes, strict=True)]
        extents[0] = (extents[0][0] + offset, first)
        if opcode == WRITE:
            spread(host, extents, content)
        fill = host.transfer(opcode, 17, nlb, extents, psdt=PRP, lists=lists)
        assert host.run(fill) == OK
        assert gather(host, extents) == content


def test_namespaces_are_apart(host: NvmeHost) -> None:
    assert host.write(3, b"\x01" * LBA, nsid=1) == OK
    assert host.write(3, b"\x02" * LBA, nsid=2) == OK
    assert set(host.read(3, 1, nsid=1)) == {1}
    assert set(host.read(3, 1, nsid=2)) == {2}


def test_first_and_last_block(host: NvmeHost) -> None:
    last = NAMESPACES[0] // LBA - 1
    for slba in (0, last):
        content = np.full(LBA, 7 + slba % 5, np.uint8)
        assert host.write(slba, content) == OK
        assert np.array_equal(host.read(slba, 1), content)


def test_flush_and_fua(host: NvmeHost) -> None:
    content = bytes(range(256)) * (2 * LBA // 256)
    assert host.write(9, content, flags=nvme.FUA) == OK
    assert host.flush() == OK
    assert host.flush(nsid=2) == OK
    assert host.read(9, 2).tobytes() == content


def test_deallocate_keeps_the_other_blocks(host: NvmeHost) -> None:
    if not host.controller.info.flags & HAS_DEALLOCATE:
        pytest.skip("the controller has no deallocate")
    assert host.write(0, b"\x05" * 32 * LBA) == OK
    assert host.deallocate([(1, 4), (0, 0), (16, 8)]) == OK
    blocks = host.read(0, 32).reshape(32, LBA)
    gone = [*range(1, 5), *range(16, 24)]
    assert (np.delete(blocks, gone, axis=0) == 5).all()
    # What a deallocated block reads as is the drive's choice: zeros or what was there.
    assert np.isin(blocks[gone], (0, 5)).all()


def test_deallocate_out_of_range(host: NvmeHost) -> None:
    if not host.controller.info.flags & HAS_DEALLOCATE:
        pytest.skip("the controller has no deallocate")
    size = NAMESPACES[0] // LBA
    assert host.deallocate([(0, 1), (size - 1, 2)]) == nvme.STATUS_LBA_OUT_OF_RANGE
    assert host.deallocate([(2**64 - 1, 2)]) == nvme.STATUS_LBA_OUT_OF_RANGE


def test_full_queue(host: NvmeHost) -> None:
    """depth - 1 commands fit; a full queue says None, and every answer makes room for one."""
    depth = host.queue_pair.depth
    sqes = [host.ring.get_sqe() for _ in range(depth - 1)]
    assert all(sqe is not None for sqe in sqes)
    assert host.ring.get_sqe() is None
    for sqe in sqes:
        simple_command(sqe, nvme.OPCODE_FLUSH, 1)
    assert host.ring.submit() == depth - 1
    for _ in range(depth - 1):
        completion = host.ring.wait_cqe(20_000_000)
        assert completion is not None
        assert completion.status == OK
        host.ring.cq_advance(1)
    assert host.queue_pair.inflight == 0
    assert host.flush() == OK


@pytest.mark.parametrize("is_started", [False, True])
def test_many_commands_in_flight(controller: NativeController, seed: int, is_started: bool) -> None:
    rng = random.Random(seed)
    host = NvmeHost(controller, depth=32)
    if is_started:
        controller.start()
    model = np.zeros(NAMESPACES[0], np.uint8)
    slot_nbytes = 128 * KiB
    for _ in range(12):
        fills, checks, taken = [], [], np.zeros(NAMESPACES[0] // LBA, bool)
        for slot in range(rng.randrange(1, 32)):
            nlb = rng.choice([1, 1, 2, 5, 17, 32])
            slba = rng.randrange(NAMESPACES[0] // LBA - nlb)
            opcode = rng.choice([READ, WRITE])
            if taken[slba : slba + nlb].any():
                continue  # the order of overlapping commands is not defined
            taken[slba : slba + nlb] = True
            at, nbytes = slot * slot_nbytes, nlb * LBA
            medium = model[slba * LBA :][:nbytes]
            if opcode == WRITE:
                medium[:] = host.data[at : at + nbytes] = pattern(rng, nbytes)
            else:
                checks.append((at, medium))
            lists = host.list_memory(offset=slot * 256, nbytes=256)
            half = rng.randrange(1, nlb) * LBA if nlb > 1 else nbytes // 2
            extents = [host.extent(at, half), host.extent(at + half, nbytes - half)]
            psdt = PRP if nlb > 1 and rng.random() < 0.5 else SGL
            fills.append(host.transfer(opcode, slba, nlb, extents, psdt=psdt, lists=lists))
        assert set(host.run_all(fills)) <= {OK}
        for at, expected in checks:
            assert np.array_equal(host.data[at : at + expected.size], expected)
    controller.stop()
    host.close()


def test_several_queue_pairs(controller: NativeController) -> None:
    hosts = [NvmeHost(controller, depth=depth) for depth in (2, 4, 64)]
    for i, host in enumerate(hosts):
        assert host.write(i, bytes([i + 1]) * LBA) == OK
    for host in hosts:
        assert host.read(0, 3)[::LBA].tolist() == [1, 2, 3]
        host.close()


@pytest.mark.parametrize("tail", [16, 17, 0xFFFFFFFF])
def test_wild_doorbells_are_ignored(host: NvmeHost, tail: int) -> None:
    doorbells = [
        ctypes.c_uint32.from_address(address)
        for address in (host.queue_pair.struct.sq_doorbell, host.queue_pair.struct.cq_doorbell)
    ]
    assert host.flush() == OK
    before = [doorbell.value for doorbell in doorbells]
    for doorbell in doorbells:
        doorbell.value = tail
    host.controller.service(0.001)
    for doorbell, value in zip(doorbells, before, strict=True):
        doorbell.value = value
    assert host.flush() == OK


def test_reset_of_an_idle_controller(host: NvmeHost) -> None:
    host.controller.reset(1.0)
    assert host.flush() == OK


def test_closing_with_a_registered_region_is_refused(controller: NativeController) -> None:
    region = controller.register(HostBuffer(LBA, hugepages=False))
    with pytest.raises(ConfigError, match="1 memory regions are still registered"):
        controller.close()
    region.close()
    region.close()


def test_overlapping_regions_are_refused(controller: NativeController) -> None:
    buffer = HostBuffer(64 * KiB, hugepages=False)
    with controller.register((buffer.address + 16 * KiB, 16 * KiB)):
        for start, nbytes in ((0, 64), (16, 16), (20, 4), (12, 5), (31, 9)):
            with pytest.raises(ConfigError, match="cannot register"):
                controller.register((buffer.address + start * KiB, nbytes * KiB))
        for start, nbytes in ((0, 16), (32, 32)):
            controller.register((buffer.address + start * KiB, nbytes * KiB)).close()


@pytest.mark.parametrize("depth", [0, 1, 3, 24, 1 << 17])
def test_bad_depths_are_refused(controller: NativeController, depth: int) -> None:
    with pytest.raises(ConfigError, match="depth"):
        controller.create_queue_pair(depth)

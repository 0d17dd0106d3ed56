"""In the guest: what one drive does at its limits, through rings and the host engine.

Places: 0 is a drive of 4 KiB blocks and 1 MiB a command; 1 has 512-byte blocks, odd sizes and 128
KiB; 2 fails on purpose, see `drives_of_the_first_boot` in test_nvme.py; 3 is slow.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Self

import numpy as np
import pytest
from gio_uring.command_ring import transfer_command
from gio_uring.data_pointer import set_descriptor
from nvme_host import LBA, PRP, READ, SGL, WRITE, NvmeHost, put_descriptors, segment
from parity.test_controllers import cut, gather, scatter, spread

from qemu.inside import Drives
from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, DeviceGone, PoolInUse
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller import (
    HAS_DEALLOCATE,
    HAS_FUA,
    HAS_VOLATILE_CACHE,
    NativeController,
)
from tutti.gio_uring.drives.rescue import Ask, DriveRescue, NativeDrive, RescueResult
from tutti.gio_uring.drives.vfio import VfioDevice
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.status import status_error

OK = nvme.STATUS_OK
USUAL, ODD, FAULTY, SLOW = range(4)
BLOCKS = 256  # that a lap writes and reads


def wait_for(rescue: DriveRescue, outcome: RescueResult) -> None:
    """Until a round of the rescue ended so; it counts after the memory came back."""
    deadline_s = time.monotonic() + 30
    while not rescue.outcomes[outcome]:
        assert time.monotonic() < deadline_s, f"no {outcome}, but {rescue.outcomes}"
        time.sleep(0.01)


class Mover:
    """An engine that moves single blocks between a namespace and a buffer; a context manager."""

    def __init__(self, controller: NativeController, depth: int, **options: object) -> None:
        self.controller = controller
        self.engine = Engine(controller, depth=depth, window_nbytes=1 << 40, **options)  # type: ignore[arg-type]
        self.nbytes = controller.info.lba_nbytes
        self.buffer = HostBuffer(BLOCKS * self.nbytes)
        self.region = controller.register(self.buffer)
        self.memory = flat_memory(self.buffer.address, self.nbytes, BLOCKS, self.buffer)

    def move(self, opcode: int, slba: np.ndarray, timeout_s: float = 30.0) -> np.ndarray:
        """Block i of the buffer to or from slba[i], one command each; their statuses."""
        job = self.submit(opcode, slba, timeout_s)
        assert job.wait_layers(1, 60)
        return job.page_status

    def submit(self, opcode: int, slba: np.ndarray, timeout_s: float) -> Job:
        """As move, under way."""
        ones = np.ones(slba.size, np.int64)
        pages = np.arange(slba.size, dtype=np.uint32)
        extents = Extents(slba, ones, ones, 1)
        return self.engine.submit(opcode, extents, pages, self.memory, timeout_s=timeout_s)

    def write_whole(self, nsid: int, timeout_s: float = 30.0) -> Job:
        """The buffer to a namespace's first blocks with one command, under way."""
        pages = np.arange(BLOCKS, dtype=np.uint32)
        whole = Extents([0], [nsid], [BLOCKS], 1)
        return self.engine.submit(WRITE, whole, pages, self.memory, timeout_s=timeout_s)

    def blocks(self) -> np.ndarray:
        return self.buffer.array.reshape(BLOCKS, self.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()
        self.region.close()


def ends(jobs: Sequence[Job]) -> set[int]:
    """The statuses of all pages of jobs that end soon."""
    assert all(job.wait_released(30) for job in jobs)
    return {int(status) for job in jobs for status in job.page_status}


@pytest.mark.parametrize(
    "depths", [(2, 4, 8, 16, 32, 64, 128, 256), (512, 1024)], ids=["to-256", "to-1024"]
)
def test_every_ring_wraps(drives: Drives, seed: int, depths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    with drives.open(USUAL, shadow_doorbells=len(depths) == 2) as controller:
        assert controller.queues_granted == 8
        for depth in depths:
            with Mover(controller, depth) as mover:
                for _ in range(max(1, 3 * depth // (2 * BLOCKS) + 1)):
                    slba = rng.permutation(BLOCKS).astype(np.uint64) + np.uint64(rng.integers(64))
                    content = rng.integers(0, 256, (BLOCKS, LBA), dtype=np.uint8)
                    mover.blocks()[:] = content
                    assert not mover.move(WRITE, slba).any()
                    mover.blocks()[:] = 0
                    assert not mover.move(READ, slba[::-1]).any()
                    assert np.array_equal(mover.blocks()[::-1], content)


@pytest.mark.parametrize("queues", [1, 2, 8])
def test_queues_at_once(drives: Drives, queues: int) -> None:
    with drives.open(USUAL, queues=queues) as controller:
        assert controller.queues_granted == queues
        hosts = [NvmeHost(controller, depth=8) for _ in range(queues)]
        waiting = []
        for i, host in enumerate(hosts):
            host.data[: 7 * LBA] = np.repeat(np.arange(7, dtype=np.uint8) + 7 * i, LBA)
            fills = [
                host.transfer(WRITE, 7 * i + k, 1, [host.extent(k * LBA, LBA)]) for k in range(7)
            ]
            waiting.append(host.submit(fills))
        for host, cids in zip(hosts, waiting, strict=True):
            assert host.wait(cids) == [OK] * 7
        for host in hosts:
            blocks = host.read(0, 7 * queues).reshape(-1, LBA)
            assert (blocks == np.arange(7 * queues, dtype=np.uint8)[:, None]).all()
            host.close()
        with pytest.raises(ConfigError, match="queue pairs"):
            controller.create_queue_pair(4)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 128, 239, 240])
def test_descriptors(drives: Drives, seed: int, count: int) -> None:
    """Single blocks and lists of them, of odd lengths at odd addresses."""
    rng = random.Random(seed)
    with drives.open(USUAL) as controller:
        host = NvmeHost(controller)
        content = rng.randbytes(256 * LBA)
        for opcode in (WRITE, READ):
            extents = scatter(rng, host, cut(rng, len(content), count, 1), rng.randrange(1, 99))
            if opcode == WRITE:
                spread(host, extents, content)
            assert host.run(host.transfer(opcode, 3, 256, extents)) == OK
        assert gather(host, extents) == content
        host.close()


def test_segment_chains(drives: Drives, seed: int) -> None:
    """Each segment is shorter than the one before: QEMU's drive forgets where it was in others."""
    rng = random.Random(seed)
    with drives.open(USUAL) as controller:
        host = NvmeHost(controller)
        content = rng.randbytes(16 * LBA)
        for opcode in (WRITE, READ):
            extents = scatter(rng, host, cut(rng, len(content), 9 + 7 + 4 + 2, 1), 5)
            assert len(extents) == 22
            if opcode == WRITE:
                spread(host, extents, content)

            def fill(sqe: nvme.Sqe, opcode: int = opcode, left: list = extents) -> None:
                transfer_command(sqe, opcode, 1, 5, 16)
                place, links = host.lists.address, []
                for size in (9, 7, 4, 2):
                    links.append((place, 16 * (size + (size != 2))))
                    place += links[-1][1] + 48
                at = 0
                for i, size in enumerate((9, 7, 4, 2)):
                    blocks = [nvme.SglDescriptor(a, n) for a, n in left[at : at + size]]
                    at += size
                    if size != 2:
                        blocks.append(segment(links[i + 1], is_last=i == 2))
                    put_descriptors(links[i][0], blocks)
                set_descriptor(sqe, segment(links[0], is_last=False))

            assert host.run(fill) == OK
        assert gather(host, extents) == content
        host.close()


def test_what_it_says(drives: Drives) -> None:
    with drives.open(USUAL) as controller:
        assert controller.info.mdts_nbytes == MiB
        assert controller.info.lba_nbytes == 4096
        assert controller.info.sgl_descriptors == 256
        assert controller.info.depth_max == 2048
        wanted = HAS_DEALLOCATE | HAS_FUA | HAS_VOLATILE_CACHE
        assert controller.info.flags & wanted == wanted
        assert controller.identity.serial == "usual"
    with drives.open(ODD, use_sgl=False) as controller:
        assert controller.info.mdts_nbytes == 128 * KiB
        assert controller.info.lba_nbytes == 512
        assert controller.info.namespace_nlb == (16391, 1001)
        assert controller.info.sgl_descriptors == 0


def test_beyond_mdts(drives: Drives) -> None:
    with drives.open(ODD) as controller:
        host = NvmeHost(controller)
        for nlb, status in ((256, OK), (257, nvme.STATUS_INVALID_FIELD)):
            fill = host.transfer(READ, 0, nlb, [host.extent(0, nlb * 512)])
            assert host.run(fill) == status
        host.close()


@pytest.mark.parametrize("psdt", [SGL, PRP])
def test_odd_sizes(drives: Drives, seed: int, psdt: int) -> None:
    rng = random.Random(seed)
    with drives.open(ODD) as controller:
        host = NvmeHost(controller)
        for nsid, size in ((1, 16391), (2, 1001)):
            for slba, nlb in ((0, 1), (size - 1, 1), (size - 200, 200), (3, 255)):
                content = rng.randbytes(nlb * 512)
                host.data[: len(content)] = np.frombuffer(content, np.uint8)
                far = host.extent(MiB + (0 if psdt == PRP else 12), nlb * 512)
                near = host.extent(0, nlb * 512)
                options = {"nsid": nsid, "psdt": psdt}
                assert host.run(host.transfer(WRITE, slba, nlb, [near], **options)) == OK
                assert host.run(host.transfer(READ, slba, nlb, [far], **options)) == OK
                assert gather(host, [far]) == content
            past = host.transfer(READ, size - 1, 2, [host.extent(0, 1024)], nsid=nsid)
            assert host.run(past) == nvme.STATUS_LBA_OUT_OF_RANGE
        host.close()


def test_deallocated_blocks_read_as_it_says(drives: Drives) -> None:
    with drives.open(USUAL) as controller:
        assert controller.namespace_identities[1].deallocated_reads == "zeros"
        host = NvmeHost(controller)
        assert host.write(0, b"\x05" * 200 * LBA) == OK
        assert host.deallocate([(2 * i, 1) for i in range(100)]) == OK
        blocks = host.read(0, 200).reshape(200, LBA)
        assert not blocks[::2].any()
        assert (blocks[1::2] == 5).all()
        host.close()


def test_injected_errors(drives: Drives) -> None:
    """Only what touches a bad block fails, with the status of a drive, through ring and engine."""
    with drives.open(FAULTY) as controller, Mover(controller, 32) as mover:
        slba = np.arange(BLOCKS, dtype=np.uint64)
        status = mover.move(WRITE, slba)
        assert np.flatnonzero(status).tolist() == [200]
        assert status[200] == nvme.STATUS_WRITE_FAULT
        status = mover.move(READ, slba)
        assert np.flatnonzero(status).tolist() == [100]
        assert status[100] == nvme.STATUS_UNRECOVERED_READ
        flush = mover.engine.flush([1])
        assert flush.wait_released(20)
        assert flush.report().status == nvme.STATUS_WRITE_FAULT
        again = mover.engine.flush([1])
        assert again.wait_released(20)
        assert again.report().status == OK


def test_memory_that_was_not_named_is_out_of_reach(drives: Drives) -> None:
    """QEMU's drive reports success, but the IOMMU drops what it writes there."""
    with drives.open(USUAL) as controller:
        host = NvmeHost(controller)
        stranger = HostBuffer(MiB)
        stranger.array[:] = 0x5A
        host.write(0, b"\x01" * LBA)
        host.run(host.transfer(READ, 0, 1, [(stranger.address, LBA)]))
        assert (stranger.array == 0x5A).all()
        with controller.register(stranger):
            assert host.run(host.transfer(READ, 0, 1, [(stranger.address, LBA)])) == OK
            assert (stranger.array[:LBA] == 1).all()
        host.run(host.transfer(READ, 0, 1, [(stranger.address + LBA, LBA)]))
        assert (stranger.array[LBA:] == 0x5A).all()
        host.close()


def test_regions_may_share_pages(drives: Drives) -> None:
    with drives.open(USUAL) as controller:
        host = NvmeHost(controller)
        buffer = HostBuffer(64 * KiB)
        base = buffer.address
        bounds = (100, 3000, 3100, 9000, 40_000, 40_004)
        regions = [controller.register((base + a, b - a)) for a, b in itertools.pairwise(bounds)]
        for region in regions[::2]:
            region.close()
        left = regions[3]
        assert host.run(host.transfer(READ, 0, 1, [(left.address, LBA)])) == OK
        for region in regions:
            region.close()
        host.close()


@pytest.mark.parametrize("shadow", [False, True])
def test_reset_under_load(drives: Drives, shadow: bool) -> None:
    """Every command ends, and the same rings go on from the start."""
    with drives.open(SLOW, shadow_doorbells=shadow) as controller:
        host = NvmeHost(controller, depth=32)
        for _ in range(2):
            extent = [host.extent(0, MiB)]
            cids = host.submit([host.transfer(WRITE, 256 * i, 256, extent) for i in range(5)])
            controller.reset(5.0)
            statuses = host.wait(cids)
            assert nvme.STATUS_ABORTED_SQ_DELETION in statuses
            assert set(statuses) <= {OK, nvme.STATUS_ABORTED_SQ_DELETION}
            assert host.queue_pair.inflight == 0
            assert host.read(0, 1).size == LBA
        host.close()


def test_abort(drives: Drives) -> None:
    """An abort is a request: the command ends by itself all the same, once."""
    with drives.open(SLOW) as controller:
        host = NvmeHost(controller)
        cids = host.submit([host.transfer(WRITE, 0, 256, [host.extent(0, MiB)]) for _ in range(3)])
        controller.abort(host.queue_pair, cids[2])
        assert set(host.wait(cids)) <= {OK, nvme.STATUS_ABORT_REQUESTED}
        host.close()


def test_a_time_out_keeps_memory_until_the_reset(drives: Drives) -> None:
    with drives.open(SLOW, rescues=False) as controller, Mover(controller, 64) as mover:
        # A second of work, behind which everything waits.
        ahead = [mover.write_whole(1) for _ in range(6)]
        slba = np.arange(BLOCKS, dtype=np.uint64)
        job = mover.submit(WRITE, slba, 0.05)
        assert job.wait_layers(1, 5)
        assert nvme.STATUS_TIMED_OUT in job.page_status
        assert not job.wait_released(0.0)
        mover.engine.reset(5.0)
        assert job.wait_released(5)
        assert ends(ahead) <= {OK, nvme.STATUS_ABORTED_SQ_DELETION}
        assert not mover.move(READ, slba[:4]).any()


@pytest.mark.parametrize("shadow", [False, True])
def test_late_commands_are_ended_and_the_rings_go_on(drives: Drives, shadow: bool) -> None:
    """The test does not ask for the reset: the rescue does, on a thread of its own."""
    with drives.open(SLOW, shadow_doorbells=shadow) as controller:
        controller.rescue._grace_s = 0.1
        with Mover(controller, 64) as mover:
            ahead = [mover.write_whole(1) for _ in range(8)]
            slba = np.arange(BLOCKS, dtype=np.uint64)
            job = mover.submit(WRITE, slba, 0.2)
            assert job.wait_layers(1, 5)
            assert job.wait_released(30), "its memory never came back"
            assert ends(ahead) <= {
                OK,
                nvme.STATUS_ABORT_REQUESTED,
                nvme.STATUS_ABORTED_SQ_DELETION,
            }
            for opcode in (READ, WRITE, READ):
                assert not mover.move(opcode, slba[:64]).any()
            wait_for(controller.rescue, RescueResult.RESET)
        assert not controller.is_gone


def test_a_lost_drive_is_an_error_at_once(drives: Drives) -> None:
    with drives.open(SLOW) as controller:
        with Mover(controller, 16) as mover:
            slba = np.arange(BLOCKS, dtype=np.uint64)
            ahead = [mover.write_whole(1) for _ in range(4)]
            NativeDrive(controller.handle, "the slow drive").ask(Ask.LOSE)
            assert controller.is_gone
            assert ends(ahead) <= {OK, nvme.STATUS_DEVICE_GONE}
            start_s = time.monotonic()
            assert set(mover.move(READ, slba)) == {nvme.STATUS_DEVICE_GONE}
            assert time.monotonic() - start_s < 20, "a lost drive makes its users wait"
        assert isinstance(status_error(nvme.STATUS_DEVICE_GONE), DeviceGone)
        controller.register(HostBuffer(LBA)).close()
    with drives.open(SLOW) as controller:  # it comes back as if nothing had been
        host = NvmeHost(controller)
        assert host.flush() == OK
        host.close()


def test_one_owner(drives: Drives) -> None:
    with drives.open(USUAL), pytest.raises(PoolInUse, match="another process has it"):
        drives.open(USUAL).__enter__()


def test_a_forked_child_does_not_keep_the_drive(drives: Drives) -> None:
    """It lives on while its parent closes the drive and opens it again."""
    begun, told = os.pipe()
    with drives.open(USUAL):
        pid = os.fork()
        if pid == 0:
            os.write(told, b".")
            time.sleep(100)
            os._exit(0)
        assert os.read(begun, 1) == b"."
    try:
        with drives.open(USUAL), pytest.raises(PoolInUse, match="another process has it"):
            drives.open(USUAL).__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(begun)
        os.close(told)


@pytest.mark.parametrize(
    ("bdf", "why"), [("0000:00:00.0", "not to vfio-pci"), ("0000:99:00.0", "does not exist")]
)
def test_other_devices_are_refused(drives: Drives, bdf: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        VfioDevice(bdf)

"""The memory controller: its modes, its virtual clock, and every way in which it misbehaves."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from gio_uring.command_ring import simple_command
from hypothesis import given
from hypothesis import strategies as st
from memory_controller import Faults, MemoryController
from nvme_host import LBA, READ, WRITE, NvmeHost

from tutti.base.units import GiB, KiB, MiB
from tutti.errors import ConfigError, DeviceTimeout, NativeError
from tutti.gio_uring import _native
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.memory import HostBuffer

OK = nvme.STATUS_OK
ALWAYS = 1_000_000


@contextmanager
def host_of(*, depth: int = 16, nbytes: int = 4 * MiB, **options: Any) -> Iterator[NvmeHost]:
    with MemoryController((nbytes,), **options) as controller:
        host = NvmeHost(controller, depth)
        yield host
        host.close()


def memory_of(host: NvmeHost) -> MemoryController:
    assert isinstance(host.controller, MemoryController)
    return host.controller


def writes(host: NvmeHost, count: int, nlb: int = 1) -> list[Any]:
    """Write number i puts i + 1 into blocks i * nlb and following."""
    fills = []
    for i in range(count):
        nbytes = nlb * LBA
        host.data[i * nbytes : (i + 1) * nbytes] = i + 1
        fills.append(host.transfer(WRITE, i * nlb, nlb, [host.extent(i * nbytes, nbytes)]))
    return fills


def blocks_of(host: NvmeHost, count: int) -> list[int]:
    """The first byte of the medium's first blocks."""
    return [int(byte) for byte in memory_of(host).medium(1)[: count * LBA : LBA]]


def test_medium_can_be_spoiled() -> None:
    with host_of() as host:
        assert host.write(5, b"\x11" * LBA) == OK
        medium = memory_of(host).medium(1)
        assert (medium[5 * LBA : 6 * LBA] == 0x11).all()
        medium[5 * LBA + 7] ^= 1
        assert host.read(5, 1)[7] == 0x10
        with pytest.raises(ConfigError, match="namespace 2 does not exist"):
            memory_of(host).medium(2)


def test_zero_copy_checks_but_moves_nothing() -> None:
    with host_of(mode="zero_copy") as host:
        assert host.write(0, b"\x11" * LBA) == OK
        assert not memory_of(host).medium(1).any()
        bad = host.transfer(READ, 0, 1, [(host.buffer.address - LBA, LBA)])
        assert host.run(bad) == nvme.STATUS_DATA_TRANSFER_ERROR
        stats = memory_of(host).stats()
        assert (stats.commands, stats.completed, stats.bytes_written) == (2, 2, LBA)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "slow"},
        {"lba_nbytes": 3000},
        {"lba_nbytes": 256},
        {"namespace_nbytes": ()},
        {"namespace_nbytes": (0,)},
        {"namespace_nbytes": (5000,)},
        {"namespace_nbytes": (LBA,) * 65},
        {"mdts_nbytes": 100},
        {"mode": "virtual", "read_bandwidth": 0},
        {"depth_max": 1},
    ],
)
def test_impossible_controllers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MemoryController(**options)


@pytest.mark.parametrize("field", ["status_ppm", "delay_turns"])
def test_impossible_faults(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Faults(**{field: -1})
    with pytest.raises(ConfigError, match="torn_ppm"):
        Faults(torn_ppm=ALWAYS + 1)


def test_status_fault() -> None:
    with host_of() as host:
        memory_of(host).set_faults(Faults(status_ppm=ALWAYS, status=nvme.STATUS_INTERNAL_ERROR))
        assert host.run_all(writes(host, 3)) == [nvme.STATUS_INTERNAL_ERROR] * 3
        assert blocks_of(host, 3) == [0, 0, 0]
        assert memory_of(host).stats().faults == 3
        memory_of(host).set_faults(None)
        assert host.run_all(writes(host, 3)) == [OK] * 3


@given(fault_seed=st.integers(0, 2**64 - 1))
def test_one_seed_means_the_same_faults(fault_seed: int) -> None:
    faults = Faults(
        seed=fault_seed,
        status_ppm=200_000,
        torn_ppm=200_000,
        lost_ppm=200_000,
        short_ppm=200_000,
        delay_ppm=300_000,
        reorder_ppm=300_000,
    )
    outcomes = []
    with host_of(depth=32) as host:
        for _ in range(2):
            memory_of(host).medium(1)[:] = 0
            memory_of(host).set_faults(faults)
            statuses = host.run_all(writes(host, 20, nlb=4))
            outcomes.append((statuses, blocks_of(host, 80)))
    assert outcomes[0] == outcomes[1]


def test_lost_writes_are_acknowledged() -> None:
    with host_of() as host:
        memory_of(host).set_faults(Faults(lost_ppm=ALWAYS))
        assert host.run_all(writes(host, 3)) == [OK] * 3
        assert blocks_of(host, 3) == [0, 0, 0]


@pytest.mark.parametrize("status", [OK, nvme.STATUS_WRITE_FAULT])
def test_torn_writes_leave_a_prefix(seed: int, status: int) -> None:
    with host_of() as host:
        memory_of(host).set_faults(Faults(seed=seed, torn_ppm=ALWAYS, torn_status=status))
        nlb = 16
        assert host.run_all(writes(host, 12, nlb)) == [status] * 12
        lengths = set()
        for i, blocks in enumerate(np.reshape(blocks_of(host, 12 * nlb), (12, nlb))):
            landed = int((blocks == i + 1).sum())
            assert (blocks[:landed] == i + 1).all()
            assert not blocks[landed:].any()
            lengths.add(landed)
        assert len(lengths) > 1
        assert max(lengths) < nlb


def test_short_reads_move_a_prefix(seed: int) -> None:
    with host_of() as host:
        memory_of(host).medium(1)[:] = 3
        memory_of(host).set_faults(Faults(seed=seed, short_ppm=ALWAYS))
        status = host.run(host.transfer(READ, 0, 64, [host.extent(0, 64 * LBA)]))
        assert status == nvme.STATUS_DATA_TRANSFER_ERROR
        moved = host.data[: 64 * LBA : LBA] == 3
        assert moved.sum() < 64
        assert not moved[int(moved.sum()) :].any()


def completion_ring(host: NvmeHost, count: int) -> list[int]:
    """CIDs of the first `count` completion queue entries, in the order of posting."""
    entries = (nvme.Cqe * count).from_address(host.queue_pair.struct.cq)
    return [entry.status & 0xFFFF for entry in entries]


def test_reordering(seed: int) -> None:
    with host_of(depth=32) as host:
        memory_of(host).set_faults(Faults(seed=seed, reorder_ppm=ALWAYS))
        cids = host.submit(writes(host, 30))
        assert host.wait(cids) == [OK] * 30
        posted = completion_ring(host, 30)
        assert sorted(posted) == sorted(cids)
        assert posted != cids
        assert blocks_of(host, 30) == list(range(1, 31))


def test_delays_count_turns(seed: int) -> None:
    with host_of(depth=32) as host:
        controller = memory_of(host)
        controller.set_faults(Faults(seed=seed, delay_ppm=ALWAYS, delay_turns=5))
        cids = host.submit(writes(host, 30))
        posted = [controller.service() for _ in range(6)]
        assert posted[0] == 0, "every command is late by a turn at least"
        assert sum(posted) == 30
        assert sum(count > 0 for count in posted) > 1
        assert host.wait(cids) == [OK] * 30


def test_a_delayed_read_moves_data_only_when_it_ends() -> None:
    with host_of() as host:
        controller = memory_of(host)
        controller.medium(1)[:] = 4
        controller.set_faults(Faults(delay_ppm=ALWAYS, delay_turns=1))
        cids = host.submit([host.transfer(READ, 0, 1, [host.extent(0, LBA)])])
        controller.service()
        assert not host.data[:LBA].any()
        assert controller.stats().unanswered == 1
        assert host.wait(cids) == [OK]
        assert (host.data[:LBA] == 4).all()


def stall(host: NvmeHost, **options: Any) -> list[int]:
    """Two commands that are answered and three that are not; the latter's CIDs."""
    controller = memory_of(host)
    controller.medium(1)[:] = 6
    controller.set_faults(Faults(stall_from=3, **options))
    fills = [host.transfer(READ, i, 1, [host.extent(i * LBA, LBA)]) for i in range(5)]
    cids = host.submit(fills)
    assert host.wait(cids[:2]) == [OK, OK]
    for _ in range(3):
        assert controller.service(0.001) == 0
    assert host.ring.peek_cqe() is None
    assert host.data[: 5 * LBA : LBA].tolist() == [6, 6, 0, 0, 0]
    assert host.queue_pair.inflight == 3
    return cids[2:]


@pytest.mark.parametrize("is_started", [False, True])
def test_a_stalled_drive_writes_to_memory_late(is_started: bool) -> None:
    """What was swallowed still owns its memory: it lands when the drive answers again."""
    with host_of() as host:
        late = stall(host)
        if is_started:
            memory_of(host).start()
        memory_of(host).release()
        assert host.wait(late) == [OK] * 3
        assert host.data[: 5 * LBA : LBA].tolist() == [6] * 5
        memory_of(host).stop()
        assert host.flush() == OK


@pytest.mark.parametrize("is_started", [False, True])
def test_reset_ends_a_stall(is_started: bool) -> None:
    with host_of() as host:
        late = stall(host)
        if is_started:
            memory_of(host).start()
        host.controller.reset(1.0)
        assert host.controller.is_served == is_started
        assert host.wait(late) == [nvme.STATUS_ABORTED_SQ_DELETION] * 3
        memory_of(host).release()
        assert host.flush() == OK
        assert host.data[: 5 * LBA : LBA].tolist() == [6, 6, 0, 0, 0]
        memory_of(host).stop()


def test_reset_answers_commands_that_were_never_fetched() -> None:
    with host_of() as host:
        cids = host.submit(writes(host, 5))
        host.controller.reset(1.0)
        assert host.wait(cids) == [nvme.STATUS_ABORTED_SQ_DELETION] * 5
        assert blocks_of(host, 5) == [0] * 5


def test_a_reset_that_fails_keeps_everything() -> None:
    with host_of() as host:
        late = stall(host, reset_fails=True)
        with pytest.raises(DeviceTimeout, match="memory stays reserved"):
            host.controller.reset(0.01)
        assert host.queue_pair.inflight == 3
        memory_of(host).release()
        assert host.wait(late) == [OK] * 3
        host.controller.reset(1.0)


def test_a_region_that_is_gone_is_never_touched() -> None:
    """A late command whose memory was unregistered fails instead of writing there."""
    with host_of() as host:
        own = HostBuffer(LBA, hugepages=False)
        region = host.controller.register(own)
        memory_of(host).medium(1)[:] = 6
        memory_of(host).set_faults(Faults(stall_from=1))
        cids = host.submit([host.transfer(READ, 0, 1, [(own.address, LBA)])])
        host.controller.service()
        region.close()
        memory_of(host).release()
        assert host.wait(cids) == [nvme.STATUS_DATA_TRANSFER_ERROR]
        assert not own.array.any()


def test_range_faults() -> None:
    with host_of() as host:
        controller = memory_of(host)
        bad = nvme.STATUS_UNRECOVERED_READ
        controller.fault_range(1, slba=10, nlb=2, opcode=READ, status=bad, count=2)

        def read(slba: int, nlb: int) -> int:
            return host.run(host.transfer(READ, slba, nlb, [host.extent(0, nlb * LBA)]))

        assert read(8, 2) == OK
        assert read(12, 1) == OK
        assert host.write(10, b"\1" * LBA) == OK
        assert read(9, 2) == bad
        assert read(11, 4) == bad
        assert read(10, 2) == OK, "both strikes are used up"
        controller.fault_range(1, 0, 0, nvme.OPCODE_FLUSH, nvme.STATUS_WRITE_FAULT)
        assert host.flush() == nvme.STATUS_WRITE_FAULT
        assert host.flush() == OK


def test_virtual_clock_is_arithmetic() -> None:
    options = {"mode": "virtual", "read_bandwidth": GiB, "write_bandwidth": GiB // 2}
    with host_of(latency_ns=1000, **options) as host:
        controller = memory_of(host)
        read = host.transfer(READ, 0, 256, [host.extent(0, MiB)])
        one_read_ns = MiB * 10**9 // GiB
        assert host.run(read) == OK
        assert controller.now_ns == one_read_ns + 1000
        start = controller.now_ns
        assert host.run_all([read] * 4) == [OK] * 4, "they share the bandwidth, not the latency"
        assert controller.now_ns == start + 4 * one_read_ns + 1000
        controller.advance(500)
        start = controller.now_ns
        assert host.flush() == OK
        assert controller.now_ns == start + 1000


def test_virtual_time_stops_at_its_limit() -> None:
    options = {"mode": "virtual", "read_bandwidth": GiB, "write_bandwidth": GiB // 2}
    with host_of(latency_ns=0, **options) as host:
        controller = memory_of(host)
        one_read_ns = MiB * 10**9 // GiB
        controller.limit(one_read_ns - 1)
        cids = host.submit([host.transfer(READ, 0, 256, [host.extent(0, MiB)])])
        assert [controller.service() for _ in range(3)] == [0, 0, 0]
        assert controller.now_ns == one_read_ns - 1
        controller.limit(2 * one_read_ns)
        assert controller.service() == 1
        assert controller.now_ns == one_read_ns, "no later than what was due"
        assert host.wait(cids) == [OK]


@pytest.mark.parametrize(("interference", "expected_us"), [(1.0, 1953), (2.5, 3417)])
def test_virtual_interference(interference: float, expected_us: int) -> None:
    """The write takes 1953 us alone, the read 977: each longer by 1.5 times 977 when slowed."""
    options = {"mode": "virtual", "read_bandwidth": GiB, "write_bandwidth": GiB // 2}
    with host_of(latency_ns=0, interference=interference, **options) as host:
        write = host.transfer(WRITE, 0, 256, [host.extent(0, MiB)])
        read = host.transfer(READ, 256, 256, [host.extent(MiB, MiB)])
        assert host.run_all([write, read]) == [OK, OK]
        assert memory_of(host).now_ns // 1000 == expected_us


def test_virtual_mode_completes_in_the_order_of_time() -> None:
    options = {"mode": "virtual", "read_bandwidth": GiB, "write_bandwidth": GiB // 16}
    with host_of(**options) as host:
        slow = host.transfer(WRITE, 0, 16, [host.extent(0, 16 * LBA)])
        quick = host.transfer(READ, 64, 16, [host.extent(MiB, 16 * LBA)])
        cids = host.submit([slow, quick])
        assert host.wait(cids) == [OK, OK]
        assert completion_ring(host, 2) == [cids[1], cids[0]]


@given(cut_seed=st.integers(0, 2**64 - 1))
def test_power_cut_keeps_what_was_flushed(cut_seed: int) -> None:
    with host_of(write_back=True, nbytes=256 * KiB) as host:
        controller = memory_of(host)
        assert host.write(0, b"\1" * 8 * LBA) == OK
        assert host.flush() == OK
        assert host.write(0, b"\2" * 4 * LBA) == OK
        assert host.write(6, b"\3" * LBA, flags=nvme.FUA) == OK
        assert host.write(6, b"\4" * 2 * LBA) == OK
        assert host.write(8, b"\5" * LBA) == OK
        assert host.write(8, b"\6" * LBA, flags=nvme.FUA) == OK
        controller.power_cut(cut_seed)
        blocks = blocks_of(host, 9)
        assert set(blocks[:4]) <= {1, 2}
        assert blocks[4:6] == [1, 1]
        assert blocks[6] in (3, 4)
        assert blocks[7] in (1, 4)
        assert blocks[8] == 6, "a durable write never gives way to an older one"
        assert host.read(0, 9)[::LBA].tolist() == blocks


def test_power_cuts_differ_and_whole_blocks_survive() -> None:
    outcomes = set()
    with host_of(write_back=True) as host:
        assert host.controller.info.flags & 4
        for cut_seed in range(40):
            assert host.write(0, b"\1" * 8 * LBA) == OK
            assert host.flush() == OK
            assert host.write(0, b"\2" * 8 * LBA) == OK
            memory_of(host).power_cut(cut_seed)
            blocks = memory_of(host).medium(1)[: 8 * LBA].reshape(8, LBA)
            assert (blocks == blocks[:, :1]).all(), "a block is old or new, never both"
            outcomes.add(tuple(blocks[:, 0]))
    assert {(1,) * 8, (2,) * 8} < outcomes, "lost, kept and torn writes all occur"


def test_without_a_write_cache_nothing_is_lost(seed: int) -> None:
    with host_of() as host:
        assert host.write(0, b"\1" * 8 * LBA) == OK
        memory_of(host).power_cut(seed)
        assert blocks_of(host, 8) == [1] * 8


@pytest.mark.parametrize("stall_from", [0, 1])
def test_a_submitter_without_rules_cannot_flood_the_controller(stall_from: int) -> None:
    """One CID for all, and a completion queue that is not reaped: bounded, and nothing breaks."""
    with host_of(depth=4) as host:
        pair = host.queue_pair.struct
        ring = (nvme.Sqe * 4).from_address(pair.sq)
        doorbell = ctypes.c_uint32.from_address(pair.sq_doorbell)
        memory_of(host).set_faults(Faults(stall_from=stall_from))
        for sqe in ring:
            simple_command(sqe, nvme.OPCODE_FLUSH, 1)
        for turn in range(100):
            doorbell.value = (turn + 1) % 4
            host.controller.service()
        stats = memory_of(host).stats()
        assert stats.completed == (0 if stall_from else 3), "the completion queue holds three"
        assert stats.commands <= 3 + 4
        assert stats.unanswered <= 4
        with pytest.raises(DeviceTimeout):
            host.controller.reset(0.01)
        ctypes.c_uint32.from_address(pair.cq_doorbell).value = 3
        host.controller.reset(1.0)


def test_closed_controllers_refuse() -> None:
    controller = MemoryController((MiB,))
    controller.close()
    controller.close()
    for call in (controller.start, controller.stats, controller.service):
        with pytest.raises(NativeError, match="closed"):
            call()


def test_closed_queue_pairs_give_their_places_back() -> None:
    with MemoryController((MiB,)) as controller:
        for _ in range(100):
            with controller.create_queue_pair(8) as queue_pair:
                assert queue_pair.qid == 1
        for _ in range(64):
            controller.create_queue_pair(8)
        with pytest.raises(ConfigError, match="64 queue pairs"):
            controller.create_queue_pair(8)


ABANDON = """
from tutti.bench.controller_memory import MemoryController
from tutti.gio_uring.memory import HostBuffer
import gc
for _ in range(20):
    controller = MemoryController((1 << 20,))
    region = controller.register(HostBuffer(4096))
    pair = controller.create_queue_pair(4)
    controller.start()
    del controller, pair, region
    gc.collect()
controller = MemoryController((1 << 20,))
controller.create_queue_pair(4)
controller.start()
print("end")
"""


def test_controllers_that_nobody_closed_end_with_the_process() -> None:
    command = [sys.executable, "-c", ABANDON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.parametrize("mode", ["copy", "zero_copy"])
def test_ring_bench(mode: str) -> None:
    with MemoryController((MiB,), mode=mode) as controller:
        memory = HostBuffer(64 * KiB)
        with controller.register(memory):
            pair = controller.create_queue_pair(64)
            seconds = ctypes.c_double()
            arguments = (5000, 16, memory.address, memory.nbytes, 1, ctypes.byref(seconds))
            bench = _native.lib().gio_ring_bench
            assert bench(controller.handle, pair.struct_address, *arguments) == 0
            assert seconds.value > 0
            assert controller.stats().completed == 5000
            assert pair.inflight == 0
            controller.set_faults(Faults(status_ppm=ALWAYS))
            assert bench(controller.handle, pair.struct_address, *arguments) < 0
            controller.reset(1.0)

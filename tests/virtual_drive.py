"""A drive on the memory controller's virtual clock: real commands through real queue pairs.

Scaled: a block of 512 bytes stands for 256 KiB, and bandwidths shrink as much, so that gigabytes
take little real time and memory.  Latencies are not scaled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gio_uring.command_ring import Ring, transfer_command
from memory_controller import MemoryController

from tutti.bench.simulate.hardware import SimulatedDrive
from tutti.errors import DeviceTimeout
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.status import status_error

_BLOCK = 512
_SCALE = 512  # a block stands for 256 KiB
_BLOCKS = 16  # of a command: 4 MiB
_FLIGHTS = 4  # commands that each direction keeps in flight
_DEPTH = 16
_TURNS_MAX = 10_000_000
_CLOSE_S = 5.0
_PAGE = 4096

READ, WRITE = "read", "write"
_OPCODES = {READ: OPCODE_READ, WRITE: OPCODE_WRITE}


@dataclass
class _Transfer:
    tag: object
    left: int  # blocks that were not submitted
    open: int  # commands without a completion


class _Direction:
    """One queue pair and what waits for it, first come first served."""

    def __init__(self, controller: MemoryController, opcode: int, address: int) -> None:
        self._ring = Ring(controller.create_queue_pair(_DEPTH))
        self._opcode = opcode
        self._address = address
        self._waiting: deque[_Transfer] = deque()
        self._flying: dict[int, _Transfer] = {}

    def close(self) -> None:
        """Gives the queue pair back."""
        self._ring.queue_pair.close()

    def add(self, tag: object, nbytes: int) -> None:
        """Queues a transfer; blocks are counted in full."""
        self._waiting.append(_Transfer(tag, -(-nbytes // (_BLOCK * _SCALE)), 0))

    def submit(self) -> None:
        """Keeps commands in flight."""
        while self._waiting and len(self._flying) < _FLIGHTS:
            transfer = self._waiting[0]
            blocks = min(_BLOCKS, transfer.left)
            sqe = self._ring.get_sqe()
            assert sqe is not None, "fewer in flight than the queue is deep"
            transfer_command(sqe, self._opcode, 1, 0, blocks)
            sqe.dptr[0] = self._address
            if blocks * _BLOCK > _PAGE:
                sqe.dptr[1] = self._address + _PAGE
            self._flying[sqe.cdw0 >> 16] = transfer
            transfer.left -= blocks
            transfer.open += 1
            if not transfer.left:
                self._waiting.popleft()
        self._ring.submit()

    def reap(self) -> list[object]:
        """Tags of transfers that ended.  Raises MediumError for a command that failed."""
        ended = []
        while (completion := self._ring.peek_cqe()) is not None:
            self._ring.cq_advance(1)
            error = status_error(completion.status, "a simulated transfer")
            if error is not None:
                raise error
            transfer = self._flying.pop(completion.cid)
            transfer.open -= 1
            if not transfer.left and not transfer.open:
                ended.append(transfer.tag)
        return ended


class VirtualDrive:
    """One simulated drive and its clock; close it."""

    def __init__(self, drive: SimulatedDrive) -> None:
        self._controller = MemoryController(
            [_BLOCKS * _BLOCK],
            mode="virtual",
            lba_nbytes=_BLOCK,
            mdts_nbytes=64 * 1024,
            read_bandwidth=round(drive.read_bytes_per_s / _SCALE),
            write_bandwidth=round(drive.write_bytes_per_s / _SCALE),
            latency_ns=round(drive.latency_us * 1000),
            interference=drive.interference,
        )
        self._buffer = HostBuffer(2 * _PAGE)
        self._region = self._controller.register(self._buffer)
        address = self._region.address
        self._directions = {
            name: _Direction(self._controller, opcode, address) for name, opcode in _OPCODES.items()
        }
        self.moved_nbytes = {READ: 0, WRITE: 0}

    @property
    def now_ns(self) -> int:
        """The virtual clock."""
        return self._controller.now_ns

    def start(self, direction: str, tag: object, nbytes: int) -> None:
        """Starts a transfer of so many bytes; its tag comes back from ``run`` when it ended."""
        self.moved_nbytes[direction] += nbytes
        self._directions[direction].add(tag, nbytes)

    def run(self, until_ns: int) -> list[object]:
        """Lets time pass until transfers end, and returns their tags; or until ``until_ns``."""
        controller = self._controller
        controller.limit(until_ns)
        for _ in range(_TURNS_MAX):
            for direction in self._directions.values():
                direction.submit()
            if not controller.service():
                controller.advance(max(0, until_ns - controller.now_ns))
                return []
            ended = [tag for d in self._directions.values() for tag in d.reap()]
            if ended:
                return ended
        raise DeviceTimeout("the simulated drive does not come to an end; report this")

    def close(self) -> None:
        """Frees the controller."""
        self._controller.reset(_CLOSE_S)
        for direction in self._directions.values():
            direction.close()
        self._region.close()
        self._controller.close()

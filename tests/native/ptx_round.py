"""Pages written and read back by device engines: run by test_ptx_machine.py in its own process.

    python ptx_round.py KIND BELL ...       KIND as of DeviceEngine, BELL: word or mmio

Prints a line for each pair: whether the bytes and the digests are right.
"""

from __future__ import annotations

import sys

import numpy as np
import xxhash
from gpu.device_memory import Allocation, page_bytes, paged
from memory_controller import MemoryController

from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import DeviceEngine, KernelSize
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.iocb import Extents
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE

LAYERS, PAGES, SEGMENTS = 2, 8, (4096, 1000)
TIMEOUT_S = 6.0


class Bells:
    """The kernels of one kind of doorbell, which on this machine is a word in either case."""

    def __init__(self, modules: Modules, bell: str) -> None:
        self._modules, self._bell = modules, bell

    def __getitem__(self, name: str) -> int:
        return self._modules[name.replace("word", self._bell)]


def is_right(driver: CudaDriver, modules: Modules, kind: str, bell: str) -> bool:
    memory = Allocation(driver, LAYERS * PAGES * sum(SEGMENTS))
    pages = paged(memory, SEGMENTS, LAYERS, PAGES)
    content = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype=np.uint8)
    slices = page_bytes(content, SEGMENTS, LAYERS, PAGES)
    expected = [
        [xxhash.xxh3_64_intdigest(layer[p].tobytes()) for layer in slices] for p in range(8)
    ]
    extents = Extents([0, 4096], [1, 1], [5, PAGES - 5], 2, 256)
    numbers, digests = np.arange(PAGES, dtype=np.uint32), np.zeros((PAGES, LAYERS), np.uint64)
    with MemoryController([64 << 20]) as controller:
        engine = DeviceEngine(
            driver,
            Bells(modules, bell),  # type: ignore[arg-type]
            controller,
            kind=kind,
            kernels=KernelSize(shares=2, depth=4),
            staging_nbytes=1 << 20,
        )

        def moves(opcode: int) -> list[int]:
            """The pages that a transfer of all of them did not move."""
            compare = opcode == OPCODE_READ
            job = engine.submit(
                opcode,
                extents,
                numbers,
                pages,
                digests=digests,
                compare=compare,
                timeout_s=TIMEOUT_S,
            )
            assert job.wait_released(2 * TIMEOUT_S)
            return np.flatnonzero(job.page_status).tolist()

        try:
            memory.write(content)
            if moves(OPCODE_WRITE) or (digests != np.array(expected, np.uint64)).any():
                return False
            memory.write(np.zeros(memory.nbytes, np.uint8))
            if moves(OPCODE_READ) or (memory.read() != content).any():
                return False
            digests[3, 1] ^= np.uint64(1)
            return moves(OPCODE_READ) == [3]
        finally:
            engine.close()


def main(words: list[str]) -> None:
    driver = CudaDriver()
    modules = Modules(driver)
    for kind, bell in zip(words[::2], words[1::2], strict=True):
        print(kind, bell, "right" if is_right(driver, modules, kind, bell) else "wrong", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Buffers, what they are backed by, and whose address may be taken."""

from __future__ import annotations

import array
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from tutti.base.units import KiB, MiB
from tutti.errors import CapacityError, ConfigError
from tutti.gio_uring.memory import HUGEPAGE_NBYTES, HostBuffer, address_of, hugepage_nbytes


class Tensor:
    """What torch.Tensor shows of its memory."""

    def __init__(self, contents: np.ndarray) -> None:
        self.contents = contents

    def data_ptr(self) -> int:
        return int(self.contents.ctypes.data)

    def numel(self) -> int:
        return self.contents.size

    def element_size(self) -> int:
        return self.contents.itemsize

    def is_contiguous(self) -> bool:
        return self.contents.flags.c_contiguous


@pytest.mark.parametrize("nbytes", [1, 4 * KiB, 3 * MiB + 5])
@pytest.mark.parametrize("hugepages", [True, False])
def test_buffer(nbytes: int, hugepages: bool) -> None:
    buffer = HostBuffer(nbytes, hugepages=hugepages)
    assert buffer.address % (HUGEPAGE_NBYTES if hugepages else mmap.PAGESIZE) == 0
    assert buffer.array.shape == (nbytes,)
    assert not buffer.array.any()
    buffer.array[:] = 7
    assert buffer.backing in (("hugetlb", "thp", "pages") if hugepages else ("pages",))
    assert address_of(buffer) == (buffer.address, nbytes)


def test_what_memory_lies_on_is_read_back() -> None:
    small = HostBuffer(4 * MiB, hugepages=False)
    small.array[:] = 1
    large = HostBuffer(8 * MiB)
    large.array[:] = 1
    ranges = [(buffer.address, buffer.nbytes) for buffer in (small, large)]
    assert hugepage_nbytes(ranges[:1]) == 0
    # Where free memory is in pieces, some of the four may be large and most of it not.
    nbytes = hugepage_nbytes(ranges)
    assert nbytes < 8 * MiB if large.backing == "pages" else 2 * MiB <= nbytes <= 8 * MiB
    assert hugepage_nbytes([]) == 0


def test_names_of_mapped_files_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    smaps = b"1000-2000 r--p 00000000 00:00 7 /tmp/\xff\x0b\xc2\x85 a\nRss: 4 kB\n"
    smaps += b"KernelPageSize: 4 kB\nAnonHugePages: 4 kB\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _: smaps)
    assert hugepage_nbytes([(0x1000, 0x1000)]) == 4096


def test_memory_outlives_its_buffer() -> None:
    view = HostBuffer(1 * MiB).array[100:]
    gc.collect()
    view[:] = 3
    assert (view == 3).all()


def test_impossible_buffers() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        HostBuffer(0)
    with pytest.raises(CapacityError, match="more than a process can address"):
        HostBuffer(1 << 60)


def test_addresses() -> None:
    numbers = np.arange(6, dtype=np.uint32).reshape(2, 3)
    expected = (int(numbers.ctypes.data), 24)
    assert address_of(numbers) == expected
    assert address_of(memoryview(numbers)) == expected
    assert address_of(Tensor(numbers)) == expected
    assert address_of(numbers[1:]) == (expected[0] + 12, 12)
    assert address_of((4096, 512)) == (4096, 512)
    raw = array.array("I", [1, 2])
    assert address_of(raw) == (raw.buffer_info()[0], 8)
    assert address_of(mmap.mmap(-1, 4096))[1] == 4096
    assert address_of(bytearray(10))[1] == 10


@pytest.mark.parametrize(
    ("buffer", "reason"),
    [
        (b"abc", "read-only"),
        (np.zeros((4, 4))[:, 1:], "contiguous"),
        (np.zeros(0), "empty"),
        (bytearray(), "empty"),
        ((0, 10), "empty"),
        ((4096, 0), "empty"),
        ("text", "cannot take the address of a str"),
        (Tensor(np.zeros((4, 4))[:, 1:]), "contiguous"),
        (np.broadcast_to(np.zeros(1), 5), "read-only"),
    ],
)
def test_unsuitable_memory(buffer: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        address_of(buffer)

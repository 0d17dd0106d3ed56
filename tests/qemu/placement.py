"""`python tests/qemu/placement.py FOLDER`: where a replayed batch goes on an emulated drive.

In the guest, prompts are stored and loaded layer by layer: in a pool by passthrough, and with one
file for every page on ext4, both with direct I/O. QEMU notes every command of the drive. What
`tutti bench placement FOLDER/trace` draws are places and order; times mean nothing here.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import tutti
from qemu.guest import Drive, Guest
from tutti.base.units import MiB

PROMPTS, PAGES = 4, 32
LAYOUT = tutti.KVLayout.mha(
    layers=8, kv_heads=2, head_dim=64, page_size=64, dtype="bfloat16", model="test-model"
)
#: In this order; a mark is a write to the second namespace at the number of what begins.
PHASES = ("pool write", "pool read", "files write", "files read")
DRIVE_NBYTES = 256 * MiB
CAPACITY_NBYTES = 128 * MiB
TRACE = "trace"


def record(folder: Path) -> Path:
    """Boots a guest that runs `replay`; the trace of its drive."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [folder / name for name in ("data", "marks")]
    for image, nbytes in zip(images, (DRIVE_NBYTES, MiB), strict=True):
        with image.open("wb") as file:
            file.truncate(nbytes)
    guest = Guest(folder, [Drive("usual", images)], ["-m", "qemu.placement"])
    trace = folder / TRACE
    guest.trace(trace, ("pci_nvme_read", "pci_nvme_write"))
    with guest:
        guest.wait(280)
    return trace


def replay() -> None:
    """In the guest."""
    from qemu.inside_kernel import generic, load_driver, namespaces

    load_driver(("usual",))
    block, marks = namespaces("usual")
    keys = np.random.default_rng(1).integers(0, 256, (PROMPTS, PAGES, 16), dtype=np.uint8)
    _in_a_pool(generic(block), marks, keys)
    subprocess.run(["mkfs.ext4", "-q", "-F", block], check=True)
    point = Path("/tmp/point")
    point.mkdir()
    subprocess.run(["mount", block, point], check=True)
    _in_files(point, marks, keys)
    subprocess.run(["umount", point], check=True)


def _in_a_pool(path: str, marks: str, keys: np.ndarray) -> None:
    tutti.format(path, LAYOUT, CAPACITY_NBYTES)
    # Without a profile: by an emulated drive's times, puts are written in parts on a slow machine.
    with tutti.open(path, profile=None) as store:
        store.allocate_memory(PAGES)
        pages = np.arange(PAGES)
        mark(marks, 0)
        for prompt in keys:
            store.put(prompt, pages).wait(60)
        mark(marks, 1)
        for prompt in keys:
            store.load(prompt, pages).wait(60)
        mark(marks, len(PHASES))


def _in_files(point: Path, marks: str, keys: np.ndarray) -> None:
    flags = os.O_DIRECT | os.O_CLOEXEC
    slice_nbytes = LAYOUT.object_nbytes // LAYOUT.layers
    with mmap.mmap(-1, slice_nbytes) as content:
        mark(marks, 2)
        for prompt in keys:
            fds = [
                os.open(point / k.tobytes().hex(), flags | os.O_RDWR | os.O_CREAT) for k in prompt
            ]
            for layer in range(LAYOUT.layers):  # layer by layer, as prefill makes them
                for fd in fds:
                    os.pwrite(fd, content, layer * slice_nbytes)
            for fd in fds:
                os.close(fd)
        mark(marks, 3)
        for prompt in keys:
            fds = [os.open(point / key.tobytes().hex(), flags | os.O_RDONLY) for key in prompt]
            for layer in range(LAYOUT.layers):
                for fd in fds:
                    os.preadv(fd, [content], layer * slice_nbytes)
            for fd in fds:
                os.close(fd)
        mark(marks, len(PHASES))


def mark(path: str, number: int) -> None:
    """Writes one block of the second namespace."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, 4096) as block:
            os.pwrite(fd, block, 4096 * number)
    finally:
        os.close(fd)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(record(Path(sys.argv[1])))
    else:
        replay()

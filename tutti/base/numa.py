"""NUMA nodes by sysfs.  Memory is on the node of the thread that touches it first, and a thread
may use the processors of the thread that starts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


def node_of(device: Path) -> int | None:
    """The node of a device, by its folder in sysfs; None where sysfs has -1 or nothing."""
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Keeps the calling thread on a node's processors, for memory and threads that it makes.

    Does nothing for None, if the thread may use none of these processors or only these, or if the
    system refuses.
    """
    before = os.sched_getaffinity(0)
    there = before & _processors(node)
    if not there or there == before:
        yield
        return
    with suppress(OSError):
        os.sched_setaffinity(0, there)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _processors(node: int | None) -> set[int]:
    """The processors of a node: sysfs lists them as "0-3,8"."""
    try:
        text = (_NODES / f"node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return {processor for end in ends for processor in range(end[0], end[-1] + 1)}

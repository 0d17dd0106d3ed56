"""Boots a guest in which the device kernels ring emulated drives, and reads QEMU's trace of it."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import pytest
from native.conftest import build as build
from native.conftest import environment as environment
from native.stand_in import run

from qemu.guest import PATIENCE, Drive, Guest, missing
from qemu.test_nvme import check, sparse
from tutti.base.units import MiB

pytestmark = [pytest.mark.nvme, pytest.mark.timeout(450 * PATIENCE)]
HERE = Path(__file__).parent
SLOW_NBYTES_PER_S = 4 * MiB
RUNG = {"mmio_doorbell_sq", "mmio_doorbell_cq", "io_cmd"}
SGL, BOTH = {"map_sgl"}, {"map_sgl", "map_prp"}
EVENTS = (*sorted(RUNG | BOTH), "admin_cmd")
#: Compiles the kernels for the guest, which finds them in the cache.
COMPILE = """
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.device_code import Modules
Modules(CudaDriver())
"""


def counted(trace: Path) -> dict[int, collections.Counter[str]]:
    """Doorbells, commands and their data pointers in the trace, by queue pair."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    last = 0
    for line in trace.read_text().splitlines():
        event, _, words = line.partition(" ")
        event = event.removeprefix("pci_nvme_")
        if event.startswith("map_"):
            found[last][event] += 1
        elif qid := re.search(r"[sc]qid (\d+)", words):
            found[int(qid[1])][event] += 1
            last = int(qid[1]) if event.endswith("cmd") else last
    return found


@pytest.mark.parametrize(
    ("cases", "maps"),
    [
        ("two_drives or unplugged", SGL),
        pytest.param("objects_come_back or deadline", BOTH, marks=pytest.mark.slow),
    ],
)
def test_kernels_ring_drives(
    cases: str, maps: set[str], environment: dict[str, str], tmp_path: Path, seed: int
) -> None:
    if reason := missing():
        pytest.skip(reason)
    run(["-c", COMPILE], environment)
    slow = "driver=throttle,throttle-group=slow,file.driver=file,file.filename={path}"
    drives = [
        Drive("left", [sparse(tmp_path / "left", 8 * MiB)]),
        Drive("slow", [sparse(tmp_path / "slow", 8 * MiB)], backend=slow),
        Drive("right", [sparse(tmp_path / "right", 8 * MiB)], hotplug=True),
    ]
    program = ["-m", "qemu.inside", "--seed", str(seed), str(HERE / "cases_gpu.py"), "-k"]
    program.append(cases)
    objects = [f"throttle-group,id=slow,x-bps-total={SLOW_NBYTES_PER_S}"]
    names = ("LD_LIBRARY_PATH", "XDG_CACHE_HOME")
    guest = Guest(
        tmp_path,
        drives,
        program,
        objects=objects,
        environment={name: environment[name] for name in names},
    )
    trace = tmp_path / "trace"
    guest.trace(trace, [f"pci_nvme_{event}" for event in EVENTS])
    with guest:
        if "unplugged" in cases:
            guest.wait_file("loading", 250)
            guest.command("device_del", id="right")
        guest.wait(270)
    check(guest.out)
    found = counted(trace)
    queues = {
        qid for qids in json.loads((guest.out / "queues").read_text()).values() for qid in qids
    }
    rung = sorted(queues & found.keys())  # a short case may use one of an engine's queue pairs
    assert rung
    for qid in rung:
        print(f"emulated: queue pair {qid} of the kernels: {dict(found[qid])}")
        assert found[qid].keys() == RUNG | maps

"""The GPU benchmarks that need no compute beside them: ceilings, movers, scatter, files, SMs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti.bench.fio import FioJob, prepare_file, run_fio
from tutti.bench.gpu_rig import (
    LBA_NBYTES,
    MOVERS,
    DevicePages,
    Load,
    Machine,
    PlainCopies,
    spin_until,
    timed,
    transfers,
    tutti_system,
)
from tutti.bench.paired import Round, System, compare
from tutti.errors import TuttiError, Unsupported
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.controller_memory import MemoryController
from tutti.gio_uring.gpu_device_engine import KINDS
from tutti.gio_uring.gpu_memory import PinnedMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.terminal import ProgressFactory
from tutti.units import KiB, MiB

DIRECTIONS = ("load", "store")
SLICES = (64 * KiB, 256 * KiB, MiB)
#: Of a round with files, so that a slow disk does not take hours.
_FILE_ROUND_NBYTES = 2048 * MiB


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    batch_nbytes: of one transfer.  round_nbytes: of a round.  file_nbytes: of the file in folder.
    """

    progress: ProgressFactory
    folder: Path
    pairs: int = 7
    batch_nbytes: int = 256 * MiB
    round_nbytes: int = 8192 * MiB
    file_nbytes: int = 4096 * MiB
    staging_nbytes: int = 256 * MiB

    def count(self, load: Load) -> int:
        """Transfers of a round."""
        return max(2, self.round_nbytes // load.nbytes)


Case = Callable[[Machine, Plan], dict[str, Any]]


def round_trip(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Bytes that are stored and loaded again are the same, by every engine and mover."""
    verdicts: dict[str, str] = {}
    load = Load(64 * KiB, 16, layers=4)
    ways = [("host", mover) for mover in _movers(machine)]
    if machine.modules is not None:
        ways += [(kind, "kernel") for kind in KINDS]
    pages = DevicePages(machine.driver, load)
    for engine, mover in ways:
        try:
            verdict = _trip(machine, pages, engine, mover)
        except TuttiError as error:
            verdict = f"{type(error).__name__}: {error}"
        verdicts[f"{engine} {mover}"] = verdict
    pages.close()
    return {"verdicts": verdicts, "right": all(v == "right" for v in verdicts.values())}


def _trip(machine: Machine, pages: DevicePages, engine: str, mover: str) -> str:
    with MemoryController([64 * MiB]) as medium, ExitStack() as stack:
        how: dict[str, Any] = {"controller": medium, "staging_nbytes": 8 * MiB}
        check = stack.enter_context(_checker(machine, pages))
        if engine == "host":
            return check(stack.enter_context(machine.host_engine(mover, **how))[0])
        return check(stack.enter_context(machine.device_engine(engine, **how)))


@contextmanager
def _checker(machine: Machine, pages: DevicePages) -> Iterator[Callable[[Any], str]]:
    """What stores random pages with an engine, wipes them and loads them: "right", or how many
    bytes are not.  Pins its memory before the engine is there.
    """
    driver, load = machine.driver, pages.load
    host = HostBuffer(load.nbytes)
    pinned = PinnedMemory(driver, host)
    content = np.random.default_rng(7).integers(0, 256, load.nbytes, dtype=np.uint8)
    stream = driver.create_stream()

    def move(target: int, source: int) -> None:
        driver.copy(target, source, load.nbytes, stream)
        spin_until(lambda: driver.is_stream_done(stream), "a copy")

    def check(submitter: Any) -> str:
        host.array[:] = content
        move(pages.address, pinned.device_address)
        transfers(submitter, pages, "store", 1)
        host.array[:] = 0
        move(pages.address, pinned.device_address)
        transfers(submitter, pages, "load", 1)
        move(pinned.device_address, pages.address)
        wrong = int(np.count_nonzero(host.array != content))
        return "right" if not wrong else f"{wrong} of {load.nbytes} bytes are wrong"

    try:
        yield check
    finally:
        driver.destroy_stream(stream)
        pinned.close()


def _movers(machine: Machine) -> list[str]:
    has = {"copy-batch": machine.driver.has_copy_batch, "kernel": machine.modules is not None}
    return [name for name in MOVERS if has.get(name, True)]


def ceiling(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Engine host and copy engines over a medium that moves nothing, against one memcpy."""
    rows = []
    mover = _movers(machine)[0]
    for slice_nbytes in SLICES:
        load = Load.of_nbytes(slice_nbytes, plan.batch_nbytes)
        for direction in DIRECTIONS:
            rows.append(_against_memcpy(machine, plan, "host", mover, load, direction))
    return {"rows": rows}


def engine(name: str, machine: Machine, plan: Plan) -> dict[str, Any]:
    """One engine with each of its movers over a medium that moves nothing, against one memcpy."""
    if name in KINDS and machine.modules is None:
        raise Unsupported("no device code is loaded")
    rows = []
    for mover in _movers(machine) if name == "host" else ["kernel"]:
        for slice_nbytes in SLICES:
            load = Load.of_nbytes(slice_nbytes, plan.batch_nbytes)
            for direction in DIRECTIONS:
                rows.append(_against_memcpy(machine, plan, name, mover, load, direction))
    return {"rows": rows}


def _against_memcpy(
    machine: Machine,
    plan: Plan,
    engine: str,
    mover: str,
    load: Load,
    direction: str,
    *,
    bar: str = "one",
    blocks: int = 16,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "engine": engine,
        "mover": mover,
        "direction": direction,
        "slice_nbytes": load.slice_nbytes,
        "fragment_nbytes": load.slice_nbytes // load.segments,
        "blocks": blocks if mover == "kernel" else 0,
    }
    count = plan.count(load)
    try:
        with ExitStack() as stack:
            # Before the engine: an allocation may wait for its kernels.
            pages = DevicePages(machine.driver, load)
            stack.callback(pages.close)
            copies = PlainCopies(machine.driver, pages)
            stack.callback(copies.close)
            how: dict[str, Any] = {"blocks": blocks, "staging_nbytes": plan.staging_nbytes}
            if engine == "host":
                submitter: Any = stack.enter_context(machine.host_engine(mover, **how))[0]
            else:
                submitter = stack.enter_context(machine.device_engine(engine, **how))
            ours = tutti_system(f"{engine} {mover}", submitter, pages, direction, count)
            theirs = copies.system(bar, direction, count)
            row |= compare(ours, theirs, pairs=plan.pairs, progress=plan.progress)
    except TuttiError as error:
        row["not_run"] = f"{type(error).__name__}: {error}"
    return row


def scatter(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Into scattered fragments of 32 and 128 KiB, K and V, against the batch call and a loop."""
    rows = []
    for fragment in (32 * KiB, 128 * KiB):
        load = Load.of_nbytes(2 * fragment, plan.batch_nbytes)
        for direction in DIRECTIONS:
            for bar in ("batch", "loop") if machine.driver.has_copy_batch else ("loop",):
                mover = _movers(machine)[0]
                row = _against_memcpy(machine, plan, "host", mover, load, direction, bar=bar)
                rows.append(row | {"bar": bar})
    return {"rows": rows}


def multiprocessors(machine: Machine, plan: Plan) -> dict[str, Any]:
    """How many blocks, one for each multiprocessor, the SM copy needs for the link's rate."""
    load = Load.of_nbytes(256 * KiB, plan.batch_nbytes)
    rows = [
        _against_memcpy(machine, plan, "host", "kernel", load, direction, blocks=blocks)
        for direction in DIRECTIONS
        for blocks in (1, 2, 4, 8, 16, 32)
    ]
    return {"rows": rows}


def files(machine: Machine, plan: Plan) -> dict[str, Any]:
    """Loads from and stores to a file by direct I/O, against fio with as many bytes in flight."""
    path = str(plan.folder / "gpu-bench.dat")
    rows: list[dict[str, Any]] = []
    try:
        prepare_file(path, plan.file_nbytes)
        for slice_nbytes in (256 * KiB, MiB):
            for direction in DIRECTIONS:
                rows.append(_against_fio(machine, plan, path, slice_nbytes, direction))
    except TuttiError as error:
        rows.append({"not_run": f"{type(error).__name__}: {error}"})
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return {"rows": rows}


def _against_fio(
    machine: Machine, plan: Plan, path: str, slice_nbytes: int, direction: str
) -> dict[str, Any]:
    load = Load.of_nbytes(slice_nbytes, min(plan.batch_nbytes, plan.file_nbytes))
    count = max(2, min(plan.round_nbytes, _FILE_ROUND_NBYTES) // load.nbytes)
    verb = "read" if direction == "load" else "write"
    fio = FioJob(path, verb, slice_nbytes, plan.file_nbytes, count * load.nbytes)

    def run() -> Round:
        result = run_fio(fio)
        return Round(result.gb_per_s, result.cpu_s_per_gb, {"fio": result.version})

    with ExitStack() as stack:
        controller = stack.enter_context(FileController([path]))
        assert controller.info.lba_nbytes == LBA_NBYTES, "files have blocks of 4096 bytes"
        pages = DevicePages(machine.driver, load)
        stack.callback(pages.close)  # after the engine, whatever becomes of a transfer
        gpu, _ = stack.enter_context(
            machine.host_engine(
                _movers(machine)[0], controller=controller, staging_nbytes=plan.staging_nbytes
            )
        )
        ours = System(
            "host file",
            lambda: timed(count * load.nbytes, lambda: transfers(gpu, pages, direction, count)),
        )
        result = compare(ours, System("fio", run), pairs=plan.pairs, progress=plan.progress)
    return {"direction": direction, "slice_nbytes": slice_nbytes, **result}

"""Measures digests of slices in GPU memory, alone and while the copy engine runs."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import numpy as np

from tutti.base.units import KiB
from tutti.bench.gpu import interference as gpu_beside
from tutti.bench.gpu.cases import RoundPlan, Row, copy_engines
from tutti.bench.gpu.interference import loads_beside
from tutti.bench.gpu.rig import DevicePages, GpuUnderTest, LayerLoad, poll_until, transfers
from tutti.bench.statistics import bootstrap_median, ratios
from tutti.errors import DeviceTimeout, Unsupported
from tutti.gio_uring.gpu.device_batch import BatchRequest, DeviceBatch, launch_layer
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner
from tutti.gio_uring.nvme_spec import OPCODE_WRITE


def digests(machine: GpuUnderTest, plan: RoundPlan) -> list[Row]:
    """XXH3 of slices in GPU memory on at most 8 blocks, alone and while the copy engine runs."""
    if machine.modules is None:
        raise Unsupported("no device code is loaded")
    return [
        Row(f"XXH3 on {blocks} blocks", partial(_digests, machine, plan, blocks))
        for blocks in (8, 4, 2)
    ]


def _digests(machine: GpuUnderTest, plan: RoundPlan, blocks: int) -> dict[str, Any]:
    # As many slices per layer as a long prefix has, because a warp handles a slice.
    load = LayerLoad(256 * KiB, max(1, plan.batch_nbytes // (256 * KiB)), layers=1)
    moved_load = plan.load(256 * KiB)
    found: dict[str, list[float]] = {
        name: []
        for name in ("alone_gb_per_s", "beside_gb_per_s", "mover_gb_per_s", "link_gb_per_s")
    }
    with ExitStack() as stack:
        hashed = stack.enter_context(closing(_Hashed(machine, load, blocks)))
        moved = stack.enter_context(closing(DevicePages(machine.driver, moved_load, 2)))
        mover = copy_engines(machine).mover
        gpu = stack.enter_context(machine.host_engine(mover, staging_nbytes=plan.staging_nbytes))
        transfers(gpu, moved, "load", 4)
        hashed.warm_up()
        for _ in range(gpu_beside.ROUNDS):
            found["alone_gb_per_s"].append(hashed.gb_per_s())
            with loads_beside(gpu, moved) as running:
                found["beside_gb_per_s"].append(hashed.gb_per_s())
            found["mover_gb_per_s"].append(running.gb_per_s())
            with loads_beside(gpu, moved) as running:
                time.sleep(gpu_beside.ROUND_S)
            found["link_gb_per_s"].append(running.gb_per_s())
    keeps_up = ratios(found["beside_gb_per_s"], found["mover_gb_per_s"])
    return {
        "blocks": blocks,
        "keeps_up": bootstrap_median(keeps_up).to_dict() if keeps_up else None,
        **{name: bootstrap_median(values).to_dict() for name, values in found.items()},
        "raw": found,
    }


class _Hashed:
    """Slices in GPU memory whose digests are computed repeatedly."""

    def __init__(self, machine: GpuUnderTest, load: LayerLoad, blocks: int) -> None:
        assert machine.modules is not None
        self._driver, self._load, self._blocks = machine.driver, load, blocks
        self._function = machine.modules["gio_verify"]
        self._pages = DevicePages(machine.driver, load)
        self._stream = machine.driver.create_stream()
        self._hold = LeaseOwner()
        self._batch = DeviceBatch(
            machine.tables,
            BatchRequest(
                self._pages.memory,
                self._pages.pages,
                opcode=OPCODE_WRITE,
                slice_nlb=load.slice_nbytes >> 9,
                lba_shift=9,
                digests=np.zeros((load.pages, load.layers), np.uint64),
            ),
            self._hold,
        )
        self._passes = 1

    def close(self) -> None:
        self._hold.is_free = lambda: True
        with suppress(DeviceTimeout):
            self._wait()
        self._driver.destroy_stream(self._stream)
        self._pages.close()

    def _wait(self) -> None:
        # With short pauses, because another thread needs the GIL; a round is much longer.
        poll_until(lambda: self._driver.is_stream_done(self._stream), "the digests", 0.00005)

    def warm_up(self) -> None:
        """Copies the tables to the device, and chooses the number of passes per round."""
        self._batch.upload(self._stream)
        self._wait()
        self.gb_per_s()
        passes = int(gpu_beside.ROUND_S * self.gb_per_s() * 1e9 / self._load.nbytes)
        self._passes = max(1, min(gpu_beside.CALLS_MAX, passes))

    def gb_per_s(self) -> float:
        """Speed of some passes over all layers."""
        began_s = time.perf_counter()
        for _ in range(self._passes):
            with self._driver.together():
                for layer in range(self._load.layers):
                    launch_layer(
                        self._driver, self._function, self._batch, layer, self._stream, self._blocks
                    )
        self._wait()
        return self._passes * self._load.nbytes / (time.perf_counter() - began_s) / 1e9

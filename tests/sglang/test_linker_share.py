"""The kernel that moves pages, on as many multiprocessors as the profile says.  No GPU runs: driver
and kernels are stand-ins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import linker_engine as engine
import pytest
from gio_uring.kernel_stand_in import Kernels
from linker_gpu import GpuRig, stand_in_gpu

from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu.driver import SmResource
from tutti.integration.sglang import linker as linker_module
from tutti.scheduler.profile import TableProfile, estimated_document
from tutti.scheduler.roofline import GPUS, ModelShape

MODEL = ModelShape("small", engine.LAYERS, 1e9, 4096, 1536, 2e9)


def profile(gb_per_s_of_one: float) -> TableProfile:
    """An SSD of somewhat less than 14.5 GB/s, and a mover that is linear in its multiprocessors."""
    document = estimated_document(MODEL, GPUS["H100"])
    points = [[sms, sms * gb_per_s_of_one] for sms in range(1, 133)]
    made = TableProfile({**document, "movers": {"points": points}})
    assert 14 < made.read_gb_per_s < 14.5
    return made


@contextmanager
def rig_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: TableProfile | None,
    sms: SmResource | None = None,
    refused: str = "",
) -> Iterator[tuple[GpuRig, list[int]]]:
    """A rig whose pages a kernel moves, and the grids of its launches."""
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    options = {"profile": "off"}  # else the pool's queue would decide on its puts a second time
    if known is not None:
        options = {"profile": "profile.json"}
        monkeypatch.setattr(linker_module, "served_profile", lambda *_: (known, "given"))
    with stand_in_gpu(monkeypatch, sms=sms) as (driver, streams):
        Kernels(driver, None)
        if refused:
            driver.fail[refused] = 1
        grids: list[int] = []
        launch = driver.launch

        def launched(function: int, grid: int, *rest: Any) -> None:
            grids.append(grid)
            launch(function, grid, *rest)

        monkeypatch.setattr(driver, "launch", launched)
        with GpuRig(folder, gpu_mover="kernel", read_ahead_share=0.0, **options) as rig:
            rig.driver, rig.streams = driver, streams
            yield rig, grids
        assert driver._greens == {}, "not released"


@pytest.mark.parametrize(
    ("gb_per_s_of_one", "sms", "expected"),
    [
        (5.0, SmResource(132, 8, 8), 8),
        (0.5, SmResource(132, 8, 8), 32),
        (0.5, SmResource(78, 4, 2), 30),
    ],
)
def test_the_mover_has_as_many_multiprocessors_as_the_profile_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gb_per_s_of_one: float,
    sms: SmResource,
    expected: int,
) -> None:
    with rig_of(tmp_path, monkeypatch, profile(gb_per_s_of_one), sms) as (rig, grids):
        assert list(rig.driver._greens.values()) == [expected]
        assert rig.driver.calls["cuGreenCtxStreamCreate"] == 2, "one for each direction"
        share, (mover,) = rig.linker._gpu.share, rig.linker._gpu._engines
        assert {mover._loads.stream, mover._stores.stream} == set(share.partition.streams)
        rig.round_trip(range(3, 9), [40, 20, 21, 22, 60, 1])
        assert set(grids) == {expected}


def test_without_a_profile_streams_are_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rig_of(tmp_path, monkeypatch, None) as (rig, grids):
        rig.round_trip(range(3, 9), [40, 20, 21, 22, 60, 1])
        assert "cuGreenCtxCreate" not in rig.driver.calls
        assert set(grids) == {16}
    assert "profile is off" in caplog.text


@pytest.mark.parametrize("call", ["cuGreenCtxCreate", "sms"])
def test_a_driver_that_refuses_costs_the_partition_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    few = SmResource(14, 8, 8) if call == "sms" else None
    refused = "" if few else call
    with rig_of(tmp_path, monkeypatch, profile(0.5), few, refused) as (rig, grids):
        rig.round_trip(range(3, 9), [40, 20, 21, 22, 60, 1])
        assert not rig.linker._gpu.share.partition.is_partition
        assert set(grids) == {16 if few else 32}, "as few blocks as it would have had"
    assert "no partition of multiprocessors" in caplog.text


def test_a_mover_that_is_too_slow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with rig_of(tmp_path, monkeypatch, profile(0.1)) as (rig, _):
        assert list(rig.driver._greens.values()) == [64]
    assert "use the copy engines" in caplog.text

"""Short pieces of pages that a kernel copies by a table of addresses, on a stand-in for a GPU.

The kernel runs in Triton's interpreter, and is compiled for GPUs that are absent; none runs it.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import linker_states
import numpy as np
import pytest
from linker_engine import names
from linker_gpu import stand_in_gpu
from linker_states import StatesRig, sparse
from triton.runtime.interpreter import InterpretedFunction

from tutti.errors import Unsupported
from tutti.integration.sglang.direct import table_copy
from tutti.integration.sglang.direct.table_copy import compile_for
from tutti.kernels.triton.copy_pages import copy_pages

PAGES = 70


def packed(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> StatesRig:
    """Latents and an indexer, whose pages are packed; room for two times the pages."""
    _, *others = linker_states.KINDS["sparse"]
    made = partial(sparse, 2 * PAGES + 4)
    monkeypatch.setitem(linker_states.KINDS, "sparse", (made, *others))
    sizes = dict.fromkeys(
        ("capacity", "sidecar_capacity", "load_staging", "store_staging"), "128MiB"
    )
    # Pages read ahead come in pieces of 64, and the few of the rest by copy engines.
    bounds = {"backlog_share": 1.0, "read_ahead_share": 0.0}
    return StatesRig(folder, "sparse", **{**sizes, **bounds, **options})


def round_trip(rig: StatesRig) -> dict[str, float]:
    """Stores and restores 70 pages elsewhere; what the kernel copied of each pool."""
    rig.fill(1)
    kept = {s.kv_pool.source: list(range(1, 1 + PAGES)) for s in rig.linker.stored_pools.values()}
    new = {source: [2 * PAGES + 2 - p for p in pages] for source, pages in kept.items()}
    want = {
        name: rig.content(name, kept[s.kv_pool.source])
        for name, s in rig.linker.stored_pools.items()
    }
    assert rig.store(rig.transfers(names(PAGES), kept))
    rig.wipe()
    assert rig.linker.lookup("r", rig.transfers(names(PAGES)))[-1:] == [PAGES]
    assert rig.restore(rig.transfers(names(PAGES), new))
    for name, stored_pool in rig.linker.stored_pools.items():
        assert rig.content(name, new[stored_pool.kv_pool.source]) == want[name], name
        assert rig.content(name, [0]) == [bytes(stored_pool.kv_pool.nbytes)]
    return copied_pages(rig)


def copied_pages(rig: StatesRig) -> dict[str, float]:
    pools = rig.linker.stored_pools.items()
    return {name: s.metrics.snapshot().get("kernel_copied_pages", 0) for name, s in pools}


@pytest.mark.parametrize("mover", ["auto", "copy-batch"])
def test_packed_pages_go_by_a_kernel_unless_copy_engines_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    with (
        stand_in_gpu(monkeypatch),
        packed(tmp_path, monkeypatch, gpu_mover=mover) as rig,
    ):
        pools = {name: s.kv_pool for name, s in rig.linker.stored_pools.items()}
        layers = {name: len(pool.spans) for name, pool in pools.items() if pool.packed}
        assert layers
        copied = round_trip(rig)
        for name, count in layers.items():
            assert copied[name] == (2 * count * PAGES if mover == "auto" else 0), name


def test_without_the_kernel_packed_pages_go_by_copy_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> bytes:
        raise Unsupported("no compiler")

    with stand_in_gpu(monkeypatch), caplog.at_level(logging.WARNING):
        monkeypatch.setattr(table_copy, "compile_for", refused)
        with packed(tmp_path, monkeypatch) as rig:
            assert not any(round_trip(rig).values())
    assert "no compiler" in caplog.text


def test_tables_that_layers_still_need_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for one table alone: the layers behind it go by copy engines.
    monkeypatch.setattr(table_copy, "_TABLES_NBYTES", 4096)
    with stand_in_gpu(monkeypatch), packed(tmp_path, monkeypatch) as rig:
        copied = round_trip(rig)
        assert any(copied.values())


def test_a_launch_that_fails_fails_its_load_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table is free again, or the linker would not close."""
    with (
        stand_in_gpu(monkeypatch) as (driver, _),
        packed(tmp_path, monkeypatch) as rig,
    ):
        before = round_trip(rig)
        pages = {
            s.kv_pool.source: list(range(1, 1 + PAGES)) for s in rig.linker.stored_pools.values()
        }
        launch, kernels = driver.launch, rig.linker._gpu._short._functions.values()

        def refused(function: int, *others: Any) -> None:
            driver.fail["cuLaunchKernel"] = int(function in kernels)
            launch(function, *others)

        with monkeypatch.context() as patch:
            patch.setattr(driver, "launch", refused)
            assert not rig.restore(rig.transfers(names(PAGES), pages))
        assert rig.restore(rig.transfers(names(PAGES), pages))
        assert copied_pages(rig) != before


@pytest.mark.parametrize("unit", [16, 4, 1])
@pytest.mark.parametrize("programs", [1, 5, 64])
def test_the_kernel_moves_these_bytes_alone(
    unit: int, programs: int, rng: np.random.Generator
) -> None:
    sizes = [unit * n for n in (1, 100, 700)]
    there, here = (
        [rng.integers(0, 256, (12, size + gap * unit), np.uint8) for size in sizes]
        for gap in (3, 1)
    )
    to, of = rng.permutation(12)[:9], rng.permutation(12)[:9]
    want = [a.copy() for a in there]
    for target, source, size in zip(want, here, sizes, strict=True):
        target[to, :size] = source[of, :size]
    spans = [
        (a.ctypes.data, a.strides[0], b.ctypes.data, b.strides[0], size)
        for a, b, size in zip(there, here, sizes, strict=True)
    ]
    table = np.concatenate([np.array(spans).reshape(-1), to, of]).astype(np.int64)
    kernel = InterpretedFunction(copy_pages.fn)
    kernel[(programs,)](int(table.ctypes.data), 3, 9, programs, UNIT=unit, BLOCK=4096)
    assert all(np.array_equal(a, b) for a, b in zip(there, want, strict=True))


@pytest.mark.parametrize(
    "architecture",
    [*(pytest.param(f"sm_{n}", marks=pytest.mark.slow) for n in (80, 100)), "sm_90"],
)
def test_the_kernel_compiles_for_a_gpu_that_is_absent(architecture: str) -> None:
    for unit in (16, 4, 1):
        assert compile_for(architecture, unit)[:4] == b"\x7fELF"


@pytest.mark.parametrize("error", [TypeError, AttributeError, OSError])
def test_a_triton_that_is_different_is_not_used(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def different(*_: object, **__: object) -> None:
        raise error("another version")

    monkeypatch.setattr("triton.compile", different)
    with pytest.raises(Unsupported, match="another version"):
        compile_for("sm_90", 16)

"""Loads whose kernels are launched when the scheduler grants their layers, under a store.

On a stand-in for the CUDA driver; kernels are Python that rings the engine's queue pairs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.gpu.test_host_engine import Rig, memory_of
from gio_uring.gpu.test_windows import LAYERS, LayerByLayer, writes_among_reads
from gio_uring.ringing_kernels import RingingKernels
from scheduler.drive import Linear
from waiting import wait_idle, wait_until

from store.pools import controller_of, formatted, some_keys
from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu.device_code import CubinCache, DeviceSource, Modules
from tutti.gio_uring.gpu.device_engine import DeviceEngine, KernelSize
from tutti.gio_uring.gpu.mover import CopyMover
from tutti.scheduler.dispatcher import Schedule
from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Decision, Issue

RigOf = Callable[..., AbstractContextManager["KernelRig"]]


class KernelRig(Rig):
    """As Rig, with an engine whose kernels submit.  kind: see DeviceEngine."""

    kind = "launch"
    cache: Path

    def _engine(self, staging_nbytes: int, mover: CopyMover | None) -> DeviceEngine:
        self.kernels = RingingKernels(self.driver)
        code = DeviceSource(self.cache), CubinCache(self.cache)
        self.modules = Modules(self.driver, source=code[0], cache=code[1])
        return DeviceEngine(
            self.driver,
            self.modules,
            self.store.engine.controller,
            kind=self.kind,
            kernels=KernelSize(shares=1, depth=16),
            staging_nbytes=staging_nbytes,
        )


@pytest.fixture(params=["launch", "resident"])
def rig_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> RigOf:
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")

    class OneKind(KernelRig):
        kind, cache = request.param, tmp_path

    @contextmanager
    def make(**options: object) -> Iterator[KernelRig]:
        driver = StandInDriver()
        rig = OneKind(controller_of(formatted()), ["member0"], driver=driver, **options)  # type: ignore[arg-type]
        try:
            yield rig
        finally:
            rig.store.close()
            rig.modules.close()
            driver.close()
        assert not driver.violations, driver.violations[:3]

    return make


def test_writes_go_between_the_layers_of_a_load(rig_of: RigOf, rng: np.random.Generator) -> None:
    """Seen by the drive; the next layer is granted only after the write has ended."""
    issues: list[Issue] = []
    schedule = Schedule(
        Linear(), policy=LayerByLayer, record=lambda _, decision: issues.extend(decision.reads)
    )
    with rig_of(timeout_s=30.0, verify="off", schedule=schedule) as rig:
        keys, contents = rig.stored(rng, 4)
        fresh = rig.fill([16, 17, 18], rng)
        trace = memory_of(rig).trace(4096)
        puts = some_keys(rng, 3)

        def put() -> None:
            for n in range(3):
                assert rig.store.put(puts[n : n + 1], [16 + n]).wait(20).stored == 1

        thread = threading.Thread(target=put)
        thread.start()
        tickets = [rig.store.put(some_keys(rng, 1), [20])]  # so that the load is not alone
        ticket = rig.store.load(keys, list(range(8, 12)))
        stream = rig.driver.create_stream()
        for layer in range(LAYERS):
            ticket.order_stream(stream, layer)
        wait_until(lambda: rig.driver.is_stream_done(stream))
        assert not ticket.failed().size
        assert [rig.pool.read(8 + n) for n in range(4)] == contents
        thread.join(30)
        assert tickets[0].wait(20).stored == 1
        rig.store.load(puts, [21, 22, 23]).wait(20)
        assert [rig.pool.read(21 + n) for n in range(3)] == fresh
        wait_idle(rig.store.scheduler)
    counts = [issue.count for issue in issues if issue.name == issues[0].name]
    assert counts == [1] * LAYERS
    assert writes_among_reads(trace, range(LAYERS)) > 0


def test_a_long_load_that_competes_with_nothing_is_launched_whole(
    rig_of: RigOf, rng: np.random.Generator
) -> None:
    decisions: list[Decision] = []
    slow = Linear(read_gbps=1e-5)
    schedule = Schedule(slow, Limits(staged_pages=0), record=lambda _, one: decisions.append(one))
    with rig_of(timeout_s=30.0, schedule=schedule) as rig:
        keys, contents = rig.stored(rng, 4)
        ticket, stream = rig.store.load(keys, list(range(8, 12))), rig.driver.create_stream()
        ticket.order_stream(stream, LAYERS - 1)
        wait_until(lambda: rig.driver.is_stream_done(stream))
        assert [rig.pool.read(8 + n) for n in range(4)] == contents
        wait_idle(rig.store.scheduler)
        issues = [issue for one in decisions for issue in one.reads]
        assert [(issue.first, issue.count) for issue in issues] == [(0, LAYERS)]


def test_a_load_that_is_granted_no_more_is_read_after_all(
    rig_of: RigOf, rng: np.random.Generator
) -> None:
    class OneLayer(LayerByLayer):
        def decide(self, state: object) -> Decision:
            decision = super().decide(state)  # type: ignore[arg-type]
            return Decision(tuple(one for one in decision.reads if not one.first), decision.writes)

    with rig_of(timeout_s=1.0, schedule=Schedule(Linear(read_gbps=1e-5), policy=OneLayer)) as rig:
        keys, contents = rig.stored(rng, 4)
        ticket = rig.store.load(keys, list(range(8, 12)))
        ticket.wait_layer(0, 10)
        ticket.wait(10)
        assert [rig.pool.read(8 + n) for n in range(4)] == contents

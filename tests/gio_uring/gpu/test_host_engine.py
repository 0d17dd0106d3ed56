"""The GPU engine `host` under a store, on a stand-in for the CUDA driver: no GPU is involved."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver, StandInTensor
from gio_uring.kernel_stand_in import Kernels
from memory_controller import Faults, MemoryController
from waiting import wait_until

from store.pools import LAYOUT, Bytes, controller_of, formatted, images_of, some_keys
from tutti.errors import (
    CapacityError,
    ConfigError,
    CudaError,
    DeviceTimeout,
    MediumError,
    TuttiError,
    Unsupported,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_code import KERNELS
from tutti.gio_uring.gpu.device_engine import DeviceEngine
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.mover import CopyMover
from tutti.gio_uring.gpu.verifier import Verifier
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import PSDT_PRP
from tutti.memory.device_memory import DeviceMemory
from tutti.pool import pool_format
from tutti.store import ObjectStore
from tutti.transfers.loader import Loader
from tutti.transfers.store_config import StoreConfig

PAGES = 24


class Rig:
    """A store, a stand-in GPU, and a pool of pages in its memory."""

    def __init__(
        self,
        controller: NativeController,
        names: list[str],
        *,
        driver: StandInDriver,
        staging_nbytes: int = 1 << 20,
        timeout_s: float = 5.0,
        verify: str = "always",
        plain: bool = False,
        digest_cache_nbytes: int = 1 << 20,
        **more: Any,
    ) -> None:
        self.controller = controller
        self.driver = driver
        self.kernels = Kernels(driver, None)
        config = StoreConfig(
            timeout_s=timeout_s, verify=verify, digest_cache_nbytes=digest_cache_nbytes, **more
        )
        self.store = ObjectStore(controller, names, config=config)
        self.gpu: Any = self._engine(staging_nbytes, CopyMover(driver) if plain else None)
        self.store.attach(self.gpu)
        tensors = [[StandInTensor(driver, PAGES * n) for n in LAYOUT.segments] for _ in range(4)]
        self.tensors = tensors
        self.pool = self.store.register(
            DeviceMemory.from_layers(LAYOUT, tensors, PAGES, gpu=self.gpu)
        )

    def _engine(self, staging_nbytes: int, mover: CopyMover | None) -> HostEngine | DeviceEngine:
        return HostEngine(
            self.driver,
            self.store.engine,
            mover=mover,
            verifier=self._verifier(),
            load_staging_nbytes=staging_nbytes,
            store_staging_nbytes=staging_nbytes,
        )

    def _verifier(self) -> Verifier:
        names = {name: self.driver.find_function(0, name) for name in KERNELS}
        return Verifier(self.driver, names, tables_nbytes=1 << 18)  # type: ignore[arg-type]

    def fill(self, pages: list[int], rng: np.random.Generator) -> list[bytes]:
        contents = [rng.bytes(LAYOUT.object_nbytes) for _ in pages]
        for page, content in zip(pages, contents, strict=True):
            self.pool.write(page, content)
        return contents

    def stored(self, rng: np.random.Generator, count: int) -> tuple[Bytes, list[bytes]]:
        """Keys and contents of objects that are stored from the first pages."""
        keys, pages = some_keys(rng, count), list(range(count))
        contents = self.fill(pages, rng)
        assert self.store.put(keys, pages).wait(10).stored == count
        return keys, contents

    def hold_copies(self) -> Bytes:
        """Copies wait for a stream that waits until the first byte of the result is 1."""
        compute, word = self.driver.create_stream(), self.driver.allocate(256)
        self.driver.wait_value(compute, word, 1)
        self.pool.follow(compute)
        return self.driver.array(word)

    def layer_bytes(self, page: int, layer: int) -> bytes:
        """Straight from the stand-in's memory, without a CUDA call."""
        return b"".join(
            tensor.array[page * n : (page + 1) * n].tobytes()
            for tensor, n in zip(self.tensors[layer], LAYOUT.segments, strict=True)
        )


@contextmanager
def rig_over(
    controller: NativeController, names: list[str], driver: StandInDriver, **options: object
) -> Iterator[Rig]:
    """Checks in the end that the product did nothing that a GPU would not forgive."""
    rig = Rig(controller, names, driver=driver, **options)  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        try:
            rig.store.close()
        finally:
            driver.close()
    assert not driver.violations, driver.violations[:3]


@contextmanager
def rig_over_file(path: Path) -> Iterator[Rig]:
    """On a new pool."""
    pool_format.format([str(path)], LAYOUT, 16 << 20)
    with rig_over(FileController([path]), [str(path)], StandInDriver()) as rig:
        yield rig


@contextmanager
def rig_over_memory(
    *,
    seed: int = 0,
    queues: int = 8,
    queue_max: int = 1024,
    has_copy_batch: bool = True,
    **options: object,
) -> Iterator[Rig]:
    driver = StandInDriver(
        seed=seed, queues=queues, queue_max=queue_max, has_copy_batch=has_copy_batch
    )
    with rig_over(controller_of(formatted()), ["member0"], driver, **options) as rig:
        yield rig


def memory_of(rig: Rig) -> MemoryController:
    assert isinstance(rig.controller, MemoryController)
    return rig.controller


@pytest.fixture(autouse=True)
def gates_are_debts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tells the stand-in whose turn it is while a gate is closed: the thread that opens it.

    That is no thread before the loader begins to read the digests.
    """
    submit, open_gate, cancel = Engine.submit, Job.open_gate, Job.cancel
    open_part = Loader._open_gate

    def noted_part(loader: Loader, gate: Any) -> None:
        for job in getattr(gate.part.job, "_jobs", ()):
            driver = _driver_of(job._engine)
            if driver is not None and getattr(job, "debt", 0) in driver.owed:
                driver.owed[job.debt] = (driver.owed[job.debt][0], threading.get_ident())
        open_part(loader, gate)

    def noted_submit(engine: Engine, *arguments: object, **options: object) -> Job:
        words = options.get("words")
        job = submit(engine, *arguments, **options)  # type: ignore[arg-type]
        driver = _driver_of(engine)
        if words is not None and options.get("gated") and driver is not None:
            nbytes = words.nbytes_of(words.layers)  # type: ignore[attr-defined]
            driver.owed[words.address] = (nbytes, 0)  # type: ignore[attr-defined]
            job.debt = words.address  # type: ignore[attr-defined]
        return job

    def settle(job: Job) -> None:
        driver = _driver_of(job._engine)
        if driver is not None:
            driver.owed.pop(getattr(job, "debt", 0), None)

    def noted_open(job: Job) -> None:
        settle(job)
        open_gate(job)

    def noted_cancel(job: Job) -> None:
        settle(job)
        cancel(job)

    monkeypatch.setattr(Loader, "_open_gate", noted_part)
    monkeypatch.setattr(Engine, "submit", noted_submit)
    monkeypatch.setattr(Job, "open_gate", noted_open)
    monkeypatch.setattr(Job, "cancel", noted_cancel)


def _driver_of(engine: Engine) -> StandInDriver | None:
    for thing in gc.get_referrers(engine):
        if isinstance(thing, dict) and isinstance(thing.get("driver"), StandInDriver):
            return thing["driver"]
        if isinstance(thing, HostEngine):
            return thing.driver  # type: ignore[return-value]
    return None


def round_trip(rig: Rig, rng: np.random.Generator) -> None:
    keys = some_keys(rng, 12)
    sent = rng.permutation(PAGES)[:12].tolist()
    contents = rig.fill(sent, rng)
    assert rig.store.put(keys, sent).wait(10).stored == 12
    assert rig.store.match(keys) == 12
    for pages in (rng.permutation(PAGES)[:12].tolist(), list(range(12))):
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = 0
        ticket = rig.store.load(keys, pages)
        for layer in range(LAYOUT.layers):
            ticket.wait_layer(layer, 10)
            start = sum(LAYOUT.segments) * layer
            part = slice(start, start + sum(LAYOUT.segments))
            assert [rig.layer_bytes(p, layer) for p in pages] == [c[part] for c in contents]
        assert ticket.wait_settled(10)
        assert ticket.done
        assert [rig.pool.read(page) for page in pages] == contents


@pytest.mark.parametrize("staging_nbytes", [1 << 20, 160 << 10])
@pytest.mark.parametrize("kind", ["batch", "plain", "aliased", "full"])
def test_pages_travel_and_come_back(
    rng: np.random.Generator, seed: int, kind: str, staging_nbytes: int
) -> None:
    """Also with staging for one layer alone, all streams on one queue, and queues of four."""
    with rig_over_memory(
        seed=seed,
        plain=kind == "plain",
        has_copy_batch=kind != "plain",
        queues=1 if kind in ("aliased", "full") else 8,
        queue_max=4 if kind == "full" else 1024,
        staging_nbytes=staging_nbytes,
    ) as rig:
        round_trip(rig, rng)


def test_pages_travel_through_files(rng: np.random.Generator, tmp_path: Path) -> None:
    with rig_over_file(tmp_path / "pool.tutti") as rig:
        round_trip(rig, rng)


def test_unproven_objects_count_when_all_their_layers_do(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        pages = list(range(8))
        keys, contents = rig.stored(rng, 8)
        images = images_of(memory_of(rig))  # as a crash would leave them
    with rig_over(controller_of(images), ["member0"], StandInDriver()) as rig:
        rig.store.wait_recovered(10)
        assert rig.store.match(keys, proven=True) == 0
        ticket = rig.store.load(keys, pages)
        stream = rig.driver.create_stream()
        ticket.order_stream(stream, 0)
        ticket.wait_layer(0, 10)
        assert [rig.pool.read(page) for page in pages] == contents
        assert ticket.wait_settled(10)
        assert rig.store.match(keys, proven=True) == 8


@pytest.mark.parametrize("verify", ["always", "off"])
def test_out_of_order_and_late_completions(
    rng: np.random.Generator, seed: int, verify: str
) -> None:
    with rig_over_memory(seed=seed, verify=verify, staging_nbytes=256 << 10) as rig:
        faults = Faults(seed=seed, delay_ppm=400_000, delay_turns=20, reorder_ppm=400_000)
        memory_of(rig).set_faults(faults)
        for _ in range(3):
            round_trip(rig, rng)
            rig.store.clear()


def test_seeded_faults_never_show_wrong_bytes(rng: np.random.Generator, seed: int) -> None:
    with rig_over_memory(seed=seed) as rig:
        keys, contents = rig.stored(rng, 16)
        memory_of(rig).set_faults(Faults(seed=seed, status_ppm=30_000, short_ppm=30_000))
        for _ in range(20):
            found = [i for i in range(16) if rig.store.match(keys[i : i + 1])]
            if not found:
                break
            ticket = rig.store.load(keys[found], found)
            failed: tuple[int, ...] = ()
            try:
                ticket.wait(10)
            except MediumError as error:
                failed = error.pages
            assert ticket.wait_settled(10)
            for place, key in enumerate(found):
                if place not in failed:
                    assert rig.pool.read(key) == contents[key]
        memory_of(rig).set_faults(None)  # closing writes metadata


def test_records_are_read_before_a_stream_waits(rng: np.random.Generator) -> None:
    """Digests that are not cached close the gate: only when it is open may a stream wait."""
    with rig_over_memory(digest_cache_nbytes=0) as rig:
        keys, contents = rig.stored(rng, 8)
        commands = rig.store.engine.stats().commands
        ticket = rig.store.load(keys, list(range(8, 16)))
        ticket.wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents
        assert rig.store.engine.stats().commands - commands > LAYOUT.layers, "of records, too"


def test_a_dead_controller_lets_every_stream_go(rng: np.random.Generator) -> None:
    # The put has to end within it, also on a machine with much to do.
    with rig_over_memory(timeout_s=2.0) as rig:
        keys, _ = rig.stored(rng, 12)
        memory_of(rig).set_faults(Faults(stall_from=5))
        ticket = rig.store.load(keys, list(range(12, 24)))
        streams = [rig.driver.create_stream() for _ in range(LAYOUT.layers)]
        for layer, stream in enumerate(streams):
            ticket.order_stream(stream, layer)
        with pytest.raises(DeviceTimeout):
            ticket.wait(10)
        wait_until(lambda: all(map(rig.driver.is_stream_done, streams)), "a stream still waits")
        assert ticket.failed().size > 0
        assert rig.gpu._loads.staging.arena.in_use == 1  # the device may still write there
        memory_of(rig).set_faults(None)
        memory_of(rig).release()
        assert ticket.wait_settled(10)
        assert rig.gpu._loads.staging.arena.in_use == 0


def test_closing_with_work_in_flight(rng: np.random.Generator) -> None:
    with rig_over_memory(timeout_s=2.0) as rig:
        pages = list(range(12))
        keys, _ = rig.stored(rng, 12)
        memory_of(rig).set_faults(Faults(stall_from=3))
        loading = rig.store.load(keys, list(range(12, 24)))
        storing = rig.store.put(some_keys(rng, 12), pages)
        rig.store.close(4.0)
        assert loading.done
        for ticket in (loading, storing):
            with pytest.raises(TuttiError):
                ticket.wait(5)


def test_a_cuda_error_in_the_middle_ends_the_load(rng: np.random.Generator) -> None:
    with rig_over_memory(has_copy_batch=False) as rig:
        keys, contents = rig.stored(rng, 8)
        word = rig.hold_copies()
        rig.driver.fail["cuMemcpyAsync"] = 3  # the copies before it have no event behind them
        ticket = rig.store.load(keys, list(range(8, 16)))
        with pytest.raises(CudaError, match="cuMemcpyAsync"):
            ticket.wait(10)
        assert not ticket.wait_settled(0.2)
        assert not ticket.done
        word[0] = 1
        assert ticket.wait_settled(10)
        with pytest.raises(ConfigError, match="start it again"):
            ticket.order_stream(0, 3)
        ticket = rig.store.load(keys, list(range(8, 16)))
        ticket.wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents


def test_a_cuda_error_in_a_put_stores_nothing(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        keys, pages = some_keys(rng, 8), list(range(8))
        rig.fill(pages, rng)
        rig.driver.fail["cuStreamWriteValue32"] = 2
        with pytest.raises(TuttiError):
            rig.store.put(keys, pages).wait(10)
        assert rig.store.match(keys) == 0
        assert rig.store.put(keys, pages).wait(10).stored == 8


def test_a_put_follows_the_stream_that_fills_its_pages(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        keys, pages = some_keys(rng, 4), list(range(4))
        rig.fill(pages, rng)
        compute = rig.driver.create_stream()
        word = rig.driver.allocate(256)
        rig.driver.wait_value(compute, word, 1)  # a kernel that is still at work
        for tensor in (t for row in rig.tensors for t in row):
            rig.driver.fill(tensor.data_ptr(), 7, tensor.numel(), compute)
        rig.pool.follow(compute)
        ticket = rig.store.put(keys, pages)
        time.sleep(0.02)
        assert not ticket.done
        rig.driver.array(word)[0] = 1
        assert ticket.wait(10).stored == 4
        rig.store.load(keys, list(range(4, 8))).wait(10)
        assert rig.pool.read(5) == b"\7" * LAYOUT.object_nbytes


def test_a_stream_waits_for_a_layer_alone(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 4)
        ticket = rig.store.load(keys, list(range(4, 8)))
        compute = rig.driver.create_stream()
        out = rig.driver.allocate(LAYOUT.layers * LAYOUT.segments[0])
        for layer in range(LAYOUT.layers):
            ticket.order_stream(compute, layer)
            n = LAYOUT.segments[0]
            source = rig.tensors[layer][0].data_ptr() + 5 * n
            rig.driver.copy(out + layer * n, source, n, compute)
        wait_until(lambda: rig.driver.is_stream_done(compute))
        expected = b"".join(
            contents[1][layer * sum(LAYOUT.segments) :][: LAYOUT.segments[0]]
            for layer in range(LAYOUT.layers)
        )
        assert rig.driver.array(out).tobytes() == expected
        with pytest.raises(IndexError):
            ticket.order_stream(compute, LAYOUT.layers)


def test_many_threads_load_and_store_at_once(rng: np.random.Generator, seed: int) -> None:
    with rig_over_memory(seed=seed, queues=1, queue_max=6, staging_nbytes=192 << 10) as rig:
        keys, contents = rig.stored(rng, 12)
        failures: list[BaseException] = []

        def load(first: int) -> None:
            try:
                for _ in range(6):
                    part = slice(first, first + 4)
                    rig.store.load(keys[part], list(range(12 + first, 16 + first))).wait(20)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=load, args=(first,)) for first in (0, 4, 8)]
        for thread in threads:
            thread.start()
        extra = some_keys(rng, 12)
        rig.store.put(extra, list(range(12))).wait(20)
        for thread in threads:
            thread.join(60)
        assert not failures
        assert [rig.pool.read(page) for page in range(12, 24)] == contents


def test_what_cannot_fit_or_work_says_so(rng: np.random.Generator) -> None:
    with (
        pytest.raises(CapacityError, match="staging"),
        rig_over_memory(staging_nbytes=8 << 10),
    ):
        pytest.fail("the memory was registered")
    with rig_over_memory(staging_nbytes=64 << 10) as rig:
        host = rig.store.allocate_memory(4)
        assert rig.store.put(some_keys(rng, 2), [0, 1], memory=rig.pool).wait(10).stored == 2
        with pytest.raises(Unsupported, match="DeviceMemory"):
            rig.store.load(some_keys(rng, 0), [], memory=host).order_stream(0, 0) or _load_host(rig)
        with pytest.raises(Unsupported):
            rig.pool.segment(0, 0, 0)
        with pytest.raises(ConfigError, match="pass bytes"):
            rig.pool.write(0, "a page")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="create a stream"):
            HostEngine(rig.driver, rig.store.engine, load_streams=(0,))
        with pytest.raises(ConfigError, match="gpu="):
            DeviceMemory.from_layers(LAYOUT, rig.tensors, PAGES)
        rig.store.unregister(rig.pool)


def test_staging_that_a_drive_without_sgls_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig_over_memory() as rig:
        memory, slice_nlb = rig.pool.memory, rig.store.geometry.slice_nlb
        shorter = (memory.segment_nbytes[0] - 512, *memory.segment_nbytes[1:])
        padded = replace(memory, segment_nbytes=shorter)
        rig.gpu.check_page(padded, slice_nlb)
        monkeypatch.setattr(rig.store.engine, "psdt", PSDT_PRP)
        rig.gpu.check_page(memory, slice_nlb)
        with pytest.raises(Unsupported, match="no SGLs"):
            rig.gpu.check_page(padded, slice_nlb)


def _load_host(rig: Rig) -> None:
    host = rig.store._resources.memories[-1]
    keys = some_keys(np.random.default_rng(1), 1)
    rig.store.put(keys, [0], memory=host).wait(10)
    rig.store.load(keys, [1], memory=host).order_stream(0, 0)

"""A small engine drives the linker with many requests over a faulty medium: never a wrong byte.

The engine does what SGLang's scheduler does with a linker: look-ups while requests wait, loads into
private pages, a forward that waits layer by layer on another thread, offloads that lock pages,
evictions of its own. The medium is the memory controller with seeded faults.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from integrity import check_allocator, check_index
from linker_engine import LAYERS, PAGES, WAIT_S, Rig, in_use, kept_ahead, names, transfer, wait_for
from memory_controller import Faults

from store.pools import Bytes, formatted, opened
from tutti.integration.sglang.direct import open_pools as open_pools_module
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.store import ObjectStore

REQUESTS = 64
GROUPS = 14  # of four objects: fewer than the requests' pages


class Model:
    """SGLang in small: pages, a cache of its own, requests.  What a page holds follows its name."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.free = list(range(PAGES))
        self.cached: OrderedDict[str, int] = OrderedDict()
        self.offloading: list[list[str]] = []
        self.stored: set[str] = set()
        self.loaded = self.failed = self.refused = 0

    def pattern(self, name: str, layer: int, part: int) -> np.ndarray[Any, Any]:
        seed = xxhash.xxh3_64_intdigest(f"{name}/{layer}/{part}".encode())
        size = self.rig.stored_pool.kv_pool.views[layer][part].shape[1]
        return np.full(size // 8, seed, np.uint64).view(np.uint8)

    def compute(self, name: str, page: int) -> None:
        for layer, row in enumerate(self.rig.stored_pool.kv_pool.views):
            for part, view in enumerate(row):
                view[page] = self.pattern(name, layer, part)

    def right(self, name: str, page: int, layer: int) -> bool:
        row = self.rig.stored_pool.kv_pool.views[layer]
        return all(
            np.array_equal(view[page], self.pattern(name, layer, part))
            for part, view in enumerate(row)
        )

    def allocate(self, count: int) -> list[int] | None:
        locked = {name for names_ in self.offloading for name in names_}
        for name in list(self.cached):
            if len(self.free) >= count:
                break
            if name not in locked:
                page = self.cached.pop(name)
                self.compute("evicted", page)  # a later reader gets caught
                self.free.append(page)
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def insert(self, chain: list[str], pages: Mapping[str, int]) -> None:
        """Pages become the cache's; what is new there is offloaded."""
        new = []
        for name in chain:
            if name in self.cached:
                self.cached.move_to_end(name)
                if name in pages:
                    self.free.append(pages[name])
            elif name in pages:
                self.cached[name] = pages[name]
                new.append(name)
        new = [name for name in new if name not in self.stored]
        if new:
            slots = [self.cached[name] for name in new]
            if self.rig.linker.offload([transfer(new, slots)]):
                self.offloading.append(new)

    def reap(self) -> None:
        for _ in range(self.rig.linker.num_completed_offloads()):
            kept = self.rig.linker.pop_completed_offload()
            done = self.offloading.pop(0)
            if kept:
                self.stored.update(done)

    def step(self, requests: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
        """One batch; returns the requests that have to be tried again."""
        linker, rng = self.rig.linker, self.rng
        plans: list[tuple[str, list[str], dict[str, int], dict[str, int]]] = []
        again = []
        for rid, chain in requests:
            hit = 0
            while hit < len(chain) and chain[hit] in self.cached:
                hit += 1
            tail = chain[hit:]
            lengths = linker.lookup(rid, [transfer(tail)]) if tail else []
            if rng.random() < 0.15:
                if rng.random() < 0.5:
                    linker.cancel_queued_load(rid)
                continue  # the request goes away, and SGLang may report it or not
            loads = tail[: lengths[-1]] if lengths else []
            pages = self.allocate(len(tail))
            if pages is None:
                again.append((rid, chain))
                continue
            at = dict(zip(tail, pages, strict=True))
            got = {name: at[name] for name in loads}
            if got and not linker.load(rid, [transfer(loads, [got[name] for name in loads])]):
                self.refused += 1
                got = {}
            if got and rng.random() < 0.05:
                assert linker.cancel_queued_load(rid)
                self.free += pages
                continue
            plans.append((rid, chain, at, got))
        index = linker.start_layer_wise_loading()
        wrong = self.forward(index, [got for _, _, _, got in plans])
        good = index < 0 or linker.finish_layer_wise_loading(index)
        assert not (good and wrong), f"served as right, and wrong: {wrong[:3]}"
        for rid, chain, at, got in plans:
            if got and not good:
                self.failed += 1
                self.free += at.values()
                again.append((rid, chain))
                continue
            self.loaded += len(got)
            for name, page in at.items():
                if name not in got:
                    self.compute(name, page)
            self.insert(chain, at)
        return again

    def forward(self, index: int, loads: list[dict[str, int]]) -> list[str]:
        """Waits for the layers on a thread of its own, as the model does; what was wrong."""
        wrong: list[str] = []

        def run() -> None:
            counter = self.rig.linker.layer_done_counter
            counter.set_consumer(index)
            for layer in range(LAYERS):
                for _ in range(2):  # K and V wait each
                    counter.wait_until(layer)
                for got in loads:
                    for name, page in got.items():
                        if not self.right(name, page, layer):
                            wrong.append(f"{name[:8]} layer {layer}")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the forward hangs"
        return wrong


def stores_in_memory(
    faults: list[Callable[[Faults], None]], images: list[Bytes] | None = None
) -> Callable[..., tuple[ObjectStore, str]]:
    """In place of pools in files: media in memory whose faults can be set.

    images: what is on them in the beginning; None for an empty pool.
    """

    def make(
        layout: KVLayout, name: str, capacity: int, options: Mapping[str, Any], *_: Any, is_kv: bool
    ) -> tuple[ObjectStore, str]:
        geometry = Geometry(layout.layers, layout.segments, 4096, 4, GROUPS)
        store = opened(
            images or formatted(layout, geometry),
            timeout_s=20.0,
            verify=options["verify"],
            pin_lookups=options["pin_lookups"],
            pin_share=options["pin_share"],
        )
        faults.append(store.controller.set_faults)  # type: ignore[attr-defined]
        return store, name

    return make


def chains(rng: random.Random) -> list[list[str]]:
    """64 prompts over few roots, each with a branch and a tail of its own."""
    made = []
    for number in range(REQUESTS):
        root, branch = rng.randrange(5), rng.randrange(3)
        chain = names(rng.randrange(3, 7), f"root{root}")
        chain += names(rng.randrange(1, 4), f"branch{root}.{branch}.{len(chain)}")
        chain += names(rng.randrange(0, 4), f"tail{number}")
        made.append(chain)
    return made


FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "delays": {"delay_ppm": 200_000, "reorder_ppm": 300_000},
    "failures": {"delay_ppm": 100_000, "status_ppm": 10_000, "short_ppm": 3_000},
    "lies": {"lost_ppm": 30_000, "torn_ppm": 10_000, "torn_status": 0, "reorder_ppm": 100_000},
}


def serve(model: Model, rng: random.Random) -> None:
    """Batches of requests, with SGLang's flush now and then."""
    rig = model.rig
    waiting = [(f"r{i}", chain) for i, chain in enumerate(chains(rng))]
    for round_ in range(70):
        batch = [waiting.pop(0) for _ in range(min(len(waiting), rng.randrange(1, 5)))]
        for rid, chain in rng.sample(waiting, min(len(waiting), 3)):
            rig.linker.lookup(rid, [transfer(chain)])  # it waits, and is looked at
        waiting += model.step(batch)
        model.reap()
        if round_ % 4 == 0:  # or a busy machine would have stored nothing yet
            assert rig.linker.backlog.wait_quiet(WAIT_S)
        if rng.random() < 0.04:  # SGLang's flush
            rig.linker.reset()
            model.offloading.clear()
            model.free += model.cached.values()
            model.cached.clear()
            model.stored.clear()
        if len(waiting) < 6:
            waiting += [(f"again{round_}.{i}", c) for i, c in enumerate(chains(rng)[:12])]


#: Little staging, so that requests wait for it; a breaker that opens soon and closes soon.
OPTIONS: dict[str, Any] = {
    "load_staging": 14 * LAYERS * 2 * 4096,
    "store_staging": 10 * LAYERS * 2 * 4096,
    "backlog_share": 0.2,
    "pin_lookups": 16,
    "breaker_failures": 4,
    "breaker_pause_s": 0.05,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_many_requests_over_a_faulty_medium(
    tmp_path: Path, kind: str, share: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{seed}/{kind}/{share}")
    controls: list[Callable[[Faults], None]] = []
    monkeypatch.setattr(open_pools_module, "open_store", stores_in_memory(controls))
    with Rig(tmp_path, read_ahead_share=share, **OPTIONS) as rig:
        model = Model(rig, rng)
        controls[0](Faults(seed=seed, **FAULTS[kind]))
        serve(model, rng)
        # A medium that lies early may not be asked again: then nothing is loaded, which is right.
        if kind in ("none", "delays"):
            assert model.loaded > 0, "nothing was loaded: the test says little"
        if kind in ("none", "delays"):
            assert not model.failed, "no 503 without a fault of the medium"
            assert rig.stored_pool.store.stats()["evicted"] > 0
        controls[0](Faults())
        nothing_leaks(rig)


def nothing_leaks(rig: Rig) -> None:
    """After a reset no staging, pin or transfer is left."""
    rig.linker.reset()
    store = rig.stored_pool.store
    wait_for(lambda: in_use(rig.stored_pool.loads) == in_use(rig.stored_pool.stores) == 0)
    assert kept_ahead(rig.linker.ahead) == rig.linker.backlog.locked == 0
    assert rig.linker.backlog.wait_quiet(0.0)
    wait_for(lambda: store._core.in_flight == 0)
    assert not store._core.index.pins.any()
    assert not store._core.index.kept.any()
    with store._core.lock:
        check_index(store._core.index)
        check_allocator(store._core.allocator)


def test_the_model_notices_wrong_bytes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above has teeth: without verification lost writes are served."""
    controls: list[Callable[[Faults], None]] = []
    monkeypatch.setattr(open_pools_module, "open_store", stores_in_memory(controls))
    with Rig(tmp_path, verify="off") as rig:
        model = Model(rig, random.Random(seed))
        chain = names(6)
        pages = dict(zip(chain, range(6), strict=True))
        for name, page in pages.items():
            model.compute(name, page)
        controls[0](Faults(seed=seed, lost_ppm=1_000_000))
        assert rig.store(chain, range(6))
        assert rig.load(chain, range(20, 26))
        index = rig.linker.start_layer_wise_loading()
        wrong = model.forward(index, [dict(zip(chain, range(20, 26), strict=True))])
        assert rig.linker.finish_layer_wise_loading(index)
        assert wrong

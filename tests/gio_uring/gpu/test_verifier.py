"""Loads compared with their digests by the GPU, on a stand-in for the CUDA driver: no GPU runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gio_uring.gpu.test_host_engine import rig_over_file, rig_over_memory
from slot_addresses import slot_lba
from waiting import wait_until

from store.pools import LAYOUT, some_keys
from tutti.errors import ChecksumMismatch
from tutti.gio_uring.gpu.stream_queue import StreamQueue
from tutti.gio_uring.nvme_spec import OPCODE_READ


@pytest.mark.parametrize("cached", [True, False], ids=["digests known", "digests read"])
def test_a_kernel_compares_pages_before_their_layer_is_released(
    rng: np.random.Generator, cached: bool
) -> None:
    """In GPU memory, so that a wrong copy is damage, too; no digest is compared by the host."""
    with rig_over_memory(digest_cache_nbytes=1 << 20 if cached else 0) as rig:
        keys, contents = rig.stored(rng, 8)
        verify = rig.kernels.verify

        def damaged(batch: int, layer: int, publish: int) -> None:
            if layer == 1:
                rig.tensors[1][0].array[10 * LAYOUT.segments[0]] ^= 1
            verify(batch, layer, publish)

        rig.driver.kernels["gio_verify"] = damaged
        ticket = rig.store.load(keys, list(range(8, 16)))
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait_layer(1, 10)
        assert caught.value.pages == (2,)
        assert ticket.wait_settled(10)
        stats = rig.store.stats()
        assert stats["gpu_digested_layers"] == stats["gpu_verified_layers"] == LAYOUT.layers
        assert rig.kernels.verified == 2 * LAYOUT.layers
        assert stats["mismatches"] == 1
        assert rig.store.match(keys) == 2, "quarantined"
        good = [i for i in range(8) if i != 2]
        assert [rig.pool.read(8 + i) for i in good] == [contents[i] for i in good]


def test_a_kernel_computes_the_digests_of_a_put(rng: np.random.Generator) -> None:
    """Those of the host, which compares its own here, and none of them by the host."""
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 8)
        stats = rig.store.stats()
        assert rig.kernels.verified == stats["gpu_digested_layers"] == LAYOUT.layers
        verifier, rig.gpu.verifier = rig.gpu.verifier, None
        rig.store.load(keys, list(range(8, 16))).wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents
        rig.gpu.verifier = verifier
    assert stats["mismatches"] == 0


def test_a_copy_out_that_goes_wrong_is_found_by_the_load(rng: np.random.Generator) -> None:
    """As the digest is that of the page, not of what was copied to staging."""
    with rig_over_memory() as rig:
        keys, pages = some_keys(rng, 8), list(range(8))
        rig.fill(pages, rng)
        verify = rig.kernels.verify

        def late(batch: int, layer: int, publish: int) -> None:
            rig.tensors[1][0].array[3 * LAYOUT.segments[0]] ^= layer == 1
            verify(batch, layer, publish)

        rig.driver.kernels["gio_verify"] = late
        rig.store.put(keys, pages).wait(10)
        rig.driver.kernels["gio_verify"] = verify
        with pytest.raises(ChecksumMismatch) as caught:
            rig.store.load(keys, list(range(8, 16))).wait(10)
        assert caught.value.pages == (3,)


def test_tables_that_do_not_fit_are_compared_by_the_host(rng: np.random.Generator) -> None:
    with rig_over_memory() as rig:
        keys, contents = rig.stored(rng, 8)
        assert rig.gpu.verifier is not None
        rig.gpu.verifier._nbytes = 8 << 10
        rig.store.load(keys, list(range(8, 16))).wait(10)
        assert [rig.pool.read(page) for page in range(8, 16)] == contents
        assert rig.store.stats()["gpu_verified_layers"] == 0


def test_damage_in_a_file_fails_its_pages_alone(rng: np.random.Generator, tmp_path: Path) -> None:
    path = tmp_path / "pool.tutti"
    with rig_over_file(path) as rig:
        keys, contents = rig.stored(rng, 8)
        slot = rig.store._core.index.find(keys[3:4])
        lba = int(slot_lba(rig.store.geometry, slot, 2)[0])
        with path.open("r+b") as file:
            file.seek(lba * rig.store.geometry.lba_nbytes + 5)
            file.write(b"damage")
        ticket = rig.store.load(keys, list(range(8, 16)))
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait(10)
        assert caught.value.pages == (3,)
        assert ticket.wait_settled(10)
        right = [i for i in range(8) if i != 3]
        assert [rig.pool.read(8 + i) for i in right] == [contents[i] for i in right]


def test_digests_that_come_after_the_read_was_cancelled_leave_its_outcome(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels have published it by then; without it the tables would never be free."""
    monkeypatch.setattr(StreamQueue, "watch", lambda *_: None)  # before the first look
    with rig_over_memory() as rig:
        keys, pages = some_keys(np.random.default_rng(seed), 8), np.arange(8, dtype=np.uint32)
        rig.store.put(keys, pages.tolist()).wait(10)
        job = rig.gpu.submit(
            OPCODE_READ,
            rig.store._core.extents(rig.store._core.index.find(keys)),
            pages,
            rig.pool.memory,
            digests=np.zeros((8, LAYOUT.layers), np.uint64),
            compare=True,
            gated=True,
        )
        wait_until(lambda: job._enqueued == LAYOUT.layers, "the stream has not all layers")
        job.cancel()
        verification = job._route.verification
        assert verification is not None
        wait_until(lambda: verification.is_over, "the stream waits for a cancelled read")
        job.open_gate()
        assert job.wait_released(10)
        wait_until(job.is_free, "the tables never come back")

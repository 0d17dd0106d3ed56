"""TuttiLinker over SGLang's real pools, without a server."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linker_engine as engine
import pytest
import torch
from linker_engine import Rig, damage, in_use, names, wait_for
from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool, MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tutti.errors import ConfigError, DeviceTimeout, PoolInUse, Unsupported
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct.kv_pools import kv_pool_group
from tutti.integration.sglang.linker import TuttiLinker
from tutti.integration.sglang.weights import WeightsWatch


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("staging", ["2MiB", "1KiB"])
def test_pages_come_back_byte_for_byte(tmp_path: Path, kind: str, staging: str) -> None:
    with Rig(tmp_path, kind, load_staging=staging, store_staging=staging) as rig:
        rig.fill(1)
        want = rig.content(range(3, 13))
        assert rig.lookup(names(10)) == 0
        assert rig.store(names(10), range(3, 13))
        rig.wipe()
        assert rig.lookup(names(12)) == 10
        target = [40, 20, 21, 22, 60, 1, 2, 30, 31, 5]
        rig.check_restored(names(10), target, want)


@pytest.mark.parametrize("kind", ["generation", "embedding"])
def test_every_layer_is_there_when_its_wait_returns(tmp_path: Path, kind: str) -> None:
    """Before a forward that generates, SGLang selects its batch; before one that embeds, it does
    not.
    """
    with Rig(tmp_path) as rig:
        rig.fill(2)
        want = [rig.content(range(8), [layer]) for layer in range(engine.LAYERS)]
        assert rig.store(names(8), range(8))
        rig.wipe()
        assert rig.load(names(8), range(8, 16))
        index = rig.linker.start_layer_wise_loading()
        if kind == "generation":
            rig.linker.layer_done_counter.set_consumer(-1)
            rig.pool.get_key_buffer(0)  # no consumer: must not wait
            rig.linker.layer_done_counter.set_consumer(index)
        for layer in range(engine.LAYERS):
            rig.pool.get_key_buffer(layer)
            rig.pool.get_value_buffer(layer)
            assert rig.content(range(8, 16), [layer]) == want[layer]
        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.linker.finish_layer_wise_loading(index), "twice changes nothing"
        assert rig.linker.start_layer_wise_loading() == -1


@pytest.mark.parametrize("staging", ["2MiB", "1KiB"])
def test_a_key_is_read_once_however_many_slots_want_it(tmp_path: Path, staging: str) -> None:
    with Rig(tmp_path, load_staging=staging) as rig:
        want = rig.stored(8)
        rig.wipe()
        before = rig.stored_pool.store.stats()["loaded"]
        assert rig.load(names(8), range(8, 16), "a")
        assert rig.load(names(5), range(16, 21), "b")
        assert rig.load(names(8)[:2], range(30, 32), "c")
        assert rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        wait_for(lambda: rig.stored_pool.store.stats()["loaded"] > before)
        assert rig.stored_pool.store.stats()["loaded"] - before == 8
        assert rig.content(range(8, 16)) == want
        assert rig.content(range(16, 21)) == want[:5]
        assert rig.content(range(30, 32)) == want[:2]
        assert rig.content([0, 7, 21, 32]) == [bytes(len(want[0]))] * 4, "no other page was touched"


def test_offload_skips_what_is_there_and_completes_in_order(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.fill(4)
        for _ in range(3):
            for start in range(0, 20, 5):
                assert rig.offload(names(20)[start : start + 5], range(start, start + 5))
        wait_for(lambda: rig.linker.num_completed_offloads() == 12)
        assert [rig.linker.pop_completed_offload() for _ in range(12)] == [True] * 12
        assert rig.linker.num_completed_offloads() == 0
        wait_for(lambda: rig.stored_pool.store.stats()["stored"] == 20)
        rig.linker.reset()
        assert rig.stored_pool.store.stats()["stored"] == 20, "each page once"


def test_a_damaged_medium_fails_the_batch_and_never_serves_the_page_again(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        want = rig.stored(10)
        damage(rig.file(tmp_path))
        assert rig.lookup(names(10)) == 10
        assert not rig.restore(names(10), range(20, 30))
        wait_for(lambda: rig.stored_pool.store.stats()["quarantined"] > 0)
        found = rig.lookup(names(10))
        assert found < 10
        found_by = rig.linker.error_log.counts  # the batch's own load, or the read-ahead before it
        assert {"load: ChecksumMismatch", "read-ahead: ChecksumMismatch"} & set(found_by)
        assert rig.store(names(10), range(10)), "computed anew, it is stored anew"
        wait_for(lambda: rig.lookup(names(10)) == 10)
        rig.restore(names(10), range(40, 50))
        rig.check_restored(names(10)[found:], range(40, 50 - found), want[found:])


def test_without_verification_damage_is_served(tmp_path: Path) -> None:
    """So the test above has teeth: it is the digests that catch it."""
    with Rig(tmp_path, verify="off") as rig:
        want = rig.stored(10)
        damage(rig.file(tmp_path))
        assert rig.restore(names(10), range(20, 30))
        assert rig.content(range(20, 30)) != want


def test_a_failing_medium_opens_the_breaker_until_a_probe_succeeds(tmp_path: Path) -> None:
    with Rig(tmp_path, breaker_failures=2, breaker_pause_s=0.01, load_staging="1KiB") as rig:
        rig.stored(4)
        for _ in range(2):
            rig.stored_pool.reads.failure()
        if not rig.stored_pool.reads.closed:  # a probe may have come already
            assert rig.stored_pool.reads.opened == 1
        wait_for(lambda: rig.lookup(names(4)) == 4)


def test_an_open_breaker_answers_nothing_and_stores_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(tmp_path, breaker_failures=1, breaker_pause_s=600.0) as rig:
        rig.stored(4)
        rig.stored_pool.reads.failure()
        assert rig.lookup(names(4)) == 0
        rig.stored_pool.writes.failure()
        assert not rig.store(names(4, "new"), range(4))
        assert "4 pages of kv are not stored: the SSD failed several times" in caplog.text


def test_what_was_found_is_not_evicted_before_it_is_loaded(tmp_path: Path) -> None:
    with Rig(tmp_path, capacity="36MiB", pin_share=1.0, backlog_share=1.0) as rig:
        want = rig.stored(10)
        assert rig.lookup(names(10)) == 10
        for round_ in range(30):
            rig.store(names(60, str(round_)), range(60))
        assert rig.stored_pool.store.stats()["evicted"] > 0
        rig.check_restored(names(10), range(10, 20), want)


def test_a_single_rank_refuses_to_load_what_is_gone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        assert not rig.load(names(3), range(3))
        rig.linker._alone = False  # with several ranks the answer depends on the transfers alone
        assert rig.load(names(3), range(3))
        assert not rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
        assert rig.stored_pool.reads.closed, "a miss is not a fault of the medium"


def test_a_wrong_number_of_slots_is_refused(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        assert rig.store(names(2), range(2))
        for wrong in (torch.arange(31), None):
            transfer = engine.transfer(names(2))
            transfer.device_indices = wrong
            assert not rig.linker.load("r", [transfer])
            assert not rig.linker.offload([transfer])
        assert not rig.linker.offload([])
        assert rig.linker.num_completed_offloads() == 0


def test_slots_that_are_no_whole_pages_fail_and_nothing_is_moved(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(2)
        before = rig.content(range(64))
        for wrong in (
            torch.arange(1, 33),
            torch.cat((torch.arange(16), torch.arange(15, -1, -1))),
            torch.arange(engine.PAGES * 16 + 16, engine.PAGES * 16 + 48),
        ):
            transfer = engine.transfer(names(2))
            transfer.device_indices = wrong
            assert rig.linker.load("r", [transfer])
            assert not rig.linker.finish_layer_wise_loading(rig.linker.start_layer_wise_loading())
            transfer.keys = names(2, "new")
            assert rig.linker.offload([transfer])
            wait_for(lambda: rig.linker.num_completed_offloads() == 1)
            assert not rig.linker.pop_completed_offload()
        assert rig.content(range(64)) == before
        assert rig.stored_pool.reads.closed
        assert rig.lookup(names(2, "new")) == 0


def test_a_queued_load_can_be_cancelled_and_a_second_one_is_refused(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(4)
        assert rig.load(names(4), range(4, 8))
        assert not rig.load(names(4), range(8, 12)), "one load for a request"
        assert rig.linker.cancel_queued_load("r")
        assert not rig.linker.cancel_queued_load("r")
        assert rig.linker.start_layer_wise_loading() == -1


def test_a_batch_is_capped(tmp_path: Path) -> None:
    with Rig(tmp_path, max_load_tokens=6 * engine.PAGE, min_tokens=2 * engine.PAGE) as rig:
        rig.stored(10)
        assert rig.linker.lookup("a", [engine.transfer(names(10))]) == [2, 3, 4, 5, 6]
        assert rig.load(names(6), range(10, 16), "a")
        assert not rig.load(names(1), range(20, 21), "b"), "the batch is full"


class DeadTicket:
    """A load that the device never answers."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.settled = False

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        raise DeviceTimeout(f"layer {layer} is not ready after {timeout_s:g} s")

    def wait_settled(self, timeout_s: float) -> bool:
        return self.settled


@pytest.mark.parametrize("staging", ["2MiB", "1KiB"])
def test_a_device_that_never_answers(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path, load_staging=staging, load_timeout_s=0.05) as rig:
        rig.stored(4)
        tickets: list[DeadTicket] = []

        def dead_load(keys: Any, *_: Any, **__: Any) -> DeadTicket:
            tickets.append(DeadTicket(len(keys)))
            return tickets[-1]

        monkeypatch.setattr(rig.stored_pool.store, "load", dead_load)
        before = rig.content(range(64))
        if staging == "1KiB":
            with pytest.raises(DeviceTimeout, match="restart the server"):
                rig.restore(names(4), range(4, 8))
            return
        assert not rig.restore(names(4), range(4, 8))
        assert rig.content(range(64)) == before
        assert in_use(rig.stored_pool.loads) == 4, "the device may still write there"
        tickets[0].settled = True
        assert in_use(rig.stored_pool.loads) == 0


def test_other_weights_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = WeightsWatch()
    monkeypatch.setattr(linker_module, "WATCH", watch)
    with Rig(tmp_path) as rig:
        rig.stored(4)
        watch.changed()
        assert rig.lookup(names(4)) == 0
        assert not rig.offload(names(4), range(4))
        assert not rig.load(names(4), range(4))
        watch.flushed()
        assert rig.lookup(names(4)) == 0
        assert rig.store(names(4), range(4))
        assert rig.lookup(names(4)) == 4


def test_pages_survive_a_restart_and_an_unclean_one_only_when_proven(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with Rig(first) as rig:
        want = rig.stored(10)
        shutil.copytree(first, second)
    with Rig(first) as rig:
        assert rig.lookup(names(10)) == 10, "closed cleanly: there at once"
    with Rig(second) as rig:
        wait_for(lambda: rig.lookup(names(10)) == 10)
        assert rig.stored_pool.store.stats()["proven"] == 10
        rig.check_restored(names(10), range(20, 30), want)


def test_damage_behind_an_unclean_close_is_never_reported(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with Rig(first) as rig:
        rig.stored(10)
        shutil.copytree(first, second)
        damage(rig.file(second))
    with Rig(second) as rig:
        wait_for(lambda: rig.stored_pool.store.stats()["mismatches"] > 0)
        wait_for(lambda: rig.stored_pool.store.stats()["slots"].get("unproven", 0) == 0)
        found = rig.lookup(names(10))
        assert found < 10
        if found:
            assert rig.restore(names(10)[:found], range(20, 20 + found))


def test_reset_and_close_leave_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path / "warm"):
        pass
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    rig = Rig(tmp_path / "a")
    rig.fill(1)
    for part in range(10):
        rig.offload(names(6, str(part)), range(part * 6, part * 6 + 6))
    rig.linker.reset()
    assert rig.linker.num_completed_offloads() == 0
    assert rig.stored_pool.store.stats()["stored"] == 60, "reset waits for what is under way"
    assert rig.lookup(names(6, "0")) == 6, "and forgets nothing that is stored"
    assert rig.load(names(6, "0"), range(6))
    rig.linker.start_layer_wise_loading()
    rig.offload(names(6, "late"), range(6))
    rig.linker.reset()  # a load and an offload under way
    wait_for(lambda: in_use(rig.stored_pool.loads) == in_use(rig.stored_pool.stores) == 0)
    assert rig.linker.backlog.locked == 0
    assert not rig.stored_pool.store._core.index.pins.any()
    rig.linker.close()
    rig.linker.close()
    # A thread that runs calls for the main one waits a moment for the next.
    wait_for(lambda: set(threading.enumerate()) <= threads)
    assert set(os.listdir("/proc/self/fd")) <= files


def test_one_pool_has_one_owner(tmp_path: Path) -> None:
    with Rig(tmp_path), pytest.raises(PoolInUse):
        Rig(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pth": "x"}, "did you mean 'path'"),
        ({"capacity": None}, "'capacity' is missing"),
        ({"pin_lookups": 0}, "pass an integer from 1"),
        ({"allow_unwatched_weights": False}, "updates of weights would go unnoticed"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Rig(tmp_path, **options)


def _make(pool: Any, tmp_path: Path, components: set[Any], **changes: Any) -> None:
    config = {"path": str(tmp_path), "capacity": "8MiB", "allow_unwatched_weights": True}
    params = engine.init_params(pool, **changes)
    TuttiLinker(engine.server_args(), params, components=components, extra_config=config)


def test_what_is_not_supported_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, full = engine.kv_pool("mha"), {ComponentType.FULL}
    for other in (ComponentType.SWA, ComponentType.MAMBA):
        with pytest.raises(Unsupported, match=f"MHATokenToKVPool with FULL, {other.name}"):
            _make(pool, tmp_path, {*full, other})
    with pytest.raises(Unsupported, match="speculative"):
        _make(pool, tmp_path, full, sidecar_draft_device_pools=(pool,))
    with pytest.raises(Unsupported, match="pages of 16 tokens"):
        _make(pool, tmp_path, full, page_size=32)

    class Derived(MHATokenToKVPool):
        pass

    monkeypatch.setattr(pool, "__class__", Derived)
    with pytest.raises(Unsupported, match="Derived"):
        _make(pool, tmp_path, full)
    assert not issubclass(MHATokenToKOnlyPool, MHATokenToKVPool)
    for name, value, sentence in (
        ("kv_cache_layout", "hnd", "'hnd'"),
        ("k_scale_buffer", [torch.zeros(1)], "quantised"),
        ("k_buffer", [b.to("meta") for b in pool.k_buffer], "several devices"),
    ):
        changed = engine.kv_pool("mha")
        setattr(changed, name, value)
        with pytest.raises(Unsupported, match=sentence):
            kv_pool_group(_Params(changed), full)
    changed.k_buffer = changed.v_buffer = [b.to("meta") for b in pool.k_buffer]
    with pytest.raises(Unsupported, match="meta memory"):
        kv_pool_group(_Params(changed), full)


class _Params:
    """CacheInitParams as far as a pool is judged by them."""

    mtp_draft_device_pools = ()
    sidecar_draft_device_pools = ()
    page_size = engine.PAGE

    def __init__(self, pool: Any) -> None:
        self.token_to_kv_pool_allocator = self
        self._pool = pool

    def get_kvcache(self) -> Any:
        return self._pool


def test_pages_are_stored_behind_their_predecessors(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.fill(14)
        assert rig.lookup(names(9)) == 0  # sets the order of the pages
        assert rig.store(names(9)[6:], range(3))
        assert rig.store(names(9)[:3], range(3, 6))
        assert rig.store(names(9)[3:6], range(6, 9))
        index = rig.stored_pool.store._core.index
        keys = rig.linker._keys(engine.transfer(names(9)))
        assert index.depth[index.find(keys)].tolist() == list(range(9))


def test_pipeline_stages_are_refused(tmp_path: Path) -> None:
    """SGLang would let stages that find different pages wait for each other."""
    with pytest.raises(Unsupported, match="--pp-size 1"):
        _make(engine.kv_pool("mha"), tmp_path, {ComponentType.FULL}, pp_size=2)
    assert not list(tmp_path.iterdir()), "no pool was made"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"enable_pdmux": True}, "does not abort a prefill whose load failed"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, "role-switch"),
        ({"dllm_algorithm": "LowConfidence"}, "does not start the loads"),
    ],
)
def test_servers_whose_loop_does_not_serve_a_linker_are_refused(
    tmp_path: Path, flags: dict[str, Any], why: str
) -> None:
    params = engine.init_params(engine.kv_pool("mha"))
    config = {"path": str(tmp_path), "capacity": "8MiB", "allow_unwatched_weights": True}
    with pytest.raises(Unsupported, match=why):
        TuttiLinker(
            SimpleNamespace(**flags),
            params,
            components={ComponentType.FULL},
            extra_config=config,
        )

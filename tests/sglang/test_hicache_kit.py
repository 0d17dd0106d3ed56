"""SGLang's own test kit for HiCache with Tutti in place of its backend `file`.

The kit (`sglang.test.kits.unified_radix_cache`) comes with SGLang: real trees, controllers and
pools of MHA alone, with sliding windows and with Mamba states. What it checks on the way, it checks
here; the steps of each round trip are ours.
"""

from __future__ import annotations

import tempfile
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_place_of_file
import pytest
import torch
from linker_engine import wait_for
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_host_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

from tutti.errors import DeviceTimeout, PagesInUse
from tutti.integration.sglang import storages, weights
from tutti.integration.sglang.direct import control_requests

#: Smaller pages waste too much of the medium and are refused, which another test shows.
CHOSEN = [
    config
    for config in CONFIGS
    if supports_hicache(config) and config.page_size >= 16 and not config.is_eagle
]


class TuttiKit(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """The kit's helpers for one configuration."""

    __test__ = False
    cfg: CacheConfig
    folder: Path

    def runTest(self) -> None:
        """unittest wants one."""

    def _make_storage_dir(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)


@pytest.fixture(params=CHOSEN, ids=lambda config: config.label)
def kit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    load_plugins()
    attach = in_place_of_file.with_tutti(HiCacheController.attach_storage_backend)
    monkeypatch.setattr(HiCacheController, "attach_storage_backend", attach)
    kit = TuttiKit()
    kit.cfg, kit.folder = request.param, tmp_path
    kit.setUp()
    yield kit
    assert in_place_of_file.BACKENDS, "nothing used the storage"
    while in_place_of_file.BACKENDS:
        in_place_of_file.BACKENDS.popitem()[1].close()
    kit.doCleanups()


def test_a_prefix_comes_back_from_storage_bit_by_bit(kit: TuttiKit) -> None:
    folder = kit._make_storage_dir()
    window = kit.cfg.sliding_window_size or 0
    pages = 2 + -(-window // kit.cfg.page_size)
    tokens = kit._make_seq(1, pages)
    want = kit._l3_produce(folder, tokens, marker=7)
    consumer, allocator, requests = kit._l3_consumer(folder)
    kit._consume_prefetch(consumer, tokens, CacheRequestHandle("again", 0))
    found = match_prefix(consumer, tokens)
    node = found.last_host_node
    assert node != consumer.root_node_handle(), "nothing was found"
    for component in (ComponentType.SWA, ComponentType.MAMBA):
        if component in kit.cfg.components:
            assert node_host_value(consumer, node, component) is not None
            counters = in_place_of_file.BACKENDS[folder].counters()
            assert component.name.lower() in counters
    request = kit._make_req(requests)
    kit._load_back_node(consumer, node, req=request)
    got = kit._snapshot_full_kv(
        allocator, consumer.path_device_indices(match_prefix(consumer, tokens).last_device_node)
    )
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


FULL_ALONE = [config for config in CHOSEN if not (config.has_swa or config.has_mamba)]


@pytest.mark.parametrize("kit", FULL_ALONE[:1], indirect=True, ids=lambda config: config.label)
def test_a_storage_thread_that_is_held_is_not_ended(
    kit: TuttiKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gives the prefetch up and is idle; a flush or detach would fail at its thread."""
    monkeypatch.setattr(storages, "_LET_GO_S", 0.1)
    folder, tokens = kit._make_storage_dir(), kit._make_seq(1, 4)
    kit._l3_produce(folder, tokens, marker=7)
    tree, *_ = kit._l3_consumer(folder)
    storage, answered = in_place_of_file.BACKENDS[folder], threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        raise PagesInUse("made up: on its way", answered.wait)

    monkeypatch.setattr(storage._stores["kv"].store, "load", never)
    request = CacheRequestHandle("late", 0)
    tree.prefetch_from_storage(request, tree.root_node_handle(), array("q", tokens), None, None)

    def begun() -> bool:
        tree.check_hicache_events()
        return storage.moving

    wait_for(begun)
    tree.release_aborted_request(request)
    assert not tree.ongoing_prefetch, "SGLang knows of it: nothing is tested"
    scheduler = SimpleNamespace(
        tree_cache=tree, is_fully_idle=lambda ignore_waiting: True, _engine_paused=False
    )

    def flush(_: Any) -> bool:
        tree.reset()
        return True

    try:
        assert not weights._around_flush(flush, scheduler)
        answer = control_requests._detach(pytest.fail, scheduler, None)
        assert not answer.success and "holds host pages" in answer.message
        manager = SimpleNamespace(scheduler=scheduler)
        with pytest.raises(DeviceTimeout, match="still uses host pages"):
            control_requests._release(pytest.fail, manager, SimpleNamespace(tags=None))
    finally:
        answered.set()
    monkeypatch.undo()
    assert weights._around_flush(flush, scheduler)
    kit._consume_prefetch(tree, tokens, CacheRequestHandle("again", 0))
    assert match_prefix(tree, tokens).last_host_node != tree.root_node_handle()


WINDOWS = [config for config in CHOSEN if config.has_swa and not config.has_mamba]


@pytest.mark.parametrize("kit", FULL_ALONE, indirect=True, ids=lambda config: config.label)
def test_what_a_sibling_computed_first_is_not_loaded_twice(kit: TuttiKit) -> None:
    """With host memory that only stages (`--hicache-host-memory-mode buffer_only`)."""
    kit._assert_sibling_head_is_trimmed(kit._make_storage_dir(), kit._make_seq(1, 4), False)


@pytest.mark.parametrize("kit", WINDOWS, indirect=True, ids=lambda config: config.label)
def test_a_window_is_fetched_below_full_attention_that_is_there(kit: TuttiKit) -> None:
    """The same mode: the KV of full attention stays, and the window's comes from storage."""
    folder, tokens = kit._make_storage_dir(), kit._buffer_swa_seq()
    kit._produce_buffer_l3(folder, tokens)
    kit._assert_masked_full_is_reused(folder, tokens, live_tail=0)

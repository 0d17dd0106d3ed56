"""SGLang's own test kit for HiCache with Tutti in place of its backend `file`.

The kit (`sglang.test.kits.unified_radix_cache`) comes with SGLang: real trees, controllers and
pools of MHA alone, with sliding windows and with Mamba states. What it checks on the way, it checks
here; the steps of each round trip are ours.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from host_pools import tutti_options
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig, supports_hicache
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_host_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

from tutti.integration.sglang.hicache import TuttiHiCacheStorage

#: Smaller pages waste too much of the medium and are refused, which another test shows.
CHOSEN = [
    config
    for config in CONFIGS
    if supports_hicache(config) and config.page_size in (16, 64) and not config.is_eagle
]


class TuttiKit(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """The kit's helpers for one configuration."""

    __test__ = False
    cfg: CacheConfig

    def runTest(self) -> None:
        """unittest wants one."""

    def _make_storage_dir(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)

    def _init_hicache(self, cache: Any, **options: Any) -> None:
        options["storage_extra"] = tutti_options(Path(options["storage_dir"]))
        create = StorageBackendFactory.create_backend

        def in_place_of_file(name: str, *args: Any, **more: Any) -> Any:
            assert name == "file"
            return create("dynamic", *args, **more)

        with mock.patch.object(StorageBackendFactory, "create_backend", in_place_of_file):
            super()._init_hicache(cache, **options)
        backend = cache.cache_controller.storage_backend
        assert isinstance(backend, TuttiHiCacheStorage)
        self.addCleanup(backend.close)
        self.backend = backend


@pytest.fixture(params=CHOSEN, ids=lambda config: config.label)
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    load_plugins()
    kit = TuttiKit()
    kit.cfg, kit.folder = request.param, tmp_path
    kit.setUp()
    yield kit
    kit.doCleanups()


def test_a_prefix_comes_back_from_storage_bit_by_bit(kit: TuttiKit) -> None:
    folder = kit._make_storage_dir()
    window = kit.cfg.sliding_window_size or 0
    pages = 2 + -(-window // kit.cfg.page_size)
    tokens = kit._make_seq(1, pages)
    want = kit._l3_produce(folder, tokens, marker=7)
    kit.backend.close()  # one owner at a time
    consumer, allocator, requests = kit._l3_consumer(folder)
    kit._consume_prefetch(consumer, tokens, CacheRequestHandle("again", 0))
    found = match_prefix(consumer, tokens)
    node = found.last_host_node
    assert node != consumer.root_node_handle(), "nothing was found"
    for component in (ComponentType.SWA, ComponentType.MAMBA):
        if component in kit.cfg.components:
            assert node_host_value(consumer, node, component) is not None
            assert component.name.lower() in kit.backend.counters()
    request = kit._make_req(requests)
    kit._load_back_node(consumer, node, req=request)
    got = kit._snapshot_full_kv(
        allocator, consumer.path_device_indices(match_prefix(consumer, tokens).last_device_node)
    )
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)

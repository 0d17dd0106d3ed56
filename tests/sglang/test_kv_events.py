"""Events of the disk's pages, as a router gets them: SGLang's trees, publisher and wire format."""

from __future__ import annotations

import atexit
import json
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_place_of_file
import linker_engine
import msgspec
import numpy as np
import pytest
import torch
import zmq
from host_pools import tutti_options
from sglang.srt.disaggregation import kv_events
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler_components import kv_events_publisher
from sglang.srt.managers.scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64
from sglang.srt.plugins import load_plugins
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

from tutti.errors import ConfigError
from tutti.integration.sglang import adapter
from tutti.integration.sglang.kv_events import EVENTS, DiskEvents
from tutti.integration.sglang.metrics import Metrics
from tutti.integration.sglang.weights import WATCH

CONFIG = next(
    config
    for config in CONFIGS
    if config.page_size == 16 and not (config.is_eagle or config.has_swa or config.has_mamba)
)
PAGE = CONFIG.page_size
WAIT_S = 20.0


class Kit(UnifiedRadixCacheStorageFixtures, CustomTestCase):
    """The kit's helpers for one configuration."""

    __test__ = False
    cfg = CONFIG

    def runTest(self) -> None:
        """unittest wants one."""


class Router:
    """A subscriber of SGLang's events, and the publisher of a scheduler's tree."""

    def __init__(self, tree: Any, config: str) -> None:
        self.publisher = SchedulerKvEventsPublisher(
            kv_events_config=config,
            tree_cache=tree,
            send_metrics_from_scheduler=None,
            max_running_requests=1,
            max_total_num_tokens=1,
            get_stats=lambda: None,
        )
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(json.loads(config)["endpoint"])
        self._socket.subscribe(b"")
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.events: list[Any] = []
        deadline_s = time.monotonic() + WAIT_S
        while not self._socket.poll(50):  # a subscription takes effect a little later
            self.publisher.kv_event_publisher.publish(KVEventBatch(ts=0.0, events=[]))
            assert time.monotonic() < deadline_s
        self.turn()  # a new tree tells that it is empty

    def turn(self) -> None:
        """One turn of the scheduler, and what came of it."""
        self.publisher.publish_kv_events()
        while self._socket.poll(150):
            _topic, _number, body = self._socket.recv_multipart()
            self.events += self._decoder.decode(body).events

    def wait(self, has: Callable[[Router], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not has(self):
            assert time.monotonic() < deadline_s, self.events
            self.turn()

    def stored(self, medium: str) -> dict[int, tuple[int | None, list[int]]]:
        """Parent and tokens by block."""
        found: dict[int, tuple[int | None, list[int]]] = {}
        for event in self.events:
            if isinstance(event, BlockStored) and event.medium == medium:
                parent = event.parent_block_hash
                for i, block in enumerate(event.block_hashes):
                    found[block] = parent, event.token_ids[i * PAGE : (i + 1) * PAGE]
                    parent = block
        return found

    def removed(self, medium: str) -> set[int]:
        return {
            block
            for event in self.events
            if isinstance(event, BlockRemoved) and event.medium == medium
            for block in event.block_hashes
        }

    def close(self) -> None:
        atexit.unregister(self.publisher.kv_event_publisher.shutdown)
        self.publisher.kv_event_publisher.shutdown()
        self._socket.close(linger=0)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server of a test is started with --kv-events-config, and has one rank."""
    monkeypatch.setattr(WATCH, "watched", WATCH.watched)  # loading the plugin sets it
    load_plugins()
    ranks = SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0)
    ranks.attn_dp_size, ranks.attn_dp_rank, ranks.dp_rank = 1, 0, None
    for module in (kv_events, kv_events_publisher):
        monkeypatch.setattr(module, "get_parallel", lambda: ranks)
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({"publisher": "zmq", "endpoint": f"ipc://{folder}/events"})
        server = SimpleNamespace(
            kv_events_config=config, model_path="dummy", trust_remote_code=False
        )
        monkeypatch.setattr(adapter, "get_server_args", lambda: server)
        yield config
    EVENTS.clear()


def test_hicache_announces_what_is_stored_and_withdraws_what_is_deleted(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = in_place_of_file.with_tutti(HiCacheController.attach_storage_backend)
    monkeypatch.setattr(
        in_place_of_file,
        "tutti_options",
        lambda folder: {**tutti_options(folder), "kv_events": True},
    )
    monkeypatch.setattr(HiCacheController, "attach_storage_backend", attach)
    kit = Kit()
    kit.setUp()
    folder = str(tmp_path)
    tree, allocator, requests = build_fixture(CONFIG, enable_kv_cache_events=True)
    kit._init_hicache(tree, storage_backend="file", storage_dir=folder, prefetch_threshold=1)
    router = Router(tree, config)
    try:
        tokens = kit._make_seq(1, 4)
        kit._insert(tree, allocator, requests, tokens)
        leaf = match_prefix(tree, tokens).last_device_node
        kit._backup_node(tree, leaf)
        kit._write_path_to_l3(tree, leaf)
        kit._flush_l3_backups(tree)
        router.wait(lambda got: len(got.stored("DISK")) == 4)
        assert router.stored("DISK") == router.stored("GPU"), "the same hashes, tokens and parents"
        told = [event.medium for event in router.events if isinstance(event, BlockStored)]
        assert told.index("GPU") < told.index("DISK")
        store = in_place_of_file.BACKENDS[folder]._stores["kv"]
        assert store.metrics.snapshot()["announced_pages"] == 4
        store.store.delete(store.store.catalogue.keys())
        router.wait(lambda got: len(got.removed("DISK")) == 4)
        assert router.removed("DISK") == set(router.stored("DISK"))
        assert not router.removed("GPU")
        assert store.metrics.snapshot()["withdrawn_pages"] == 4
    finally:
        router.close()
        in_place_of_file.BACKENDS.pop(folder).close()
        kit.doCleanups()


def test_the_linker_announces_also_what_only_a_lookup_found(config: str, tmp_path: Path) -> None:
    """What a server stored before its restart is announced when a request looks it up."""
    tokens = array("q", range(100, 100 + 4 * PAGE))
    names = get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)
    assert linker_engine.PAGE == PAGE
    for life in range(2):
        tree, allocator, requests = build_fixture(CONFIG, enable_kv_cache_events=True)
        router = Router(tree, config)
        with linker_engine.Rig(tmp_path / "ssd", kv_events=True) as rig:
            if life == 0:
                assert rig.store(names, range(4))
            else:
                assert rig.lookup(names) == 4
            router.turn()
            assert not router.stored("DISK"), "the tokens are not known yet"
            Kit()._insert(tree, allocator, requests, list(tokens))
            router.wait(lambda got: len(got.stored("DISK")) == 4)
            assert router.stored("DISK") == router.stored("GPU")
            assert set(router.stored("DISK")) == set(map(hash_str_to_int64, names))
        router.wait(lambda got: len(got.removed("DISK")) == 4)  # the linker was closed
        assert not EVENTS
        router.close()


def test_dynamos_indexer_finds_what_is_announced_until_it_is_withdrawn(
    config: str, tmp_path: Path
) -> None:
    """The tree that Dynamo's router asks, fed with events of the disk alone."""
    reason = "pip install --no-deps ai-dynamo-runtime==1.6.1"
    dynamo = pytest.importorskip("dynamo.llm", reason=reason)
    tokens = array("q", range(100, 100 + 4 * PAGE))
    names = get_storage_hash_str(RadixKey(tokens), None, page_size=PAGE)
    hashes = dynamo.compute_block_hash_for_seq(list(tokens), PAGE)
    assert len(set(hashes)) == 4
    tree, allocator, requests = build_fixture(CONFIG, enable_kv_cache_events=True)
    router, indexer, worker = Router(tree, config), dynamo.RadixTree(), 7

    def tell(number: int, what: dict[str, Any]) -> dict[Any, int]:
        """What the indexer finds of the prompt after an event: pages by worker."""
        indexer.apply_event(worker, json.dumps({"event_id": number, "data": what}).encode())
        found: dict[Any, int] = indexer.find_matches(hashes).scores
        return found

    with linker_engine.Rig(tmp_path / "ssd", kv_events=True) as rig:
        assert rig.store(names, range(4))
        Kit()._insert(tree, allocator, requests, list(tokens))
        router.wait(lambda got: len(got.stored("DISK")) == 4)
        assert not indexer.find_matches(hashes).scores
        for number, (block, (parent, page)) in enumerate(router.stored("DISK").items(), 1):
            (local,) = dynamo.compute_block_hash_for_seq(page, PAGE)
            one = {"block_hash": block % 2**64, "tokens_hash": local}
            before = None if parent is None else parent % 2**64
            found = tell(number, {"stored": {"parent_hash": before, "blocks": [one]}})
            assert list(found.values()) == [number]
    router.wait(lambda got: len(got.removed("DISK")) == 4)  # the linker was closed
    gone = [block % 2**64 for block in router.removed("DISK")]
    assert not tell(5, {"removed": {"block_hashes": gone}})
    router.close()


def test_the_option_wants_a_server_that_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WATCH, "watched", WATCH.watched)
    load_plugins()
    with pytest.raises(ConfigError, match="--kv-events-config"):
        linker_engine.Rig(tmp_path, kv_events=True)


def test_what_is_too_much_is_counted_and_nothing_grows(config: str) -> None:
    metrics = Metrics({"mode": "hicache", "pool": "kv", "rank": "0"})
    events = DiskEvents(2, metrics, blocks_max=8)
    names = [f"{number:064x}" for number in (n << 192 for n in range(20))]
    keys = np.arange(40, dtype=np.uint64).view(np.uint8).reshape(20, 16)
    blocks = [hash_str_to_int64(name) for name in names]
    events.offered(names, keys)
    events.stored(keys, np.ones(20, np.bool_))
    told = BlockStored(blocks, None, list(range(40)), 2, None, medium="GPU")
    out = events.take([told])
    assert out[0] is told
    (disk,) = out[1:]
    assert (disk.block_hashes, disk.parent_block_hash) == (blocks[12:], blocks[11])
    assert disk.token_ids == list(range(24, 40))
    assert metrics.snapshot()["announced_pages"] == 8
    assert max(map(len, (events._offered, events._known, events._waiting, events._ready))) <= 8
    failed = np.array([False, True])
    events.offered(["0" * 15 + "f" + "0" * 48] * 2, keys[:2])
    events.stored(keys[:2], failed)
    assert not events._waiting, "a chain ends at the first page that was not stored"
    assert events.take([AllBlocksCleared()])[1:] == []
    events.check(pytest.fail)  # type: ignore[arg-type]


def test_a_detached_pool_withdraws_more_pages_than_there_is_room_for(config: str) -> None:
    """Pages that a router was told of, of a pool that is gone."""
    metrics = Metrics({"mode": "hicache", "pool": "kv", "rank": "0"})
    events = DiskEvents(2, metrics, blocks_max=8)
    keys = np.arange(40, dtype=np.uint64).view(np.uint8).reshape(20, 16)
    names = [f"{number:064x}" for number in (n << 192 for n in range(20))]
    for first in range(0, 20, 5):
        part = slice(first, first + 5)
        blocks = [hash_str_to_int64(name) for name in names[part]]
        events.offered(names[part], keys[part])
        events.stored(keys[part], np.ones(5, np.bool_))
        assert len(events.take([BlockStored(blocks, None, [0] * 10, 2, None, medium="GPU")])) > 1
    assert len(events._announced) == 20
    events.close()
    gone: set[int] = set()
    for _ in range(4):
        gone |= {block for event in events.take([]) for block in event.block_hashes}
    assert gone == {hash_str_to_int64(name) for name in names}
    assert events not in EVENTS, "it has nothing left to tell"


def test_a_page_that_was_evicted_is_withdrawn_and_announced_again(
    config: str, tmp_path: Path
) -> None:
    """The pool has fewer slots than pages are stored."""
    with linker_engine.Rig(tmp_path, kv_events=True) as rig:
        slots = rig.stored_pool.store.stats()["capacity_objects"]
        events = rig.stored_pool.events
        rig.fill(1)
        total = 0
        for start in range(0, slots + 2 * linker_engine.PAGES, linker_engine.PAGES - 2):
            pages = linker_engine.PAGES - 2
            names = [f"{(start + n):016x}{'0' * 48}" for n in range(1, pages + 1)]
            blocks = [hash_str_to_int64(name) for name in names]
            told = BlockStored(blocks, None, [0] * pages * PAGE, PAGE, None, medium="GPU")
            events.take([told])
            rig.store(names, range(1, pages + 1))
            total += len(events.take([])) > 0
        assert total
        events._next_check_s = 0.0
        events.check(rig.stored_pool.store)
        gone = [event for event in events.take([]) if isinstance(event, BlockRemoved)]
        assert gone
        there = rig.stored_pool.store.catalogue.keys()
        assert set(events._announced) <= {key.tobytes() for key in there}


assert torch, "SGLang's kit wants it imported first"

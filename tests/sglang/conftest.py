"""What the tests on SGLang share: its stand-ins on the path, a tiny model, and skips by name."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from absent import Absent

HERE = Path(__file__).resolve().parent
MISSING = "SGLang is not installed here (make test-sglang installs it where packages can be had)"

for folder in (HERE, HERE / "stand_in"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def has_sglang() -> bool:
    """Asks for a module of it: the name alone would find the folder of these tests."""
    try:
        return importlib.util.find_spec("sglang.srt") is not None
    except ModuleNotFoundError:
        return False


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return None if has_sglang() else Absent.of(MISSING, module_path, parent)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The kit loads plugins and publishes settings for the whole process: tests that need a process
    # without them comes first.
    items.sort(key=lambda item: item.path == HERE / "test_hicache_kit.py")


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Collects what a test leaves in cycles, SGLang's pools and their memory among it.

    SGLang refuses host pools where less than 10 GiB are free, and the collector comes by too rarely
    to keep two workers from that.
    """
    yield
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # a million objects of SGLang's modules, which every test would wait for


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def rig_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens rigs on the stand-in for a GPU, in the test's folder."""
    from linker_gpu import gpu_rig

    return functools.partial(gpu_rig, tmp_path, monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Opens HiCache's storages on one path and closes them afterwards."""
    import host_pools

    from tutti.integration.sglang.hicache import TuttiHiCacheStorage

    with contextlib.ExitStack() as stack:

        def one(pool: Any, **changes: Any) -> TuttiHiCacheStorage:
            storage = TuttiHiCacheStorage(host_pools.config(tmp_path, **changes), {})
            stack.callback(storage.close)
            storage.register_mem_pool_host(pool)
            storage.on_host_pools_registered()
            return storage

        yield one


@pytest.fixture
def real_manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's manager of weights and their memory, without a model, and with the plugin."""
    from sglang.srt.managers.scheduler_components import weight_updater
    from sglang.srt.plugins import load_plugins

    from tutti.integration.sglang.weights import WATCH

    monkeypatch.setattr(WATCH, "watched", WATCH.watched)  # loading the plugin sets it
    load_plugins()
    manager = object.__new__(weight_updater.SchedulerWeightUpdaterManager)
    manager.scheduler = manager.metrics_collector = manager.draft_worker = manager._session = None
    manager.offload_tags = set()
    return manager


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of multi-head attention; made in another process, which imports transformers."""
    from sglang_server import make_model

    return make_model(tmp_path_factory.mktemp("model"))

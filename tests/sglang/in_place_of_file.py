"""Tutti in the place of SGLang's storage backend `file`: a plugin of pytest for SGLang's tests.

A test that names the backend `file` gets Tutti, zero-copy, in the folder that it made for its
files. A pool has one owner, so a second backend of a folder closes the first. With --without-tutti
it gets `file`, and what this process needs to run without a GPU all the same.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import no_datasets
import pytest
from host_pools import tutti_options
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.plugins import load_plugins

from tutti.integration.sglang.hicache import TuttiHiCacheStorage

assert no_datasets, "imported for what it does"
#: The backends of the running test, by their folder.
BACKENDS: dict[str, TuttiHiCacheStorage] = {}


def with_tutti(original: Callable[..., Any]) -> Callable[..., Any]:
    """`HiCacheController.attach_storage_backend` with Tutti for `file`."""

    @functools.wraps(original)
    def attach(controller: Any, storage_backend: str, **more: Any) -> Any:
        if storage_backend != "file":
            return original(controller, storage_backend, **more)
        folder = os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]
        if folder in BACKENDS:
            BACKENDS.pop(folder).close()
        given = more.get("storage_backend_extra_config") or {}
        more["storage_backend_extra_config"] = {**given, **tutti_options(Path(folder))}
        done = original(controller, "dynamic", **more)
        assert isinstance(controller.storage_backend, TuttiHiCacheStorage)
        BACKENDS[folder] = controller.storage_backend
        return done

    return attach


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-tutti", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    without_tutti = config.getoption("--without-tutti")
    if without_tutti:
        os.environ["SGLANG_PLUGINS"] = "host_copies_on_cpu"
    load_plugins()
    if without_tutti:
        return
    HiCacheController.attach_storage_backend = with_tutti(HiCacheController.attach_storage_backend)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes for the report how many backends of Tutti the test had."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("tutti", len(BACKENDS)))
        while BACKENDS:
            BACKENDS.popitem()[1].close()

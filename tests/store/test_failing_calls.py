"""A function of the package that fails as it is called, for want of memory, leaves nothing behind.

`tests/native/failures.py` finds such functions; these are the ones that did.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

import tutti
from store.kept import Kept
from store.pools import some_keys
from store.storm import LAYOUT
from tutti import store
from tutti.base.interrupts import Latch
from tutti.errors import TuttiError
from tutti.gio_uring import file_member
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.pool.record_table import RecordTable
from tutti.transfers.expiry import Expiry
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.resources import Resources

#: Owner and name of each function; how many calls of it come before the one that fails.
PLACES: list[tuple[Any, str, int]] = [
    (Engine, "close", 0),
    (Expiry, "stop", 1),
    (Latch, "set", 0),
    (NativeController, "__init__", 0),
    (Reclaimer, "close", 0),
    (RecordTable, "close", 0),
    (Resources, "release", 0),
    (file_member, "finalize", 0),
    (file_member, "finalize", 1),
    (file_member, "own_file", 0),
    (file_member, "own_file", 1),
    (file_member, "unlock_and_close", 0),
    (store, "finalize", 0),
]


def failing_once(function: Callable[..., Any], passes: int) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == passes + 1:
            raise MemoryError
        return function(*args, **options)

    return call


def use(path: Path) -> None:
    with tutti.open(path, profile=None) as opened:
        opened.allocate_memory(1)
        opened.put(some_keys(np.random.default_rng(0), 1), [0]).wait(10)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("owner", "name", "passes"), PLACES, ids=[f"{o.__name__}.{n}-{p}" for o, n, p in PLACES]
)
def test_a_call_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, passes: int
) -> None:
    path = tmp_path / "pool"
    tutti.open(path, LAYOUT, "8MiB", profile=None).close()
    kept = Kept(path)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing_once(getattr(owner, name), passes))
        with contextlib.suppress(MemoryError, TuttiError):
            use(path)
        gc.collect()
    wait_until(lambda: bool(gc.collect() + 1) and kept.is_nothing())
    with tutti.open(path, profile=None) as again:
        again.wait_recovered(30)


@pytest.mark.parametrize("name", ["release", "remove"])
def test_a_close_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A second close goes on where the first one failed."""
    path = tmp_path / "pool"
    opened = tutti.open(path, LAYOUT, "8MiB", profile=None)
    opened.allocate_memory(1)
    with monkeypatch.context() as patched:
        patched.setattr(Resources, name, failing_once(getattr(Resources, name), 0))
        with pytest.raises(MemoryError):
            opened.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened.close()
        del opened
        gc.collect()
    tutti.open(path, profile=None).close()

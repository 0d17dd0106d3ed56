"""Several damaged pages of one prefix cost one failed request, however they were read."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from linker_engine import Rig, kept_ahead, names, wait_for
from medium_damage import flip

#: (page, layer): pages that come earlier are wrong in later layers.
DAMAGED = ((11, 0), (8, 1), (5, 2))


def damaged(rig: Rig, folder: Path) -> list[bytes]:
    """Twelve pages in the store, three of them damaged; SGLang's memory is empty afterwards."""
    want = rig.stored(12)
    for page, layer in DAMAGED:
        assert flip(rig.file(folder), rig.content([page], [layer])[0][:512]) == 1
    rig.wipe()
    return want


def fails_once(rig: Rig, want: list[bytes], *, is_ahead: bool) -> None:
    """The first request fails; its retry gets what comes before all damage."""
    assert rig.lookup(names(12), "first") == 12
    wait_for(lambda: not is_ahead or kept_ahead(rig.linker.ahead) > 0)
    assert not rig.restore(names(12), range(12), "first")
    assert rig.lookup(names(12), "again") == 5
    assert rig.restore(names(5), range(20, 25), "again")
    assert rig.content(range(20, 25)) == want[:5]


def test_a_retry_that_comes_before_the_failed_load_is_over(tmp_path: Path) -> None:
    with Rig(tmp_path, read_ahead_share=0.0) as rig:
        want = damaged(rig, tmp_path)
        loader = rig.stored_pool.store._loader
        settle = loader.settle

        def settle_late(*args: Any) -> None:
            time.sleep(0.2)
            settle(*args)

        loader.settle = settle_late
        fails_once(rig, want, is_ahead=False)
        assert rig.stored_pool.store.stats()["quarantined"] == len(DAMAGED)


def test_a_retry_does_not_take_what_a_failed_read_ahead_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        want = damaged(rig, tmp_path)
        ahead, judged = rig.linker.ahead, threading.Event()
        finish = ahead._finish
        monkeypatch.setattr(ahead, "_finish", lambda *read: (judged.wait(30), finish(*read)))
        try:
            fails_once(rig, want, is_ahead=True)
        finally:
            judged.set()

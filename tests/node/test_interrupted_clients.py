"""Ctrl-C in a client: no answer is taken for another's, and no plan is forgotten."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node.agents import WAIT_S, running
from waiting import wait_until

from store.pools import Bytes, some_keys
from tutti.node.client import NodeStore
from tutti.node.pool_service import ClientSession


class Held:
    """A kind of request that the agent answers only once ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        answer = getattr(ClientSession, name)

        def late(session: ClientSession, message: Any) -> Any:
            self.asked.set()
            assert self.go.wait(WAIT_S)
            return answer(session, message)

        monkeypatch.setattr(ClientSession, name, late)

    def strike(self, call: Callable[[], object], go_after_s: float | None = None) -> None:
        """Ctrl-C in the main thread during a call, as soon as the agent was asked."""

        def run() -> None:
            assert self.asked.wait(WAIT_S)
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
            if go_after_s is not None:
                time.sleep(go_after_s)
                self.go.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        thread.join(WAIT_S)
        self.go.set()


Stored = tuple[NodeStore, Bytes, Bytes]


@pytest.fixture
def stored(tmp_path: Path, seed: int) -> Iterator[Stored]:
    """A client with memory of eight pages, four keys that are stored, and four others."""
    rng = np.random.default_rng(seed)
    with running(tmp_path / "agent") as agent, agent.connect() as store:
        store.allocate_memory(8)
        keys, others = some_keys(rng, 4), some_keys(rng, 4)
        store.put(keys, np.arange(4)).wait(WAIT_S)
        yield store, keys, others
        assert store.stats()["reconnects"] == 0


@pytest.mark.parametrize("name", ["match", "present"])
def test_the_answer_to_an_interrupted_look_up_is_no_others(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, keys, others = stored
    Held(monkeypatch, name).strike(partial(getattr(store, name), keys))
    assert store.match(others) == 0
    assert not store.present(others).any()
    assert store.match(keys) == 4
    assert store.present(keys).all()


@pytest.mark.parametrize("name", ["plan_put", "plan_load"])
def test_an_interrupted_transfer_claims_nothing(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store, keys, others = stored
    put, load = partial(store.put, others), partial(store.load, keys)
    call = partial(put if name == "plan_put" else load, np.arange(4))
    Held(monkeypatch, name).strike(call, go_after_s=0.2)
    wait_until(lambda: store.stats()["busy_objects"] == 0)
    store.put(others, np.arange(4)).wait(WAIT_S)
    assert store.match(others) == 4
    store.load(keys, np.arange(4, 8)).wait(WAIT_S)

"""A closed store is freed by its last reference, and its engine with it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from waiting import wait_until

from store.pools import formatted, opened
from tutti.errors import KeyMissing


def test_a_closed_store_needs_no_collector() -> None:
    images = formatted()
    gc.collect()
    gc.disable()
    try:
        store = opened(images)
        store.allocate_memory(1)
        with pytest.raises(KeyMissing):
            store.load(np.zeros((1, 16), np.uint8), [0])
        engine = weakref.ref(store.engine)
        store.close()
        del store
        wait_until(lambda: engine() is None)  # the thread that closed it may still refer to it
    finally:
        gc.enable()

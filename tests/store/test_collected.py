"""A closed store is freed by its last reference, and its engine with it."""

from __future__ import annotations

import gc
import weakref

from store.pools import formatted, opened


def test_a_closed_store_needs_no_collector() -> None:
    images = formatted()
    gc.collect()
    gc.disable()
    try:
        store = opened(images)
        engine = weakref.ref(store.engine)
        store.close()
        del store
        assert engine() is None
    finally:
        gc.enable()

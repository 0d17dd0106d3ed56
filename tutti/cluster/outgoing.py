"""Reads objects of a pool into staging memory and adds the trailers of their remote copies."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tutti.base.arrays import Keys
from tutti.cluster.remote_process import Staging
from tutti.cluster.worker import VERSION
from tutti.errors import KeyMissing, MediumError, PagesInUse
from tutti.medium.keys import as_keys
from tutti.medium.slot_record import EXPIRY_UNIT_S
from tutti.placement.index import MISSING
from tutti.store import ObjectStore

_READ_S = 0.5


class Outgoing:
    """settle: waits until its argument returns True; the pages may be overwritten then."""

    def __init__(
        self,
        store: ObjectStore,
        staging: Staging,
        settle: Callable[[Callable[[float], bool]], None],
    ) -> None:
        self._store, self._staging, self._settle = store, staging, settle

    def read(self, keys: Keys) -> Keys:
        """Reads keys that may be copied into staging pages 0, 1, ...; returns them in this order.

        Keys that are gone, have expired or have no digests are left out.  Empty if a read failed.
        """
        found = self._store.catalogue.described(keys)
        found = [
            (info, record)
            for info, record in found
            if info.has_digests and (info.expires_s is None or info.expires_s > 0)
        ]
        now_s, layers = time.time(), self._store.layout.layers
        own = as_keys([info.key for info, _ in found])
        if not found or not self._load(own):
            return own[:0]
        for page, (info, record) in enumerate(found):
            until_s = 0 if info.expires_s is None else now_s + info.expires_s
            expiry = round(until_s / EXPIRY_UNIT_S)
            names = (np.frombuffer(key, np.uint8) for key in (info.key, info.parent))
            digests = record["digests"][:layers]
            fields = (*names, info.depth, info.tenant, expiry, VERSION, digests)
            self._staging.trailers[page] = fields
        index = self._store._core.index
        with self._store._core.lock:
            slots = index.find(own)
            same = index.sequence(slots) == [record["sequence"] for _, record in found]
        # An object that was replaced meanwhile may have other bytes than its record describes.
        return own if same.all() and (slots != MISSING).all() else own[:0]

    def _load(self, keys: Keys) -> bool:
        """Loads objects into the first staging pages; returns whether all arrived and verified."""
        pages = np.arange(len(keys), dtype=np.uint32)
        try:
            ticket = self._store.load(keys, pages, memory=self._staging, ahead=True)
        except KeyMissing:
            return False  # evicted meanwhile
        except PagesInUse as error:
            self._settle(error.wait_settled)
            return False
        try:
            ticket.wait_settled(2 * self._store.config.timeout_s)
            ticket.wait(_READ_S)
        except MediumError:
            return False
        finally:
            self._settle(ticket.wait_settled)
        return True

"""What a store may show: the model that every look-up, load and recovery is compared with.

The oracle is told of every operation before it begins and after it ended, by any thread. Time is a
counter of those reports, so two operations are ordered only where one ended before the other began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Finding(AssertionError):
    """The store showed what it must not, or hid what it must show."""


@dataclass
class _Known:
    """One key. begun, ended: of its last acknowledged put; pending: puts under way; last: the end
    of its last put, acknowledged or not.
    """

    begun: int = -1
    ended: int = -1
    pending: int = 0
    last: int = -1


class Oracle:
    """Thread-safe. keeps: nothing is evicted or damaged, so what was acknowledged must be there.

    tell: is given every report, so that another process can follow; see `follow`.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.tell: Callable[[list[Any]], None] = lambda report: None
        self._lock = threading.Lock()
        self._now = 0
        self._keys: dict[bytes, _Known] = {}
        self._clear_begun = -1  # the last clear that ended
        self._clear_ended = -1
        self._clearing: int | None = None

    def follow(self, report: list[Any]) -> None:
        """Merges another process's report."""
        name, *given = report
        keys = [bytes.fromhex(key) for key in given[0]] if given else []
        if name == "put_begins":
            self.put_begins(keys)
        elif name == "put_ends":
            self.put_ends(given[1], keys, acknowledged=given[2])
        elif name == "damaged":
            self.damaged(keys)
        elif name == "clear_begins":
            self.clear_begins()
        else:
            self.clear_ends(done=name == "clear_ends")

    def put_begins(self, keys: Sequence[bytes]) -> int:
        """Returns what `put_ends` wants."""
        with self._lock:
            self.tell(["put_begins", _hex(keys)])
            self._now += 1
            for key in keys:
                self._keys.setdefault(key, _Known()).pending += 1
            return self._now

    def put_ends(self, begun: int, keys: Sequence[bytes], *, acknowledged: bool) -> None:
        with self._lock:
            self.tell(["put_ends", _hex(keys), begun, acknowledged])
            self._now += 1
            for key in keys:
                known = self._keys[key]
                known.pending -= 1
                known.last = self._now
                if acknowledged:
                    known.begun, known.ended = begun, self._now

    def damaged(self, keys: Sequence[bytes]) -> None:
        """A typed error said that these are lost: they may be there or not from now on."""
        with self._lock:
            self.tell(["damaged", _hex(keys)])
            for key in keys:
                self._keys[key].begun = self._keys[key].ended = -1

    def clear_begins(self) -> None:
        with self._lock:
            self.tell(["clear_begins"])
            self._now += 1
            self._clearing = self._now

    def clear_ends(self, *, done: bool) -> None:
        """done: False when an error left open whether the objects are gone."""
        with self._lock:
            self.tell(["clear_ends" if done else "clear_fails"])
            self._now += 1
            assert self._clearing is not None
            if done:
                self._clear_begun, self._clear_ended = self._clearing, self._now
            else:
                for known in self._keys.values():
                    known.begun = known.ended = -1
            self._clearing = None

    def look_begins(self) -> int:
        with self._lock:
            return self._now

    def looked(self, begun: int, key: bytes, *, present: bool) -> None:
        """A look-up that began at `begun` found the key or not."""
        with self._lock:
            known = self._keys.get(key)
            if present and (known is None or (self._gone(known) and self._clear_ended <= begun)):
                raise Finding(f"key {key.hex()} is there after a clear")
            if not present and known and known.ended <= begun and self._must(known):
                raise Finding(f"key {key.hex()} was acknowledged and is not there")

    def _gone(self, known: _Known) -> bool:
        return not known.pending and known.last < self._clear_begun

    def _must(self, known: _Known) -> bool:
        return self.keeps and self._clearing is None and known.begun > self._clear_ended

    def must(self) -> frozenset[bytes]:
        """What has to be there now."""
        with self._lock:
            return frozenset(key for key, known in self._keys.items() if self._must(known))

    def known(self) -> list[bytes]:
        """Every key that was ever put and is not forgotten."""
        with self._lock:
            return list(self._keys)

    def cleared_since(self, moment: int) -> bool:
        """Whether a clear was under way after `moment`."""
        with self._lock:
            return self._clearing is not None or self._clear_ended > moment

    @property
    def clearing(self) -> bool:
        """Whether a clear is under way, or was when the process died."""
        with self._lock:
            return self._clearing is not None

    def settle(self, present: Collection[bytes]) -> None:
        """The process died, and this is what the pool holds: it must fit, and counts from now on.

        A clear that was under way happened as a whole or did not happen.
        """
        with self._lock:
            begun = self._clearing
            self._clearing = None
            before = {
                k for k, v in self._keys.items() if begun and not v.pending and v.last < begun
            }
            must = {k for k, v in self._keys.items() if self._must(v)}
            cleared = begun is not None and not before & set(present)
            if not cleared and (lost := must - set(present)):
                raise Finding(f"{len(lost)} of {len(must)} acknowledged objects are lost")
            unknown = set(present) - self._keys.keys()
            back = {k for k in present if k in self._keys and self._gone(self._keys[k])}
            if unknown or back:
                raise Finding(f"{len(back)} cleared and {len(unknown)} unknown objects are there")
            self._begin_anew(set(present))

    def _begin_anew(self, present: set[bytes]) -> None:
        self._now += 2
        if self.keeps:  # what is not there now does not come back
            self._clear_begun = self._clear_ended = self._now - 1
        for key, known in self._keys.items():
            known.pending = 0
            if key in present:
                known.begun = known.ended = known.last = self._now
            else:
                known.begun = known.ended = -1
                if not self.keeps:
                    known.last = max(known.last, self._clear_begun)

    def forget(self, rng: np.random.Generator, most: int) -> None:
        """Keeps at most so many keys that were cleared; what is there is kept."""
        with self._lock:
            gone = [key for key, known in self._keys.items() if self._gone(known)]
            for at in rng.permutation(len(gone))[most:].tolist():
                del self._keys[gone[at]]


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]

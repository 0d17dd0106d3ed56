"""Every public call, given anything for any of its parameters: it works, or raises a TuttiError."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

import tutti
from tutti.errors import ConfigError, KeySizeError, PageRangeError, TuttiError
from tutti.gio_uring import file_member
from tutti.transfers.store_config import StoreConfig

LAYOUT = tutti.KVLayout.mha(
    layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
KEYS = [bytes([i]) * 16 for i in range(3)]
PAGES = [0, 1, 2]
CAPACITY = "8MiB"


KEYED: dict[str, Any] = {"keys": KEYS}
WAIT: dict[str, Any] = {"timeout_s": 20.0}
Table = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


class Odd:
    """An object of no type that is expected anywhere."""


HOSTILE = [
    *(None, True, -1, 0, 2**31, 2**63, 2**65, -(2**63), 10**400, 0.5, math.nan, math.inf, 1e30, 1j),
    *("", "5", "a\0b", "\ud800", b"", b"\xff", b"x" * 16, bytearray(16), memoryview(b"abc")),
    *([], [None], [5], ["x"], [b"x"], [b"x" * 16] * 3, {}, {1: 2}, range(3), Odd(), Odd, len),
    *(np.zeros(3), np.zeros((3, 17), np.uint8), np.array(5), np.array([-1]), np.array([None])),
    *((1 << 65, 16), (0, 1 << 20)),
]
ANYTHING = st.one_of(
    st.sampled_from(range(len(HOSTILE))).map(HOSTILE.__getitem__),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=20),
    st.lists(st.one_of(st.integers(), st.binary(max_size=17), st.none()), max_size=4),
)


class Calls:
    """The public calls, by name, each with arguments that are right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = tutti.open(folder / "pool", LAYOUT, CAPACITY, config=StoreConfig(timeout_s=20))
        self.memory = self.store.allocate_memory(4)
        self._put().wait()
        self.table: Table = {
            **self._store_calls(),
            **self._catalogue_calls(),
            **self._ticket_calls(),
            **self._memory_calls(),
            **self._module_calls(),
        }

    def _store_calls(self) -> Table:
        store = self.store
        return {
            "match": (store.match, KEYED | {"pin": False, "proven": False}),
            "present": (store.present, KEYED | {"pin": False, "proven": False}),
            "unpin": (store.unpin, {"name": None}),
            "put": (store.put, self._puts()),
            "load": (store.load, self._loads()),
            "prove": (store.prove, {"max_objects": 4} | WAIT),
            "quarantine": (store.quarantine, {"keys": KEYS[:0]}),
            "clear": (store.clear, {"deallocate": False}),
            "wait_recovered": (store.wait_recovered, WAIT),
            "close": (store.close, {"timeout_s": "never right here"}),
            "register": (store.register, {"memory": "never right here"}),
            "unregister": (store.unregister, {"memory": "never right here"}),
            "attach": (store.attach, {"part": "never right here"}),
            "allocate_memory": (
                lambda **given: store.unregister(store.allocate_memory(**given)),
                {"pages": 1, "order": None, "hugepages": False},
            ),
        }

    def _loads(self) -> dict[str, Any]:
        return KEYED | {"pages": PAGES, "memory": None, "batch": "", "ahead": False}

    def _catalogue_calls(self) -> Table:
        catalogue = self.store.catalogue
        return {
            "catalogue.keys": (catalogue.keys, {"namespace": None}),
            "catalogue.objects": (catalogue.objects, KEYED),
            "catalogue.delete": (catalogue.delete, {"keys": KEYS[:0]} | WAIT),
            "catalogue.pin": (catalogue.pin, KEYED),
            "catalogue.unpin": (catalogue.unpin, KEYED),
            "catalogue.expire": (catalogue.expire, KEYED | {"ttl_s": None}),
        }

    def _ticket_calls(self) -> Table:
        return {
            "put.wait": (lambda **given: self._put().wait(**given), WAIT),
            "put.wait_ended": (lambda **given: self._put().wait_ended(**given), WAIT),
            "put.on_done": (lambda **given: self._put().on_done(**given), {"callback": id}),
            "load.wait": (lambda **given: self._load().wait(**given), WAIT),
            "load.wait_layer": (
                lambda **given: self._load().wait_layer(**given),
                {"layer": 0} | WAIT,
            ),
            "load.wait_settled": (lambda **given: self._load().wait_settled(**given), WAIT),
            "load.cancel": (lambda **given: self._load().cancel(**given), WAIT),
            "load.order_stream": (
                lambda **given: self._load().order_stream(**given),
                {"stream": "never right here", "layer": 0},
            ),
        }

    def _memory_calls(self) -> Table:
        return {
            "memory.read": (self.memory.read, {"page": 3}),
            "memory.segment": (self.memory.segment, {"page": 3, "layer": 0, "k": 0}),
            "memory.write": (
                self.memory.write,
                {"page": 3, "content": bytes(LAYOUT.object_nbytes)},
            ),
            "HostMemory.allocate": (
                tutti.HostMemory.allocate,
                {"layout": LAYOUT, "pages": 1, "order": None, "hugepages": False},
            ),
            "HostMemory.from_buffer": (
                tutti.HostMemory.from_buffer,
                {
                    "layout": LAYOUT,
                    "buffer": np.zeros(1 << 20, np.uint8),
                    "pages": 1,
                    "order": None,
                },
            ),
        }

    def _module_calls(self) -> Table:
        folder = self.folder
        return {
            "open": (lambda **given: tutti.open(**given).close(), self._opening()),
            "format": (tutti.format, self._formatting()),
            "connect": (
                tutti.connect,
                {
                    "path": str(folder / "none"),
                    "layout": LAYOUT,
                    "capacity": CAPACITY,
                    "pool": "",
                    "lookup_timeout_s": 1.0,
                    "executor": "auto",
                    "profile": None,
                },
            ),
            "StoreConfig": (StoreConfig, dict(vars(StoreConfig()))),
            "KVLayout": (tutti.KVLayout, dict(vars(replace(LAYOUT)))),
            "KVLayout.mha": (tutti.KVLayout.mha, {**self._shape(), "v_head_dim": None}),
            "KVLayout.gqa": (tutti.KVLayout.gqa, self._shape() | {"q_heads": 4}),
            "KVLayout.from_json": (tutti.KVLayout.from_json, {"text": LAYOUT.to_json()}),
            "object_keys": (
                tutti.object_keys,
                {"fingerprint": LAYOUT.fingerprint, "hashes": [b"x", b"y"]},
            ),
            "chain_keys": (
                tutti.chain_keys,
                {
                    "fingerprint": LAYOUT.fingerprint,
                    "tokens": list(range(64)),
                    "page_size": 16,
                    "salt": b"",
                },
            ),
        }

    def _put(self) -> Any:
        return self.store.put(KEYS, PAGES)

    def _load(self) -> Any:
        return self.store.load(KEYS, PAGES)

    @staticmethod
    def _puts() -> dict[str, Any]:
        return {
            "keys": KEYS,
            "pages": PAGES,
            "memory": None,
            "parent": None,
            "depth": 0,
            "ttl_s": None,
            "namespace": "",
        }

    @staticmethod
    def _shape() -> dict[str, Any]:
        return {"layers": 2, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"}

    def _pool(self) -> dict[str, Any]:
        return {"paths": str(self.folder / "pool"), "layout": LAYOUT, "executor": "auto"}

    def _opening(self) -> dict[str, Any]:
        """Of the pool that is open already: what is right here is refused as well."""
        settings = ("capacity", "verify", "durability", "profile", "config")
        return {**self._pool(), **dict.fromkeys(settings)}

    def _formatting(self) -> dict[str, Any]:
        return {
            **self._pool(),
            "capacity": CAPACITY,
            "force": False,
            "prewrite": False,
            "progress": None,
        }


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("arguments")
        patch.chdir(folder)  # where relative names of files lead
        patch.setattr(file_member, "LOCK_TIMEOUT_S", 0.02)  # the pool that is tried is in use
        made = Calls(folder)
        yield made
        made.store.close()


def try_call(calls: Calls, name: str, parameter: str, value: object) -> None:
    function, right = calls.table[name]
    with contextlib.suppress(TuttiError):
        function(**{**right, parameter: value})


@pytest.mark.timeout(300)
def test_every_parameter_of_every_call(calls: Calls) -> None:
    for name, (_, right) in calls.table.items():
        for parameter in right:
            if parameter == "paths" or name == "close":
                continue  # names of files that would be made; the end of all that follows
            for value in HOSTILE:
                try_call(calls, name, parameter, value)
    check_sound(calls)


@pytest.mark.timeout(300)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_for_one_parameter(calls: Calls, data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(sorted(set(calls.table) - {"open", "format", "connect", "close"}))
    )
    parameter = data.draw(st.sampled_from(sorted(calls.table[name][1])))
    try_call(calls, name, parameter, data.draw(ANYTHING))


def check_sound(calls: Calls) -> None:
    """The store that all this was tried on works, and nothing is in use."""
    calls._put().wait(60)
    assert calls._load().wait_settled(60)
    assert calls.store.match(KEYS) == len(KEYS)
    calls.store.unpin()
    wait_until(lambda: calls.store.stats()["busy_objects"] == 0)  # slots are made free behind calls
    assert sorted(path.name for path in calls.folder.iterdir()) == ["pool"]


def test_the_table_has_every_parameter(calls: Calls) -> None:
    """A parameter that is added is tried as well."""
    store = calls.store
    for name in ("match", "present", "put", "load", "prove", "clear", "unpin", "allocate_memory"):
        named = set(inspect.signature(getattr(store, name)).parameters)
        assert named == set(calls.table[name][1]), name
    for name in ("open", "format", "connect", "chain_keys", "object_keys"):
        named = set(inspect.signature(getattr(tutti, name)).parameters)
        assert named == set(calls.table[name][1]), name


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        (KeySizeError, "put", {"keys": None}),
        (KeySizeError, "match", {"keys": KEYS[0]}),
        (KeySizeError, "put", {"parent": "str"}),
        (KeySizeError, "chain_keys", {"fingerprint": LAYOUT}),
        (ConfigError, "attach", {"part": None}),
        (ConfigError, "put", {"depth": 2**63}),
        (ConfigError, "put", {"depth": math.nan}),
        (ConfigError, "put", {"depth": 1e30}),
        (ConfigError, "put", {"ttl_s": math.inf}),
        (ConfigError, "put", {"namespace": 5}),
        (ConfigError, "put", {"namespace": None}),
        (ConfigError, "load", {"batch": None}),
        (ConfigError, "load", {"batch": "\ud800"}),
        (ConfigError, "load", {"ahead": 0}),
        (ConfigError, "match", {"pin": 1}),
        (ConfigError, "register", {"memory": None}),
        (ConfigError, "HostMemory.from_buffer", {"buffer": (1 << 65, 1 << 20)}),
        (ConfigError, "HostMemory.from_buffer", {"buffer": (4096,)}),
        (ConfigError, "HostMemory.from_buffer", {"buffer": ("4096", 1 << 20)}),
        (ConfigError, "put.wait", {"timeout_s": "5"}),
        (ConfigError, "load.wait", {"timeout_s": math.nan}),
        (ConfigError, "load.wait", {"timeout_s": 1e30}),
        (ConfigError, "load.wait_settled", {"timeout_s": -1}),
        (PageRangeError, "load.wait_layer", {"layer": 2**63}),
        (PageRangeError, "memory.read", {"page": 2**65}),
        (PageRangeError, "memory.segment", {"layer": -1}),
        (PageRangeError, "memory.segment", {"k": -1}),
        (PageRangeError, "memory.segment", {"k": len(LAYOUT.segments)}),
        (ConfigError, "close", {"timeout_s": "5"}),
        (ConfigError, "StoreConfig", {"digest_cache_nbytes": -1}),
        (ConfigError, "StoreConfig", {"eviction": None}),
        (ConfigError, "StoreConfig", {"timeout_s": 1e30}),
        (ConfigError, "open", {"paths": "a\0b"}),
        (ConfigError, "open", {"paths": "\ud800"}),
        (ConfigError, "open", {"layout": 5}),
        (ConfigError, "open", {"capacity": "much"}),
        (ConfigError, "open", {"executor": None}),
        (ConfigError, "format", {"paths": ["a\0b"]}),
        (ConfigError, "format", {"force": 5}),
        (ConfigError, "connect", {"path": "a\0b"}),
        (ConfigError, "connect", {"lookup_timeout_s": math.inf}),
    ],
)
def test_what_is_refused(
    calls: Calls, kind: type[TuttiError], name: str, arguments: dict[str, Any]
) -> None:
    function, right = calls.table[name]
    with pytest.raises(kind, match=r"give|pass|name|use|write"):
        function(**{**right, **arguments})
    check_sound(calls)


@pytest.mark.parametrize("setting", ["verify", "durability"])
def test_a_setting_beside_a_config_is_refused(setting: str, tmp_path: Path) -> None:
    config = StoreConfig()
    value = {setting: getattr(config, setting)}
    with pytest.raises(ConfigError, match=f"put {setting} into the StoreConfig"):
        tutti.open(tmp_path / "pool", LAYOUT, "8MiB", config=config, **value)
    assert not list(tmp_path.iterdir())


def test_segments_numbered_by_short_integers(calls: Calls) -> None:
    numbers = np.uint8(3), np.uint8(1), np.uint8(0)
    assert np.shares_memory(calls.memory.segment(*numbers), calls.memory.segment(3, 1, 0))


def test_a_segment_keeps_its_memory() -> None:
    memory = tutti.HostMemory.allocate(LAYOUT, 1)
    segment, owner = memory.segment(0, 0, 0), weakref.ref(memory.owner)
    del memory
    gc.collect()
    assert owner() is not None, "the view is of memory that was freed"
    del segment
    gc.collect()
    assert owner() is None

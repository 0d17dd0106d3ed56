"""Pools whose bytes are well formed, with right CRCs, and make no sense: refused before any use."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.objects import load_present, make_files, put_objects

import tutti.store
from store.pools import GEOMETRY, LAYOUT
from tutti import cli, native
from tutti.base.units import GiB
from tutti.errors import PoolCorrupt
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.slot_record import COUNTER_MAX, RECORD_DTYPE, RecordState
from tutti.medium.superblock import SUPERBLOCK_DTYPE, Superblock, choose_superblock

KEYS = [bytes([i]) * 16 for i in range(1, 7)]
UNUSABLE = 3


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A pool of six objects that was closed cleanly."""
    path = str(tmp_path / "pool")
    make_files([path], GEOMETRY)
    put(path, KEYS)
    return path


def put(path: str, keys: list[bytes]) -> None:
    with tutti.store.open(path) as store:
        put_objects(store, keys)


def present(path: str, keys: list[bytes]) -> int:
    """How many of the keys load, each with the right bytes."""
    with tutti.store.open(path) as store:
        store.wait_recovered(10)
        found, damaged = load_present(store, keys)
        assert not damaged
        return len(found)


def superblock(path: str) -> Superblock:
    raw = Path(path).read_bytes()[: 2 * BLOCK_NBYTES]
    return choose_superblock(raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:], path)[0]


def write_superblocks(path: str, encoded: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(encoded * 2)


def with_layout(change: Callable[[dict[str, Any]], object]) -> Callable[[str], None]:
    def edit(path: str) -> None:
        layout = json.loads(LAYOUT.to_json())
        change(layout)
        text = json.dumps(layout, sort_keys=True, separators=(",", ":"))
        write_superblocks(path, dataclasses.replace(superblock(path), layout_json=text).encode())

    return edit


def with_counter(name: str, value: int) -> Callable[[str], None]:
    def edit(path: str) -> None:
        block = np.frombuffer(superblock(path).encode(), np.uint8).copy()
        row = block.view(SUPERBLOCK_DTYPE)
        row[name] = value
        native.records_seal(row)
        write_superblocks(path, block.tobytes())

    return edit


def with_record(value: int) -> Callable[[str], None]:
    """The first object's record has this sequence number, and no snapshot stands for it."""

    def edit(path: str) -> None:
        write_superblocks(path, dataclasses.replace(superblock(path), snapshot=None).encode())
        content = np.fromfile(path, np.uint8)
        table = content[GEOMETRY.table_offset :][: GEOMETRY.slots * RECORD_DTYPE.itemsize]
        records = table.view(RECORD_DTYPE)
        first = int(np.flatnonzero(records["state"] == RecordState.READY)[0])
        records["sequence"][first] = value
        native.records_seal(records[first : first + 1])
        content.tofile(path)

    return edit


LAYOUTS = {
    "more-layers": with_layout(lambda layout: layout.update(layers=8)),
    "fewer-layers": with_layout(lambda layout: layout.update(layers=1)),
    "one-segment": with_layout(lambda layout: layout["segments"].pop()),
    "larger-segments": with_layout(lambda layout: layout.update(segments=[GiB, GiB])),
    "smaller-segments": with_layout(lambda layout: layout.update(segments=[8, 8])),
    "other-version": with_layout(lambda layout: layout.update(format=2)),
    "no-dtype": with_layout(lambda layout: layout.pop("dtype")),
    "wrong-dtype": with_layout(lambda layout: layout.update(dtype="float7")),
    "fractions": with_layout(lambda layout: layout.update(page_size=16.0)),
}


@pytest.mark.parametrize("edit", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_that_is_not_the_geometrys(
    path: str, edit: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(path)
    before = Path(path).read_bytes()
    with pytest.raises(PoolCorrupt, match="contradicts itself"):
        tutti.store.open(path)
    for command in (["info", path], ["fsck", path], ["fsck", path, "--repair"]):
        assert cli.main(command) == UNUSABLE
        assert "format the pool again" in capsys.readouterr().err
    assert Path(path).read_bytes() == before


def test_a_layout_that_is_not_canonical(path: str) -> None:
    """Its fingerprint would not be that of the layout that users compute keys with."""
    text = json.dumps(json.loads(LAYOUT.to_json()), indent=1)
    write_superblocks(path, dataclasses.replace(superblock(path), layout_json=text).encode())
    with pytest.raises(PoolCorrupt, match="not canonical"):
        tutti.store.open(path)


REFUSED = {
    "generation-0": with_counter("generation", 0),
    "generation-next-to-last": with_counter("generation", COUNTER_MAX - 1),
    "generation-last": with_counter("generation", COUNTER_MAX),
    "generation-beyond": with_counter("generation", COUNTER_MAX + 1),
    "sequence-0": with_counter("next_sequence", 0),
    "sequence-beyond": with_counter("next_sequence", COUNTER_MAX + 1),
}


@pytest.mark.parametrize("edit", REFUSED.values(), ids=REFUSED)
def test_a_counter_out_of_range(path: str, edit: Callable[[str], None]) -> None:
    edit(path)
    before = Path(path).read_bytes()
    with pytest.raises(PoolCorrupt, match="again"):
        tutti.store.open(path)
    for command in (["fsck", path], ["fsck", path, "--repair"], ["fsck", path]):
        assert cli.main(command) == UNUSABLE
    assert Path(path).read_bytes() == before


LAST = {
    "superblock": with_counter("next_sequence", COUNTER_MAX - 4),
    "superblock-last": with_counter("next_sequence", COUNTER_MAX),
    "record": with_record(COUNTER_MAX - 5),
    "record-last": with_record(COUNTER_MAX - 1),
    "record-beyond": with_record(COUNTER_MAX),
}


@pytest.mark.parametrize("name", LAST)
def test_sequence_numbers_that_run_out(path: str, name: str) -> None:
    """What is acknowledged stays, over closing, clearing and voiding; then puts are refused."""
    LAST[name](path)
    was = present(path, KEYS)
    assert was == (5 if name == "record-beyond" else 6)
    stored: list[bytes] = []
    refused = False
    for round_ in range(8):
        key = bytes([100 + round_]) * 16
        refusal = ""
        try:
            put(path, [key])
        except PoolCorrupt as error:
            refusal = str(error)
        assert not refusal or "format the pool again" in refusal
        refused |= bool(refusal)
        stored += [] if refusal else [key]
        assert present(path, KEYS + stored) == was + len(stored)
    assert refused == (name != "record-beyond")
    with tutti.store.open(path) as store:
        assert store.quarantine(KEYS[1:2]) == 1
    assert present(path, KEYS + stored) == was + len(stored) - 1


HOSTILE = {**LAST, **REFUSED, "sound": lambda path: None}


@pytest.mark.parametrize("name", HOSTILE)
def test_repair_says_the_same_when_it_is_repeated(
    path: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run reaches a fixed point: what it calls repaired, no later run finds again."""
    HOSTILE[name](path)
    first = cli.main(["fsck", path, "--repair"])
    after = cli.main(["fsck", path])
    again = cli.main(["fsck", path, "--repair"])
    assert first == after == again
    said = capsys.readouterr()
    if first:
        assert "again" in said.out + said.err
    else:
        assert "The pool is sound." in said.out

"""After a loss of power a key serves its own bytes or misses; what was flushed is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from crash.objects import (
    as_rows,
    check_books,
    check_usable,
    content_of,
    format_members,
    load_present,
)
from crash.power_log import DAMAGES, NOTHING, Bytes, Damage, Entry, image_after, read_log

import tutti.store
from store.pools import GEOMETRY, LAYOUT, formatted, names, opened
from tutti.base.arrays import Mask, Slots
from tutti.errors import PoolError
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.nvme_spec import OPCODE_WRITE
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.memory.host_memory import HostMemory
from tutti.placement.index import SlotState
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

CHAINS = 12  # of lives, each of which begins with what the one before left behind
LIVES = 4
IMAGES = 11  # of each life
STEPS = 8
RESERVE = 4  # slots that a put of two needs besides
TEARS = 4  # of every superblock; some leave all or nothing


SMALL = replace(GEOMETRY, groups=4)  # so that a life evicts


def blank(members: int) -> list[Bytes]:
    """A new pool."""
    return formatted(LAYOUT, SMALL, members)


@dataclass(frozen=True)
class Mark:
    """Something had ended when the log had `nbytes` bytes.

    held: keys that were served then. kind: "open", "put", "evict", "clear", "close" or "leave".
    """

    kind: str
    nbytes: int
    held: frozenset[bytes]


@dataclass
class Life:
    """A store from open to close, with its log.

    base: the members before. kept: keys of which the base must hold an intact object. gone: keys
    that were cleared for good. known: every other key that was ever put; the first `begun[i]` of
    `puts` were put before mark i.
    """

    durability: str
    base: list[Bytes]
    kept: frozenset[bytes]
    gone: set[bytes]
    known: set[bytes]
    entries: list[Entry] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    puts: list[bytes] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)


class Recording:
    """Lives a life on files."""

    def __init__(self, life: Life, folder: Path, executor: str, rng: np.random.Generator) -> None:
        self._life = life
        self._rng = rng
        self._paths = [str(folder / name) for name in names(len(life.base))]
        for path, member in zip(self._paths, life.base, strict=True):
            Path(path).write_bytes(member.tobytes())
        self._log = open(folder / "log", "wb+")  # noqa: SIM115
        self._executor = executor

    def run(self, steps: Sequence[str]) -> None:
        fd = self._log.fileno()
        controller = FileController(self._paths, executor=self._executor, record_fd=fd)
        config = StoreConfig(durability=self._life.durability, timeout_s=10.0)
        store = ObjectStore(controller, self._paths, config=config)
        store.wait_recovered(10)
        pool = store.allocate_memory(24, hugepages=False)
        self._mark("open", store)
        self._mark_evictions(store)
        for step in steps:
            if step == "put":
                self._put(store, pool)
            else:
                store.clear(deallocate=bool(self._rng.random() < 0.5))
            self._mark(step, store)
        held, unproven = self._held(store), store.stats()["slots"]["unproven"]
        store.close()
        # A pool with unproven objects is left as a crash leaves it.
        kind = "leave" if unproven else "close"
        self._life.marks.append(Mark(kind, self._nbytes(), held))
        self._life.begun.append(len(self._life.puts))
        self._log.seek(0)
        self._life.entries = read_log(self._log.read())
        self._log.close()
        for path in self._paths:
            os.unlink(path)

    def _put(self, store: ObjectStore, pool: HostMemory) -> None:
        n = int(self._rng.integers(1, 9))
        keys = [self._rng.bytes(16) for _ in range(n)]
        self._life.puts += keys
        for page, key in enumerate(keys):
            pool.write(page, content_of(key))
        assert not store.match(as_rows(keys)), "a new key is there"  # makes room in the background
        cut = int(self._rng.integers(0, n))
        tickets = [
            store.put(as_rows(keys[first:last]), np.arange(first, last))
            for first, last in ((0, cut), (cut, n))
            if first < last
        ]
        assert sum(ticket.wait(10).stored for ticket in tickets) == n

    def _nbytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _mark(self, kind: str, store: ObjectStore, gone: frozenset[bytes] = frozenset()) -> None:
        with store._core.lock:  # marks are in the order of the log
            held = self._held(store) - gone
            self._life.marks.append(Mark(kind, self._nbytes(), held))
            self._life.begun.append(len(self._life.puts))

    def _mark_evictions(self, store: ObjectStore) -> None:
        """Marks what goes from now on: a store makes room for puts to come at any time."""
        core, choose = store._core, store._core.choose_victims

        def chosen(n: int, among: Mask | None = None) -> Slots:
            victims = choose(n, among)
            keys = core.index.key[victims]
            self._mark("evict", store, frozenset(key.tobytes() for key in keys))
            return victims

        core.choose_victims = chosen  # type: ignore[method-assign]

    @staticmethod
    def _held(store: ObjectStore) -> frozenset[bytes]:
        core = store._core
        with core.lock:
            served = (core.index.state == SlotState.READY) | (
                core.index.state == SlotState.UNPROVEN
            )
            return frozenset(row.tobytes() for row in core.index.key[served])


@dataclass(frozen=True)
class Verdict:
    """What an image has to hold, and what it must not."""

    must: frozenset[bytes]
    may: frozenset[bytes]
    never: frozenset[bytes]
    clearing: bool


def expect(life: Life, cut: int) -> Verdict:
    """What must be true when the power fails after `cut` entries of a life."""
    nbytes = life.entries[cut - 1].end if cut else 0
    past = [mark for mark in life.marks if mark.nbytes <= nbytes]
    after = life.marks[len(past)] if len(past) < len(life.marks) else life.marks[-1]
    # Objects that a later mark does not hold were evicted; they may or may not be on the medium.
    must = life.kept
    for mark in (*past, after):
        if mark.kind == "close" and mark in past:
            must = mark.held
        elif mark.kind == "clear" and mark is after and mark not in past:
            continue  # that it began obliges to nothing
        elif life.durability == "flush" and mark in past:
            must = mark.held
        else:
            must &= mark.held
    clears = [i for i, mark in enumerate(past) if mark.kind == "clear"]
    before = life.begun[clears[-1]] if clears else 0
    never = frozenset(life.gone) | frozenset(life.puts[:before])
    if clears:
        never |= life.known
    may = (life.known | set(life.puts)) - never
    return Verdict(must, frozenset(may), never, after.kind == "clear" and after not in past)


def check_image(
    life: Life, images: list[Bytes], verdict: Verdict, rng: np.random.Generator
) -> set[bytes]:
    """Opens an image; returns the keys that it serves."""
    with opened(images) as store:
        store.wait_recovered(10)
        check_books(store)
        found, damaged = load_present(store, sorted(verdict.may | verdict.never))
        assert not (found | damaged) & verdict.never, "an object came back after a clear"
        if life.durability == "flush":
            assert not damaged, "a record was written before its data was flushed"
        if not (verdict.clearing and not found):
            lost = verdict.must - found
            assert not lost, f"{len(lost)} of {len(verdict.must)} durable objects are lost"
        # Whatever was damaged costs its place.
        if len(damaged) < store.stats()["capacity_objects"] - RESERVE:
            check_usable(store, [rng.bytes(16) for _ in range(2)])
        check_books(store)
    return found


def writes_below(life: Life, end: int) -> list[int]:
    """Which entries of the log are writes that begin below byte `end` of a member."""
    return [
        i
        for i, entry in enumerate(life.entries)
        if entry.opcode == OPCODE_WRITE and entry.offset < end
    ]


def superblock_writes(life: Life) -> list[int]:
    return writes_below(life, 2 * BLOCK_NBYTES)


def some_cut(life: Life, rng: np.random.Generator) -> int:
    """Any number of entries; often one just before or after a superblock or record was written."""
    chance = rng.random()
    if chance < 0.3:
        return int(rng.integers(len(life.entries) + 1))
    end = 2 * BLOCK_NBYTES if chance < 0.6 else SMALL.groups_offset
    return int(rng.choice(writes_below(life, end)) + rng.integers(2))


def some_steps(rng: np.random.Generator) -> list[str]:
    return ["clear" if x < 0.2 else "put" for x in rng.random(int(rng.integers(2, STEPS + 1)))]


def checked(life: Life, cut: int, damage: Damage, rng: np.random.Generator) -> Life:
    """Checks what a loss of power leaves behind; returns a life that begins with it."""
    images = image_after(life.base, life.entries, cut, damage, rng)
    verdict = expect(life, cut)
    try:
        found = check_image(life, images, verdict, rng)
    except BaseException:
        marks = [(mark.kind, mark.nbytes) for mark in life.marks]
        print(f"after {cut} of {len(life.entries)} entries, {damage}; ends in the log: {marks}")
        raise
    kept = frozenset() if verdict.clearing and not found else verdict.must
    return Life(life.durability, images, kept, set(verdict.never), set(verdict.may))


@pytest.mark.parametrize("durability", ["process", "flush"])
def test_images(durability: str, executor: str, tmp_path: Path, seed: int) -> None:
    images = 0
    for number in range(CHAINS // 4):
        chain = seed + number
        print(f"chain of lives with seed {chain}")
        rng = np.random.default_rng(chain)
        life = Life(durability, blank(1 + number % 2), frozenset(), set(), set())
        for _ in range(LIVES):
            Recording(life, tmp_path, executor, rng).run(some_steps(rng))
            for number in range(IMAGES):
                checked(life, some_cut(life, rng), DAMAGES[number % len(DAMAGES)], rng)
            cut = len(life.entries) if rng.random() < 0.4 else some_cut(life, rng)
            life = checked(life, cut, DAMAGES[int(rng.integers(len(DAMAGES)))], rng)
            images += IMAGES + 1
    assert images >= 125


@pytest.mark.parametrize("members", [1, 2])
def test_a_superblock_may_tear(members: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """Every write of one, in pools that were cleared before and whose better copy is A, then B."""
    life = Life("flush", blank(members), frozenset(), set(), set())
    for steps in (["put"], ["put", "clear", "put"], ["put", "put", "clear"], ["clear", "put"]):
        Recording(life, tmp_path, "threads", rng).run(steps)
        for entry in superblock_writes(life) * TEARS:
            checked(life, entry, Damage(0.0, 1.0, 1.0, 512), rng)
        life = checked(life, len(life.entries), NOTHING, rng)


def test_every_prefix(tmp_path: Path, rng: np.random.Generator) -> None:
    """Without damage and with some, at every length of the log."""
    life = Life("process", blank(1), frozenset(), set(), set())
    Recording(life, tmp_path, "threads", rng).run(["put", "clear", "put"])
    for cut in range(len(life.entries) + 1):
        for damage in (NOTHING, DAMAGES[1 + cut % (len(DAMAGES) - 1)]):
            checked(life, cut, damage, rng)


def test_a_format_over_an_old_pool(tmp_path: Path, rng: np.random.Generator) -> None:
    """Until it is done there is the old pool, a typed error, or the new pool; no mixture."""
    life = Life("flush", blank(2), frozenset(), set(), set())
    Recording(life, tmp_path, "threads", rng).run(["put"])
    old = checked(life, len(life.entries), NOTHING, rng)
    paths = [str(tmp_path / name) for name in names(2)]
    for path, member in zip(paths, old.base, strict=True):
        Path(path).write_bytes(member.tobytes())
    with (tmp_path / "log").open("wb") as log:
        format_members(paths, SMALL, record_fd=log.fileno())
    entries = read_log((tmp_path / "log").read_bytes())
    for cut in range(len(entries) + 1):
        for damage in DAMAGES:
            images = image_after(old.base, entries, cut, damage, rng)
            try:
                store = opened(images)
            except PoolError:
                assert cut < len(entries), "a finished format opens"
                continue
            with store:
                store.wait_recovered(10)
                found, _ = load_present(store, sorted(old.known))
                new = store.members.uuid != life.base[0][16:32].tobytes()
                assert found == (set() if new else set(old.kept))
                check_usable(store, [rng.bytes(16)])


def test_what_was_not_proven_is_never_trusted(tmp_path: Path, rng: np.random.Generator) -> None:
    """Opened after a crash and closed cleanly without a load: still nothing has been verified."""
    life = Life("process", blank(1), frozenset(), set(), set())
    Recording(life, tmp_path, "threads", rng).run(["put", "put"])
    cut = next(i for i, mark in enumerate(life.marks) if mark.kind == "close")
    cut = sum(entry.end <= life.marks[cut - 1].nbytes for entry in life.entries)
    [image] = image_after(life.base, life.entries, cut, NOTHING, rng)
    image[SMALL.groups_offset :] ^= 1  # no slice reached the medium as it was written
    path = tmp_path / "member0"
    path.write_bytes(image.tobytes())
    for verify in ("always", "off"):
        with tutti.store.open(path, verify=verify) as store:
            store.wait_recovered(10)
            found = load_present(store, life.puts)[0] if verify == "off" else set()
            assert not found

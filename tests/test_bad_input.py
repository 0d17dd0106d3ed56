"""Every wrong input of a user: an error of its own type, with the remedy."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from crash.objects import (
    as_rows,
    check_usable,
    content_of,
    load_present,
    make_files,
    put_objects,
)
from slot_addresses import slot_lba

import tutti.store
from store.pools import GEOMETRY, LAYOUT
from tutti import native
from tutti.base.units import KiB
from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    ConfigError,
    KeyMissing,
    KeySizeError,
    LayoutError,
    MemberMissing,
    MemberSwapped,
    PageRangeError,
    PoolCorrupt,
    PoolExists,
    PoolInUse,
    PoolMismatch,
    PoolNotFound,
    TuttiError,
)
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import RECORD_DTYPE
from tutti.medium.superblock import SUPERBLOCK_DTYPE
from tutti.pool import pool_format
from tutti.store import ObjectStore

OTHER = KVLayout.mha(
    layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="float16", model="test-model"
)
KEYS = [bytes([i]) * 16 for i in range(1, 11)]
TIMEOUT_S = 30.0
SHARED = Path("/dev/shm")

# Become another user where the file's mode would not stop this one, then open argv[1].
AS_NOBODY = """
import os, sys
import tutti.store
from tutti.gio_uring.controller_file import uring_refusal
uring_refusal()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    {call}
except Exception as error:
    print(type(error).__name__, error)
"""
HOLD = """
import sys
import tutti.store
with tutti.store.open(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A pool of ten objects that was closed cleanly; slot i holds object i."""
    path = tmp_path / "member0"
    make_files([str(path)], GEOMETRY)
    put_all([path])
    return path


def put_all(paths: list[Path]) -> None:
    with tutti.store.open(paths) as store:
        put_objects(store, KEYS)


def several(folder: Path, count: int = 3) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"member{i}" for i in range(count)]
    make_files([str(path) for path in paths], GEOMETRY)
    put_all(paths)
    return paths


@contextmanager
def edited(path: Path) -> Iterator[np.ndarray]:
    """The bytes of a file, to change."""
    content = np.fromfile(path, np.uint8)
    yield content
    content.tofile(path)


def python(code: str, *arguments: str) -> list[str]:
    """The command that runs a program with the modules of this process."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *arguments]


def output_as_nobody(call: str, path: Path) -> str:
    command = python(AS_NOBODY.format(call=call), str(path))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd="/"
    )
    return done.stdout


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    """The kernel refuses writes behind this byte of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuses(kind: type[TuttiError], remedy: str, call: Callable[[], object]) -> None:
    """`call` raises exactly this kind, and the message names what to do."""
    with pytest.raises(kind, match=remedy) as caught:
        call()
    assert caught.type is kind
    assert len(str(caught.value)) > 20


def test_a_missing_path(tmp_path: Path) -> None:
    path = tmp_path / "none"
    refuses(PoolNotFound, "pass layout and capacity", lambda: tutti.store.open(path))
    refuses(PoolNotFound, "pass layout and capacity", lambda: tutti.store.open(path, LAYOUT))
    inside = tmp_path / "no" / "folder"
    refuses(PoolNotFound, "create it", lambda: tutti.store.open(inside, LAYOUT, "64MiB"))
    both = [path, inside]
    refuses(PoolNotFound, "create it", lambda: tutti.store.open(both, LAYOUT, "64MiB"))
    for none in ([], "", ["", path]):
        refuses(ConfigError, "at least one path", partial(tutti.store.open, none))
    for odd in (None, 5, [path, None], b"name"):
        refuses(ConfigError, "neither a path", partial(tutti.store.open, odd, LAYOUT, "64MiB"))
    for wrong in ({"verify": "maybe"}, {"durability": 3}, {"executor": "gpu"}):
        refuses(
            ConfigError, "use one of", partial(tutti.store.open, path, LAYOUT, "64MiB", **wrong)
        )
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_pool(tmp_path: Path) -> None:
    refuses(PoolNotFound, "correct the path, or make one", lambda: tutti.store.open(tmp_path))
    refuses(ConfigError, "name a namespace", lambda: tutti.store.open("/dev/null"))
    path = tmp_path / "member0"
    path.touch()
    refuses(ConfigError, "allocate it first", lambda: tutti.store.open(path))
    path.write_bytes(bytes(KiB * KiB))
    refuses(PoolNotFound, "format the member", lambda: tutti.store.open(path))
    path.write_bytes(b"\x5a" * KiB * KiB)
    refuses(PoolCorrupt, "check the path", lambda: tutti.store.open(path))
    path.write_bytes(path.read_bytes()[: 3 * KiB])
    refuses(ConfigError, "allocate it first", lambda: tutti.store.open(path))
    path.write_bytes(b"\x5a" * 4 * KiB)
    refuses(PoolCorrupt, "check the path", lambda: tutti.store.open(path))


def test_an_existing_pool_is_not_formatted(path: Path) -> None:
    refuses(PoolExists, "use --force", lambda: tutti.store.format(path, LAYOUT, "64MiB"))
    with tutti.store.open(path, LAYOUT, "64MiB") as store:
        assert store.match(as_rows(KEYS)) == len(KEYS)


@pytest.fixture
def public(path: Path) -> Iterator[Path]:
    """The pool in a folder that all users can enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield Path(shutil.move(path, folder / "member0"))
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_file_and_a_folder_of_another_user(public: Path) -> None:
    for path, mode in ((public, 0o444), (public.parent, 0o700)):
        path.chmod(mode)
        said = output_as_nobody("tutti.store.open(sys.argv[1])", public)
        assert re.match("PoolReadOnly.*change its permissions or remount", said), said


def test_a_read_only_directory(public: Path) -> None:
    public.parent.chmod(0o555)
    layout = "tutti.KVLayout.mha(4, 2, 64, 16, 'bfloat16', model='test-model')"
    call = f"tutti.store.format(sys.argv[1], {layout}, '64MiB')"
    said = output_as_nobody(call, public.with_name("new"))
    assert re.match("PoolReadOnly.*change its permissions or remount", said), said


def test_a_full_disk_at_format(tmp_path: Path) -> None:
    path = tmp_path / "member0"
    with file_limit(16 << 20):
        refuses(CapacityError, "free space", lambda: tutti.store.open(path, LAYOUT, "64MiB"))
    assert not path.exists(), "a format that failed leaves its file"
    tutti.store.format(path, LAYOUT, "64MiB")


def test_more_than_a_file_system_has() -> None:
    size = os.statvfs(SHARED)
    if not os.access(SHARED, os.W_OK) or size.f_blocks == 0:
        pytest.skip(f"{SHARED} is not a file system of bounded size")
    too_much = 2 * (2 * size.f_frsize * size.f_blocks)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=SHARED) as small:
        paths = [Path(small) / "member0", Path(folder) / "member1"]
        remedy = "free space or choose a smaller capacity"
        refuses(CapacityError, remedy, lambda: tutti.store.format(paths, LAYOUT, too_much))
        assert not any(path.exists() for path in paths)


def test_a_full_disk_in_the_middle_of_a_put(path: Path) -> None:
    """What was stored stays, what was not is said, and later it fits."""
    fresh = [bytes([100 + i]) * 16 for i in range(4)]
    with tutti.store.open(path) as store:
        pool = store.allocate_memory(4, hugepages=False)
        for page, key in enumerate(fresh):
            pool.write(page, content_of(key))
        with file_limit(GEOMETRY.groups_offset):
            ticket = store.put(as_rows(fresh), np.arange(4))
            refuses(CapacityError, "free space", lambda: ticket.wait(10))
        store.unregister(pool)
        assert load_present(store, KEYS + fresh) == (set(KEYS), set())
        check_usable(store, fresh)
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS + fresh) == (set(KEYS + fresh), set())


def test_another_layout(path: Path) -> None:
    refuses(PoolMismatch, "open it with that layout", lambda: tutti.store.open(path, OTHER))
    with tutti.store.open(path, LAYOUT) as store:
        memory = tutti.store.HostMemory.allocate(OTHER, 2, hugepages=False)
        refuses(PoolMismatch, "a pool with the memory's layout", lambda: store.register(memory))
        assert store.match(as_rows(KEYS)) == len(KEYS)


@pytest.mark.parametrize("copies", [[0], [1], [0, 1]])
def test_another_version(path: Path, copies: list[int]) -> None:
    with edited(path) as content:
        for copy in copies:
            block = content[copy * 4096 :][:4096].copy()
            block.view(SUPERBLOCK_DTYPE)["version"] = 2
            native.records_seal(block)
            content[copy * 4096 :][:4096] = block
    before = path.read_bytes()
    refuses(PoolMismatch, "use the software that wrote it", lambda: tutti.store.open(path))
    assert path.read_bytes() == before


def test_members(tmp_path: Path) -> None:
    paths = several(tmp_path / "a")
    others = several(tmp_path / "b")
    give = tutti.store.open
    refuses(MemberMissing, "pass all of them", lambda: give(paths[:2]))
    refuses(MemberSwapped, "in the order of the format", lambda: give([*paths[1::-1], paths[2]]))
    refuses(MemberSwapped, "of one pool", lambda: give([paths[0], others[1], paths[2]]))
    with pytest.raises(MemberSwapped, match="pass each member once"):
        give([paths[0], paths[0], paths[2]])
    some = tutti.StoreConfig(degraded=True)
    refuses(MemberSwapped, "leave it out", lambda: give([paths[0], others[1]], config=some))
    with give(paths) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())
    paths[1].unlink()
    with pytest.raises((MemberMissing, PoolNotFound), match=str(paths[1])):
        give(paths)
    with give([paths[0], paths[2]], config=some) as store:
        found, damaged = load_present(store, KEYS)
        assert 0 < len(found) < len(KEYS)
        assert not damaged


def test_a_truncated_member(path: Path) -> None:
    content = path.read_bytes()
    for nbytes in (GEOMETRY.member_nbytes - 4096, GEOMETRY.table_offset, 8192):
        path.write_bytes(content[:nbytes])
        refuses(PoolCorrupt, "truncated: restore it, or format", lambda: tutti.store.open(path))
    path.write_bytes(content)
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())


def flip(path: Path, byte: int, bit: int) -> None:
    with edited(path) as content:
        content[byte] ^= 1 << bit


def test_bits_flipped_in_superblocks(path: Path, rng: np.random.Generator) -> None:
    """One copy is enough; without a whole one nothing is guessed."""
    original = path.read_bytes()
    for _ in range(12):
        path.write_bytes(original)
        byte, bit = int(rng.integers(4096)), int(rng.integers(8))
        flip(path, int(rng.integers(2)) * 4096 + byte, bit)
        with tutti.store.open(path) as store:
            store.wait_recovered(10)
            assert load_present(store, KEYS) == (set(KEYS), set())
        path.write_bytes(original)
        flip(path, byte, bit)
        flip(path, 4096 + int(rng.integers(4096)), bit)
        refuses(PoolCorrupt, r"damaged or torn|format the pool", lambda: tutti.store.open(path))


def make_unclean(path: Path) -> None:
    """As if the owner had died: both superblocks say open."""
    with edited(path) as content:
        for copy in (0, 1):
            block = content[copy * 4096 :][:4096].copy()
            row = block.view(SUPERBLOCK_DTYPE)[0]
            row["state"], row["snapshot_valid"] = 2, 0
            for name in ("snapshot_entries", "snapshot_xxh3", "snapshot_generation"):
                row[name] = 0
            native.records_seal(block)
            content[copy * 4096 :][:4096] = block


@pytest.mark.parametrize("clean", [True, False])
def test_bits_flipped_in_slot_records(path: Path, clean: bool, rng: np.random.Generator) -> None:
    """Its object is gone; with a snapshot that still names it, the load reports it."""
    if not clean:
        make_unclean(path)
    used = RECORD_DTYPE.fields["digests"][1] + 8 * GEOMETRY.layers  # type: ignore[index]
    flip(path, GEOMETRY.table_offset + 3 * 4096 + int(rng.integers(used)), int(rng.integers(8)))
    with tutti.store.open(path) as store:
        store.wait_recovered(10)
        assert load_present(store, KEYS) == ({*KEYS} - {KEYS[3]}, {KEYS[3]} if clean else set())
        check_usable(store, [b"x" * 16])
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == ({*KEYS} - {KEYS[3]}, set())


@pytest.mark.parametrize("clean", [True, False])
def test_bits_flipped_in_payload(path: Path, clean: bool, rng: np.random.Generator) -> None:
    if not clean:
        make_unclean(path)
    layer = int(rng.integers(GEOMETRY.layers))
    lba = int(slot_lba(GEOMETRY, np.array([5]), layer)[0])
    flip(path, lba * 4096 + int(rng.integers(GEOMETRY.slice_nbytes)), int(rng.integers(8)))
    with tutti.store.open(path) as store:
        store.wait_recovered(10)
        pool = store.allocate_memory(len(KEYS), hugepages=False)
        ticket = store.load(as_rows(KEYS), np.arange(len(KEYS)))
        refuses(ChecksumMismatch, "check the drive's health", lambda: ticket.wait(10))
        assert ticket.wait_settled(10)
        assert ticket.failed().tolist() == [5]
        store.unregister(pool)
        assert load_present(store, KEYS) == ({*KEYS} - {KEYS[5]}, set())


def test_two_owners_in_one_process(path: Path) -> None:
    with tutti.store.open(path) as store:
        refuses(PoolInUse, "close it", lambda: tutti.store.open(path))
        refuses(
            PoolInUse, "close it", lambda: tutti.store.format(path, LAYOUT, "64MiB", force=True)
        )
        assert load_present(store, KEYS) == (set(KEYS), set())
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())


def test_two_processes_on_one_pool(path: Path) -> None:
    owner = subprocess.Popen(
        python(HOLD, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        refuses(PoolInUse, "close it", lambda: tutti.store.open(path))
        refuses(
            PoolInUse, "close it", lambda: tutti.store.format(path, LAYOUT, "64MiB", force=True)
        )
    finally:
        owner.communicate(timeout=TIMEOUT_S)
    assert owner.returncode == 0
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())


def test_a_capacity_below_one_group(tmp_path: Path) -> None:
    path = tmp_path / "member0"
    with pytest.raises(CapacityError, match="pass at least") as caught:
        tutti.store.open(path, LAYOUT, "1MiB")
    found = re.search(r"at least (\d+) bytes", str(caught.value))
    assert found
    least = int(found[1])
    refuses(CapacityError, "at least", lambda: tutti.store.format(path, LAYOUT, least - 1))
    assert not path.exists()
    assert tutti.store.format(path, LAYOUT, least).groups == 1
    refuses(ConfigError, "number|units?", lambda: tutti.store.format(path, LAYOUT, "many"))


def test_a_geometry_that_wastes_more_than_a_quarter(tmp_path: Path) -> None:
    """The message names the number of pages to bundle, and exactly that many do."""

    def layout(page_size: int) -> KVLayout:
        return KVLayout.mla(4, 512, 64, page_size, "bfloat16", model="test-model")

    path = tmp_path / "member0"
    with pytest.raises(LayoutError, match="bundle") as caught:
        tutti.store.open(path, layout(1), "64MiB")
    found = re.search(r"bundle (\d+) pages", str(caught.value))
    assert found
    k = int(found[1])
    assert k > 1
    refuses(LayoutError, "bundle", lambda: tutti.store.format(path, layout(k - 1), "64MiB"))
    assert not path.exists()
    tutti.store.format(path, layout(k), "64MiB")


def both(store: ObjectStore) -> tuple[Callable[..., object], ...]:
    return store.put, store.load


def test_pages_outside_the_registered_pool(path: Path) -> None:
    with tutti.store.open(path) as store:
        keys = as_rows(KEYS[:2])
        for call in both(store):
            refuses(ConfigError, "register one|registered", lambda call=call: call(keys, [0, 1]))
        store.allocate_memory(4, hugepages=False)
        for call in both(store):
            for pages in ([0, 4], [-1, 0], [0, 2**32]):
                refuses(PageRangeError, "0 to 3", lambda c=call, p=pages: c(keys, p))
            refuses(ConfigError, "one page per key", lambda call=call: call(keys, [0]))
            refuses(PageRangeError, "integers", lambda call=call: call(keys, [0.5, 1.0]))
        missing = as_rows([b"y" * 16])
        refuses(KeyMissing, r"ask match\(\)", lambda: store.load(missing, [0]))


def test_keys_of_the_wrong_size(path: Path) -> None:
    with tutti.store.open(path) as store:
        store.allocate_memory(2, hugepages=False)
        wrong = ([b"x" * 15], [b"x" * 16, b"x" * 17], [""], b"x" * 16, np.zeros((1, 15), np.uint8))
        for keys in wrong:
            refuses(KeySizeError, r"pass", lambda keys=keys: store.match(keys))
            for call in both(store):
                refuses(KeySizeError, r"pass", lambda keys=keys, call=call: call(keys, [0]))
        refuses(KeySizeError, "parent", lambda: store.put(as_rows(KEYS[:1]), [0], parent=b"x"))


@pytest.mark.parametrize("does_close", [False, True])
def test_two_make_one_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does_close: bool
) -> None:
    """Who comes second finds the pool of the first, and loses nothing of it."""
    path = tmp_path / "new"
    winners: list[ObjectStore] = []
    with monkeypatch.context() as patch:

        def come_first(*arguments: object, **options: object) -> object:
            patch.undo()
            winners.append(tutti.store.open(path, LAYOUT, "64MiB"))
            put_objects(winners[0], KEYS)
            if does_close:
                winners[0].close()
            return pool_format.reserve_file(*arguments, **options)  # type: ignore[arg-type]

        patch.setattr(pool_format, "reserve_file", come_first)
        if does_close:
            winners.append(tutti.store.open(path, LAYOUT, "64MiB"))
        else:
            refuses(PoolInUse, "close it", lambda: tutti.store.open(path, LAYOUT, "64MiB"))
    with winners[-1] as store:
        assert load_present(store, KEYS) == (set(KEYS), set())
    with tutti.store.open(path) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())

"""Stores on emulated drives: power loss replayed from QEMU's log of writes, and a killed guest."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from crash.objects import as_rows, check_books, check_usable, load_present
from crash.power_log import DAMAGES, Bytes
from crash.test_power_loss import Life, Mark, checked, some_cut

import tutti.store
from qemu.guest import PATIENCE, Drive, Guest, missing
from qemu.lives import DURABILITIES, KILLED_OBJECTS_MAX
from qemu.write_log import image_at_end, read_write_log
from store.pools import LAYOUT, formatted
from tutti.base.units import MiB
from tutti.medium.geometry import Geometry

pytestmark = [pytest.mark.nvme, pytest.mark.timeout(450 * PATIENCE)]

SMALL = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 4)
LARGE = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 64)
CASES = 150  # of each life
LOGGED = (
    "driver=blklogwrites,log-sector-size=512,file.driver=file,file.filename={path},"
    "log.driver=file,log.filename={path}.log"
)


def lives_folder(folder: Path, seed: int) -> Path:
    """Boots a guest that lives two lives and is killed in the third; returns what it left."""
    drives = []
    for name, geometry, backend in (
        ("flush", SMALL, LOGGED),
        ("process", SMALL, LOGGED),
        ("killed", LARGE, "driver=raw,file.driver=file,file.filename={path},discard=unmap"),
    ):
        [image] = formatted(LAYOUT, geometry, 1)
        path = folder / name
        path.write_bytes(image.tobytes() + bytes(MiB))
        (folder / f"{name}.base").write_bytes(image.tobytes())
        (folder / f"{name}.log").touch()
        drives.append(Drive(name, [path], backend=backend))
    rng = np.random.default_rng(seed)
    with Guest(folder, drives, ["-m", "qemu.lives", str(seed)]) as guest:
        acks = guest.wait_file("acks", 120)
        wanted = int(rng.integers(3, 12))
        deadline_s = time.monotonic() + 60
        while acks.read_text().count("\n") < wanted and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(float(rng.random()) * 0.1)
        guest.kill()
    return folder


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if reason := missing():
        pytest.skip(reason)
    return lives_folder(tmp_path_factory.mktemp("power"), int(request.config.option.seed))


def own_rng(seed: int) -> np.random.Generator:
    """Draws other keys than the guest, whose generator has the seed alone."""
    return np.random.default_rng([seed, 1])


def life_of(folder: Path, durability: str) -> tuple[Life, Bytes]:
    """What the log and the marks say, and the image that the guest left."""
    base = np.frombuffer((folder / f"{durability}.base").read_bytes(), np.uint8)
    said = json.loads((folder / "out" / f"{durability}.json").read_text())
    records = range(SMALL.table_offset, SMALL.groups_offset)
    # What the guest saw in its submission queue: records and nothing else were sent with FUA.
    forced = records if durability == "flush" else range(0)
    assert bool(said["fua"]) == bool(forced)
    assert all(slba * SMALL.lba_nbytes in records for slba in said["fua"])
    assert not any(slba * SMALL.lba_nbytes in forced for slba in said["plain"])
    log = (folder / f"{durability}.log").read_bytes()
    entries, positions = read_write_log(log, base.size, forced)
    assert len(positions) == len(said["marks"]) - 1, "the log has other marks than the guest set"
    life = Life(durability, [base], frozenset(), set(), set(), entries)
    life.puts = [bytes.fromhex(key) for key in said["puts"]]
    for mark, position in zip(said["marks"], [*positions, entries[-1].end], strict=True):
        held = frozenset(bytes.fromhex(key) for key in mark["held"])
        life.marks.append(Mark(mark["kind"], position, held))
        life.begun.append(mark["begun"])
    image = np.frombuffer((folder / durability).read_bytes(), np.uint8)
    return life, image[: base.size]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_power_loss(left: Path, durability: str, seed: int) -> None:
    """Prefixes of the log, and prefixes with damage to what was not flushed."""
    life, image = life_of(left, durability)
    assert np.array_equal(image_at_end(life.base[0], life.entries), image), "the log is not whole"
    rng = own_rng(seed)
    for number in range(CASES):
        checked(life, some_cut(life, rng), DAMAGES[number % len(DAMAGES)], rng)
    print(f"emulated: {CASES} losses of power, {len(life.entries)} entries")


def test_a_killed_guest(left: Path, seed: int) -> None:
    """SIGKILL of the whole guest in mid-put: what was acknowledged is there."""
    lines = (left / "out" / "acks").read_text().splitlines()
    assert lines[0] == "begins"
    stored = [bytes.fromhex(key) for line in lines[1:] for key in line.split() if key != "ends"]
    assert stored
    assert len(stored) <= KILLED_OBJECTS_MAX + 8
    with tutti.store.open(left / "killed") as store:
        store.wait_recovered(30)
        check_books(store)
        for first in range(0, len(stored), 32):
            keys = stored[first : first + 32]
            assert load_present(store, keys) == (set(keys), set())
        rng = own_rng(seed)
        check_usable(store, [rng.bytes(16) for _ in range(2)])
        assert store.match(as_rows([b"\0" * 16])) == 0

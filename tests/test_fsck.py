"""fsck: what it finds, that it writes nothing, and what repair leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slot_addresses import slot_lba

from tutti import cli, store
from tutti.base.terminal import progress
from tutti.errors import MediumError, PoolCorrupt, PoolNotFound
from tutti.fsck import FsckReport, check_files, repair
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import RECORD_DTYPE, RecordState
from tutti.medium.superblock import choose_superblock
from tutti.pool.block_io import BlockIo
from tutti.profiles import at_open
from tutti.transfers.store_config import StoreConfig

LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="test-model")
OBJECTS = 12


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


KEYS = [key(number) for number in range(1, OBJECTS + 1)]


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(LAYOUT.object_nbytes)


def fill(paths: list[str], *, verify: str = "always") -> None:
    with store.open(paths, config=StoreConfig(verify=verify)) as pool:
        memory = pool.allocate_memory(OBJECTS)
        for page in range(OBJECTS):
            memory.write(page, content(page))
        assert pool.put(KEYS, range(OBJECTS)).wait().stored == OBJECTS


@pytest.fixture
def pool(tmp_path: Path) -> tuple[str, Geometry]:
    """A clean pool of one member with OBJECTS objects."""
    path = str(tmp_path / "pool")
    geometry = store.format(path, LAYOUT, "16MiB")
    fill([path])
    return path, geometry


def crashed(path: str) -> str:
    """A copy of the pool as a killed process would have left it."""
    copy = f"{path}.crashed"
    with store.open(path):
        shutil.copyfile(path, copy)
    return copy


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def slot_of(path: str, geometry: Geometry, wanted: bytes) -> int:
    records = np.fromfile(path, RECORD_DTYPE, geometry.slots, offset=geometry.table_offset)
    found = (records["key"] == np.frombuffer(wanted, np.uint8)).all(axis=1)
    found &= records["state"] == RecordState.READY
    (slot,) = np.flatnonzero(found).tolist()
    return int(slot)


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def flip_payload(path: str, geometry: Geometry, wanted: bytes, layer: int = 1) -> int:
    slot = slot_of(path, geometry, wanted)
    lba = int(slot_lba(geometry, np.array([slot]), layer)[0])
    flip(path, lba * geometry.lba_nbytes + 77)
    return slot


def flip_record(path: str, geometry: Geometry, wanted: bytes) -> int:
    slot = slot_of(path, geometry, wanted)
    flip(path, geometry.table_offset + slot * BLOCK_NBYTES + 130)
    return slot


def check(path: str, **options: int) -> FsckReport:
    """Checks, and insists that nothing was written."""
    before = digest(path)
    report = check_files([path], progress, **options)
    assert digest(path) == before
    return report


def assert_holds(path: str, numbers: list[int]) -> None:
    """The pool serves exactly these objects, with the right bytes."""
    with store.open(path) as pool:
        pool.wait_recovered(30)
        memory = pool.allocate_memory(1)
        for number in range(OBJECTS):
            found = pool.match([KEYS[number]])
            assert found == (number in numbers)
            if found:
                pool.load([KEYS[number]], [0]).wait()
                assert memory.read(0) == content(number)


def others(*numbers: int) -> list[int]:
    return [number for number in range(OBJECTS) if number not in numbers]


def test_a_sound_pool(pool: tuple[str, Geometry]) -> None:
    report = check(pool[0])
    assert report.sound
    assert (report.state, report.objects, report.verified) == ("clean", OBJECTS, OBJECTS)
    assert report.verified_nbytes == OBJECTS * LAYOUT.object_nbytes


def test_an_empty_pool(tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    geometry = store.format(path, LAYOUT, "16MiB")
    report = check(path)
    assert report.sound
    assert (report.objects, report.slots) == (0, geometry.slots)


def test_a_pool_that_was_not_closed(pool: tuple[str, Geometry]) -> None:
    report = check(crashed(pool[0]))
    assert report.sound
    assert (report.state, report.verified) == ("open", OBJECTS)


@pytest.mark.parametrize("make", [str, crashed])
def test_a_flipped_payload_byte(pool: tuple[str, Geometry], make: Callable[[str], str]) -> None:
    path, geometry = make(pool[0]), pool[1]
    slot = flip_payload(path, geometry, KEYS[3])
    report = check(path)
    (finding,) = report.findings
    assert (finding.kind, finding.slot, finding.layers) == ("payload", slot, (1,))
    assert finding.key == KEYS[3].hex()
    assert (report.damaged, report.verified) == (1, OBJECTS)
    repaired = repair([path], report, progress)
    assert (repaired.quarantined, repaired.left) == (1, 0)
    after = check(path)
    assert after.sound
    assert (after.quarantined, after.objects) == (int(make is str), OBJECTS - 1)
    assert_holds(path, others(3))


@pytest.mark.parametrize("make", [str, crashed])
def test_the_command_does_not_call_reused_slots_quarantined(
    pool: tuple[str, Geometry], make: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """After an unclean close the slot of a damaged object is free again."""
    path = make(pool[0])
    flip_payload(path, pool[1], KEYS[3])
    assert cli.main(["fsck", path]) == 1
    assert "run again with --repair to remove the damaged objects" in capsys.readouterr().out
    assert cli.main(["fsck", path, "--repair"]) == 0
    said = capsys.readouterr().out
    assert "Repaired: 1 removed, 0 already missing, 0 intact in another copy." in said
    assert "1 quarantined" not in said
    assert cli.main(["info", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quarantined"] == int(make is str)


def test_a_flipped_record_byte(pool: tuple[str, Geometry]) -> None:
    path, geometry = pool
    slot = flip_record(path, geometry, KEYS[5])
    report = check(path)
    (finding,) = report.findings
    assert (finding.kind, finding.slot, finding.key) == ("record", slot, KEYS[5].hex())
    assert (report.torn, report.objects, report.verified) == (0, OBJECTS, OBJECTS - 1)
    assert report.lost == 0, "the snapshot names it"
    assert repair([path], report, progress).left == 0
    assert check(path).sound
    assert_holds(path, others(5))


def test_a_damaged_record_of_an_object_without_digests(tmp_path: Path) -> None:
    """A load has nothing to compare with, and would call it sound."""
    path = str(tmp_path / "pool")
    geometry = store.format(path, LAYOUT, "16MiB")
    fill([path], verify="off")
    slot = flip_record(path, geometry, KEYS[5])
    report = check(path)
    assert [(finding.kind, finding.slot) for finding in report.findings] == [("record", slot)]
    repaired = repair([path], report, progress)
    assert (repaired.quarantined, repaired.sound, repaired.left) == (1, 0, 0)
    after = check(path)
    assert after.sound
    assert (after.quarantined, after.objects) == (1, OBJECTS - 1)
    assert_holds(path, others(5))


def test_a_torn_record_of_a_crashed_pool_is_an_empty_slot(pool: tuple[str, Geometry]) -> None:
    path, geometry = crashed(pool[0]), pool[1]
    flip_record(path, geometry, KEYS[5])
    report = check(path)
    assert report.sound
    assert (report.torn, report.lost, report.objects) == (1, 0, OBJECTS - 1)


def test_a_torn_record_of_a_free_slot_outlives_clean_closes(pool: tuple[str, Geometry]) -> None:
    """Traces of a crash are not damage of a pool that was closed cleanly afterwards."""
    path, geometry = crashed(pool[0]), pool[1]
    flip_record(path, geometry, KEYS[5])
    repair([path], FsckReport(), progress)  # opens, proves, and closes cleanly
    report = check(path)
    assert report.sound
    assert (report.state, report.torn, report.objects) == ("clean", 1, OBJECTS - 1)
    flip(path, geometry.snapshot_offset + BLOCK_NBYTES + 9)
    report = check(path)
    assert [finding.kind for finding in report.findings] == ["snapshot"], "nothing was lost"


def wipe(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes(BLOCK_NBYTES))


@pytest.mark.parametrize("spoil", [flip, wipe])
def test_records_lost_together_with_their_snapshot(
    pool: tuple[str, Geometry],
    spoil: Callable[[str, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing names the objects any more; how many there were is known all the same."""
    path, geometry = pool
    for wanted in KEYS[2:5]:
        slot = slot_of(path, geometry, wanted)
        spoil(path, geometry.table_offset + slot * BLOCK_NBYTES)
    flip(path, geometry.snapshot_offset + BLOCK_NBYTES + 9)
    report = check(path)
    assert [finding.kind for finding in report.findings] == ["snapshot", "lost"]
    assert report.findings[1].message.startswith(f"3 of the {OBJECTS} records")
    assert (report.lost, report.damaged, report.objects) == (3, 0, OBJECTS - 3)
    assert report.torn == (3 if spoil is flip else 0)
    repaired = repair([path], report, progress)
    assert (repaired.given_up, repaired.left) == (3, 0)
    assert f"3 of the {OBJECTS} records" in caplog.text, "an opening says it too"
    assert check(path).sound
    assert_holds(path, others(2, 3, 4))


def test_the_command_says_what_it_gives_up(
    pool: tuple[str, Geometry], capsys: pytest.CaptureFixture[str]
) -> None:
    path, geometry = pool
    flip_record(path, geometry, KEYS[5])
    flip(path, geometry.snapshot_offset + 8)
    copy = shutil.copyfile(path, f"{path}.copy")

    def run(*argv: str) -> tuple[int, str]:
        code = cli.main(["fsck", *argv])
        return code, capsys.readouterr().out

    code, shown = run(path)
    assert code == 1
    assert f"1 of the {OBJECTS} records" in shown and "empty slots" not in shown
    code, shown = run(path, "--json")
    report = json.loads(shown)
    assert (code, report["sound"], report["lost"], report["torn"]) == (1, False, 1, 1)
    assert [finding["kind"] for finding in report["findings"]] == ["snapshot", "lost"]
    code, shown = run(copy, "--repair")
    assert code == 0 and "1 lost record dropped" in shown
    code, shown = run(path, "--repair", "--json")
    assert (code, json.loads(shown)["repaired"]["given_up"]) == (0, 1)
    code, shown = run(path)
    assert code == 0 and "1 (empty slots)" in shown, "the slot is free, its record as it was"


def test_a_snapshot_that_cannot_be_read(
    pool: tuple[str, Geometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, geometry = pool
    read = BlockIo.read

    def fails(self: BlockIo, nsid: int, offset: int, nbytes: int) -> bytes:
        if offset == geometry.snapshot_offset:
            raise MediumError("unreadable")
        return read(self, nsid, offset, nbytes)

    monkeypatch.setattr(BlockIo, "read", fails)
    report = check(path)
    assert [finding.kind for finding in report.findings] == ["snapshot"]
    assert (report.lost, report.verified) == (0, OBJECTS)


def test_a_record_of_another_object(pool: tuple[str, Geometry]) -> None:
    """A misdirected write: an intact record in the wrong slot."""
    path, geometry = pool
    at = [geometry.table_offset + slot_of(path, geometry, k) * BLOCK_NBYTES for k in KEYS[:2]]
    with open(path, "r+b") as file:
        file.seek(at[0])
        record = file.read(BLOCK_NBYTES)
        file.seek(at[1])
        file.write(record)
    (finding,) = check(path).findings
    assert (finding.kind, finding.key) == ("record", KEYS[1].hex())


@pytest.mark.parametrize("copy", [0, 1])
def test_a_damaged_superblock(pool: tuple[str, Geometry], copy: int) -> None:
    path, _ = pool
    flip(path, copy * BLOCK_NBYTES + 40)
    report = check(path)
    assert [finding.kind for finding in report.findings] == ["superblock"]
    assert "AB"[copy] in report.findings[0].message
    assert repair([path], report, progress).left == 0
    assert check(path).sound
    assert_holds(path, others())


def test_two_damaged_superblocks_are_no_pool(pool: tuple[str, Geometry]) -> None:
    for copy in (0, 1):
        flip(pool[0], copy * BLOCK_NBYTES + 40)
    with pytest.raises(PoolCorrupt):
        check(pool[0])


def test_a_damaged_snapshot(pool: tuple[str, Geometry]) -> None:
    path, geometry = pool
    flip(path, geometry.snapshot_offset + BLOCK_NBYTES + 9)
    report = check(path)
    assert [finding.kind for finding in report.findings] == ["snapshot"]
    assert (report.objects, report.verified) == (OBJECTS, OBJECTS)
    assert repair([path], report, progress).left == 0
    assert check(path).sound
    assert_holds(path, others())


def test_several_members(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    geometry = store.format(paths, LAYOUT, "32MiB")
    fill(paths)
    report = check_files(paths, progress)
    assert report.sound
    assert (report.objects, report.slots) == (OBJECTS, 2 * geometry.slots)
    holder = next(m for m, path in enumerate(paths) if KEYS[0] in Path(path).read_bytes())
    flip_payload(paths[holder], geometry, KEYS[0], layer=0)
    (finding,) = check_files(paths, progress).findings
    assert (finding.member, finding.layers) == (holder, (0,))


def test_an_interrupted_clear(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    store.format(paths, LAYOUT, "32MiB")
    fill(paths)
    raw = Path(paths[1]).read_bytes()[: 2 * BLOCK_NBYTES]
    superblock, _ = choose_superblock(raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:], paths[1])
    cleared = replace(
        superblock, epoch=superblock.epoch ^ 1, generation=superblock.generation + 1, snapshot=None
    )
    with open(paths[1], "r+b") as file:
        file.write(2 * cleared.encode())
    before = [digest(path) for path in paths]
    report = check_files(paths, progress)
    assert [finding.kind for finding in report.findings] == ["clear"]
    assert [digest(path) for path in paths] == before
    assert repair(paths, report, progress).left == 0
    after = check_files(paths, progress)
    assert after.sound
    assert after.objects == 0


def test_objects_without_digests_are_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    store.format(path, LAYOUT, "16MiB")
    fill([path], verify="off")
    report = check(path)
    assert report.sound
    assert (report.objects, report.without_digests, report.verified) == (OBJECTS, OBJECTS, 0)


def test_a_sample_is_drawn_by_its_seed(pool: tuple[str, Geometry], seed: int) -> None:
    path, geometry = pool
    for wanted in KEYS:
        flip_payload(path, geometry, wanted)
    drawn = [check(path, sample=4, seed=seed) for _ in range(2)]
    assert [report.verified for report in drawn] == [4, 4]
    assert drawn[0].damaged_keys == drawn[1].damaged_keys
    assert check(path, sample=OBJECTS + 1, seed=seed).damaged == OBJECTS


def test_repair_of_every_object(pool: tuple[str, Geometry]) -> None:
    path, geometry = pool
    for wanted in KEYS:
        flip_payload(path, geometry, wanted)
    report = check(path)
    assert report.damaged == OBJECTS
    assert repair([path], report, progress).quarantined == OBJECTS
    assert_holds(path, [])


def test_the_command_mends_a_pool_that_others_can_write(
    pool: tuple[str, Geometry], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it takes back from quarantine, for which nothing is measured either."""
    path, geometry = pool
    monkeypatch.setattr(at_open, "find_profile", lambda *_, **__: pytest.fail("measured"))
    flip_payload(path, geometry, KEYS[0])
    os.chmod(path, 0o666)
    assert cli.main(["fsck", path, "--repair"]) == 0
    capsys.readouterr()
    assert cli.main(["fsck", path, "--reuse-quarantined", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reused"] == 1


def test_no_pool(tmp_path: Path) -> None:
    with pytest.raises(PoolNotFound):
        check_files([str(tmp_path / "missing")], progress)
    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(64 << 10))
    with pytest.raises(PoolNotFound):
        check(str(zeros))


def test_a_truncated_member(pool: tuple[str, Geometry]) -> None:
    path, geometry = pool
    with open(path, "r+b") as file:
        file.truncate(geometry.member_nbytes - BLOCK_NBYTES)
    with pytest.raises(PoolCorrupt):
        check(path)

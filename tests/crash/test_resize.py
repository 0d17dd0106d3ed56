"""A pool that is given another size keeps its objects, also when that is killed anywhere."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.objects import as_rows, check_books, content_of, when_unlocked
from loop_devices import loop_devices

import tutti
from store.pools import LAYOUT
from tutti import cli, resize
from tutti.base.units import MiB
from tutti.errors import (
    CapacityError,
    ConfigError,
    MediumError,
    PoolError,
    PoolExists,
    PoolInUse,
    PoolReadOnly,
    Unsupported,
)
from tutti.gio_uring.file_member import FileMember
from tutti.pool import pool_format, replacement
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.core import Core
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadTicket

SMALL, LARGE = 24 * MiB, 48 * MiB
KEYS = [bytes([1 + i]) * 16 for i in range(40)]
DEVICE_POINTS = 60
OF_DEVICES = (  # steps of a resize through a folder
    (resize, "make_blank"),
    (resize, "_generations"),
    (resize, "sync_folder"),
    (Members, "new_epoch"),
    (Core, "deallocate"),
    (pool_format, "erase"),
    (Members, "_write_next"),
)
POINTS = 12  # at which a resize of two members may be killed


def made(tmp_path: Path, capacity: int) -> list[str]:
    """A pool of two members that holds KEYS: the first is pinned, the last four used last."""
    return made_on([str(tmp_path / name) for name in ("left", "right")], capacity)


def made_on(paths: list[str], capacity: int) -> list[str]:
    """The same, of these files or blank devices."""
    tutti.format(paths, LAYOUT, capacity)
    with tutti.open(paths, LAYOUT, capacity) as store:
        memory = store.allocate_memory(len(KEYS), hugepages=False)
        for page, key in enumerate(KEYS):
            memory.write(page, content_of(key))
        assert store.put(as_rows(KEYS[:20]), np.arange(20)).wait(30).stored == 20
        put = store.put(as_rows(KEYS[20:]), np.arange(20, 40), ttl_s=1e6, namespace="other")
        assert put.wait(30).stored == 20
        store.catalogue.pin(as_rows(KEYS[:1]))
    return paths


def held(store: ObjectStore) -> list[bytes]:
    """The keys that are served, after a look at every byte."""
    store.wait_recovered(30)
    memory = store.allocate_memory(1, hugepages=False)
    found = []
    for key in KEYS:
        if store.present(as_rows([key]))[0]:
            store.load(as_rows([key]), [0], memory=memory).wait(30)
            assert memory.read(0) == content_of(key)
            found.append(key)
    check_books(store)
    return found


def check_whole(paths: list[str] | Path) -> None:
    """A pool serves all that `made` put there."""
    with tutti.open(paths) as store:
        assert held(store) == KEYS


@pytest.mark.parametrize(("before", "after"), [(SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)])
def test_everything_that_fits_goes_along(tmp_path: Path, before: int, after: int) -> None:
    paths = made(tmp_path, before)
    done = resize.resize(paths, after)
    assert done.damaged == 0
    assert sorted(os.listdir(tmp_path)) == ["left", "right"]
    with tutti.open(paths) as store:
        assert store.geometry.member_nbytes * 2 <= after
        assert store.geometry.member_nbytes * 2 > after // 2
        found = held(store)
        assert len(found) == done.kept
        assert done.kept + done.dropped == len(KEYS)
        infos = {info.key: info for info in store.catalogue.objects(as_rows(found))}
        assert infos[KEYS[-1]].expires_s is not None
        assert infos[KEYS[-1]].tenant != infos[found[0]].tenant or found[0] in KEYS[20:]
        assert infos[KEYS[-1]].parent == KEYS[-2]
        pinned = [key for key, info in infos.items() if info.pinned]
        assert pinned == [key for key in found if key == KEYS[0]]


def fill(store: ObjectStore) -> list[bytes]:
    """Puts as many objects as evict none, one after the other; their keys."""
    slots = store.stats()["capacity_objects"]
    memory = store.allocate_memory(1, hugepages=False)
    keys = [i.to_bytes(16, "big") for i in range(slots - store.geometry.group_slots)]
    for key in keys:
        memory.write(0, content_of(key))
        assert store.put(as_rows([key]), [0]).wait(30).stored == 1
    return keys


def test_a_smaller_pool_keeps_what_was_used_last(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    with pytest.raises(CapacityError, match="pass at least"):
        tutti.open(path, LAYOUT, MiB)
    with tutti.open(path, LAYOUT, LARGE) as store:
        keys = fill(store)
        store.match(as_rows(keys[:1]))
    assert cli.main(["resize", path, "--capacity", "12MiB"]) == 0
    with tutti.open(path) as store:
        left = store.present(as_rows(keys))
        count = int(left.sum())
        assert 0 < count < len(keys)
        assert left[0], "it was used last"
        assert left[-count + 1 :].all()


def test_pinned_objects_go_along_whatever_has_no_room(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    with tutti.open(path, LAYOUT, LARGE) as store:
        keys = fill(store)
        store.catalogue.pin(as_rows(keys[:3]))  # used before all others
    done = resize.resize(path, "12MiB")
    with tutti.open(path) as store:
        left = store.present(as_rows(keys))
        assert (done.kept, done.dropped) == (left.sum(), len(keys) - left.sum())
        assert left[:3].all() and not left[3] and left[-1]
        assert all(info.pinned for info in store.catalogue.objects(as_rows(keys[:3])))
    with tutti.open(path, config=StoreConfig(pin_share=1.0)) as store:
        store.catalogue.pin(as_rows(keys))
    with pytest.raises(CapacityError, match="unpin some"):
        resize.resize(path, "9MiB")


def test_expiry_during_a_resize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, wanted = made(tmp_path, SMALL), resize._wanted
    monkeypatch.setattr("tutti.transfers.expiry._INTERVAL_S", 0.01)

    def expired(old: ObjectStore, room: int) -> Any:
        found, expiry = wanted(old, room), old._core.index.expiry
        expiry[expiry > 0] = 1  # long ago
        time.sleep(0.2)
        return found

    monkeypatch.setattr(resize, "_wanted", expired)
    assert resize.resize(paths, LARGE) == (len(KEYS), 0, 0), "kept, damaged, dropped"


def test_links_owners_and_modes_stay(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    real = tmp_path / "disk" / "pool"
    tutti.open(str(real), LAYOUT, SMALL).close()
    real.chmod(0o660)
    link = tmp_path / "pool"
    link.symlink_to(real)
    resize.resize(str(link), LARGE)
    assert link.is_symlink() and link.resolve() == real
    assert (real.stat().st_mode & 0o777, os.listdir(tmp_path / "disk")) == (0o660, ["pool"])
    with tutti.open(str(link)) as store:
        assert store.geometry.member_nbytes > SMALL


def test_who_waits_for_the_old_file_finds_no_pool_in_it(tmp_path: Path) -> None:
    """Objects stored in the old file would be lost."""
    path = str(tmp_path / "pool")
    tutti.open(path, LAYOUT, SMALL).close()
    with open(path, "r+b") as waiting:
        resize.resize(path, LARGE)
        with pytest.raises(PoolError):
            tutti.open(f"/proc/self/fd/{waiting.fileno()}")
    with tutti.open(path) as store:
        assert store.geometry.member_nbytes > SMALL


def no_room(path: object) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 1000, 1, 1, 100, 100, 100, 0, 255))


def killed_at(point: int, paths: Sequence[str], capacity: int, through: str | None = None) -> bool:
    """Resizes in a child that kills itself at its n-th step; whether it came so far."""
    child = os.fork()
    if child == 0:
        left = point

        def step(call: Callable[..., object], *arguments: object, **options: object) -> object:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*arguments, **options)

        def stepping(call: Callable[..., object]) -> Callable[..., object]:
            return lambda *arguments, **options: step(call, *arguments, **options)

        try:
            for module, name in (
                (resize, "format"),
                (resize, "open_pool"),
                (resize, "_copy_batch"),
                *(OF_DEVICES if through else ()),
                (replacement, "replace"),
                (replacement, "_rename"),
            ):
                setattr(module, name, stepping(getattr(module, name)))
            resize._BATCH_NBYTES = 10 * LAYOUT.object_nbytes
            resize.resize(paths, capacity, through=through)
            step(lambda: None)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """Whatever was done: the pool opens and serves everything; a second resize ends it."""
    paths = made(tmp_path, SMALL)
    target, points = LARGE, 0
    for point in range(POINTS):
        if not killed_at(point, paths, target):
            break
        points += 1
        with when_unlocked(lambda: tutti.open(paths)) as store:
            assert len(held(store)) == len(KEYS)
        resize.resize(paths, target)
        check_whole(paths)
        assert sorted(os.listdir(tmp_path)) == ["left", "right"]
        target = SMALL + LARGE - target  # grows and shrinks in turn
    assert points >= 8, "too few places were tried"


def test_info_and_fsck_say_what_an_interrupted_resize_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is changed by that; a repair ends a replacement that had begun."""
    paths = made(tmp_path, SMALL)
    seen = set()
    for point in range(POINTS):
        assert killed_at(point, paths, LARGE)
        files = sorted(os.listdir(tmp_path))
        for path in paths:
            FileMember(path, lock=True).close()  # the killed process has ended its transfers
        is_half = files == ["left", "right", "right.resize"]
        for command in ("info", "fsck"):
            code = cli.main([command, *paths])
            shown = capsys.readouterr()
            if is_half:
                assert code == 3 and "run `tutti resize` again, or open the pool" in shown.err
            elif len(files) == 4:
                assert code == 0 and "run `tutti resize` again, or remove them" in shown.out
                assert f"{tmp_path}/left.resize, {tmp_path}/right.resize" in shown.out
            else:
                assert code == 0 and "resize" not in shown.out
        assert sorted(os.listdir(tmp_path)) == files
        seen.add(len(files))
        if is_half:
            break
    assert seen == {2, 3, 4}
    assert cli.main(["fsck", *paths, "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_of_resize"] == []
    check_whole(paths)


def test_what_cannot_be_resized(tmp_path: Path) -> None:
    paths = made(tmp_path, SMALL)
    with tutti.open(paths), pytest.raises(PoolInUse):
        resize.resize(paths, LARGE)
    with pytest.raises(CapacityError, match="free space"):
        resize.resize(paths, "900TiB")
    with pytest.raises(CapacityError, match="pass at least"):
        resize.resize(paths, MiB)
    with pytest.raises(Unsupported, match="--through"):
        resize.resize("nvme:0000:03:00.0", LARGE)
    with pytest.raises(ConfigError, match="--through is only for pools on devices"):
        resize.resize(paths, LARGE, through=str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["left", "right"]
    check_whole(paths)


def test_who_may_not_give_files_away_is_told_before_anything_is_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = made(tmp_path, SMALL)

    def refused(*arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "chown", refused)
        patch.setattr(resize, "_copy", refused)
        with pytest.raises(PoolReadOnly, match="give it a group of yours with chgrp"):
            resize.resize(paths, LARGE)
        if os.geteuid() == 0:  # root's files, which a group may write
            patch.setattr(os, "geteuid", lambda: 1000)
            assert cli.main(["resize", *paths, "--capacity", "48MiB"]) == 3
            assert "run as its owner" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["left", "right"]
    check_whole(paths)


def test_a_pool_that_was_opened_meanwhile_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = made(tmp_path, SMALL)
    replace = replacement.replace

    def late(*arguments: object) -> None:
        tutti.open(paths).close()
        replace(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(replacement, "replace", late)
    with pytest.raises(PoolInUse, match="opened meanwhile"):
        resize.resize(paths, LARGE)
    assert sorted(os.listdir(tmp_path)) == ["left", "right"]
    check_whole(paths)


@pytest.mark.parametrize(("size", "other"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_pool_on_devices_changes_its_size_through_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, other: int
) -> None:
    spools = tmp_path / "spools"
    spools.mkdir()
    with loop_devices(tmp_path) as make:
        devices = made_on([make(), make()], size)
        words = ["resize", *devices, "--capacity", str(other)]
        assert cli.main(words) == 3
        assert "--through FOLDER" in capsys.readouterr().err
        with tutti.open(devices) as store:
            before = store.stats()["capacity_objects"]
        assert cli.main([*words, "--through", str(spools)]) == 0
        assert not os.listdir(spools)
        with tutti.open(devices) as store:
            assert held(store) == KEYS
            assert (store.stats()["capacity_objects"] > before) == (other > size)
            infos = {info.key: info for info in store.catalogue.objects(as_rows(KEYS))}
            assert [key for key, info in infos.items() if info.pinned] == KEYS[:1]
            assert infos[KEYS[-1]].expires_s is not None
            assert infos[KEYS[0]].tenant != infos[KEYS[-1]].tenant


def test_what_a_smaller_pool_on_a_device_does_not_use_is_deallocated(tmp_path: Path) -> None:
    (tmp_path / "spools").mkdir()

    def taken_nbytes() -> int:
        with open(tmp_path / "image0", "rb") as image:
            os.fsync(image.fileno())
            return os.stat(image.fileno()).st_blocks * 512

    with loop_devices(tmp_path) as make:
        device = make()
        tutti.format(device, LAYOUT, SMALL)
        with tutti.open(device) as store:
            keys = fill(store)
        assert taken_nbytes() > SMALL - 4 * MiB
        done = resize.resize(device, "9MiB", through=str(tmp_path / "spools"))
        assert done.dropped > 0 and done.kept + done.dropped == len(keys)
        assert taken_nbytes() < 13 * MiB


def test_a_resize_of_devices_is_killed_in_the_middle(tmp_path: Path, seed: int) -> None:
    """The same call goes on, and in between the pool or its copy is whole."""
    spools = tmp_path / "spools"
    spools.mkdir()
    seen = set()
    with loop_devices(tmp_path) as make:
        devices = made_on([make(), make()], SMALL)
        target = LARGE
        for point in range(seed % 3, DEVICE_POINTS, 3):
            if not killed_at(point, devices, target, str(spools)):
                break
            (name, *others) = os.listdir(spools) or [""]
            assert not others
            is_complete = name.endswith(".tutti")
            whole = str(spools / name) if is_complete else devices
            with when_unlocked(lambda whole=whole: tutti.open(whole)) as store:
                assert held(store) == KEYS
            for device in devices:
                when_unlocked(lambda device=device: FileMember(device, lock=True)).close()
            seen.add(name.endswith("-.tutti") if is_complete else name[-5:])
            resize.resize(devices, target, through=str(spools))
            assert not os.listdir(spools)
            check_whole(devices)
            target = SMALL + LARGE - target
        else:
            pytest.fail("it was killed at every point")
    assert seen == {"", ".part", True, False}, "a state that was not tried"


def test_a_pool_that_is_used_after_an_interrupted_resize_keeps_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = tmp_path / "spools"
    spools.mkdir()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with loop_devices(tmp_path) as make:
        devices = made_on([make(), make()], SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(resize, "make_blank", interrupt)
            with pytest.raises(KeyboardInterrupt):
                resize.resize(devices, LARGE, through=str(spools))
        with pytest.raises(ConfigError, match="2 devices"):
            resize.resize(devices[:1], LARGE, through=str(spools))
        with tutti.open(devices) as store:
            keys = fill(store)
        with pytest.raises(PoolExists, match="was used after"):
            resize.resize(devices, LARGE, through=str(spools))
        (name,) = os.listdir(spools)
        check_whole(spools / name)
        os.unlink(spools / name)
        assert resize.resize(devices, LARGE, through=str(spools)).kept == len(keys)


def test_a_read_that_fails_does_not_lose_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spools").mkdir()
    with loop_devices(tmp_path) as make:
        devices = made_on([make(), make()], SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(LoadTicket, "failed", lambda ticket: np.array([3]))
            with pytest.raises(MediumError, match="could not be read"):
                resize.resize(devices, LARGE, through=str(tmp_path / "spools"))
        check_whole(devices)


def test_objects_that_stay_unproven_end_a_resize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reading ends, and the copy stays."""
    (tmp_path / "spools").mkdir()
    stats = ObjectStore.stats
    calls: list[int] = []

    def some_unproven(store: ObjectStore) -> dict[str, Any]:
        return stats(store) | {"slots": {"unproven": 65}}

    with loop_devices(tmp_path) as make:
        devices = made_on([make(), make()], SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "stats", some_unproven)
            patch.setattr(ObjectStore, "prove", lambda _, most: calls.append(most))
            with pytest.raises(MediumError, match="could not be read"):
                resize.resize(devices, LARGE, through=str(tmp_path / "spools"))
        assert calls == [64, 64]
        resize.resize(devices, LARGE, through=str(tmp_path / "spools"))
        check_whole(devices)


def test_what_a_resize_of_devices_refuses(tmp_path: Path) -> None:
    """Before anything is written."""
    spools = tmp_path / "spools"
    spools.mkdir()
    with loop_devices(tmp_path) as make:
        devices, foreign = made_on([make(), make()], SMALL), made_on([make(), make()], SMALL)
        with pytest.raises(CapacityError, match="a member needs"):
            resize.resize(devices, "1GiB", through=str(spools))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "statvfs", no_room)
            with pytest.raises(CapacityError, match="free space"):
                resize.resize(devices, LARGE, through=str(spools))
        assert not os.listdir(spools)
        check_whole(devices)
        assert killed_at(17, devices, LARGE, str(spools))
        (name,) = os.listdir(spools)
        assert name.endswith(".tutti")
        with pytest.raises(PoolExists, match="does not hold the pool whose objects are in"):
            resize.resize(foreign, LARGE, through=str(spools))
        check_whole(foreign)

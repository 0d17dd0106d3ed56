"""Devices are measured where no pool has data; memory stands in for drives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from store.pools import (
    GEOMETRY,
    LAYOUT,
    Bytes,
    controller_of,
    fill,
    images_of,
    left_by,
    names,
    opened,
    some_keys,
)
from tutti.base.units import KiB, MiB
from tutti.errors import CapacityError, PoolNotFound, TuttiError
from tutti.gio_uring.drives.device_content import LABEL
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.profiles import medium_timing
from tutti.profiles.medium_timing import Medium

NBYTES = 64 * MiB
END = NBYTES // MiB - 1  #: The last MiB, which stays as it is.


def measure(images: Sequence[Bytes]) -> tuple[list[Bytes], list[Bytes]]:
    """Measures drives with this content: what they hold meanwhile, and afterwards."""
    controller = controller_of(list(images))
    controller.close, close = lambda: None, controller.close  # type: ignore[method-assign]
    drives = [f"nvme:0000:{place:02x}:00.0" for place in range(len(images))]
    meanwhile: list[Bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medium_timing, "open_controller", lambda *_, **__: controller)
        try:
            with Medium(drives, 32 * MiB, 4 * MiB, None) as medium:
                for direction in ("read", "write", "both"):
                    assert min(medium.time_us(direction, 4 * MiB, 256 * KiB)) > 0
                meanwhile = images_of(controller, len(images))
        except TuttiError:
            assert changed(images, images_of(controller, len(images))) == [set()] * len(images)
            raise
        finally:
            after = images_of(controller, len(images))
            close()
    return meanwhile, after


def changed(before: Sequence[Bytes], after: Sequence[Bytes]) -> list[set[int]]:
    """The MiB of each drive that are not as before."""
    return [
        set(np.flatnonzero((one != other).reshape(-1, MiB).any(axis=1)).tolist())
        for one, other in zip(before, after, strict=True)
    ]


def new_pool(nbytes: int = NBYTES) -> list[Bytes]:
    controller = controller_of([np.zeros(nbytes, np.uint8)])
    with opened_io(controller) as (engine, io):
        Members.format(io, engine, names(1), LAYOUT, GEOMETRY)
    images = images_of(controller)
    controller.close()
    return images


def used_pool(
    rng: np.random.Generator, nbytes: int = NBYTES, *, clean: bool = True, cleared: bool = False
) -> tuple[list[Bytes], Bytes, list[bytes]]:
    """(images, keys, contents) of a pool after its first life, in which it may be cleared."""
    store = opened(new_pool(nbytes))
    pool = store.allocate_memory(4)
    keys, contents = some_keys(rng, 4), fill(pool, range(4), rng)
    if cleared:
        store.clear()
    assert store.put(keys, np.arange(4)).wait(30).stored == 4
    return left_by(store, clean=clean), keys, contents


def test_a_labelled_device_keeps_its_label_and_both_ends() -> None:
    image = np.zeros(NBYTES, np.uint8)
    image[: len(LABEL)] = np.frombuffer(LABEL, np.uint8)
    meanwhile, after = measure([image, image])
    assert changed([image, image], meanwhile) == [set(range(1, 17))] * 2, "half of 32 MiB on each"
    assert changed([image, image], after) == [set(), set()], "it was deallocated"


def test_a_pool_that_was_never_opened_keeps_its_superblocks_and_table(
    rng: np.random.Generator,
) -> None:
    images = new_pool()
    meanwhile, after = measure(images)
    first = GEOMETRY.groups_offset // MiB
    assert changed(images, meanwhile) == [set(range(first, first + 32))]
    for left in (meanwhile, after):  # by a crash, and at the end
        with opened(left) as store:
            pool = store.allocate_memory(4)
            keys, contents = some_keys(rng, 2), fill(pool, range(2), rng)
            assert store.put(keys, np.arange(2)).wait(30).stored == 2
            store.load(keys, np.arange(2, 4)).wait(30)
            assert [pool.read(page) for page in (2, 3)] == contents


@pytest.mark.parametrize("state", ["clean", "crashed", "cleared", "damaged"])
def test_a_pool_that_was_used_keeps_all_that_it_has(state: str, rng: np.random.Generator) -> None:
    """Also after a crash in its first life, when one superblock still is that of the format, or
    after a `clear` both are equal.
    """
    is_cleared = state == "cleared"
    images, keys, contents = used_pool(rng, clean=state == "clean", cleared=is_cleared)
    assert (images[0][:4096] == images[0][4096:8192]).all() == is_cleared
    if state == "damaged":
        images[0][4096:8192] = 0
    meanwhile, after = measure(images)
    (places,) = changed(images, meanwhile)
    assert len(places) == 32
    assert min(places) * MiB >= GEOMETRY.member_nbytes
    assert max(places) < END
    if state == "damaged":
        return
    for left in (meanwhile, after):  # by a crash, and at the end
        with opened(left) as store:
            store.wait_recovered(30)
            pool = store.allocate_memory(4)
            store.load(keys, np.arange(4)).wait(30)
            assert [pool.read(page) for page in range(4)] == contents


def test_what_has_no_room_or_no_pool_is_not_touched(rng: np.random.Generator) -> None:
    nbytes = (GEOMETRY.member_nbytes // MiB + 5) * MiB
    with pytest.raises(CapacityError, match="no room"):
        measure(used_pool(rng, nbytes)[0])
    with pytest.raises(PoolNotFound, match="not formatted"):
        measure([np.zeros(NBYTES, np.uint8)])

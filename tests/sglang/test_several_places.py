"""Both modes over several folders, files and devices, with SGLang's own pools in one process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import host_pools as hp
import pytest
from linker_engine import PAGES, Rig, names, wait_for
from loop_devices import loop_devices
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from tutti import cli
from tutti.integration.sglang.direct import open_pools
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.integration.sglang.identity import ParallelRank
from tutti.pool.pool_format import label
from tutti.profiles import at_open

Places = Callable[[str], list[str]]
CHAINS = "abcdef"  # more pages in all than one group holds
KINDS = ("folders", "files", "devices")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    """Two of a kind; devices are loop devices, labelled."""
    with contextlib.ExitStack() as stack:

        def make(kind: str) -> list[str]:
            if kind != "devices":
                return [str(tmp_path / f"{n}{'.tutti' if kind == 'files' else ''}") for n in "ab"]
            loop = stack.enter_context(loop_devices(tmp_path))
            devices = [loop(), loop()]
            label(devices)
            return devices

        yield make


def check_both_are_used(members: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of a pool that was closed cleanly."""
    capsys.readouterr()
    assert cli.main(["info", *members, "--json"]) == 0
    counts = [member["objects"] for member in json.loads(capsys.readouterr().out)["members"]]
    assert len(counts) == 2 and min(counts) > 0


def keys(chain: int) -> list[str]:
    return [f"{chain:032x}{page:032x}" for page in range(hp.PAGES)]


def members_of(paths: list[str], kind: str) -> list[str]:
    if kind != "folders":
        return paths
    return [str(file) for path in paths for file in Path(path).rglob("*.tutti")]


def linker_round_trip(paths: list[str], folder: Path) -> None:
    """Stores chains of pages, and loads them twice: the second time after a restart."""
    for life in range(2):
        with Rig(folder, path=paths, capacity="24MiB") as rig:
            rig.fill(1)
            want = rig.content(range(PAGES))
            for chain in CHAINS:
                if life == 0:
                    assert rig.store(names(PAGES, chain), range(PAGES))
            for chain in CHAINS:
                rig.wipe()
                wait_for(lambda rig=rig, chain=chain: rig.lookup(names(PAGES, chain)) == PAGES)
                rig.check_restored(names(PAGES, chain), range(PAGES), want)


def hicache_round_trip(paths: list[str], folder: Path, seed: int) -> None:
    """As `linker_round_trip`, through the storage that SGLang's factory makes."""
    pool = hp.mha_pool("page_first")
    hp.fill(pool, seed)
    everything = list(range(hp.PAGES))
    want = [hp.page_bytes(pool, page) for page in everything]
    for life in range(2):
        config = hp.config(folder, options={"path": paths})
        storage = StorageBackendFactory.create_backend("dynamic", config, pool)
        assert isinstance(storage, TuttiHiCacheStorage)
        storage.register_mem_pool_host(pool)
        with contextlib.closing(storage):
            if life == 0:
                for chain in range(16):
                    assert all(storage.batch_set_v1(keys(chain), hp.indices(pool, everything)))
            for chain in range(16):
                hp.wipe(pool)
                assert storage.batch_exists(keys(chain)) == hp.PAGES
                assert all(storage.batch_get_v1(keys(chain), hp.indices(pool, everything)))
                assert [hp.page_bytes(pool, page) for page in everything] == want


@pytest.mark.parametrize("kind", KINDS)
def test_the_linker_uses_both(
    places: Places, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = places(kind)
    linker_round_trip(paths, tmp_path)
    check_both_are_used(members_of(paths, kind), capsys)


def test_a_rank_measures_its_own_devices_only(tmp_path: Path) -> None:
    """Another rank opens the others, each of them exclusively."""
    drives, folder = [f"nvme:0000:0{i}:00.0" for i in range(1, 4)], str(tmp_path)
    for rank in (0, 1):
        parallel_rank = ParallelRank(tp_size=2, tp_rank=rank)
        assert open_pools._own([*drives[:2], folder], parallel_rank) == [drives[rank]]
        assert open_pools._own([folder], parallel_rank) == [folder]
        assert open_pools._own(drives, parallel_rank) == drives, "refused when they are opened"


def test_the_linker_measures_labelled_devices_at_its_first_start(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(at_open, "_ROUNDS_S", 0.0)
    for name in ("_WRITTEN_S", "BUDGET_S"):  # on a busy machine it takes longer
        monkeypatch.setattr(at_open, name, 60.0)
    paths = places("devices")
    for source in ("measured", "cache"):
        with Rig(tmp_path, path=paths, capacity="24MiB") as rig:
            assert rig.stored_pool.store.stats()["profile"] == source


@pytest.mark.parametrize("kind", KINDS)
def test_hicache_uses_both(
    places: Places, tmp_path: Path, kind: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = places(kind)
    hicache_round_trip(paths, tmp_path, seed)
    check_both_are_used(members_of(paths, kind), capsys)

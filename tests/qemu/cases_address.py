"""In the guest: pools on drives that are given by their addresses, as a user gives them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from crash.objects import as_rows, content_of

import tutti
from qemu.benches import BENCHES, check_bench
from qemu.cases_drive import SLOW, Mover, ends, wait_for
from qemu.inside import Drives
from store.pools import LAYOUT
from tutti import cli
from tutti.errors import ConfigError, PoolExists, PoolInUse, PoolNotFound
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.drives.rescue import RescueResult
from tutti.gio_uring.nvme_spec import STATUS_OK
from tutti.profiles import at_open
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LEFT, RIGHT = 4, 5
KEYS = [bytes([i]) * 16 for i in range(1, 13)]
CAPACITY = "16MiB"
#: Puts to the pool on the drives that are named, reports it, and is killed.
PUTTER = """
import os, signal, sys
import numpy as np
import tutti
from crash.objects import as_rows, content_of
from qemu.cases_address import KEYS
store = tutti.open(sys.argv[1:])
pool = store.allocate_memory(len(KEYS), hugepages=False)
for page, key in enumerate(KEYS):
    pool.write(page, content_of(key))
assert store.put(as_rows(KEYS), np.arange(len(KEYS))).wait(60).stored == len(KEYS)
os.kill(os.getpid(), signal.SIGKILL)
"""


def names_of(drives: Drives, *places: int) -> list[str]:
    return [f"nvme:{drives.bdfs[place]}" for place in places]


def check_all(store: ObjectStore) -> None:
    pool = store.allocate_memory(len(KEYS), hugepages=False)
    assert store.match(as_rows(KEYS)) == len(KEYS)
    store.load(as_rows(KEYS), np.arange(len(KEYS))).wait(60)
    assert all(pool.read(page) == content_of(key) for page, key in enumerate(KEYS))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """One command of the command line; what it printed as JSON."""
    code = cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, object] = json.loads(out)
    return found


def test_a_drive_by_its_address(
    drives: Drives, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Format, live, info, fsck, another size, and another format, which is refused."""
    names = names_of(drives, LEFT)
    with pytest.raises(PoolNotFound, match="not formatted"):
        tutti.open(names, LAYOUT, CAPACITY)
    shape = ["--model=test-model", "--layers=4", "--kv-heads=2", "--head-dim=64", "--page-size=16"]
    run(capsys, "format", *names, "--capacity", CAPACITY, *shape)
    with tutti.open(names, LAYOUT) as store:
        assert isinstance(store.controller, VfioController)
        with pytest.raises(PoolInUse):
            tutti.open(names)
        pool = store.allocate_memory(len(KEYS), hugepages=False)
        for page, key in enumerate(KEYS):
            pool.write(page, content_of(key))
        assert store.put(as_rows(KEYS), np.arange(len(KEYS))).wait(60).stored == len(KEYS)
    found = run(capsys, "info", *names)
    assert (found["state"], found["objects"]) == ("clean", len(KEYS))
    found = run(capsys, "fsck", *names)
    assert (found["sound"], found["verified"]) == (True, len(KEYS))
    found = run(capsys, "resize", *names, "--capacity", "20MiB", "--through", str(tmp_path))
    assert (found["kept"], list(tmp_path.iterdir())) == (len(KEYS), [])
    with tutti.open(names) as store:
        check_all(store)
    for force in (False, True, "right"):
        with pytest.raises(PoolExists, match="'left'"):
            tutti.store.format(names, LAYOUT, CAPACITY, force=force)
    tutti.store.format(names, LAYOUT, CAPACITY, force="left")
    with tutti.open(names) as store:
        assert store.match(as_rows(KEYS)) == 0


def test_a_profile_is_measured_where_the_pool_stores_nothing(
    drives: Drives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that was never opened, and behind one with objects, which keeps them."""
    monkeypatch.setattr(at_open, "_ROUNDS_S", 0.0)
    for name in ("_WRITTEN_S", "BUDGET_S"):  # an emulated drive is too slow for two seconds
        monkeypatch.setattr(at_open, name, 60.0)
    names = names_of(drives, LEFT)
    tutti.store.format(names, LAYOUT, "8MiB", force="left")
    for life, source in enumerate(["measured", "cache", "measured"]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{life // 2}"))
        with tutti.open(names) as store:
            assert store.stats()["profile"] == source
            if life:
                check_all(store)
                continue
            pool = store.allocate_memory(len(KEYS), hugepages=False)
            for page, key in enumerate(KEYS):
                pool.write(page, content_of(key))
            assert store.put(as_rows(KEYS), np.arange(len(KEYS))).wait(60).stored == len(KEYS)


def test_two_drives_and_a_process_that_is_killed(drives: Drives, tmp_path: Path) -> None:
    names = names_of(drives, RIGHT, LEFT)
    tutti.store.format(names, LAYOUT, "40MiB", force="left")
    child = subprocess.run([sys.executable, "-c", PUTTER, *names], check=False, timeout=120)
    assert child.returncode == -signal.SIGKILL
    with tutti.open(names, config=StoreConfig(timeout_s=20.0)) as store:
        assert isinstance(store.controller, SpanController)
        store.wait_recovered(60)
        check_all(store)


@pytest.mark.parametrize("name", BENCHES)
def test_benches(
    drives: Drives, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = names_of(drives, LEFT, RIGHT)
    check_bench(name, names, tmp_path, capsys, force=["left", "right"])


def test_addresses_that_do_not_do(drives: Drives, tmp_path: Path) -> None:
    usual, left = names_of(drives, 0, LEFT)
    with pytest.raises(ConfigError, match=r"several namespaces; use one of .*/ns1, .*/ns2"):
        tutti.open(usual)
    with pytest.raises(ConfigError, match="no namespace 7"):
        tutti.open(f"{usual}/ns7")
    with pytest.raises(ConfigError, match="given twice"):
        tutti.open([left, f"{left}/ns1"])
    with pytest.raises(ConfigError, match="files or on drives"):
        tutti.open([left, str(tmp_path / "file")])
    with pytest.raises(ConfigError, match="is not an NVMe drive"):
        tutti.open("nvme:0000:00:00.0")


def test_the_other_drive_of_a_span_goes_on(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    """One drive is late and reset; nothing of the other one fails, also while that lasts."""
    made = SpanController([VfioController(drives.bdfs[place]) for place in (SLOW, LEFT)])
    slow, other = made.drives
    slow.rescue._grace_s = 0.1
    monkeypatch.setattr(slow.rescue, "_abort", lambda late: None)  # only a reset helps
    with made as span, Mover(span, 64) as mover:
        jobs = [mover.write_whole(1, 0.2) for _ in range(24)]  # six seconds of work
        deadline_s = time.monotonic() + 60
        while not all(job.wait_released(0.0) for job in jobs):
            assert time.monotonic() < deadline_s, "memory never came back"
            assert ends([mover.write_whole(2)]) == {STATUS_OK}
        wait_for(slow.rescue, RescueResult.RESET)
        assert set(other.rescue.outcomes) <= {RescueResult.NOTHING_LATE}
        assert ends([mover.write_whole(nsid) for nsid in (1, 2)]) == {STATUS_OK}

"""In the guest: what both of SGLang's modes open, on two drives that were labelled for a server.

SGLang itself takes minutes to import here: `cases_sglang.py` has its classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from qemu.guest import PATIENCE
from tutti import cli
from tutti.base.units import MiB
from tutti.errors import ConfigError, PoolNotFound, TuttiError
from tutti.integration.sglang.host.host_store import HostStore
from tutti.integration.sglang.identity import (
    ModelIdentity,
    PageShape,
    ParallelRank,
    layout_of,
    open_store,
)
from tutti.integration.sglang.metrics import Metrics
from tutti.integration.sglang.options import HICACHE, parse_options
from tutti.integration.sglang.weights import WeightsWatch
from tutti.memory.host_memory import HostMemory

OUT = Path("/out")
TOKENS, PAGES, CHAINS = 16, 16, 6
SHAPE = PageShape(
    "kv", "mha", 1, 4, 0, (65536, 65536), TOKENS, "bfloat16", "page_first", (4, 32, 32)
)
DEADLINE_S = 100.0 * PATIENCE


def servers_names() -> list[str]:
    """The two drives, as this guest has them."""
    if not Path("/sys/module/nvme").exists():
        from qemu.inside import Fixtures

        return [f"nvme:{bdf}" for bdf in Fixtures.drives.bdfs]
    from qemu.inside_kernel import generic, namespaces

    return [generic(namespaces(serial)[0]) for serial in ("left", "right")]


def keys(chain: int) -> list[str]:
    return [f"{chain:032x}{page:032x}" for page in range(PAGES)]


def content(chain: int, page: int) -> bytes:
    return bytes([1 + chain * PAGES + page]) * (2 * 65536)


class Rank:
    """The storage of one rank behind its host pool."""

    def __init__(self, names: Sequence[str], rank: ParallelRank) -> None:
        options = {"path": list(names), "capacity": "40MiB", "timeout_s": 20.0 * PATIENCE}
        layout = layout_of(SHAPE, ModelIdentity("tiny", "v1"), rank)
        parsed = parse_options(options, HICACHE)
        self.store, self.place = open_store(layout, "kv", 40 * MiB, parsed, rank)
        self.memory = self.store.register(HostMemory.allocate(layout, PAGES, hugepages=False))
        metrics = Metrics({"mode": HICACHE, "pool": "kv", "rank": rank.name}, prometheus=False)
        watch = WeightsWatch()
        self.host = HostStore(
            self.store, self.memory, TOKENS, metrics, watch, timeout_s=options["timeout_s"]
        )

    def save(self, chain: int) -> list[bool]:
        for page in range(PAGES):
            self.memory.write(page, content(chain, page))
        return self.host.put(keys(chain), np.arange(PAGES * TOKENS))

    def load(self, chain: int) -> list[bool]:
        """Which pages are there; a wrong byte fails the test."""
        for page in range(PAGES):
            self.memory.write(page, bytes(2 * 65536))
        there = self.host.load(keys(chain), np.arange(PAGES * TOKENS))
        for page in np.flatnonzero(there):
            assert self.memory.read(int(page)) == content(chain, int(page))
        return there


@contextmanager
def opened(names: Sequence[str], rank: ParallelRank | None = None) -> Iterator[Rank]:
    made = Rank(names, rank or ParallelRank())
    try:
        yield made
    finally:
        made.host.close()


def test_a_server_erases_no_drive() -> None:
    names = servers_names()
    with pytest.raises(TuttiError, match="format"), opened(names):
        pass
    assert cli.main(["format", *names, "--for-server"]) == 0
    assert cli.main(["info", *names]) == 3


def test_one_rank_has_both_drives() -> None:
    names = servers_names()
    for life in range(2):
        with opened(names) as rank:
            assert rank.place == ", ".join(names)
            for chain in range(CHAINS):
                if life == 0:
                    assert rank.save(chain) == [True] * PAGES
                assert rank.host.match(keys(chain)) == PAGES
                assert rank.load(chain) == [True] * PAGES
    assert cli.main(["fsck", *names]) == 0
    with pytest.raises(TuttiError, match="pass all of them"), opened(names[:1]):
        pass


def test_two_ranks_have_one_drive_each() -> None:
    names = servers_names()
    assert cli.main(["format", *names, "--for-server", "--force", "left", "--force", "right"]) == 0
    with (
        opened(names, ParallelRank(tp_rank=0, tp_size=2)) as first,
        opened(names, ParallelRank(tp_rank=1, tp_size=2)) as second,
    ):
        assert [first.place, second.place] == names
        for rank in (first, second):
            assert rank.save(0) == [True] * PAGES
            assert rank.load(0) == [True] * PAGES
    with pytest.raises(ConfigError, match="2 files and devices for 4 ranks"):
        Rank(names, ParallelRank(tp_size=4))


def test_a_drive_that_leaves_is_misses() -> None:
    names = servers_names()
    assert cli.main(["format", *names, "--for-server", "--force", "left", "--force", "right"]) == 0
    rank = Rank(names, ParallelRank())
    for chain in range(CHAINS):
        assert rank.save(chain) == [True] * PAGES
    (OUT / "loading").touch()
    deadline_s = time.monotonic() + DEADLINE_S
    served: list[bool] = [True]
    while all(served):
        assert time.monotonic() < deadline_s, "the drive was not unplugged"
        served = [there for chain in range(CHAINS) for there in rank.load(chain)]
    found = [sum(rank.load(chain)) for chain in range(CHAINS)]
    assert 0 < sum(found) < CHAINS * PAGES, "one drive's pages are served, the other's miss"
    rank.host.close()
    with pytest.raises(PoolNotFound if names[0].startswith("/dev") else TuttiError), opened(names):
        pass

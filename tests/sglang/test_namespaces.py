"""The option `namespace` of both modes: in a pool of this process, and with an agent's quota."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import host_pools as hp
import pytest
from linker_engine import WAIT_S, Rig, names
from node.agents import running

from tutti import cli
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.transfers.put_limits import Quota
from tutti.transfers.store_config import StoreConfig

PAGES = 8
#: A page of HiCache's pool with its record is larger than one of the linker's.
QUOTA_NBYTES = 4 * (4 * 2 * 16 * hp.HEADS * hp.HEAD_DIM * 2 + 4096)
Save = Callable[[str, str], float]


def by_hicache(path: str, namespace: str) -> float:
    """Stores pages; how many of them were dropped."""
    pool = hp.mha_pool("page_first")
    options = {"namespace": namespace, "capacity": "16MiB"}
    with closing(TuttiHiCacheStorage(hp.config(path, options=options), {})) as storage:
        storage.register_mem_pool_host(pool)
        stored = storage.batch_set_v1(names(PAGES), hp.indices(pool, list(range(PAGES))))
        dropped = storage.counters()["kv"].get("dropped_pages", 0.0)
    assert stored.count(False) == dropped
    return dropped


def by_linker(path: str, namespace: str) -> float:
    """As `by_hicache`."""
    with Rig(Path(), path=path, namespace=namespace) as rig:
        assert rig.offload(names(PAGES), range(PAGES))
        assert rig.linker.backlog.wait_quiet(WAIT_S)
        return rig.linker.metrics.snapshot().get("dropped_pages", 0.0)


SAVES = pytest.mark.parametrize("save", [by_hicache, by_linker])


@SAVES
def test_pages_are_listed_by_namespace(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert save(str(tmp_path), "team") == 0
    (pool,) = tmp_path.rglob("*.tutti")
    found = []
    for namespace in ("team", "other"):
        capsys.readouterr()
        assert cli.main(["ls", str(pool), "--namespace", namespace, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["objects"])
    assert found == [PAGES, 0]


@SAVES
def test_an_agent_limits_a_namespace(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = StoreConfig(quotas=(Quota("team", QUOTA_NBYTES),))
    with running(tmp_path / "agent", config=config) as agent:
        dropped = save(f"unix:{agent.path}", "team")
        capsys.readouterr()
        assert cli.main(["stat", f"unix:{agent.path}", "--json"]) == 0
        of = json.loads(capsys.readouterr().out)["namespaces"]["team"]
    assert 0 < of["used_nbytes"] <= QUOTA_NBYTES
    assert 0 < dropped == of["over_quota"] < PAGES

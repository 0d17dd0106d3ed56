"""What an operator sees of a HiCache server: metrics from the start, pins that end, slots back."""

from __future__ import annotations

import json
import time
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
import torch
from medium_damage import flip_objects, pool_files
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tutti import cli
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.integration.sglang.metrics import _OF_MODE, METRICS
from tutti.integration.sglang.options import HICACHE

LABELS = {"mode": "hicache", "pool": "kv", "rank": "tp0-pp0-cp0-dp0"}
PAGE = 16
NAMES = [f"{i:064x}" for i in range(1, 9)]
INDICES = torch.arange(len(NAMES) * PAGE)


def storage(folder: Path, **options: Any) -> TuttiHiCacheStorage:
    config = hp.config(folder, options=options)
    config.enable_storage_metrics = True
    made = TuttiHiCacheStorage(config, {})
    pool = hp.mha_pool("page_first", PAGE)
    hp.fill(pool, 1)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def value(name: str, **more: str) -> Any:
    return REGISTRY.get_sample_value(f"tutti:{name}", {**LABELS, **more})


def test_every_metric_exists_from_the_start(tmp_path: Path) -> None:
    with closing(storage(tmp_path)):
        for name in METRICS:
            if _OF_MODE.get(name, HICACHE) != HICACHE:
                continue
            full = name + ("_total" if METRICS[name][0] == "counter" else "")
            directions = [{"direction": way} for way in ("load", "store")]
            drives = [{"direction": way, "drive": "0"} for way in ("read", "write")]
            found = [value(full, **labels) for labels in ({}, *directions, *drives)]
            assert sum(sample is not None for sample in found) in (1, 2), name
        assert value("attached") == 1
        assert value("capacity_tokens") == PAGE * value("usable_objects") > 0
        assert value("errors_total") == value("failed_pages_total", direction="load") == 0
    assert value("attached") == 0


def test_a_missing_member_the_budget_and_the_profile_are_published(tmp_path: Path) -> None:
    members = [str(tmp_path / f"{name}.tutti") for name in "ab"]
    storage(tmp_path, path=members).close()
    assert (value("missing_members"), value("write_budget_bytes")) == (0, 0)
    Path(members[1]).rename(tmp_path / "away")
    options = {"degraded": True, "write_budget": "1GiB", "profile": "off"}
    made = storage(tmp_path, path=members, **options)
    made.close()
    assert (value("missing_members"), value("write_budget_bytes")) == (1, 1 << 30)
    assert {"off"} < {info.labels["profile"] for info in infos()}, "found before, and off now"


def infos() -> list[Any]:
    """The samples of `tutti:info` of this process."""
    families = (family for family in REGISTRY.collect() if family.name == "tutti:info")
    return [sample for family in families for sample in family.samples]


def test_a_prompt_is_pinned_by_its_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pages have the names that SGLang gave them."""
    tokens = array("q", range(7, 7 + PAGE * len(NAMES) + 3))
    names = get_storage_hash_str(RadixKey(tokens), page_size=PAGE)[: len(NAMES)]  # full pages
    with closing(storage(tmp_path / "pools")) as made:
        assert all(made.batch_set_v1(names, INDICES))
    (pool,) = pool_files(tmp_path / "pools")
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(tokens.tolist()))
    assert cli.main(["pin", str(pool), "--tokens", str(prompt), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"pinned": len(NAMES)}


def test_pins_of_look_ups_end_without_requests(tmp_path: Path) -> None:
    with closing(storage(tmp_path)) as made:
        assert all(made.batch_set_v1(NAMES, INDICES))
        assert made.batch_exists(NAMES) == len(NAMES)
        store = made._stores["kv"]
        store.refresh()
        assert value("busy_objects") == len(NAMES)
        store.tick(time.monotonic() + 61)
        store.refresh()
        assert value("busy_objects") == 0
        assert all(made.batch_get_v1(NAMES, INDICES))


def test_quarantined_slots_come_back_by_the_documented_command(tmp_path: Path) -> None:
    made = storage(tmp_path)
    usable = value("usable_objects")
    assert all(made.batch_set_v1(NAMES, INDICES))
    (file,) = pool_files(tmp_path)
    flip_objects(file)
    assert not any(made.batch_get_v1(NAMES, INDICES))
    made.close()
    again = storage(tmp_path)
    quarantined = value("quarantined_slots")
    assert quarantined > 0 and value("usable_objects") == usable - quarantined
    again.close()
    assert cli.main(["fsck", str(file), "--reuse-quarantined"]) == 0
    with closing(storage(tmp_path)) as again:
        assert (value("quarantined_slots"), value("usable_objects")) == (0, usable)
        assert all(again.batch_set_v1(NAMES, INDICES))
        assert all(again.batch_get_v1(NAMES, INDICES))

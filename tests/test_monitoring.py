"""The dashboard and the alert rules use metrics that exist, in forms that their programs read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import tutti
from tutti.cluster.second_tier import COUNTERS as TIER_COUNTERS
from tutti.medium.layout import KVLayout
from tutti.metrics import AgentCollector, StoreCollector
from tutti.node.agent import AgentCounters

MONITORING = Path(__file__).parent.parent / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())
NAME = re.compile(r"\btutti_[a-z_]+")
LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples of a pool and an agent."""
    agent: Any = SimpleNamespace(counters=AgentCounters(), sessions={})
    path = tmp_path_factory.mktemp("monitoring") / "pool.tutti"
    with tutti.open(str(path), LAYOUT, "32MiB") as store:
        remote = {**dict.fromkeys(TIER_COUNTERS, 0), "state": "closed", "write_state": "closed"}
        served: Any = SimpleNamespace(
            stats=lambda: {**store.stats(), "remote": remote},
            layout=store.layout,
            config=store.config,
            recovered=True,
        )
        collectors = (StoreCollector({"chat": served}), AgentCollector(agent))
        return {
            sample.name
            for collector in collectors
            for family in collector.collect()
            for sample in family.samples
        }


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


@pytest.mark.parametrize("query", list(queries()))
def test_every_query_names_published_metrics(query: str, published: set[str]) -> None:
    names = set(NAME.findall(query))
    assert names
    assert names <= published
    assert query.count("(") == query.count(")")


def test_alert_rules_have_the_fields_of_prometheus() -> None:
    names = []
    for group in RULES["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert (
                {"alert", "expr", "annotations"}
                <= set(rule)
                <= {
                    *("alert", "expr", "for", "labels", "annotations"),
                }
            )
            assert re.fullmatch(r"[0-9]+[smh]", rule.get("for", "1m"))
            assert rule["annotations"]["summary"]
            names.append(rule["alert"])
    assert len(set(names)) == len(names)


def test_prometheus_reads_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's and Ubuntu's package prometheus)")
    check = [promtool, "check", "rules", str(MONITORING / "alerts.yml")]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places
        assert max(x for x, _ in cells) < 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])

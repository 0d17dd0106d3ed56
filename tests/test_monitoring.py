"""The dashboard and the alert rules use metrics that exist, in forms that their programs read."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

import tutti
from tutti.cluster.second_tier import COUNTERS as TIER_COUNTERS
from tutti.integration.sglang.metrics import METRICS
from tutti.medium.layout import KVLayout
from tutti.metrics import AgentCollector, StoreCollector
from tutti.node.agent import AgentCounters
from tutti.transfers.put_limits import Quota

MONITORING = Path(__file__).parent.parent / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())
WAIT_S = 30.0
NAME = re.compile(r"\btutti[_:][a-z_]+")
LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples of a server, a pool and an agent."""
    agent: Any = SimpleNamespace(counters=AgentCounters(), sessions={})
    path = tmp_path_factory.mktemp("monitoring") / "pool.tutti"
    config = tutti.StoreConfig(quotas=(Quota("team", 1 << 20, 1 << 20),), write_budget="1GiB")
    with tutti.open(str(path), LAYOUT, "32MiB", config=config) as store:
        remote = {**dict.fromkeys(TIER_COUNTERS, 0), "state": "closed", "write_state": "closed"}
        served: Any = SimpleNamespace(
            stats=lambda: {**store.stats(), "remote": remote},
            layout=store.layout,
            config=store.config,
            members=store.members,
            recovered=True,
        )
        collectors = (StoreCollector({"chat": served}), AgentCollector(agent))
        servers = {
            f"tutti:{name}" + "_total" * (kind == "counter") for name, (kind, _) in METRICS.items()
        }
        return servers | {
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


def program(name: str) -> str:
    """A program of Prometheus: installed, or as `make prometheus` unpacks it."""
    unpacked = Path(__file__).parent.parent / "build/prometheus/usr/bin" / name
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's and Ubuntu's package prometheus)")
    return found


def promtool(*arguments: object) -> None:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_rules() -> None:
    promtool("check", "rules", MONITORING / "alerts.yml")


def series(name: str, values: str, labels: str = 'pool="p"') -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


MOVED, STORES = "tutti:moved_pages_total", 'pool="p",direction="store"'
#: An alert, the time at which it has to fire, and the samples of every minute that lead to it.
FIRES = (
    ("TuttiPoolDown", "3m", [series("tutti_up", "1 0 0 0 0")]),
    (
        "TuttiDropsPages",
        "40m",
        [
            series("tutti_dropped_pages_total", "0+2x60"),
            series("tutti_stored_pages_total", "0+8x60"),
        ],
    ),
    ("TuttiCorruptData", "2m", [series("tutti_corrupt_objects_total", "0 0 1 1")]),
    ("TuttiMemberMissing", "1m", [series("tutti_missing_members", "1 1")]),
    ("TuttiServerCorruptData", "3m", [series("tutti:quarantined_slots", "0 0 1 1")]),
    ("TuttiServerUsesNoPool", "20m", [series("tutti:recovering", "1+0x30")]),
    (
        "TuttiServerDropsPages",
        "40m",
        [series("tutti:dropped_pages_total", "0+2x60"), series(MOVED, "0+8x60", STORES)],
    ),
)
#: The same alerts do not fire here.
QUIET = (
    ("TuttiPoolDown", "3m", [series("tutti_up", "1 0 1 0 1")]),
    (
        "TuttiDropsPages",
        "40m",
        [
            series("tutti_dropped_pages_total", "0+1x60"),
            series("tutti_stored_pages_total", "0+20x60"),
        ],
    ),
    ("TuttiCorruptData", "2m", [series("tutti_corrupt_objects_total", "7 7 7 7")]),
    ("TuttiMemberMissing", "1m", [series("tutti_missing_members", "0 0")]),
    (
        "TuttiServerCorruptData",
        "3m",
        [series("tutti:quarantined_slots", "0 0 9 9"), series("tutti:missing_members", "0 0 1 1")],
    ),
    ("TuttiServerUsesNoPool", "20m", [series("tutti:recovering", "1+0x9 0+0x20")]),
    (
        "TuttiServerDropsPages",
        "40m",
        [series("tutti:dropped_pages_total", "0+1x60"), series(MOVED, "0+20x60", STORES)],
    ),
)


@pytest.mark.parametrize("fires", [True, False], ids=["fires", "quiet"])
def test_alerts_fire_when_they_should(tmp_path: Path, fires: bool) -> None:
    summaries = {
        rule["alert"]: rule["annotations"]["summary"].replace("{{ $labels.pool }}", "p")
        for group in RULES["groups"]
        for rule in group["rules"]
    }
    tests = [
        {
            "interval": "1m",
            "input_series": samples,
            "alert_rule_test": [
                {
                    "eval_time": at,
                    "alertname": alert,
                    "exp_alerts": [
                        {
                            "exp_labels": {"pool": "p"},
                            "exp_annotations": {"summary": summaries[alert]},
                        }
                    ]
                    * fires,
                }
            ],
        }
        for alert, at, samples in (FIRES if fires else QUIET)
    ]
    file = tmp_path / "test.yml"
    rules = [str(MONITORING / "alerts.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rules, "tests": tests}))
    promtool("test", "rules", file)


def test_prometheus_evaluates_every_query_of_the_dashboard_on_a_pools_metrics(
    tmp_path: Path,
) -> None:
    """The server itself, with the rules loaded, scrapes a store and answers the panels' queries."""
    registry = CollectorRegistry()
    with tutti.open(str(tmp_path / "pool.tutti"), LAYOUT, "32MiB") as store:
        registry.register(StoreCollector({"chat": store}))
        metrics, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            scraped = f"127.0.0.1:{metrics.server_port}"
            with prometheus(tmp_path, scraped) as ask:
                deadline_s = time.monotonic() + WAIT_S
                while not ask("query", query="tutti_up == 1")["result"]:
                    assert time.monotonic() < deadline_s, "the store was not scraped"
                    time.sleep(0.1)
                rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
                assert {rule["name"] for rule in rules} == {
                    rule["alert"] for group in RULES["groups"] for rule in group["rules"]
                }
                for query in queries():
                    for name, value in (("$__rate_interval", "1m"), ("$pool", ".*")):
                        query = query.replace(name, value)
                    ask("query", query=query)
                assert ask("query", query="tutti_capacity_objects")["result"]
        finally:
            metrics.shutdown()
            metrics.server_close()
            thread.join(WAIT_S)


@contextlib.contextmanager
def prometheus(folder: Path, scraped: str) -> Iterator[Callable[..., Any]]:
    """A server that scrapes one address each second; what is yielded asks its HTTP interface."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [{"job_name": "tutti", "static_configs": [{"targets": [scraped]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "series",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    command = [program("prometheus"), *(f"--{name}={value}" for name, value in options.items())]
    log = (folder / "log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(what: str, **arguments: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{what}?{urlencode(arguments)}"
        with urlopen(url, timeout=WAIT_S) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    try:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                ask("rules")
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline_s, "prometheus does not answer"
                time.sleep(0.1)
        yield ask
    finally:
        process.kill()
        process.wait(WAIT_S)
        log.close()


def test_grafanas_own_models_know_every_field_of_the_dashboard() -> None:
    """A field that Grafana's generated types lack would be lost on the way through them."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD)))
    assert lost(DASHBOARD, read) == []
    assert lost({**DASHBOARD, "titel": "x"}, read) == [".titel"]


def lost(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Paths of what the first has and the second has not, or has otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            path
            for name, value in ours.items()
            for path in lost(value, theirs.get(name), f"{at}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [path for n, (a, b) in pairs for path in lost(a, b, f"{at}[{n}]")]
    return [] if ours == theirs else [at]


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

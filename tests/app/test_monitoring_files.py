"""The files for Grafana and Prometheus: they hold, and ask only for what there is."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from kv.metrics.histogram import exported_as
from kv.metrics.table import METRICS
from tests.monitoring_files import RULES, Query, dashboard, dashboard_queries, panels, rule_queries, rules

EXPORTED = {f"ray_{part.name}": set(part.tags) for metric in METRICS for part in exported_as(metric)}
GRID_COLUMNS = 24


def recorded() -> dict[str, set[str]]:
    """What rules make, and its labels."""
    return {query.record: query.groups() for query in rule_queries() if query.record}


@pytest.mark.parametrize("query", [*dashboard_queries(), *rule_queries()], ids=lambda query: query.where)
def test_each_metric_exists_and_has_the_labels_that_are_asked_for(query: Query) -> None:
    known = EXPORTED | recorded()
    labels = set()
    for selector in query.selectors():
        assert selector.name in known, query.where
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[str(selector.name)]
        labels |= known[str(selector.name)]
    assert query.selectors()
    assert query.groups() <= labels
    assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= query.groups()


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = dashboard()
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", board["uid"])
    assert board["title"]
    assert board["schemaVersion"] >= 39
    assert "id" not in board  # of one Grafana; it would overwrite another dashboard there
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables.keys() | {"__rate_interval"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        "Requests", "Roles", "Cache", "Tiers", "Moves",
    ]  # fmt: skip


def test_no_panel_covers_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= GRID_COLUMNS
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


def test_what_a_choice_of_models_comes_from_exists() -> None:
    (variable,) = (each for each in dashboard()["templating"]["list"] if each["name"] == "model")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in EXPORTED[name]


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 5
    queries = {query.where: query for query in rule_queries()}
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["what_to_do"].endswith(".")
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        query = queries[f"rule {rule['alert']}"]
        known = query.groups().union(*(recorded().get(name, set()) for name in query.names()))
        assert told <= known, rule["alert"]


def test_rules_are_made_before_they_are_used() -> None:
    made: set[str] = set()
    for query in rule_queries():
        assert {name for name in query.names() if name.startswith("equipoise:")} <= made, query.where
        made.add(query.record)


def test_prometheus_reads_the_rules() -> None:
    config = yaml.safe_load((RULES.parent / "prometheus.yaml").read_text(encoding="utf-8"))
    assert [RULES.parent / name for name in config["rule_files"]] == [RULES]


def test_on_kubernetes_the_rules_are_these() -> None:
    page = (RULES.parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (\{ printf .*\}) \| kubectl apply -f -$", page, flags=re.M)
    made = subprocess.run(["bash", "-c", command], cwd=RULES.parents[2], capture_output=True, text=True, check=True)
    resource = yaml.safe_load(made.stdout)
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))
    monitor = yaml.safe_load((RULES.parent / "pod-monitor.yaml").read_text(encoding="utf-8"))
    assert resource["metadata"] == monitor["metadata"]


def test_the_monitor_finds_every_pods_exporter() -> None:
    monitor = yaml.safe_load((RULES.parent / "pod-monitor.yaml").read_text(encoding="utf-8"))["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    cluster = yaml.safe_load((RULES.parents[1] / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert monitor["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
        (container,) = group["template"]["spec"]["containers"]
        (port,) = (port for port in container["ports"] if port["name"] == endpoint["port"])
        assert port["containerPort"] == int(group["rayStartParams"]["metrics-export-port"])

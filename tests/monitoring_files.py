"""What the files for Grafana and Prometheus ask for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from promql_parser import AggModifierType, AggregateExpr, Expr, VectorSelector

FOLDER = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD = FOLDER / "grafana" / "equipoise.json"
RULES = FOLDER / "prometheus" / "rules.yaml"


@dataclass(frozen=True)
class Query:
    """An expression in PromQL. `where` is for messages."""

    where: str
    text: str
    legend: str = ""
    record: str = ""
    parsed: Expr = field(init=False)

    def __post_init__(self) -> None:
        # Grafana fills in the names before Prometheus sees them.
        text = self.text.replace("$__rate_interval", "1m").replace("$model", "some model")
        object.__setattr__(self, "parsed", promql_parser.parse(text))

    def selectors(self) -> list[VectorSelector]:
        return [node for node in _nodes(self.parsed) if isinstance(node, VectorSelector)]

    def names(self) -> set[str]:
        """Of the metrics that it asks for."""
        return {str(selector.name) for selector in self.selectors()}

    def groups(self) -> set[str]:
        """Labels that it groups by, `le` left out, which a quantile uses up."""
        found: set[str] = set()
        for node in _nodes(self.parsed):
            if isinstance(node, AggregateExpr) and node.modifier is not None:
                assert node.modifier.type == AggModifierType.By, self.where
                found |= set(node.modifier.labels)
        return found - {"le"}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    """Those that show something, rows left out."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def dashboard_queries() -> list[Query]:
    return [
        Query(f"panel {panel['title']!r}", target["expr"], legend=target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


def rule_queries() -> list[Query]:
    return [
        Query(f"rule {rule.get('record') or rule['alert']}", rule["expr"], record=rule.get("record", ""))
        for rule in rules()
    ]


def _nodes(root: Expr) -> Iterator[Any]:
    found: list[Any] = []
    promql_parser.walk(root, found.append)
    yield from found

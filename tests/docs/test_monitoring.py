"""Grafana's dashboard and the alerts use metrics that a dashboard of a run has, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from lightning_swarm.dashboard.metrics import metrics_text
from tests.unit.dashboard.example import overview

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"


def test_every_metric_and_label_exists() -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    queries = [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    queries += [(rule["expr"], rule["annotations"]["summary"]) for rule in group["rules"]]
    families = text_string_to_metric_families(metrics_text(overview()).decode())
    labels = {family.name: {*family.samples[0].labels} for family in families}
    for query, text in queries:
        names = re.findall(r"lightning_swarm:\w+", query)
        assert names
        for name in names:
            assert {*re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", text)} <= labels[name], (name, text)
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    assert [panel["id"] for panel in panels] == [*range(1, len(panels) + 1)]

"""Grafana's dashboard: of the form that Grafana's schema requires, and about metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from clcomm.insight.exporters.figures import FIGURES, STEP, Labels

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
_TEXT, _COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
_SOURCE = {"type": "object", "required": ["type", "uid"], "properties": {"type": {"const": "prometheus"}, "uid": _TEXT}}
_GRID = {"x": {**_COUNT, "maximum": 23}, "y": _COUNT, "w": {**_COUNT, "minimum": 1, "maximum": 24}, "h": _COUNT}
#: The fields that kinds/dashboard/dashboard_kind.cue of Grafana requires, with their types, for what is used here.
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "uid": {"type": "string", "maxLength": 40},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "graphTooltip": {"enum": [0, 1, 2]},
        "time": {"type": "object", "required": ["from", "to"]},
        "annotations": {"type": "object", "required": ["list"]},
        "panels": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "datasource", "gridPos", "fieldConfig", "options", "targets"],
                "properties": {
                    "id": _COUNT,
                    "type": {"enum": ["timeseries", "stat"]},
                    "title": _TEXT,
                    "datasource": _SOURCE,
                    "gridPos": {"type": "object", "required": list(_GRID), "properties": _GRID},
                    "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
                    "targets": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["refId", "expr"],
                            "properties": {"refId": {"pattern": "^[A-Z]$"}, "expr": _TEXT, "legendFormat": _TEXT},
                        },
                    },
                },
            },
        },
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type"],
                        "properties": {"type": {"enum": ["query", "datasource"]}, "name": {"pattern": r"^\w+$"}},
                    },
                }
            },
        },
    },
}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_it_has_what_the_schema_requires() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed; pip install -e '.[test]'")
    jsonschema.validate(DASHBOARD, SCHEMA)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24, "panels overlap"


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    metrics = {figure.metric for figure in (*FIGURES, STEP)}
    assert {name for text in expressions() for name in re.findall(r"\bclcomm_\w+", text)} == metrics
    assert {name for text in expressions() for name in re.findall(r"(\w+)=~", text)} <= set(Labels._fields)
    legends = [target["legendFormat"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert {name for text in legends for name in re.findall(r"{{(\w+)}}", text)} <= set(Labels._fields)


def test_queries_name_variables_that_there_are() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = {name for text in expressions() for name in re.findall(r"\$(\w+)", text)}
    assert used | {"datasource"} == variables
    for each in DASHBOARD["templating"]["list"]:
        if each["type"] == "query":
            assert each["query"]["query"] == f"label_values(clcomm_step, {each['name']})"

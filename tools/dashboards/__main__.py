"""Writes the Grafana dashboards, docs/grafana.json and docs/grafana-cache.json.

    python tools/dashboards [FOLDER]

A panel is an entry of `server.py` or `cache.py`: its title, description, unit and queries.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from queries import Dashboard, Panel

from cache import CACHE
from server import SERVER

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
WIDEST = 24

DASHBOARDS = (SERVER, CACHE)


def text_of(dashboard: Dashboard) -> str:
    """Returns the file of a dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in dashboard.rows.items():
        place = {"h": 1, "w": WIDEST, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        top += 1
        for number, panel in enumerate(row):
            left, below = number * WIDTH % WIDEST, number * WIDTH // WIDEST * HEIGHT
            place = {"h": HEIGHT, "w": WIDTH, "x": left, "y": top + below}
            panels.append(_chart(panel, place))
        top += -(-len(row) * WIDTH // WIDEST) * HEIGHT
    found = {
        "title": dashboard.title,
        "uid": dashboard.uid,
        "schemaVersion": 39,
        "version": 2,
        "editable": True,
        "refresh": "10s",
        "tags": ["milepost", "llm"],
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "Milepost", "tags": ["milepost"], "keepTime": True}
        ],
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }
    return json.dumps(found, indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source",
    }  # fmt: skip
    model = _variable("model", "Model", "label_values(milepost:build_info, model_name)")
    of_model = 'label_values(milepost:build_info{model_name=~"$model"}, instance)'
    return [source, model, _variable("instance", "Instance", of_model)]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Returns a choice of any of the values that a query finds; all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _chart(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    lines: dict[str, Any] = {"fillOpacity": 40 if panel.is_stacked else 10, "showPoints": "never"}
    if panel.is_stacked:
        lines["stacking"] = {"mode": "normal"}
    targets = [
        {"expr": expression, "legendFormat": legend, "refId": chr(ord("A") + number)}
        for number, (expression, legend) in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": lines},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": targets,
    }


def main(folder: Path) -> None:
    for dashboard in DASHBOARDS:
        (folder / dashboard.file).write_text(text_of(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)

"""Grafana's dashboard of the charts of a report: python -m qurl_ray.tracking.grafana > cluster/grafana.json"""

import json
import sys
from typing import Any

from qurl_ray.report import catalog
from qurl_ray.report.charts import Panel
from qurl_ray.tracking.numbers import gauge_name

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3


def dashboard() -> dict[str, Any]:
    """Return the dashboard, for Grafana's import: a row for each heading of the report, a panel for each of its charts'
    panels, and a variable that chooses runs. Its source is a Prometheus that collects Ray's metrics."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in catalog.headings().items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        made = [(chart, panel) for chart in charts for panel in chart.panels]
        for place, (chart, panel) in enumerate(made):
            row, column = divmod(place, _COLUMNS)
            position = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + 1 + row * _HEIGHT}
            panels.append(_panel(chart.title, chart.reading, panel) | {"gridPos": position})
        y += 1 + _HEIGHT * -(-len(made) // _COLUMNS)
    for number, made_panel in enumerate(panels, start=1):
        made_panel["id"] = number
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    runs = {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": f"label_values(ray_{gauge_name('step')}, run)",
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "title": "qurl-ray",
        "uid": "qurl-ray",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, runs]},
        "panels": panels,
    }


def _panel(title: str, reading: str, panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "expr": f'ray_{gauge_name(series.key)}{{run=~"$run"}}',
            "legendFormat": f"{series.label} {{{{run}}}}",
            "refId": chr(ord("A") + place),
        }
        for place, series in enumerate(panel.series)
    ]
    defaults: dict[str, Any] = {"unit": "percentunit" if panel.percent else "short"}
    if panel.zero:
        defaults["min"] = 0
    if panel.log:
        defaults["custom"] = {"scaleDistribution": {"type": "log", "log": 10}}
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "type": "timeseries",
        "title": f"{title}: {panel.unit}",
        "description": reading,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")

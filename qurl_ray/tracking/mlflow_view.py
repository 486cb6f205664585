"""The view of an experiment that MLflow's pages open: the charts of a report, under its headings, for all runs. All
other metrics follow in groups that are folded.

MLflow keeps such views as tags of the experiment, as its own button "Save & share view" does. The form of a view was
read from the source of MLflow 3.17's pages, and was not yet looked at in a browser.
"""

import base64
import json
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

from qurl_ray.report import catalog
from qurl_ray.report.charts import Panel
from qurl_ray.tracking.mlflow_records import metric_name
from qurl_ray.tracking.numbers import series_name

VIEW_TAG = "mlflow.sharedViewState.qurl-ray"
"""Tag of an experiment that holds the view."""
KIND_TAG = ("mlflow.experimentKind", "custom_model_development")
"""Tag of an experiment of training runs: MLflow shows these first. As there are traces, too, it would take the
experiment for one of prompts."""
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f")
"""Colours of an experiment's runs, in their order: MLflow would draw them by chance, and so some of them twice."""

_REST = (
    "mismatch",
    "rollout",
    "clip",
    "policy",
    "reward",
    "eval",
    "eval_rollout",
    "time",
    "sync",
    "environment",
    "fleet",
    "guard",
    "value",
    "tokens",
    "problems",
    "summary",
    "Model metrics",
    "System metrics",
)
"""MLflow's names of the groups of all other metrics: what is before the last slash of a metric's name."""


def view_value(created_ms: int) -> str:
    """Return the tag's value. `created_ms` is unix time in milliseconds."""
    state = {"isAccordionReordered": True, "compareRunSections": _sections(), "compareRunCharts": list(_charts())}
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    return json.dumps(
        {"name": "qurl-ray", "createdAt": created_ms, "updatedAt": created_ms, "state": f"deflate;{packed}"}
    )


def view_path(experiment_id: str, *, viewed: bool) -> str:
    """Return the part after the address of an MLflow server that opens the charts of the training runs, in the view if
    the experiment has it: MLflow reports an error for one that is not there."""
    view = f"viewStateShareKey={VIEW_TAG.rpartition('.')[2]}&" if viewed else ""
    return f"/#/experiments/{experiment_id}/runs?{view}compareRunsMode=CHART"


def _sections() -> list[dict[str, Any]]:
    shown = {name: name != catalog.TURNS for name in catalog.headings()} | dict.fromkeys(_REST, False)
    return [
        {
            "uuid": _id(name),
            "name": name,
            "display": display,
            "isReordered": True,
            "deleted": False,
            "isGenerated": False,
        }
        for name, display in shown.items()
    ]


def _charts() -> Iterator[dict[str, Any]]:
    for heading, charts in catalog.headings().items():
        for chart in charts:
            for panel in chart.panels:
                yield _chart(_id(heading), chart.title, panel)


def _chart(section: str, title: str, panel: Panel) -> dict[str, Any]:
    keys = [key for series in panel.series for key in (series.key, series.low, series.high) if key]
    names = [metric_name(series_name(key)) for key in keys]
    return {
        "uuid": _id(section, title, panel.unit),
        "type": "LINE",
        "metricSectionId": section,
        "displayName": f"{title}: {panel.unit}",
        "metricKey": names[0],
        "selectedMetricKeys": names,
        "scaleType": "log" if panel.log else "linear",
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "yAxisKey": "metric",
        "range": {},
        "lineSmoothness": 0,
        "runsCountToCompare": len(COLORS),
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "deleted": False,
        "isGenerated": False,
    }


def _id(*parts: str) -> str:
    """Return an id that depends on the parts alone, so that the same view is the same tag."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(("qurl-ray", *parts))))

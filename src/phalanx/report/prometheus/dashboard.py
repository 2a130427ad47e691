"""The Grafana dashboard as the JSON that Grafana imports.

Source: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.report.prometheus.dashboard_panels import (
    DASHBOARD_ROWS,
    RUN_SELECTOR,
    DashboardPanel,
)

DASHBOARD_UID = "phalanx-runs"
_GRID_WIDTH = 24  # columns of Grafana's grid
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def build_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's "Import dashboard" takes it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in DASHBOARD_ROWS:
        panels.append(_build_row_header(row.title, top, len(panels) + 1))
        top = _place_panels(row.panels, top + 1, panels)
    return {
        "uid": DASHBOARD_UID,
        "title": "phalanx runs",
        "tags": ["phalanx"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_DATASOURCE_VARIABLE, _RUN_VARIABLE]},
        "annotations": {"list": [_RESTART_ANNOTATION]},
        "panels": panels,
    }


def _place_panels(panels: Sequence[DashboardPanel], top: int, placed: list[dict[str, Any]]) -> int:
    """Append the panels from left to right, line by line; returns the row below them."""
    column = line_height = 0
    for panel in panels:
        if column + panel.width > _GRID_WIDTH:
            top, column, line_height = top + line_height, 0, 0
        position = {"x": column, "y": top, "w": panel.width, "h": panel.height}
        placed.append(_build_panel(panel, position, len(placed) + 1))
        column, line_height = column + panel.width, max(line_height, panel.height)
    return top + line_height


def _build_row_header(title: str, top: int, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": _GRID_WIDTH, "h": 1},
        "panels": [],
    }


def _build_panel(panel: DashboardPanel, position: dict[str, int], number: int) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 8, "showPoints": "auto", "spanNulls": False}
    if panel.is_stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": position,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": custom},
            "overrides": [],
        },
        "options": _build_options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "instant": panel.kind == "table",
                "range": panel.kind != "table",
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _build_options(panel: DashboardPanel) -> dict[str, Any]:
    options = dict(_OPTIONS_OF_KIND.get(panel.kind, {}))
    if panel.shows_name:
        options["textMode"] = "name"
    return options


_OPTIONS_OF_KIND: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "none",
        "textMode": "auto",  # with the name of each run where there are several
    },
}

_DATASOURCE_VARIABLE = {
    "name": "datasource",
    "label": "Prometheus",
    "type": "datasource",
    "query": "prometheus",
}
_RUN_VARIABLE = {
    "name": "run",
    "label": "Run",
    "type": "query",
    "datasource": _DATASOURCE,
    "definition": "label_values(phalanx_run_info, run)",
    "query": {"query": "label_values(phalanx_run_info, run)", "refId": "runs"},
    "refresh": 2,  # whenever the time range changes
    "sort": 2,  # by name from Z to A, the newest first: names of runs end with their time
    "multi": True,
    "includeAll": True,
}
_RESTART_ANNOTATION = {
    "name": "Restarts",
    "datasource": _DATASOURCE,
    "enable": True,
    "iconColor": "orange",
    # A range that reaches into the one before: `changes` compares samples within it alone, and
    # would miss a restart between the last of one and the first of the next.
    "expr": f"changes(phalanx_restarts_total{{{RUN_SELECTOR}}}[$__rate_interval]) > 0",
    "titleFormat": "{{run}} restarts: {{cause}}",
}

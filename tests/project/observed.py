"""Read the PromQL expressions of the dashboard and of the alerts in docker/observe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

OBSERVE = Path(__file__).parents[2] / "docker" / "observe"


class Query(NamedTuple):
    """A PromQL expression of the dashboard or of an alert.

    Attributes:
        name: the title of the panel or the name of the alert.
        text: the PromQL expression, which may use variables of the dashboard.
        legend: a text with names of labels in double braces, which Grafana or Prometheus replaces by values.
    """

    name: str
    text: str
    legend: str


def board() -> dict[str, Any]:
    """The dashboard for Grafana, as parsed JSON."""
    read: dict[str, Any] = json.loads((OBSERVE / "grafana/dashboards/lmpool.json").read_text("utf-8"))
    return read


def rules() -> list[dict[str, Any]]:
    """The alert rules for Prometheus."""
    read = yaml.safe_load((OBSERVE / "alerts.yml").read_text("utf-8"))
    return [rule for group in read["groups"] for rule in group["rules"]]


def board_queries() -> Iterator[Query]:
    """The expressions of the dashboard's panels, variables and annotations."""
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"], target["legendFormat"])
    for note in board()["annotations"]["list"]:
        yield Query(note["name"], note["expr"], note["textFormat"])
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            yield Query(variable["name"], selector, "{{" + label + "}}")


def alert_queries() -> Iterator[Query]:
    """The expressions of the alerts, with the labels that their summaries name."""
    for rule in rules():
        yield Query(rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", ""))

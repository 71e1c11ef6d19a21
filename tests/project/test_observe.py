"""The dashboard and the alerts of docker/observe name only metrics, labels and outcomes that lmpool exports."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from lmpool.errors import WorkerError
from lmpool.producer.metrics import ProducerCollector
from tests.project.observed import OBSERVE, Query, alert_queries, board, board_queries, rules
from tests.support.pool import Pool, until_async
from tests.support.scrape import Scrape, free_port, get

ROOT = Path(__file__).parents[2]
# ADDED: labels that Prometheus adds to every scraped sample. OWN: samples that Prometheus itself makes.
ADDED = {"job", "instance"}
OWN = {"up": ADDED, "ALERTS": {"alertname", "alertstate", "model", *ADDED}}
SUFFIX = re.compile(r"_(bucket|sum|count)$")
NAMES = re.compile(r"\b(?:lmpool_\w+|process_\w+|up|ALERTS)\b")
SELECTORS = re.compile(r"(\w+)\{([^}]*)\}")


class Exported(dict[str, set[str]]):
    """Exported samples: name of a sample -> names of its labels; attributes have the values of labels."""

    def __init__(self, *texts: str) -> None:
        super().__init__(OWN)
        self.values_of: dict[str, set[str]] = {}
        for text in texts:
            for name, labels in Scrape(text).samples:
                self[name] = {label for label, _ in labels} | ADDED
                for label, value in labels:
                    self.values_of.setdefault(label, set()).add(value)


async def exported(pool: Pool) -> Exported:
    """The metrics that a worker and a producer export after they have counted every kind of event."""
    port, registry = free_port(), CollectorRegistry()
    await asyncio.to_thread(pool.start, "--metrics-port", port, "--fail-token", 300)
    async with pool.producer() as producer:
        registry.register(ProducerCollector(producer))
        await producer.logprobs([1, 2])
        with pytest.raises(WorkerError):
            await producer.logprobs([300])

        async def has_looked() -> bool:
            page = await asyncio.to_thread(get, port, "/metrics")
            return page is not None and "lmpool_server_evicted_keys_total{" in page.text

        await until_async(has_looked, "the worker has looked at the queue and at the server")
        page = await asyncio.to_thread(get, port, "/metrics")
        assert page is not None
        return Exported(page.text, generate_latest(registry).decode())


def strays(query: Query, known: Exported) -> list[str]:
    """The metrics, labels and label values in a query that lmpool does not export."""
    text = re.sub(r"\$__\w+", "5m", query.text)
    names = set(NAMES.findall(re.sub(r"\{[^}]*\}", "", text)))
    found = [f"{query.name}: {name}" for name in names if name not in known]
    labels = {label for name in names for label in known.get(name, ())}
    for name, selector in SELECTORS.findall(text):
        for label, operator, value in re.findall(r"(\w+)(=~|!~|!=|=)\"([^\"]*)\"", selector):
            if label not in known.get(name, ()):
                found.append(f"{query.name}: {label} of {name}")
            elif operator == "=" and label == "outcome" and value not in known.values_of[label]:
                found.append(f"{query.name}: {value} of {label}")
    grouped = {label for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", text) for label in re.findall(r"\w+", group)}
    shown = set(re.findall(r"\{\{ ?(\w+) ?\}\}", query.legend))
    found += [f"{query.name}: {label}" for label in grouped | shown if label not in labels]
    # A legend cannot show a label that the query's sum has removed.
    kept = re.match(r"(?:histogram_quantile\([\d.]+, )?(?:sum|max|min) (?:by \(([^)]*)\))?", text)
    if kept and shown - set(re.findall(r"\w+", kept[1] or "")):
        found.append(f"{query.name}: {query.legend} of what is grouped by {kept[1]}")
    return found


async def test_the_dashboard_and_the_alerts_name_exported_metrics(pool: Pool) -> None:
    known = await exported(pool)
    queries = [*board_queries(), *alert_queries()]
    assert len(queries) > 50
    assert [stray for query in queries for stray in strays(query, known)] == []
    for wrong, what in (
        (Query("q", "sum by (model) (rate(lmpool_worker_rowz_total[5m]))", ""), "lmpool_worker_rowz_total"),
        (Query("q", 'lmpool_worker_ready{worker="a"}', ""), "worker of lmpool_worker_ready"),
        (Query("q", "sum by (kind) (lmpool_worker_ready)", ""), "kind"),
        (Query("q", "sum by (model) (lmpool_worker_ready)", "{{instance}}"), "grouped by model"),
        (Query("q", 'lmpool_worker_jobs_total{outcome="rows"}', ""), "rows of outcome"),
    ):
        assert any(what in stray for stray in strays(wrong, known)), wrong


async def test_every_metric_is_on_the_board(pool: Pool) -> None:
    known = await exported(pool)
    asked = " ".join(query.text for query in board_queries())
    metrics = {SUFFIX.sub("", name) for name in known if name.startswith("lmpool_") and not name.endswith("_created")}
    # The dashboard shows the bytes of the producer's cache, but not its number of rows. It shows no numbers that stay
    # the same as long as a worker runs.
    constant = {"lmpool_worker_ranks", "lmpool_worker_devices"}
    assert {name for name in metrics if name not in asked} == {"lmpool_producer_cache_rows", *constant}


def test_the_panels_lie_side_by_side_and_know_their_data_source() -> None:
    panels, ids = board()["panels"], set()
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        ids.add(panel["id"])
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["targets"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
    assert len(ids) == len(panels)
    source = yaml.safe_load((OBSERVE / "grafana/provisioning/datasources/prometheus.yml").read_text("utf-8"))
    variable = next(item for item in board()["templating"]["list"] if item["name"] == "datasource")
    assert variable["current"]["value"] == source["datasources"][0]["uid"]


def test_every_alert_is_explained_and_tested() -> None:
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    explained = re.findall(r"^\| `(Lmpool\w+)`", page, re.M)
    assert explained == [rule["alert"] for rule in rules()]
    tests = yaml.safe_load((OBSERVE / "alerts_test.yml").read_text("utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == set(explained)
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == set(explained)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert f"\n### {anchor.capitalize()}\n" in (ROOT / path).read_text("utf-8")


def test_graphs_of_workers_have_a_bounded_number_of_lines() -> None:
    queries = [query for query in board_queries() if "$instance" in query.text and "{{instance}}" in query.legend]
    assert len(queries) > 10
    assert not [query.text for query in queries if not re.match(r"(top|bottom)k\(20, ", query.text)]

"""The operations page describes all log messages, metrics and exceptions that exist, and no others."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from lmpool import errors
from lmpool.http.app import HttpCollector
from lmpool.http.limits import HttpCounters
from lmpool.metrics import Histogram
from lmpool.producer.metrics import ProducerCollector
from lmpool.producer.producer import Producer
from lmpool.workers.execution.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, Snapshot, WorkerCollector, WorkerCounters

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


class Metric(NamedTuple):
    kind: str
    labels: tuple[str, ...]


def exported() -> dict[str, Metric]:
    """Exported metrics: name -> kind of the metric, and its labels except `model`."""
    look = Snapshot("m", "w", True, 0, 0.0, BackendStats(), WorkerCounters())
    producer = Producer(redis="redis://127.0.0.1:1")
    producer._counters.failures["WorkerError"] = 1
    http = HttpCounters(Counter({("/v1/rows", 200): 1}), {"/v1/rows": Histogram()})
    collectors = WorkerCollector(lambda: look), ProducerCollector(producer), HttpCollector(http)
    families = [family for collector in collectors for family in collector.collect()]
    metrics = {}
    for family in families:
        labels = {name for sample in family.samples for name in sample.labels} - {"model", "le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        metrics[name] = Metric(family.type, tuple(sorted(labels)))
    return metrics


def test_the_documented_metrics_are_exactly_the_exported_ones() -> None:
    documented = {
        row[0].strip("`"): (row[1], tuple(sorted(row[2].replace(",", " ").split())))
        for row in ROWS
        if row[0].startswith("`lmpool_")
    }
    assert documented == exported()


def test_units_match_the_names() -> None:
    for row in ROWS:
        if row[0].startswith("`lmpool_"):
            name = row[0].strip("`").removesuffix("_total")
            for unit in ("seconds", "bytes"):
                assert (row[3] == unit) == name.endswith(f"_{unit}"), name


def test_every_metric_in_an_alert_exists() -> None:
    known = {f"{name}{end}" for name in exported() for end in ("", "_bucket", "_sum", "_count")}
    assert set(re.findall(r"\blmpool_[a-z_]+[a-z]\b", PAGE)) - known <= {
        "lmpool_queue_",
        "lmpool_queue",
        "lmpool_server_",
        "lmpool_server",
    }


def test_every_exception_of_a_request_is_explained() -> None:
    explained = set(re.findall(r"`([A-Z]\w+)`", PAGE))
    ends = {errors.RequestFailed, errors.ServerError, errors.ModelError}
    wanted = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, tuple(ends)) and kind not in ends
    }
    assert wanted | {"ServerError", "ProtocolError", "InvalidPrompt", "SettingsError", "TrieError"} <= explained


def test_every_warning_of_a_worker_is_explained() -> None:
    calls = r"_log\.warning\(\s*\"([^\"]+)\""
    templates = {
        text
        for path in (ROOT / "workers/lmpool/workers").rglob("*.py")
        if "backends" not in path.parts
        for text in re.findall(calls, path.read_text("utf-8"))
    }
    assert len(templates) >= 8
    page = PAGE.replace("…", "%")
    for template in templates:
        beginning = re.split(r"%[a-z]|:", template.replace("%d", "").replace("%r", "").strip())[0].strip()
        words = " ".join(beginning.split()[:3])
        assert words in re.sub(r"% ", "", page), template


def test_outcomes_and_limits_on_the_page_match_the_code() -> None:
    row = next(row for row in ROWS if row[0] == "`lmpool_worker_jobs_total`")
    assert set(re.findall(r"`(\w+)`", row[4])) == set(OUTCOMES)
    assert "one step ran for longer than `--step-timeout-s`" in PAGE

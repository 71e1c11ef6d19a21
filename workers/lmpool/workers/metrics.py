"""A worker's metrics: their names and meanings, and the values when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

from lmpool.histogram import Histogram
from lmpool.metrics import Metric, Number, Samples, families, prometheus
from lmpool.workers.backend import BackendStats
from lmpool.workers.figures import OUTCOMES, Figures

METRICS = (
    Metric("lmpool_worker_info", "gauge", "Always 1; who this worker is.", ("worker", "version")),
    Metric("lmpool_worker_ready", "gauge", "1 while the worker takes jobs, else 0."),
    Metric("lmpool_worker_jobs_total", "counter", "Jobs that ended, by what they ended with.", ("outcome",)),
    Metric("lmpool_worker_claimed_jobs_total", "counter", "Jobs taken over from workers that fell silent."),
    Metric("lmpool_worker_steps_total", "counter", "Forwards that the backend has run."),
    Metric("lmpool_worker_rows_total", "counter", "Rows that the backend has computed."),
    Metric("lmpool_worker_tokens_total", "counter", "Tokens of the prompts that were computed."),
    Metric("lmpool_worker_reused_tokens_total", "counter", "Tokens among them that a prefix cache already held."),
    Metric("lmpool_worker_published_bytes_total", "counter", "Bytes of rows and answers sent to the server."),
    Metric("lmpool_worker_fetched_bytes_total", "counter", "Bytes of rows and weights fetched to answer asks."),
    Metric("lmpool_worker_refused_rows_total", "counter", "Rows that the server refused, as when it is out of memory."),
    Metric("lmpool_worker_evicted_rows_total", "counter", "Rows that were evicted as soon as they were stored."),
    Metric("lmpool_worker_server_errors_total", "counter", "Attempts to use the server that failed."),
    Metric("lmpool_worker_held_prompts", "gauge", "Prompts that the worker holds."),
    Metric("lmpool_worker_heartbeat_age_seconds", "gauge", "Seconds since the server last answered a heartbeat."),
    Metric("lmpool_worker_batch_prompts", "histogram", "Prompts that a step finished."),
    Metric("lmpool_worker_step_seconds", "histogram", "Seconds of a step of the backend."),
    Metric("lmpool_worker_publish_seconds", "histogram", "Seconds from rows being ready to their jobs' end."),
    Metric("lmpool_worker_job_seconds", "histogram", "Seconds from a job's queueing to its row or answer."),
    Metric("lmpool_queue_jobs", "gauge", "Prompts of the model that wait or are computed, at the last heartbeat."),
    Metric("lmpool_queue_oldest_job_seconds", "gauge", "Age of the oldest of them, at the last heartbeat."),
    Metric("lmpool_queue_dead_letters", "gauge", "Jobs of the model that were given up and are kept for a look."),
)


class Look(NamedTuple):
    """What a worker is and has done, at one moment.

    Attributes:
        model: its name.
        worker_id: the worker's.
        is_ready: whether it takes jobs.
        held: prompts that it holds.
        silent_s: seconds since the server last answered a heartbeat.
        stats: the backend's counters.
        figures: the worker's.
    """

    model: str
    worker_id: str
    is_ready: bool
    held: int
    silent_s: float
    stats: BackendStats
    figures: Figures


class WorkerCollector:
    """Gives a registry of prometheus_client the metrics of one worker.

    Args:
        look: looks at the worker; called in the thread that collects.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, look: Callable[[], Look]) -> None:
        self._library = prometheus("worker")
        self._look = look

    def collect(self) -> Iterator[Any]:
        """The metric families now."""
        return families(METRICS, _samples(self._look()), ("model",), self._library)


def _samples(look: Look) -> dict[str, Samples]:
    """Name of a metric -> its values."""
    figures, stats = look.figures, look.stats
    plain: dict[str, Number | Histogram] = {
        "lmpool_worker_ready": int(look.is_ready),
        "lmpool_worker_claimed_jobs_total": figures.claimed,
        "lmpool_worker_steps_total": stats.steps,
        "lmpool_worker_rows_total": stats.rows,
        "lmpool_worker_tokens_total": stats.tokens,
        "lmpool_worker_reused_tokens_total": stats.reused,
        "lmpool_worker_published_bytes_total": figures.published_bytes,
        "lmpool_worker_fetched_bytes_total": figures.fetched_bytes,
        "lmpool_worker_refused_rows_total": figures.refused,
        "lmpool_worker_evicted_rows_total": figures.evicted,
        "lmpool_worker_server_errors_total": figures.server_errors,
        "lmpool_worker_held_prompts": look.held,
        "lmpool_worker_heartbeat_age_seconds": look.silent_s,
        "lmpool_worker_batch_prompts": figures.batch,
        "lmpool_worker_step_seconds": figures.step_s,
        "lmpool_worker_publish_seconds": figures.publish_s,
        "lmpool_worker_job_seconds": figures.job_s,
    }
    # A queue that nobody has looked at yet is not an empty one.
    if (queue := figures.queue) is not None:
        plain["lmpool_queue_jobs"] = queue.depth
        plain["lmpool_queue_oldest_job_seconds"] = queue.age_s
        plain["lmpool_queue_dead_letters"] = queue.dead
    samples: dict[str, Samples] = {name: {(look.model,): value} for name, value in plain.items()}
    samples["lmpool_worker_info"] = {(look.model, look.worker_id, version("lmpool")): 1}
    samples["lmpool_worker_jobs_total"] = {(look.model, name): figures.ended[name] for name in OUTCOMES}
    return samples

"""A worker's metrics for a registry of prometheus_client: made from plain numbers when it is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

from lmpool.metrics import prometheus
from lmpool.workers.backend.contract import BackendStats
from lmpool.workers.metrics.counters import OUTCOMES, Counters


class Snapshot(NamedTuple):
    """What a worker is and has done, at one moment.

    Attributes:
        model: its name.
        worker_id: the worker's.
        is_ready: whether it takes jobs.
        in_flight: prompts that it holds.
        silent_s: seconds since the server last answered a heartbeat.
        stats: the backend's counters.
        counters: the worker's.
    """

    model: str
    worker_id: str
    is_ready: bool
    in_flight: int
    silent_s: float
    stats: BackendStats
    counters: Counters


class WorkerCollector:
    """Gives a registry of prometheus_client the metrics of one worker.

    Args:
        take_snapshot: called in the thread that collects.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(self, take_snapshot: Callable[[], Snapshot]) -> None:
        self._library = prometheus("worker")
        self._take_snapshot = take_snapshot

    def collect(self) -> Iterator[Any]:
        """The metric families now."""
        snapshot, core = self._take_snapshot(), self._library
        info = core.GaugeMetricFamily(
            "lmpool_worker_info", "Always 1; who this worker is.", labels=("model", "worker", "version")
        )
        info.add_metric((snapshot.model, snapshot.worker_id, version("lmpool")), 1)
        yield info
        ready = "1 while the worker takes jobs, else 0."
        yield _family(core.GaugeMetricFamily, snapshot.model, "lmpool_worker_ready", ready, int(snapshot.is_ready))
        jobs = core.CounterMetricFamily(
            "lmpool_worker_jobs_total", "Jobs that ended, by what they ended with.", labels=("model", "outcome")
        )
        for outcome in OUTCOMES:
            jobs.add_metric((snapshot.model, outcome), snapshot.counters.ended[outcome])
        yield jobs
        yield from _of_the_model(snapshot, core)


# fmt: off
def _of_the_model(snapshot: Snapshot, core: ModuleType) -> Iterator[Any]:
    """The others, which have no label but the model."""
    counters, stats, queue = snapshot.counters, snapshot.stats, snapshot.counters.queue
    counter = partial(_family, core.CounterMetricFamily, snapshot.model)
    gauge = partial(_family, core.GaugeMetricFamily, snapshot.model)
    histogram = partial(_family, core.HistogramMetricFamily, snapshot.model)
    yield counter("lmpool_worker_claimed_jobs_total", "Jobs taken over from workers that fell silent.",
                  counters.claimed)
    yield counter("lmpool_worker_homed_jobs_total", "Jobs taken that continue what the worker has computed.",
                  counters.homed)
    yield counter("lmpool_worker_stolen_jobs_total", "Jobs taken from other workers' lanes.", counters.stolen)
    yield counter("lmpool_worker_steps_total", "Forwards that the backend has run.", stats.steps)
    yield counter("lmpool_worker_rows_total", "Rows that the backend has computed.", stats.rows)
    yield counter("lmpool_worker_tokens_total", "Tokens of the prompts that were computed.", stats.tokens)
    yield counter("lmpool_worker_reused_tokens_total", "Tokens among them that a prefix cache already held.",
                  stats.reused)
    yield counter("lmpool_worker_published_bytes_total", "Bytes of rows and answers sent to the server.",
                  counters.published_bytes)
    yield counter("lmpool_worker_fetched_bytes_total", "Bytes of rows and weights fetched to answer queries.",
                  counters.fetched_bytes)
    yield counter("lmpool_worker_refused_rows_total", "Rows that the server refused, as when it is out of memory.",
                  counters.refused)
    yield counter("lmpool_worker_evicted_rows_total", "Rows that were evicted as soon as they were stored.",
                  counters.evicted)
    yield counter("lmpool_worker_server_errors_total", "Attempts to use the server that failed.",
                  counters.server_errors)
    yield gauge("lmpool_worker_held_prompts", "Prompts in flight in the worker.", snapshot.in_flight)
    yield gauge("lmpool_worker_lane_jobs", "Jobs in the worker's lane, waiting and held, at the last heartbeat.",
                counters.lane)
    yield gauge("lmpool_worker_heartbeat_age_seconds", "Seconds since the server last answered a heartbeat.",
                snapshot.silent_s)
    yield histogram("lmpool_worker_batch_prompts", "Prompts that a step finished.", *counters.batch.cumulative())
    yield histogram("lmpool_worker_step_seconds", "Seconds of a step of the backend.", *counters.step_s.cumulative())
    yield histogram("lmpool_worker_publish_seconds", "Seconds from rows being ready to their jobs' end.",
                    *counters.publish_s.cumulative())
    yield histogram("lmpool_worker_job_seconds", "Seconds from a job's queueing to its row or answer.",
                    *counters.job_s.cumulative())
    # A queue that has not been measured yet is not an empty one.
    depth, age_s, dead = ((), (), ()) if queue is None else ((queue.depth,), (queue.age_s,), (queue.dead,))
    yield gauge("lmpool_queue_jobs", "Prompts of the model that wait or are computed, at the last heartbeat.", *depth)
    yield gauge("lmpool_queue_oldest_job_seconds", "Age of the oldest of them, at the last heartbeat.", *age_s)
    yield gauge("lmpool_queue_dead_letters", "Jobs that were given up, kept until retried or dropped.", *dead)
# fmt: on


def _family(kind: Callable[..., Any], model: str, name: str, text: str, *value: Any) -> Any:
    """A metric family of prometheus_client with the value that its `add_metric` takes; empty without one."""
    family = kind(name, text, labels=("model",))
    if value:
        family.add_metric((model,), *value)
    return family

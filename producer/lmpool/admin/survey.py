"""A survey of a pool: its models, queues and workers, as `lmpool status --json` prints it."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker.scripts import QueueState, read_lanes
from lmpool.broker.server import Server
from lmpool.errors import UnknownModel, printable
from lmpool.metrics import SECONDS, add_packed, quantile
from lmpool.producer.client.discovery import Discovery, WorkerInfo
from lmpool.protocol.keys import Keys

Survey = list[dict[str, Any]]
"""One entry per model, as `lmpool status --json` prints it."""

SILENT = "silent"  # State of a worker whose last two heartbeats are missing: it may have been killed.
MAX_TEXT = 500  # Max characters of a text from the server that are shown; longer texts are cut.
_SILENT_SHARE = 2 / 5  # A worker that sent no heartbeat for this share of a lease is silent: workers send five.
# Heartbeat fields that describe the last interval; a silent worker has no current values.
_INTERVAL_FIELDS = ("rows_per_s", "batch", "p50_s", "p99_s")
_TEXT_FIELDS = ("model", "backend", "fingerprint", "state")  # Fields that are not converted to numbers.
_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d{1,2})?")


async def survey(server: Server, keys: Keys) -> Survey:
    """Read the survey of a pool over a new connection.

    Raises:
        ServerError: the server cannot be used.
    """
    async with server.connected() as redis:
        return await read_survey(redis, keys)


async def read_survey(redis: Redis, keys: Keys) -> Survey:
    """Read the survey of a pool: its models, queues and workers.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    discovery = Discovery(redis, keys)
    infos, loading = await discovery.infos(), await discovery.loading()
    # A model whose first worker is still loading has no info.
    names = [*infos, *sorted({worker.fields["model"] for worker in loading} - set(infos))]
    models = []
    for name in names:
        queue, trouble = QueueState(0, 0.0, 0, 0.0), ""
        try:
            queue = await discovery.queue(name)
        except ResponseError as error:  # Invalid data of one model must not hide other models.
            if "WRONGTYPE" not in str(error):
                raise
            trouble = "the queue cannot be read: its key has a value of another type"
        serving = [*await discovery.workers(name), *loading]
        workers = [worker for worker in serving if worker.fields.get("model") == name]
        silences, lanes = await discovery.silences(workers), await read_lanes(redis, keys.model(name))
        shown = [_worker(worker, silences.get(worker.worker_id), lanes.get(worker.worker_id)) for worker in workers]
        # Add up the latency counts and the rates of all workers in their last heartbeat intervals.
        counts, rate = [0] * (len(SECONDS) + 1), 0.0
        for worker, fields in zip(workers, shown, strict=True):
            if fields["state"] != SILENT:
                add_packed(counts, worker.fields.get("job_counts", ""))
                rate += number(worker.fields, "rows_per_s") or 0.0
        models.append(
            {
                "name": name,
                "info": {**asdict(infos[name]), "fingerprint": infos[name].fingerprint} if name in infos else None,
                "queued": queue.depth,
                "age_s": queue.age_s,
                "dead": queue.dead,
                "trouble": trouble,
                "rows_per_s": rate,
                "p50_s": quantile(counts, 0.5),
                "p99_s": quantile(counts, 0.99),
                "workers": shown,
            }
        )
    return models


def _worker(worker: WorkerInfo, silent_s: float | None, lane: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": worker.worker_id, "state": None}
    for name, text in worker.fields.items():
        fields[name] = text or None
        if name not in _TEXT_FIELDS and _NUMBER.fullmatch(text):
            fields[name] = int(text) if text.lstrip("-").isdecimal() else float(text)
    fields |= {"lane": lane, "silent_s": silent_s}
    lease_s = number(worker.fields, "lease_s")
    if silent_s is not None and lease_s is not None and silent_s > _SILENT_SHARE * lease_s:
        fields |= {"state": SILENT, **dict.fromkeys(_INTERVAL_FIELDS)}
    return fields


def number(fields: Any, name: str) -> float | None:
    """Return a field of a heartbeat as a number, or None if it is not a number."""
    try:
        return float(fields.get(name, ""))
    except (TypeError, ValueError):
        return None


def workers_of(models: Survey) -> list[dict[str, Any]]:
    """Return the workers of all models."""
    return [worker for model in models for worker in model["workers"]]


def file_notices(models: Survey) -> list[str]:
    """Return one sentence per worker whose model files have changed since it loaded them."""
    return [
        f"worker {worker['id']}: files of its model have changed since it loaded them ({files}). It continues with the "
        "weights in its memory"
        for worker in workers_of(models)
        if (files := worker.get("changed_files"))
    ]


async def why_unknown(discovery: Discovery, model: str) -> str:
    """Return why a model is not served, or "". Commands add the reason to an empty result: the name may be mistyped."""
    try:
        await discovery.info(model)
    except UnknownModel as error:
        return str(error)
    return ""


def shortened(text: str, max_chars: int = MAX_TEXT) -> str:
    """Return a printable text of at most `max_chars` characters."""
    shown = printable(text[: max_chars + 1])
    return shown if len(shown) <= max_chars else shown[: max_chars - 1] + "…"

"""A survey of a pool: its models, queues and workers, as `lmpool status --json` prints it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.admin.fleet import SILENT, number, summarize
from lmpool.admin.heartbeats import WorkerInfo, read_heartbeats
from lmpool.broker.scripts import QueueState, read_alive_in, read_lanes, read_queue_in, read_texts
from lmpool.broker.server import Server
from lmpool.errors import UnknownModel, printable
from lmpool.metrics import SECONDS, add_packed, quantile
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo

Survey = list[dict[str, Any]]
"""One entry per model, as `lmpool status --json` prints it."""

MAX_TEXT = 500  # Max characters of a text from the server that are shown; longer texts are cut.
_SILENT_SHARE = 1 / 2  # A worker that sent no heartbeat for this share of a lease is silent: workers send four.
# Heartbeat fields that describe the last interval; a silent worker has no current values.
_INTERVAL_FIELDS = ("rows_per_s", "batch", "p50_s", "p99_s")
_TEXT_FIELDS = ("model", "backend", "fingerprint", "state", "version")  # Fields that are not converted to numbers.
_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d{1,2})?")
# Seconds between two surveys, per worker: 3 s for 1,000 workers, which send a heartbeat every 3.75 s.
_PAUSE_PER_WORKER_S = 0.003


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
    infos = await Discovery(redis, keys).live()
    shown = {info.name: name for name, info in infos.items()}
    partitions = {name: keys.partitions(info) for name, info in infos.items()}
    serving = {name: set((await read_alive_in(redis, partitions[name], names=True)).names) for name in infos}
    loading = await read_texts(redis, keys.loading())
    beats = await read_heartbeats(redis, keys, set(loading).union(*serving.values()))
    by_model: dict[str, list[WorkerInfo]] = {name: [] for name in infos}
    for beat in beats:
        name = shown.get(beat.fields["model"], beat.fields["model"])
        # A worker that has begun to serve may still be in the hash of loading workers.
        is_loading = beat.worker_id in loading and beat.fields.get("state") == "loading"
        if is_loading or beat.worker_id in serving.get(name, ()):
            by_model.setdefault(name, []).append(beat)
    # A model whose first worker is still loading has no info.
    names = [*infos, *sorted(set(by_model) - set(infos))]
    return [await _read_model(redis, keys, name, infos.get(name), by_model[name]) for name in names]


async def _read_model(
    redis: Redis, keys: Keys, name: str, info: ModelInfo | None, workers: Sequence[WorkerInfo]
) -> dict[str, Any]:
    queue, trouble = QueueState(0, 0.0, 0, 0.0), ""
    partitions = keys.partitions(info) if info else [keys.model(name)]
    try:
        queue = await read_queue_in(redis, partitions)
    except ResponseError as error:  # Invalid data of one model must not hide other models.
        if "WRONGTYPE" not in str(error):
            raise
        trouble = "the queue cannot be read: its key has a value of another type"
    lanes = dict[str, int]()
    for partition in partitions:
        lanes |= await read_lanes(redis, partition)
    shown = [_worker(worker, lanes.get(worker.worker_id)) for worker in workers]
    # Add up the latency counts and the rates of all workers in their last heartbeat intervals.
    counts, rate = [0] * (len(SECONDS) + 1), 0.0
    for worker, fields in zip(workers, shown, strict=True):
        if fields["state"] != SILENT:
            add_packed(counts, worker.fields.get("job_counts", ""))
            rate += number(worker.fields, "rows_per_s") or 0.0
    return {
        "name": name,
        "info": {**asdict(info), "fingerprint": info.fingerprint} if info else None,
        "queued": queue.depth,
        "age_s": queue.age_s,
        "dead": queue.dead,
        "trouble": trouble,
        "rows_per_s": rate,
        "p50_s": quantile(counts, 0.5),
        "p99_s": quantile(counts, 0.99),
        "summary": summarize(shown),
        "workers": shown,
    }


def _worker(worker: WorkerInfo, lane: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": None, "state": None}
    for name, text in worker.fields.items():
        fields[name] = text or None
        if name not in _TEXT_FIELDS and _NUMBER.fullmatch(text):
            fields[name] = int(text) if text.lstrip("-").isdecimal() else float(text)
    fields |= {"id": worker.worker_id, "lane": lane, "silent_s": worker.silent_s}
    lease_s = number(worker.fields, "lease_s")
    if worker.silent_s is not None and lease_s is not None and worker.silent_s > _SILENT_SHARE * lease_s:
        fields |= {"state": SILENT, **dict.fromkeys(_INTERVAL_FIELDS)}
    return fields


def pause_s(models: Survey, interval_s: float) -> float:
    """Return the seconds from one survey to the next: `interval_s`, and longer for a pool of many workers.

    Surveys of a pool of any size then cost the server less than 1 % of a core.
    """
    return max(interval_s, _PAUSE_PER_WORKER_S * sum(len(model["workers"]) for model in models))


def file_notices(models: Survey) -> list[str]:
    """Return one sentence per model and set of changed files, if workers' files have changed since they loaded them."""
    changed: dict[tuple[str, str], list[str]] = {}
    for model in models:
        for worker in model["workers"]:
            if files := worker.get("changed_files"):
                changed.setdefault((model["name"], str(files)), []).append(worker["id"])
    notices = []
    for (_, files), (first, *others) in changed.items():
        workers, loaded, go_on = f"worker {first}", "it loaded", "It continues with the weights in its memory"
        if others:
            workers, loaded = f"{workers} and {len(others):,} more of its model", "they loaded"
            go_on = "They continue with the weights in their memory"
        notices.append(f"{workers}: files of its model have changed since {loaded} them ({files}). {go_on}")
    return notices


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

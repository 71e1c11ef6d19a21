"""What a pool serves and how it does: read once, for those who look on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from lmpool.broker.server import Server
from lmpool.histogram import SECONDS, add_packed, quantile
from lmpool.producer.client.discovery import Lobby, WorkerInfo
from lmpool.protocol.keys import Keys

Survey = list[dict[str, Any]]
"""One entry a model, as `lmpool status --json` prints it."""

_NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?(e[+-]?\d{1,2})?")
# What may look like a number and is none.
_NAMES = ("model", "backend", "fingerprint", "state")


async def survey(server: Server, keys: Keys) -> Survey:
    """Look at a pool with a connection of its own.

    Raises:
        ServerError: the server cannot be used.
    """
    redis = server.client()
    try:
        return await look(redis, keys)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()


async def look(redis: Redis, keys: Keys) -> Survey:
    """Look at a pool.

    Raises:
        RedisError, OSError: the server cannot be used.
    """
    lobby = Lobby(redis, keys)
    cards, loading = await lobby.cards(), await lobby.loading()
    # A model whose first worker still loads has no card.
    names = [*cards, *sorted({worker.fields["model"] for worker in loading} - set(cards))]
    found = []
    for name in names:
        queue = await lobby.queue(name)
        serving = [*await lobby.workers(name), *loading]
        workers = [worker for worker in serving if worker.fields.get("model") == name]
        silences = await lobby.silences(workers)
        found.append(
            {
                "name": name,
                "card": {**asdict(cards[name]), "fingerprint": cards[name].fingerprint} if name in cards else None,
                "queued": queue.depth,
                "age_s": queue.age_s,
                "dead": queue.dead,
                **_together(workers),
                "workers": [
                    {"id": worker.worker_id, **_typed(worker.fields), "silent_s": silences.get(worker.worker_id)}
                    for worker in workers
                ],
            }
        )
    return found


def _together(workers: Iterable[WorkerInfo]) -> dict[str, float | None]:
    """The figures of all workers of a model, in the intervals of their last heartbeats."""
    counts = [0] * (len(SECONDS) + 1)
    rate = 0.0
    for worker in workers:
        add_packed(counts, worker.fields.get("job_counts", ""))
        rate += number(worker.fields, "rows_per_s") or 0.0
    return {"rows_per_s": rate, "p50_s": quantile(counts, 0.5), "p99_s": quantile(counts, 0.99)}


def _typed(fields: Mapping[str, str]) -> dict[str, str | int | float | None]:
    """What a worker tells, with its numbers as such."""
    found: dict[str, str | int | float | None] = dict(fields)
    for name, text in fields.items():
        if name not in _NAMES and _NUMBER.fullmatch(text):
            found[name] = int(text) if text.lstrip("-").isdecimal() else float(text)
        elif not text:
            found[name] = None  # A time of an interval in which nothing was computed, say.
    return found


def number(fields: Any, name: str) -> float | None:
    """A number among what a worker tells; None when it tells none."""
    try:
        return float(fields.get(name, ""))
    except (TypeError, ValueError):
        return None

"""The demand for a model, for autoscalers. A model without workers has a demand too: its first worker must start."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.asyncio import Redis
from starlette.requests import Request
from starlette.routing import Route

from lmpool.broker.scripts import drain_seconds, read_alive, read_queue, read_texts
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name
from lmpool.web.guard import answers

NEVER_S = 86_400.0
"""`drain_seconds` of a queue that has no worker: a large number, because JSON has no infinity."""

_MAX_READ = 16  # Max workers whose speed is read: the mean speed of 16 is good enough.


class Demand(NamedTuple):
    """The demand for a model, and its workers.

    Attributes:
        model: name of the model.
        queued: prompts that wait or are in flight.
        oldest_s: seconds since the oldest queued prompt was submitted; 0 without prompts.
        workers: live workers that serve the model.
        loading: workers that are loading the model.
        wanted: 1 if at least one worker is needed, else 0: prompts are queued, or clients with `when_absent="wait"`
            have polled for the model within the last minute.
        drain_seconds: seconds in which the workers would empty the queue if no prompt were added; `NEVER_S` if a worker
            is wanted and none serves the model.
    """

    model: str
    queued: int
    oldest_s: float
    workers: int
    loading: int
    wanted: int
    drain_seconds: float


async def read_demand(redis: Redis, keys: Keys, model: str) -> Demand:
    """Read the demand for a model ("trie" for trie workers); an unknown model has no demand."""
    check_name("model", model)
    names = keys.model(model)
    queue, alive = await read_queue(redis, names), await read_alive(redis, names, names=True)
    # While a worker is alive, the key `wanted` is only left from before the worker started.
    is_awaited = not alive.serving and bool(await redis.exists(names.wanted))
    wanted = int(queue.depth > 0 or is_awaited)
    drain_s = wanted * NEVER_S
    if alive.serving:
        speeds = [await _speed(redis, keys.worker(worker)) for worker in alive.names[:_MAX_READ]]
        known = [speed for speed in speeds if 0 < speed < float("inf")]
        drain_s = drain_seconds(queue, sum(known) / max(1, len(known)) * alive.serving)
    return Demand(model, queue.depth, queue.age_s, alive.serving, alive.loading, wanted, drain_s)


async def _speed(redis: Redis, heartbeat: bytes) -> float:
    """Return a worker's results per second; 0 if unknown: another program may have written the heartbeat."""
    try:
        return float((await read_texts(redis, heartbeat, ("speed",))).get("speed", 0))
    except (ValueError, LMPoolError):
        return 0.0


def demand_route(server: Server, keys: Keys) -> Route:
    """Return the route `GET /api/demand/MODEL`: the fields of `Demand` as JSON."""

    async def demand(request: Request) -> dict[str, Any]:
        async with server.connected() as redis:
            return (await read_demand(redis, keys, request.path_params["model"]))._asdict()

    # Model names may contain slashes.
    return Route("/api/demand/{model:path}", answers(demand), methods=["GET"])

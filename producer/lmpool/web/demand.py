"""The demand for a model, for autoscalers. A model without workers has a demand too, so that its first one starts."""

from __future__ import annotations

from typing import NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lmpool.broker.scripts import drain_seconds, read_alive, read_queue, read_texts
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name

NEVER_S = 86_400.0
"""`drain_seconds` of a queue without workers: a large number, because JSON has no infinity."""

_MAX_READ = 16  # Max workers whose speed is read: their mean is good enough.
_FIELDS = ("speed",)


class Demand(NamedTuple):
    """The demand for a model, and its workers.

    Attributes:
        model: its name.
        queued: prompts that wait or are in flight.
        oldest_s: seconds since the oldest of them was queued; 0 without prompts.
        workers: live workers that serve the model.
        loading: workers that are loading it.
        wanted: 1 if at least one worker is needed, else 0: prompts are queued, or clients with `when_absent="wait"`
            have polled for the model within the last minute.
        drain_seconds: seconds in which the workers would empty the queue if no prompt were added; `NEVER_S` if there
            are no workers and one is wanted.
    """

    model: str
    queued: int
    oldest_s: float
    workers: int
    loading: int
    wanted: int
    drain_seconds: float


async def read_demand(redis: Redis, keys: Keys, model: str) -> Demand:
    """Read the demand for a model; an unknown model is not wanted.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        model: its name; "trie" for trie workers.

    Raises:
        SettingsError: the name is invalid.
        ProtocolError, RedisError, OSError: the server cannot be used.
    """
    check_name("model", model)
    names = keys.model(model)
    queue, alive = await read_queue(redis, names), await read_alive(redis, names, names=True)
    # With a live worker, the key is left over from the time before.
    is_awaited = not alive.serving and bool(await redis.exists(names.wanted))
    wanted = int(queue.depth > 0 or is_awaited)
    if alive.serving:
        drain_s = drain_seconds(queue, await _speed(redis, keys, alive.names) * alive.serving)
    else:
        drain_s = wanted * NEVER_S
    return Demand(model, queue.depth, queue.age_s, alive.serving, alive.loading, wanted, drain_s)


async def _speed(redis: Redis, keys: Keys, workers: tuple[str, ...]) -> float:
    """Return the mean results per second of some workers; 0 if none has computed."""
    speeds = []
    for worker in workers[:_MAX_READ]:
        try:
            speed = float((await read_texts(redis, keys.worker(worker), _FIELDS)).get("speed", 0))
        except (ValueError, LMPoolError):
            continue  # Another program may have written the heartbeat.
        if 0 < speed < float("inf"):
            speeds.append(speed)
    return sum(speeds) / len(speeds) if speeds else 0.0


def demand_route(server: Server, keys: Keys) -> Route:
    """Return the route `GET /api/demand/MODEL`: the fields of `Demand` as JSON.

    Its status is 400 for an invalid name, and 503 if the server cannot be used.
    """

    async def answer(request: Request) -> JSONResponse:
        redis = server.client()
        try:
            demand = await read_demand(redis, keys, request.path_params["model"])
        except SettingsError as error:
            return JSONResponse({"error": str(error)}, 400)
        except (RedisError, OSError, LMPoolError) as error:
            return JSONResponse({"error": str(server.explain(error))}, 503)
        finally:
            await redis.aclose()
        return JSONResponse(demand._asdict())

    # Model names may contain slashes.
    return Route("/api/demand/{model:path}", answer, methods=["GET"])

"""What is asked of a model, for an autoscaler: also while nobody serves it, so that a first worker is started."""

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
"""Seconds that a queue is said to take which no worker serves, where something waits: a large number, for JSON has no
infinity."""

_MAX_READ = 16
_FIELDS = ("speed",)


class Demand(NamedTuple):
    """What is asked of a model at one moment, and who answers.

    Attributes:
        model: its name.
        queued: prompts that wait or are computed.
        oldest_s: seconds since the oldest of them was queued; 0 when there is none.
        workers: live workers that serve it.
        loading: workers that load it.
        wanted: 1 when at least one worker is needed, else 0: prompts are queued, or clients that were told to wait have
            looked for the model within the last minute and found nobody to encode prompts for.
        drain_seconds: seconds that the workers take for what is queued, as if nothing were added; `NEVER_S` when there
            is no worker and one is wanted.
    """

    model: str
    queued: int
    oldest_s: float
    workers: int
    loading: int
    wanted: int
    drain_seconds: float


async def read_demand(redis: Redis, keys: Keys, model: str) -> Demand:
    """Look at what is asked of a model; one that nobody has ever heard of is not wanted.

    Args:
        redis: a client for control messages.
        keys: the deployment's key names.
        model: its name; "trie" for the trie workers.

    Raises:
        SettingsError: no model can have that name.
        ProtocolError, RedisError, OSError: the server cannot be used.
    """
    check_name("model", model)
    names = keys.model(model)
    queue, alive = await read_queue(redis, names), await read_alive(redis, names, names=True)
    # Only while nobody serves: what a client wrote before a worker came is of no more use.
    is_missed = not alive.serving and bool(await redis.exists(names.wanted))
    wanted = int(queue.depth > 0 or is_missed)
    if alive.serving:
        drain_s = drain_seconds(queue, await _speed(redis, keys, alive.names) * alive.serving)
    else:
        drain_s = wanted * NEVER_S
    return Demand(model, queue.depth, queue.age_s, alive.serving, alive.loading, wanted, drain_s)


async def _speed(redis: Redis, keys: Keys, workers: tuple[str, ...]) -> float:
    """Answers a second of one worker: the mean of some that have computed; 0 when there is none."""
    speeds = []
    for worker in workers[:_MAX_READ]:
        try:
            speed = float((await read_texts(redis, keys.worker(worker), _FIELDS)).get("speed", 0))
        except (ValueError, LMPoolError):
            continue  # Others may write there.
        if 0 < speed < float("inf"):
            speeds.append(speed)
    return sum(speeds) / len(speeds) if speeds else 0.0


def demand_route(server: Server, keys: Keys) -> Route:
    """`GET /api/demand/MODEL`: the fields of `Demand` as a JSON object; 400 for no model's name, 503 without a server.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
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

    # Names of models have slashes.
    return Route("/api/demand/{model:path}", answer, methods=["GET"])

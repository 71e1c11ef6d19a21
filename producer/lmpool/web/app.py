"""The web service of `lmpool web`: its pages, and its routes for dead letters and autoscalers."""

from __future__ import annotations

import asyncio
import gzip
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from redis.asyncio import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from lmpool.admin.fleet import number
from lmpool.admin.queue import DeadLetters, contents, summary
from lmpool.aio import end_tasks
from lmpool.broker.scripts import drain_seconds, read_alive_in, read_queue_in, read_texts
from lmpool.broker.server import Server
from lmpool.cli import say
from lmpool.errors import LMPoolError
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name, shown
from lmpool.web.explorer import ExploredModel, explorer_routes
from lmpool.web.feed import MAX_STREAMS, Feed
from lmpool.web.guard import HEALTH_PATHS, Guard, Refused, Sessions, answers, check_token, read_body
from lmpool.web.models import Models
from lmpool.web.server import HttpConnection, open_port, run_server

NEVER_S = 86_400.0
"""`drain_seconds` of a queue that has no worker: a large number, because JSON has no infinity."""

_PAGES = {"pool.html": "/", "explorer.html": "/explorer"}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_PIECE_BYTES = 64 * 1024  # Bytes per write of a response, so that large responses are not buffered for a slow client.
_MAX_LETTERS = 50  # Max dead letters that a page lists.
_MAX_IDS = 256  # Max token ids of one dead letter that a page shows.
_MAX_READ = 16  # Max workers whose speed is read: the mean speed of 16 workers is good enough.
_MAX_CHANGED = 500  # Max dead letters that one request retries or drops.


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The settings of the web service.

    Attributes:
        redis: URL of the server; None for LMPOOL_REDIS_URL, then this user's embedded server.
        prefix: prefix of the pool's keys.
        token: the secret of browsers and programs, at least 16 characters; "" to generate one.
        hosts: host names of the service, in addition to `localhost` and IP addresses.
        allow_changes: whether pages may retry and drop dead letters.
        interval_s: seconds between two surveys of the pool.
    """

    redis: str | None = None
    prefix: str = "lmpool"
    token: str = ""
    hosts: Sequence[str] = ()
    allow_changes: bool = False
    interval_s: float = 1.0

    def __post_init__(self) -> None:
        """Raise `SettingsError` if the token is too short, or contains characters that a header cannot contain."""
        check_token(self.token)


def web_service(settings: WebSettings) -> tuple[ASGIApp, Sessions, Feed]:
    """Make the web service, which surveys the pool while its application runs.

    Returns:
        the application, the sessions of browsers, and the feed, whose streams must end before the server stops.
    """
    server, keys = Server(settings.redis), Keys(settings.prefix)
    sessions = Sessions(settings.token)
    feed, models = Feed(server, keys, settings.interval_s), Models(ExploredModel, settings.redis, settings.prefix)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        surveying = asyncio.create_task(feed.run())
        try:
            yield
        finally:
            await end_tasks([surveying])
            await models.close()

    async def frames(request: Request) -> AsyncIterator[bytes]:
        async with aclosing(feed.frames()) as stream:
            async for frame in stream:
                # End the stream if the browser signed out or its session expired.
                if not sessions.is_allowed(request.scope):
                    return
                yield frame

    async def stream(request: Request) -> Response:
        if feed.watching >= MAX_STREAMS:
            return PlainTextResponse(f"{feed.watching} pages watch already, the maximum: close some", 503)
        return StreamingResponse(frames(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def history(request: Request) -> Response:
        body, headers = await feed.history(), {"Vary": "Accept-Encoding", "Content-Encoding": "gzip"}
        if "gzip" not in request.headers.get("accept-encoding", "").lower():  # Not a browser: all browsers accept gzip.
            body = await asyncio.to_thread(gzip.decompress, body)
            del headers["Content-Encoding"]

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), _PIECE_BYTES):
                yield body[start : start + _PIECE_BYTES]

        headers["Content-Length"] = str(len(body))
        return StreamingResponse(pieces(), media_type="application/json", headers=headers)

    async def workers(request: Request) -> dict[str, Any]:
        offset = request.query_params.get("offset", "0")
        if not re.fullmatch(r"\d{1,9}", offset, re.ASCII):
            raise Refused(400, f"offset: {shown(offset)} is no number of workers")
        return feed.tables.workers(request.query_params.get("filter", ""), int(offset))

    async def shown_settings(_: Request) -> dict[str, Any]:
        return {"allow_changes": settings.allow_changes}

    async def healthy(request: Request) -> Response:
        if feed.trouble and request.scope["path"] == "/readyz":
            return PlainTextResponse("the Redis server cannot be used\n", 503)
        return PlainTextResponse("ok\n")

    pages = _pages()
    routes: list[BaseRoute] = [
        *(Route(path, healthy) for path in HEALTH_PATHS),
        Route(HttpConnection.endless, stream),
        Route("/api/history", history),
        Route("/api/workers", answers(workers)),
        Route("/api/models", answers(lambda _: feed.served())),
        Route("/api/settings", answers(shown_settings)),
        *dead_letter_routes(server, keys, allow_changes=settings.allow_changes),
        *explorer_routes(models),
        # Autoscalers use the next route with `Authorization: Bearer`.
        demand_route(server, keys),
        *sessions.routes,
        *pages,
    ]
    app = Starlette(routes=routes, lifespan=run)
    return Guard(app, sessions, [page.path for page in pages], settings.hosts), sessions, feed


class _Chosen(Struct, forbid_unknown_fields=True):
    """A request to retry or drop dead letters of a model."""

    model: str
    ids: Annotated[list[str], Meta(min_length=1, max_length=_MAX_CHANGED)]


def dead_letter_routes(server: Server, keys: Keys, *, allow_changes: bool) -> list[Route]:
    """Return the routes of dead letters; retry and drop need `allow_changes`."""

    @asynccontextmanager
    async def letters_of(model: str) -> AsyncIterator[tuple[DeadLetters, Discovery]]:
        check_name("model", model)
        async with server.connected() as redis:
            discovery = Discovery(redis, keys)
            yield DeadLetters(redis, *await discovery.partitions(model)), discovery

    async def read_chosen(request: Request) -> _Chosen:
        if not allow_changes:
            raise Refused(403, "this page is read-only: start `lmpool web --allow-changes` to change dead letters")
        return await read_body(request, _Chosen)

    async def newest(request: Request) -> dict[str, Any]:
        async with letters_of(request.query_params.get("model", "")) as (letters, _):
            listed = [summary(letter) for letter in await letters.newest(_MAX_LETTERS)]
            return {"count": await letters.count(), "letters": listed}

    async def show(request: Request) -> dict[str, Any]:
        async with letters_of(request.query_params.get("model", "")) as (letters, _):
            (letter,) = await letters.find([request.query_params.get("id", "")])
        return {**summary(letter), **contents(letter, max_ids=_MAX_IDS)}

    async def retry(request: Request) -> dict[str, Any]:
        chosen = await read_chosen(request)
        outcome: dict[str, Any] = {"queued": 0, "refused": {}}
        async with letters_of(chosen.model) as (letters, discovery):
            info = await discovery.info(chosen.model)
            adapters = await letters.served_adapters(keys, info)
            for letter in await letters.find(chosen.ids):
                try:
                    await letters.retry(letter, info, adapters)
                    outcome["queued"] += 1
                except LMPoolError as error:
                    outcome["refused"][letter.entry] = str(error)
        return outcome

    async def drop(request: Request) -> dict[str, Any]:
        chosen = await read_chosen(request)
        async with letters_of(chosen.model) as (letters, _):
            return {"dropped": await letters.drop(await letters.find(chosen.ids))}

    return [
        Route("/api/dead", answers(newest)),
        Route("/api/dead/show", answers(show)),
        Route("/api/dead/retry", answers(retry), methods=["POST"]),
        Route("/api/dead/drop", answers(drop), methods=["POST"]),
    ]


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
            is wanted and no worker serves the model.
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
    # A model's workers serve its versions, and clients follow; a worker that starts loads under the model's own name.
    infos = [info for info in (await Discovery(redis, keys).infos()).values() if model in (info.base, info.name)]
    partitions = list({each.base: each for info in infos for each in keys.partitions(info)}.values())
    partitions += [names] * all(each.base != names.base for each in partitions)
    queue, alive = await read_queue_in(redis, partitions), await read_alive_in(redis, partitions, names=True)
    # Spread the sample over the sorted names: the workers of one host, whose names are similar, have similar speeds.
    sample = alive.names[:: -(-len(alive.names) // _MAX_READ) or 1]
    # Ignore the key `wanted` while a worker serves the model: clients wrote the key before the worker started.
    is_awaited = not alive.serving and bool(await redis.exists(names.wanted))
    wanted = int(queue.depth > 0 or is_awaited)
    drain_s = wanted * NEVER_S
    if alive.serving:
        beats = [await read_texts(redis, keys.worker(worker), ("speed",)) for worker in sample]
        # Check the numbers, because another program may have written a heartbeat.
        speeds = [speed for beat in beats if 0 < (speed := number(beat, "speed") or 0.0) < math.inf]
        drain_s = drain_seconds(queue, sum(speeds) / max(1, len(speeds)) * alive.serving)
    return Demand(model, queue.depth, queue.age_s, alive.serving, alive.loading, wanted, drain_s)


def demand_route(server: Server, keys: Keys) -> Route:
    """Return the route `GET /api/demand/MODEL`: the fields of `Demand` as JSON."""

    async def demand(request: Request) -> dict[str, Any]:
        async with server.connected() as redis:
            return (await read_demand(redis, keys, request.path_params["model"]))._asdict()

    # The type `path` allows slashes in model names.
    return Route("/api/demand/{model:path}", answers(demand))


def _pages() -> list[Route]:
    """Make a route for each file in `static`. Files are read only here, so a requested path never reaches the disk."""

    def route(path: str, content: bytes, kind: str) -> Route:
        # Browsers must revalidate: a page of one release must not load a script of another release.
        page = Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})
        return Route(_PAGES.get(path, f"/static/{path}"), page, methods=["GET"])

    static = files("lmpool.web") / "static"
    return [
        route(prefix + file.name, file.read_bytes(), kind)
        for prefix, folder in (("", static), ("uplot/", static / "uplot"))
        for file in folder.iterdir()
        if file.is_file() and (kind := _TYPES.get(file.name.rpartition(".")[2]))
    ]


def serve(settings: WebSettings, host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM. Once the port (0: a free one) is open, print the address and how to sign in."""
    listening, url = open_port(host, port, "lmpool web")
    app, sessions, feed = web_service(settings)
    # Do not print a configured token, because logs keep these lines.
    if sessions.is_own_token:
        say(f"the pool is shown at {url}?token={sessions.link_token} (this address signs in one browser, once)")
        say(f"other browsers sign in at {url} with the token {sessions.token}")
    else:
        say(f"the pool is shown at {url} : sign in with the token of LMPOOL_WEB_TOKEN or --token")
    run_server(app, listening, sessions.is_allowed, end_streams=feed.end)

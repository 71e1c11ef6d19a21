"""The web service: its routes and pages, including the routes of dead letters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from lmpool.admin.dead_letters import DeadLetters, contents, summary
from lmpool.aio import end_tasks
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, SettingsError
from lmpool.producer.client.discovery import Discovery
from lmpool.protocol.keys import Keys
from lmpool.settings import check_name
from lmpool.web.answers import Refused, answers, read_body
from lmpool.web.demand import demand_route
from lmpool.web.explorer import ExplorerRoutes
from lmpool.web.feed import MAX_STREAMS, Feed
from lmpool.web.guard import Guard, Sessions
from lmpool.web.models import Models

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_MIN_TOKEN = 16  # Min characters of a token: a shorter one could be guessed.
_PIECE_BYTES = 64 * 1024  # Bytes per write of a large response.
_MAX_LETTERS = 50  # Max dead letters listed on a page.
_MAX_IDS = 256  # Max token ids shown of one letter.
_MAX_CHANGED = 500  # Max letters changed by one request.


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
        """Check the token.

        Raises:
            SettingsError: it is too short, or contains characters that a header cannot contain.
        """
        if not self.token:
            return
        is_plain = self.token.isascii() and all(char.isalnum() or char in "-_.~" for char in self.token)
        if len(self.token) < _MIN_TOKEN or not is_plain:
            raise SettingsError(
                f"token: it must have at least {_MIN_TOKEN} letters, digits and -_.~: `openssl rand -hex 32` makes one"
            )


class Service(NamedTuple):
    """The web service.

    Attributes:
        app: the ASGI application, protected by the guard.
        sessions: the token and the sessions of browsers.
        feed: the source of the streams. End it before the HTTP server, which waits for open responses.
    """

    app: ASGIApp
    sessions: Sessions
    feed: Feed


def web_service(settings: WebSettings) -> Service:
    """Make the service; it surveys the pool while its application runs."""
    server, keys = Server(settings.redis), Keys(settings.prefix)
    sessions = Sessions(settings.token)
    feed, models = Feed(server, keys, settings.interval_s), Models(settings.redis, settings.prefix)

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
                # Signing out ends the streams of a session.
                if not sessions.is_allowed(request.scope):
                    return
                yield frame

    async def stream(request: Request) -> Response:
        if feed.watching >= MAX_STREAMS:
            return PlainTextResponse(f"{feed.watching} pages watch already, the maximum: close some", 503)
        return StreamingResponse(frames(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def history(request: Request) -> Response:
        return _in_pieces(*(await feed.history()), accepted=request.headers.get("accept-encoding", ""))

    async def served(_: Request) -> dict[str, Any]:
        return {"models": await feed.served()}

    async def shown_settings(_: Request) -> dict[str, Any]:
        return {"allow_changes": settings.allow_changes}

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        return (
            PlainTextResponse("the Redis server cannot be used\n", 503) if feed.trouble else PlainTextResponse("ok\n")
        )

    pages = _files()
    routes: list[BaseRoute] = [
        Route("/healthz", healthy),
        Route("/readyz", ready),
        Route("/api/stream", stream),
        Route("/api/history", history),
        Route("/api/models", answers(served)),
        Route("/api/settings", answers(shown_settings)),
        *DeadLetterRoutes(server, keys, allow_changes=settings.allow_changes).routes,
        *ExplorerRoutes(models).routes,
        # Autoscalers use it with `Authorization: Bearer`.
        demand_route(server, keys),
        *sessions.routes,
        *pages,
    ]
    app = Starlette(routes=routes, lifespan=run)
    return Service(Guard(app, sessions, [page.path for page in pages], settings.hosts), sessions, feed)


class _Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """A request to change letters of a model."""

    model: str
    ids: list[str]


class DeadLetterRoutes:
    """The routes of dead letters; retry and drop need `allow_changes`."""

    def __init__(self, server: Server, keys: Keys, *, allow_changes: bool) -> None:
        self._server = server
        self._keys = keys
        self._allow_changes = allow_changes
        self.routes = [
            Route("/api/dead", answers(self._newest)),
            Route("/api/dead/show", answers(self._show)),
            Route("/api/dead/retry", answers(self._retry), methods=["POST"]),
            Route("/api/dead/drop", answers(self._drop), methods=["POST"]),
        ]

    @asynccontextmanager
    async def _letters(self, model: str) -> AsyncIterator[tuple[DeadLetters, Discovery]]:
        check_name("model", model)
        redis = self._server.client()
        try:
            yield DeadLetters(redis, self._keys.model(model)), Discovery(redis, self._keys)
        except (RedisError, OSError) as error:
            raise self._server.explain(error) from error
        finally:
            await redis.aclose()

    async def _newest(self, request: Request) -> dict[str, Any]:
        async with self._letters(request.query_params.get("model", "")) as (letters, _):
            newest, count = await letters.newest(_MAX_LETTERS), await letters.count()
        return {"count": count, "letters": [summary(letter) for letter in newest]}

    async def _show(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        async with self._letters(query.get("model", "")) as (letters, _):
            (letter,) = await letters.find([query.get("id", "")])
        return {**summary(letter), **contents(letter, max_ids=_MAX_IDS)}

    async def _retry(self, request: Request) -> dict[str, Any]:
        chosen = await self._chosen(request)
        outcome: dict[str, Any] = {"queued": 0, "refused": {}}
        async with self._letters(chosen.model) as (letters, discovery):
            info = await discovery.info(chosen.model)
            adapters = await letters.served_adapters(info)
            for letter in await letters.find(chosen.ids):
                try:
                    await letters.retry(letter, info, adapters)
                    outcome["queued"] += 1
                except LMPoolError as error:
                    outcome["refused"][letter.entry] = str(error)
        return outcome

    async def _drop(self, request: Request) -> dict[str, Any]:
        chosen = await self._chosen(request)
        async with self._letters(chosen.model) as (letters, _):
            return {"dropped": await letters.drop([letter.entry for letter in await letters.find(chosen.ids)])}

    async def _chosen(self, request: Request) -> _Chosen:
        if not self._allow_changes:
            raise Refused(403, "this page is read-only: start `lmpool web --allow-changes` to change dead letters")
        chosen = await read_body(request, _Chosen)
        if not 1 <= len(chosen.ids) <= _MAX_CHANGED:
            raise SettingsError(f"ids: {len(chosen.ids)} letters; name 1 to {_MAX_CHANGED}")
        return chosen


def _in_pieces(plain: bytes, gzipped: bytes, *, accepted: str) -> Response:
    """Send large JSON in pieces, compressed if accepted; a slow client needs no copy of it."""
    takes_gzip = _takes_gzip(accepted)
    body = gzipped if takes_gzip else plain
    headers = {"Vary": "Accept-Encoding", "Content-Length": str(len(body))}
    if takes_gzip:
        headers["Content-Encoding"] = "gzip"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), _PIECE_BYTES):
            yield body[start : start + _PIECE_BYTES]

    return StreamingResponse(pieces(), media_type="application/json", headers=headers)


def _takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` header permits gzip."""
    codings = dict(part.replace(" ", "").lower().partition(";")[::2] for part in accepted.split(","))
    quality = codings.get("gzip", codings.get("*"))
    return quality is not None and not re.fullmatch(r"q=0(\.0*)?", quality)


def _files() -> list[Route]:
    """Make a route for each file in `static`; files are read once, so no requested path reaches the disk."""
    static = files("lmpool.web") / "static"
    found = [("", static), ("uplot/", static / "uplot")]
    routes = []
    for prefix, folder in found:
        for file in folder.iterdir():
            kind = _TYPES.get(file.name.rpartition(".")[2])
            if file.is_file() and kind is not None:
                name = prefix + file.name
                path = {"pool.html": "/", "explorer.html": "/explorer"}.get(name, f"/static/{name}")
                routes.append(Route(path, _file(file.read_bytes(), kind)))
    return routes


def _file(content: bytes, kind: str) -> Any:
    async def send(_: Request) -> Response:
        # Browsers must revalidate: a page of one release must not load a script of another.
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return send

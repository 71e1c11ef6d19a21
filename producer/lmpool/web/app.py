"""The service: its routes, its pages, and what runs beside them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from lmpool.aio import end_tasks
from lmpool.broker.server import Server
from lmpool.errors import SettingsError
from lmpool.protocol.keys import Keys
from lmpool.web.answers import answers
from lmpool.web.demand import demand_route
from lmpool.web.explorer import ExplorerRoutes
from lmpool.web.feed import MAX_STREAMS, Feed
from lmpool.web.guard import Guard, Sessions
from lmpool.web.letters import LetterRoutes
from lmpool.web.models import Models

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_MIN_TOKEN = 16
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class WebSettings:
    """What the service is told.

    Attributes:
        redis: URL of the server; None for the environment's, then this user's embedded one.
        prefix: prefix of the pool's keys.
        token: the secret that browsers sign in with and programs send, at least 16 characters; "" to make one.
        hosts: names by which browsers call the service, beside `localhost` and IP addresses.
        allow_changes: whether dead letters may be queued again and dropped.
        interval_s: seconds between two looks at the pool.
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
            SettingsError: it is too short, or no header could hold it.
        """
        if not self.token:
            return
        is_plain = self.token.isascii() and all(char.isalnum() or char in "-_.~" for char in self.token)
        if len(self.token) < _MIN_TOKEN or not is_plain:
            raise SettingsError(
                f"token: it must be at least {_MIN_TOKEN} letters, digits and -_.~: `openssl rand -hex 32` makes one"
            )


class Service(NamedTuple):
    """The service.

    Attributes:
        app: an ASGI application, guarded by its token.
        sessions: the token, and the browsers that are signed in.
        feed: what pages watch. Whoever ends the service ends it first, for servers wait for their answers.
    """

    app: ASGIApp
    sessions: Sessions
    feed: Feed


def web_service(settings: WebSettings) -> Service:
    """The service as it is told to be; it looks at the pool as long as its application runs."""
    server, keys = Server(settings.redis), Keys(settings.prefix)
    sessions = Sessions(settings.token)
    feed, models = Feed(server, keys, settings.interval_s), Models(settings.redis, settings.prefix)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(feed.run())
        try:
            yield
        finally:
            await end_tasks([looking])
            await models.close()

    async def frames(request: Request) -> AsyncIterator[bytes]:
        async with aclosing(feed.frames()) as watched:
            async for frame in watched:
                # Signing out ends the streams of the session too.
                if not sessions.is_allowed(request.scope):
                    return
                yield frame

    async def stream(request: Request) -> Response:
        if feed.watching >= MAX_STREAMS:
            return PlainTextResponse(f"{feed.watching} pages watch already: close some", 503)
        return StreamingResponse(frames(request), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def history(request: Request) -> Response:
        return _in_pieces(*(await feed.history()), accepted=request.headers.get("accept-encoding", ""))

    async def served(_: Request) -> dict[str, Any]:
        return {"models": await feed.served()}

    async def settings_told(_: Request) -> dict[str, Any]:
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
        Route("/api/settings", answers(settings_told)),
        *LetterRoutes(server, keys, allow_changes=settings.allow_changes).routes,
        *ExplorerRoutes(models).routes,
        # For autoscalers, which send `Authorization: Bearer`.
        demand_route(server, keys),
        *sessions.routes,
        *pages,
    ]
    app = Starlette(routes=routes, lifespan=run)
    return Service(Guard(app, sessions, [page.path for page in pages], settings.hosts), sessions, feed)


def _in_pieces(plain: bytes, gzipped: bytes, *, accepted: str) -> Response:
    """JSON that may be large, gzipped for who takes it so; a client that reads slowly has no copy of it kept for it."""
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
    """Whether an `Accept-Encoding` lets an answer be gzipped."""
    codings = dict(part.replace(" ", "").lower().partition(";")[::2] for part in accepted.split(","))
    quality = codings.get("gzip", codings.get("*"))
    return quality is not None and not re.fullmatch(r"q=0(\.0*)?", quality)


def _files() -> list[Route]:
    """A route for each file of `static`, which is read once: no path that is asked for ever reaches the disk."""
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
        # Asked for again by each page: a page of one release must not meet a script of another.
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return send

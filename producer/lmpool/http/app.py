"""The gateway's application: its routes, its metrics, and the command's loop."""

from __future__ import annotations

import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lmpool.broker.server import Server
from lmpool.cli import say
from lmpool.errors import LMPoolError, SettingsError, use_options
from lmpool.http.dialects import generate, native, openai, sglang, trl
from lmpool.http.errors import error_response
from lmpool.http.limits import PROBE_PATHS, Gateway, HttpCounters, Limits, json_response
from lmpool.http.models import GatewayModel, Targets, list_models
from lmpool.metrics import prometheus
from lmpool.producer.metrics import ProducerCollector
from lmpool.protocol.keys import Keys
from lmpool.web.guard import Refused, Sessions, check_token, is_address
from lmpool.web.models import CACHE_BYTES, Models
from lmpool.web.server import HttpConnection, open_port, run_server

MAX_CONNECTIONS = 4096
"""Max open connections, of which most may be idle; the process's limit of file descriptors may allow fewer."""

_DIALECTS = (openai, generate, trl, sglang, native)
_KEEP_ALIVE_S = 75  # Seconds that a connection stays open between requests, as long as nginx keeps connections.
_PROBE_S = 2.0  # Seconds to wait for the Redis server in a health probe.


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of a gateway.

    Attributes:
        redis: URL of the server; None for LMPOOL_REDIS_URL, then this user's embedded server.
        prefix: prefix of the pool's keys.
        token: the secret of clients, at least 16 characters; "" to admit clients without a token.
        hosts: host names for clients without a token, in addition to `localhost` and IP addresses.
        model: the model of requests that name none; "" for the only one.
        limits: the limits of requests.
        cache_bytes: max bytes of rows of one model in the gateway's own memory.
    """

    redis: str | None = None
    prefix: str = "lmpool"
    token: str = ""
    hosts: Sequence[str] = ()
    model: str = ""
    limits: Limits = field(default_factory=Limits)
    cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        """Raise `SettingsError` if the token is malformed."""
        check_token(self.token)


def gateway(settings: GatewaySettings) -> Gateway:
    """Make the application of a gateway, which closes its producers when it stops."""
    server, keys = Server(settings.redis), Keys(settings.prefix)
    options = {"timeout": settings.limits.timeout_s, "cache_bytes": settings.cache_bytes}
    models = Models(GatewayModel, settings.redis, settings.prefix, **options)
    redis = server.client()
    targets = Targets(models, settings.model, redis, keys)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()
        await redis.aclose()

    posts = [route for dialect in _DIALECTS for route in dialect.routes(targets)]

    async def metrics(_: Request) -> Response:
        return metrics_response(served.counters, models)

    gets = [*model_routes(server, keys, settings.model), *health_routes(server), Route("/metrics", metrics)]
    # Starlette raises other exceptions again after their response, and uvicorn logs them.
    handlers: dict[Any, Any] = dict.fromkeys((LMPoolError, HTTPException, Exception), _explain)
    app = Starlette(routes=[*posts, *gets], lifespan=run, exception_handlers=handlers)
    sessions = Sessions(settings.token) if settings.token else None
    served = Gateway(app, sessions, settings.hosts, settings.limits, [route.path for route in posts])
    return served


async def _explain(request: Request, error: Exception) -> Response:
    """The response for an exception of a route, or of Starlette for a path or method without a route."""
    path = request.scope["path"]
    if not isinstance(error, HTTPException):
        return error_response(path, error)
    response = error_response(path, Refused(error.status_code, f"{request.method} {path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


def model_routes(server: Server, keys: Keys, default: str) -> list[Route]:
    """The routes `/v1/models` and `/v1/models/NAME`, in the format of OpenAI with vLLM's fields.

    The model of requests that name none is listed first: clients that need one model take the first.
    """

    async def cards() -> list[dict[str, Any]]:
        found, now = [], int(time.time())
        async with server.connected() as redis:
            for name, info, parent in await list_models(redis, keys):
                card = {"id": name, "object": "model", "created": now, "owned_by": "lmpool", "parent": parent}
                found.append({**card, "root": info.source or None, "max_model_len": info.max_prompt_tokens})
        return sorted(found, key=lambda card: card["id"] != default)

    async def listed(_: Request) -> Response:
        return json_response({"object": "list", "data": await cards()})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]
        for card in await cards():
            if card["id"] == name:
                return json_response(card)
        raise Refused(404, f"the pool serves no model {name!r}")

    return [Route("/v1/models", listed), Route("/v1/models/{name:path}", one)]


def health_routes(server: Server) -> list[Route]:
    """The health probes: `/healthz` says that the process runs, the others that it can use its Redis server."""

    async def healthy(request: Request) -> Response:
        if request.scope["path"] != "/healthz":
            try:
                async with server.connected(reply_timeout_s=_PROBE_S) as redis:
                    await redis.ping()
            except (RedisError, OSError, LMPoolError):
                return PlainTextResponse("the Redis server cannot be used\n", 503)
        return PlainTextResponse("ok\n")

    return [Route(path, healthy) for path in PROBE_PATHS]


class HttpCollector:
    """Exports the counters of a gateway to prometheus_client."""

    def __init__(self, counters: HttpCounters) -> None:
        self._library = prometheus("http")
        self._counters = counters

    def collect(self) -> Iterator[Any]:
        """Yield the current metric families."""
        counters = self._counters
        text = "HTTP requests that ended; status 499: the client hung up."
        requests = self._library.CounterMetricFamily("lmpool_http_requests_total", text, labels=("path", "status"))
        for (path, status), count in counters.requests.copy().items():
            requests.add_metric((path, str(status)), count)
        text = "Duration of HTTP requests."
        seconds = self._library.HistogramMetricFamily("lmpool_http_request_seconds", text, labels=("path",))
        for path, histogram in counters.seconds.copy().items():
            seconds.add_metric((path,), *histogram.cumulative())
        gauge = self._library.GaugeMetricFamily
        yield from (requests, seconds)
        yield gauge("lmpool_http_requests_in_flight", "HTTP requests in flight.", counters.in_flight)
        yield gauge("lmpool_http_held_bytes", "Estimated bytes of bodies and responses in flight.", counters.held_bytes)


def metrics_response(counters: HttpCounters, models: Models[GatewayModel]) -> Response:
    """The metrics of the gateway and of its producers, for Prometheus."""
    collectors = HttpCollector(counters), ProducerCollector(*(model.producer for model in models))
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class _GatewayConnection(HttpConnection):
    """A connection of a client, which may be idle, and whose responses may take until the request's deadline."""

    max_connections = MAX_CONNECTIONS
    request_s = 120.0  # Max seconds between requests, and to send the largest body: 280 kB/s.
    response_s = None  # `limits` has a limit for each piece of a response.


def serve(settings: GatewaySettings, host: str, port: int, *, is_open: bool = False) -> None:
    """Serve until Ctrl-C or SIGTERM. Once the port (0: a free one) is open, print the address.

    Raises:
        SettingsError: the port cannot be used, or other machines could send requests without a token and `is_open` is
            False.
    """
    if not settings.token and not is_open and not _is_loopback(host):
        text = f"other machines could use the pool through {host}: set LMPOOL_HTTP_TOKEN, or pass --no-token"
        raise SettingsError(f"token: {text}")
    _raise_descriptors()
    listening, url = open_port(host, port, "lmpool http")
    app = gateway(settings)
    # Name the header of a request in errors about its time, in place of the command's option.
    use_options({"timeout": "X-Lmpool-Timeout"}.get)
    how = "with the token of LMPOOL_HTTP_TOKEN or --token" if settings.token else "without a token"
    say(f"serving the pool at {url} {how}; OpenAI's clients use {url}v1")
    run_server(app, listening, app.is_allowed, _GatewayConnection, keep_alive_s=_KEEP_ALIVE_S)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or (is_address(host) and host.startswith("127."))


def _raise_descriptors() -> None:
    """Raise the limit of file descriptors: each connection takes one, and many shells allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if hard < 0 else min(2 * MAX_CONNECTIONS, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

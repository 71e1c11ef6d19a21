"""Admit requests within limits, measure them, and cancel the work of clients that hang up.

`Gateway` is the outermost application. For each request that sends data, it checks the token, counts the request, reads
the body within the limits, and ends the work when the client closes the connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec.json import encode
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmpool.aio import await_beside
from lmpool.errors import LMPoolError, SettingsError
from lmpool.http.errors import error_response
from lmpool.metrics import Histogram
from lmpool.producer.client.requests import Deadline, check_timeout
from lmpool.settings import shown
from lmpool.web.guard import HEALTH_PATHS, Refused, Sessions, host_and_port, is_address

T = TypeVar("T")

PROBE_PATHS = ("/health", *HEALTH_PATHS)
"""Paths for health probes, which need no token; vLLM's server has the first one."""

TIMEOUT_HEADER = "x-lmpool-timeout"
"""Header with the seconds that a request may take."""

MODEL_HEADER = "x-lmpool-model"
"""Header with the model of a request whose dialect has no field for it."""

VERSION_HEADER = "x-lmpool-version"
"""Header of a response with the version of the weights that computed it."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Max bytes of a request's body: about five million token ids as JSON."""

MAX_HELD_BYTES = 2 * 1024 * 1024 * 1024
"""Max estimated bytes of the bodies and responses of all requests in flight."""

MAX_PROMPTS = 4096
"""Max prompts, and max continuations, of one request."""

_MAX_TIMEOUT_S = 3600.0  # Max seconds of a request; a client may ask for more, but gets this number.
_GROWTH = 8  # Bytes in memory per byte of a JSON body: a list of token ids takes about 40 bytes per id.
_PIECE_BYTES = 1024 * 1024  # Bytes per write of a response.
_GONE = 499  # The status of requests whose clients have hung up, in metrics only; nginx uses this number too.
# The OpenAI client sends its own timeout in this header.
_TIMEOUT_HEADERS = (TIMEOUT_HEADER, "x-stainless-read-timeout")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a gateway.

    Attributes:
        max_inflight: max requests in flight; the gateway refuses more requests with status 429.
        max_body_bytes: max bytes of a body.
        max_held_bytes: max estimated bytes of all bodies and responses; the gateway refuses more with status 429.
        timeout_s: seconds of a request that states no time.
        send_s: max seconds until a client has received a piece of a response, so that a client cannot hold memory.
    """

    max_inflight: int = 512
    max_body_bytes: int = MAX_BODY_BYTES
    max_held_bytes: int = MAX_HELD_BYTES
    timeout_s: float = 60.0
    send_s: float = 60.0


@dataclass(slots=True, eq=False)
class HttpCounters:
    """The counters of a gateway, which its event loop updates.

    Attributes:
        requests: (path, status) -> number of requests that have ended. Unknown paths are counted as "other".
        seconds: path -> durations of requests.
        in_flight: requests in flight.
        held_bytes: estimated bytes of the bodies and responses in flight.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: dict[str, Histogram] = field(default_factory=dict)
    in_flight: int = 0
    held_bytes: int = 0


class Turn:
    """One admitted request: its body, its deadline, and the bytes that it holds.

    Attributes:
        body: the body.
        headers: the headers.
        query: the parameters after the path.
        deadline: the time by which the request must end.
        held: the estimated bytes of the parts of the request and response in memory.
    """

    def __init__(self, scope: Scope, limits: Limits, counters: HttpCounters) -> None:
        self.body = b""
        self.headers = Headers(scope=scope)
        self.query = QueryParams(scope["query_string"])
        self._limits = limits
        self._counters = counters
        self.held = 0
        self.deadline = self._read_deadline()

    def _read_deadline(self) -> Deadline:
        given = next(filter(None, map(self.headers.get, _TIMEOUT_HEADERS)), None)
        try:
            seconds = self._limits.timeout_s if given is None else float(given)
        except ValueError:
            raise SettingsError(f"{TIMEOUT_HEADER}: {shown(given)} must be a number of seconds") from None
        return Deadline(min(_MAX_TIMEOUT_S, check_timeout(seconds)))

    def limit_time(self, seconds: float | None) -> None:
        """Use the deadline of a request's field `timeout`, if it has one."""
        if seconds is not None:
            self.deadline = Deadline(min(_MAX_TIMEOUT_S, check_timeout(seconds)))

    def hold(self, count: int) -> None:
        """Count the estimated bytes of a part of the request or response; raises `Refused` if there are too many."""
        most = self._limits.max_held_bytes
        if (own := self.held + count) > most:
            raise Refused(413, f"the request would take about {own} bytes; the limit is {most}: ask for less")
        if self._counters.held_bytes + count > most:
            raise Refused(429, f"the requests in flight hold {self._counters.held_bytes} bytes; try again soon")
        self._counters.held_bytes += count
        self.held += count

    def release(self, kept: int = 0) -> None:
        """Count only `kept` held bytes from now on: the request has ended, or it begins again."""
        self._counters.held_bytes -= self.held - kept
        self.held = kept

    async def read(self, receive: Receive) -> None:
        """Read the body before the deadline.

        Raises:
            Refused: the body is too large.
            DeadlineExceeded: the client sends too slowly.
            ConnectionAbortedError: the client has closed the connection.
        """
        sized = self.headers.get("content-length", "")
        self._check_size(int(sized) if sized.isdecimal() else 0)
        data, is_complete = bytearray(), False
        async with self.deadline.limit():
            while not is_complete:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionAbortedError("the client has closed the connection")
                chunk = message.get("body", b"")
                self._check_size(len(data) + len(chunk))
                self.hold(_GROWTH * len(chunk))
                data += chunk
                is_complete = not message.get("more_body", False)
        self.body = bytes(data)

    def _check_size(self, size: int) -> None:
        if size > (most := self._limits.max_body_bytes):
            raise Refused(413, f"the body has {size} bytes; the limit is {most}: send fewer prompts at once")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the request as in flight during the block; raises `Refused` if too many are in flight.

        A request is in flight when its body is complete, so that slow uploads take no slot of other requests.
        """
        if self._counters.in_flight >= (most := self._limits.max_inflight):
            raise Refused(429, f"{most} requests are in flight, the limit of this gateway; try again soon")
        self._counters.in_flight += 1
        try:
            yield
        finally:
            self._counters.in_flight -= 1


class _Sender:
    """Passes on the messages of a response, with a time limit for each, and records the response's status."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send = send
        self._seconds = seconds
        self.status = _GONE
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self.is_complete = True
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise ConnectionAbortedError("the client reads no more") from None


class Gateway:
    """Admits requests to an application.

    A browser can send requests to a gateway on this machine from a page of any site. So without a token, a request must
    name `localhost`, an IP address or an allowed host, and must not come from a page.

    Args:
        app: the application.
        sessions: the token, or None to admit requests without a token.
        hosts: allowed host names for requests without a token.
        limits: the limits.
        paths: the paths of requests to models; other requests, such as scrapes of metrics, are not limited.
    """

    def __init__(
        self, app: ASGIApp, sessions: Sessions | None, hosts: Collection[str], limits: Limits, paths: Collection[str]
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._hosts = frozenset({"localhost", *(host.lower() for host in hosts)})
        self._limits = limits
        self._paths = frozenset(paths)
        self.counters = HttpCounters()

    def is_allowed(self, scope: Scope) -> bool:
        """Whether a request has the token, if one is needed."""
        return self._sessions is None or self._sessions.is_program(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop, sender = asyncio.get_running_loop(), _Sender(send, self._limits.send_s)
        began = loop.time()
        try:
            await self._serve(scope, receive, sender)
        except ConnectionAbortedError:
            sender.status = _GONE
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self.counters.requests[path, sender.status] += 1
            self.counters.seconds.setdefault(path, Histogram()).observe(loop.time() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: _Sender) -> None:
        try:
            if scope["path"] not in PROBE_PATHS:
                self._check(scope)
            if scope["path"] not in self._paths:
                await self._app(scope, receive, send)
                return
            turn = Turn(scope, self._limits, self.counters)
            try:
                await turn.read(receive)
                with turn.counted():
                    scope["lmpool.turn"] = turn
                    work: Any = self._app(scope, receive, send)  # A coroutine of Starlette's.
                    await await_beside(work, [_watch(receive, send)])
            finally:
                turn.release()
        except LMPoolError as error:
            await error_response(scope["path"], error)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self.is_allowed(scope):
            what = "is wrong" if "authorization" in headers else "is missing"
            raise Refused(401, f"the token {what}: send Authorization: Bearer TOKEN, the token of `lmpool http`")
        if self._sessions is None:
            name, _ = host_and_port(headers.get("host", ""))
            if name not in self._hosts and not is_address(name):
                raise Refused(403, "this host name is not allowed: start `lmpool http` with --allow-host NAME")
            if "origin" in headers:
                raise Refused(403, "requests from web pages need a token: start `lmpool http` with --token")


async def _watch(receive: Receive, send: _Sender) -> None:
    """Raise ConnectionAbortedError when the client closes the connection before its response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not send.is_complete:
        raise ConnectionAbortedError("the client has closed the connection")


class PiecewiseResponse(Response):
    """A response that is sent in pieces, so that the server buffers little for a slow client.

    Args:
        parts: the bytes of the body, as bytes or as arrays of any type.
        media_type: the type of the content.
        headers: more headers.
    """

    def __init__(self, parts: Sequence[Any], media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._views = [memoryview(part).cast("B") for part in parts if len(part)]
        length = str(sum(view.nbytes for view in self._views))
        super().__init__(None, 200, {**(headers or {}), "content-length": length}, media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for view in self._views:
            for at in range(0, view.nbytes, _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Any) -> Response:
    """A value as JSON."""
    return PiecewiseResponse([encode(value)], "application/json")


def turn_of(scope: Scope) -> Turn:
    """The admitted request of a route."""
    turn: Turn = scope["lmpool.turn"]
    return turn


def read_fields(
    data: bytes | dict[str, Any], kind: type[T], ignored: Collection[str] = (), neutral: dict[str, Any] | None = None
) -> T:
    """Decode a JSON object. A field that is null counts as absent.

    Args:
        data: the JSON, or the decoded object.
        kind: a msgspec class with the fields that the route serves.
        ignored: fields that do not change results.
        neutral: fields that the route does not serve -> the values that have no effect.

    Raises:
        Refused: the data are no JSON object, a field is unknown or malformed, or has a value that is not served.
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any]) if isinstance(data, bytes) else data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body must be a JSON object: {error}") from error
    given = {name: value for name, value in fields.items() if value is not None and name not in ignored}
    for name, values in (neutral or {}).items():
        if name in given and (value := given.pop(name)) not in values:
            raise Refused(400, f"{name}: {shown(value, 80)} is not served here; leave this field out")
    try:
        return msgspec.convert(given, kind)
    except msgspec.MsgspecError as error:
        raise Refused(400, f"invalid request: {error}") from error

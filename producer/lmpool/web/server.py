"""The HTTP server of `lmpool web` and `lmpool http`: its port, its connections with time limits, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any, ClassVar, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmpool.cli import INTERRUPTED
from lmpool.errors import SettingsError

MAX_CONNECTIONS = 512
"""Max open connections, to limit memory and file descriptors. A page that watches the pool has two connections."""

REQUEST_S = 20.0
"""Max seconds from a connection's start or last response until the next request is complete: enough for the largest
request at 13 kB/s. A response that refuses a request must end in this time too."""

RESPONSE_S = 300.0
"""Max seconds to send a response other than a stream: enough for the largest history at 12 kB/s."""

_GRACE_S = 2  # Seconds that open requests get to finish when the service stops.


def open_port(host: str, port: int, command: str) -> tuple[socket.socket, str]:
    """Listen on a port, 0 for a free one; return the socket and the service's URL. `command` is named in errors."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            reason = f"another program uses it. If it is another `{command}`, open the URL that it printed, or pass "
            reason += "--port N (0 for a free one)"
        raise SettingsError(f"--port: cannot listen on {host}:{port}: {reason}") from error
    name = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return listening, f"http://{name}:{listening.getsockname()[1]}/"


class _Http(h11.Connection):
    """The state of a connection; sends data without a copy of the data, because a row may have megabytes."""

    def send(self, event: h11.Event) -> Any:
        """The bytes of an event, or None for the end of the connection; for data, the same object."""
        parts = self.send_with_data_passthrough(event)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)


class HttpConnection(H11Protocol):
    """A connection with time limits for requests and responses.

    Opening a connection needs no token. When too many connections are open, the service closes the connection that has
    waited longest for a complete, allowed request. Refused requests do not count: otherwise a client that does not
    read the responses could keep its connections.

    Args:
        is_allowed: whether a request has the service's token.

    Attributes:
        max_connections: max open connections of the service.
        request_s: max seconds until a request is complete, as `REQUEST_S`.
        response_s: max seconds to send a response, as `RESPONSE_S`; None for no limit.
        endless: the path of a stream, whose response has no limit.
    """

    max_connections: ClassVar[int] = MAX_CONNECTIONS
    request_s: ClassVar[float] = REQUEST_S
    response_s: ClassVar[float | None] = RESPONSE_S
    endless: ClassVar[str] = "/api/stream"
    # Connections without a complete, allowed request, the oldest first; in one dict, because a process has one server.
    _idle: ClassVar[dict[HttpConnection, None]] = {}

    def __init__(self, is_allowed: Callable[[Scope], bool], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Http(h11.SERVER)
        self._is_allowed = is_allowed
        self._serve, self.app = self.app, self._run
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """If too many connections are open, close the oldest idle connection, or the new one if all others are busy."""
        super().connection_made(transport)
        # Leave half of the process's file descriptors for Redis and files. A negative number means no limit.
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = self.max_connections if descriptors < 0 else min(self.max_connections, descriptors // 2)
        if len(self.connections) > most:
            oldest = next(iter(self._idle), self)
            self._idle.pop(oldest, None)
            oldest.transport.abort()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._idle.pop(self, None)
        self._end_in(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle events as uvicorn does; stop the request timer when an allowed request is complete."""
        super().handle_events()
        is_complete = self.cycle and not self.cycle.more_body and not self.cycle.response_complete
        if is_complete and self in self._idle and self._is_allowed(cast(Any, self.scope)):
            del self._idle[self]
            self._end_in(None if self.scope["path"].endswith(self.endless) else self.response_s)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. If the application ends within a response, abort the connection.

        uvicorn would close the connection when the client has read the rest, for which it could wait forever.
        """
        cycle = self.cycle
        try:
            await self._serve(scope, receive, send)
        finally:
            if cycle.response_started and not cycle.response_complete:
                cycle.disconnected = True  # Otherwise uvicorn logs an error.
                self.transport.abort()

    def on_response_complete(self) -> None:
        """Start the timer that limits the time until the next request is complete."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        self._idle.pop(self, None)
        self._idle[self] = None
        self._end_in(self.request_s)

    def _end_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Abort the connection: `close` would wait until the client has read the whole response.
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """Ends the streams of the service before it shuts down, because the shutdown would wait for the streams."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], Awaitable[None]] | None) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal. Exit at once at the second signal, because uvicorn would print tracebacks."""
        if self.should_exit:
            os._exit(INTERRUPTED)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then stop the server."""
        if self._end_streams is not None:
            await self._end_streams()
        await super().shutdown(sockets)


def run_server(
    app: ASGIApp,
    listening: socket.socket,
    is_allowed: Callable[[Scope], bool],
    connection: type[HttpConnection] = HttpConnection,
    end_streams: Callable[[], Awaitable[None]] | None = None,
    keep_alive_s: int = 5,
) -> None:
    """Serve an application until Ctrl-C or SIGTERM.

    Args:
        app: the application.
        listening: the socket of `open_port`.
        is_allowed: whether a request has the service's token.
        connection: the class of connections, with their limits.
        end_streams: ends streams that would never end, before the server shuts down.
        keep_alive_s: seconds that a connection stays open without requests.
    """
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(connection, is_allowed)),
        # Do not log addresses, because they contain tokens.
        access_log=False,
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=keep_alive_s,
    )
    with listening:
        _Server(config, end_streams).run(sockets=[listening])

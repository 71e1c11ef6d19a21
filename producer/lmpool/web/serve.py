"""Run the web service with uvicorn, with limits on connections and their time."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmpool.cli import INTERRUPTED
from lmpool.errors import SettingsError
from lmpool.web.app import Service, WebSettings, web_service
from lmpool.web.guard import Sessions

MAX_CONNECTIONS = 512
"""Max open connections: two per watching page. Limits memory and descriptors."""

REQUEST_S = 20.0
"""Seconds for a complete request, from the opening of the connection or the last response: the largest request at
13 kB/s. The response to a request without token or session must end within them too."""

RESPONSE_S = 300.0
"""Seconds for sending a response other than a stream: the largest history at 12 kB/s."""

_STREAM_PATH = "/api/stream"
_GRACE_S = 2  # Seconds for open requests when the service stops.


def serve(settings: WebSettings, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        settings: the settings of the service.
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        say: called with the lines that tell the user the address and how to sign in, once the port is open.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except (OSError, OverflowError) as error:
        raise SettingsError(f"--port: cannot listen on {host}:{port}: {_why(error)}") from error
    service = web_service(settings)
    config = uvicorn.Config(
        service.app,
        http=cast("type[asyncio.Protocol]", partial(_Connection, service.sessions)),
        # Do not log addresses, because they contain tokens.
        access_log=False,
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    with listening:
        for line in _shown_at(f"http://{name}:{listening.getsockname()[1]}/", service.sessions):
            say(line)
        _Server(config, service).run(sockets=[listening])


def _shown_at(url: str, sessions: Sessions) -> list[str]:
    """Return the lines with the address and how to sign in, without a configured token: logs keep these lines."""
    if not sessions.is_own_token:
        return [f"the pool is shown at {url} : sign in with the token of LMPOOL_WEB_TOKEN or --token"]
    return [
        f"the pool is shown at {url}?token={sessions.link_token} (this address signs in one browser, once)",
        f"other browsers sign in at {url} with the token {sessions.token}",
    ]


def _why(error: OSError | OverflowError) -> str:
    """Return why the address cannot be listened on; Python's own text repeats itself."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            "another program uses it. If it is another `lmpool web`, open the URL that it printed, or pass --port N "
            "(0 for a free one)"
        )
    is_about_name = isinstance(error, socket.gaierror)
    return str(error.strerror) if is_about_name else os.strerror(error.errno)


def _connection_limit() -> int:
    """Return the max connections of this process; half of its descriptors remain for Redis and files."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if descriptors < 0 else min(MAX_CONNECTIONS, descriptors // 2)


class _Connection(H11Protocol):
    """A connection with time limits for requests and responses.

    Opening a connection needs no token. When there are too many, the service closes the connection that has waited
    longest without a complete, allowed request. Refused requests do not count: otherwise a client that does not read
    the responses could keep its connections.
    """

    # Connections without a complete, allowed request, the oldest first. A process has one server.
    _idle: dict[_Connection, None] = {}  # noqa: RUF012
    _limit = _connection_limit()

    def __init__(self, sessions: Sessions, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sessions = sessions
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest idle connection if there are too many, or this one if all others are busy."""
        super().connection_made(transport)
        if len(self.connections) > self._limit:
            oldest = next(iter(self._idle), self)
            self._idle.pop(oldest, None)
            oldest.transport.abort()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._idle.pop(self, None)
        self._end_in(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle events as uvicorn does; stop the request timer when an allowed request is complete."""
        super().handle_events()
        is_complete = self.cycle and not self.cycle.more_body and not self.cycle.response_complete
        if is_complete and self in self._idle and self._sessions.is_allowed(cast(Any, self.scope)):
            del self._idle[self]
            self._end_in(None if self.scope["path"].endswith(_STREAM_PATH) else RESPONSE_S)

    def on_response_complete(self) -> None:
        """Start the timer for the next request."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        self._idle.pop(self, None)
        self._idle[self] = None
        self._end_in(REQUEST_S)

    def _end_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # `close` would wait until the client has read everything.
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """Ends the streams of pages first; otherwise the shutdown would wait for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal; exit at the second one, where uvicorn would print tracebacks."""
        if self.should_exit:
            os._exit(INTERRUPTED)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then stop."""
        await self._service.feed.end()
        await super().shutdown(sockets)

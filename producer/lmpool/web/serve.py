"""The service as a process, by uvicorn."""

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
"""Connections that are open at once: twice as many as pages may watch. Bounds memory and descriptors."""

REQUEST_S = 20.0
"""Seconds in which a whole request must arrive after the connection was opened or the last response was sent: the
largest one at 13 kB/s. A request without the token or a session must be answered within them, too."""

RESPONSE_S = 300.0
"""Seconds in which a response must be sent, except the stream of a page: the largest history at 12 kB/s."""

_STREAM_PATH = "/api/stream"
# Seconds that open requests get when the service stops.
_GRACE_S = 2


def serve(settings: WebSettings, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        settings: what the service is told.
        host: address to listen at.
        port: port to listen at; 0 for any that is free.
        tell: called with each line that says where the pool is shown and how to sign in, once the port is open.

    Raises:
        SettingsError: nobody can listen there.
    """
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except (OSError, OverflowError) as error:
        raise SettingsError(f"--port: cannot listen at {host}:{port}: {_why(error)}") from error
    service = web_service(settings)
    config = uvicorn.Config(
        service.app,
        http=cast("type[asyncio.Protocol]", partial(_Connection, service.sessions)),
        # Addresses have tokens in them: none goes into a log.
        access_log=False,
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    with listening:
        for line in _shown_at(f"http://{name}:{listening.getsockname()[1]}/", service.sessions):
            tell(line)
        _Server(config, service).run(sockets=[listening])


def _shown_at(url: str, sessions: Sessions) -> list[str]:
    """Where the pool is shown, and how to sign in. A token that was set stays out: logs of containers keep this."""
    if not sessions.is_own_token:
        return [f"the pool is shown at {url} : sign in with the token of LMPOOL_WEB_TOKEN or --token"]
    return [
        f"the pool is shown at {url}?token={sessions.link_token} (this address signs in one browser, once)",
        f"other browsers sign in at {url} with the token {sessions.token}",
    ]


def _why(error: OSError | OverflowError) -> str:
    """Why nobody can listen there, and what to do; Python's own text says it twice."""
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            "another program does; if it is another `lmpool web`, open the URL that that one has printed, or pass "
            "--port N (0 takes a free one)"
        )
    is_about_name = isinstance(error, socket.gaierror)
    return str(error.strerror) if is_about_name else os.strerror(error.errno)


def _connection_limit() -> int:
    """Connections that this process accepts: half of its descriptors remain for Redis and for files."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if descriptors < 0 else min(MAX_CONNECTIONS, descriptors // 2)


class _Connection(H11Protocol):
    """A connection that must send its requests and take its responses in time.

    No token is needed to open a connection. So when there are too many, the one is closed that has been without a whole
    request of a signed-in browser or a program for the longest time. Other requests do not count: a client that does
    not read the responses to them could hold its connections.

    Args:
        sessions: the token, and the browsers that are signed in.
    """

    # Connections without a whole request that is allowed, the oldest first. A process has one server.
    _idle: dict[_Connection, None] = {}  # noqa: RUF012
    _limit = _connection_limit()

    def __init__(self, sessions: Sessions, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sessions = sessions
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for the connection, or close it at once where all others are busy."""
        super().connection_made(transport)
        if len(self.connections) > self._limit:
            oldest = next(iter(self._idle), self)
            self._idle.pop(oldest, None)
            oldest.transport.abort()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._idle.pop(self, None)
        self._end_in(None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """As uvicorn's; an allowed request that has arrived whole may take its time."""
        super().handle_events()
        is_whole = self.cycle and not self.cycle.more_body and not self.cycle.response_complete
        if is_whole and self in self._idle and self._sessions.is_allowed(cast(Any, self.scope)):
            del self._idle[self]
            self._end_in(None if self.scope["path"].endswith(_STREAM_PATH) else RESPONSE_S)

    def on_response_complete(self) -> None:
        """As uvicorn's; the next request must arrive in time as the first."""
        self._await_request()
        super().on_response_complete()

    def _await_request(self) -> None:
        self._idle.pop(self, None)
        self._idle[self] = None
        self._end_in(REQUEST_S)

    def _end_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Not `close`, which would wait until the client has read all that was sent.
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class _Server(uvicorn.Server):
    """Ends the streams of pages first, which would otherwise go on as long as it waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """As uvicorn's; a second signal ends the process here, where uvicorn would leave tracebacks of what it cuts."""
        if self.should_exit:
            os._exit(INTERRUPTED)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        await self._service.feed.end()
        await super().shutdown(sockets)

"""The service as a process, by uvicorn."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from lmpool.cli import INTERRUPTED
from lmpool.errors import SettingsError
from lmpool.web.app import Service, WebSettings, web_service
from lmpool.web.guard import Sessions

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

"""Starts `lmpool web` as a process for tests, and sends requests to its HTTP routes."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.support.pool import DEADLINE_S, Pool, WorkerProcess, lmpool_command

TOKEN = "0123456789abcdef-a-token-of-tests"


class Answer(NamedTuple):
    """A response over HTTP: status, headers with names in lower case, and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class WebService:
    """An `lmpool web` process for a pool; the process ends with the pool.

    Args:
        pool: the pool that the service shows.
        options: more options of the command.
        port: port to listen on; 0 for a free port.
        token: the service's token, or None to let the service generate a token.

    Attributes:
        url: the address that the service has printed.
    """

    def __init__(self, pool: Pool, *options: str, port: int = 0, token: str | None = TOKEN) -> None:
        self.token = token or ""
        log = pool.folder / f"web-{len(pool.workers)}.log"
        address = ["--port", str(port), "--redis", pool.url, "--prefix", pool.prefix]
        command = [*lmpool_command(), "web", *address, *options]
        self.process = WorkerProcess(command, log, {"LMPOOL_WEB_TOKEN": self.token})
        pool.workers.append(self.process)
        self.process.until_says("sign in" if token else "with the token")
        self.url = re.findall(r"http://\S+", self.process.text)[0]
        self.port = urlsplit(self.url).port or 0
        self.base = f"http://127.0.0.1:{self.port}"

    def request(
        self, path: str, body: Any = None, *, token: str | None = TOKEN, method: str = "", **headers: str
    ) -> Answer:
        """Send a request: POST with a body, else GET. In names of `headers`, "_" stands for "-"."""
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def sign_in(self, token: str | None = None, *, field: str = "token", **headers: str) -> Answer:
        """Sign in as a page does that a browser has loaded from the `Host` in `headers`."""
        host = headers.get("Host", f"127.0.0.1:{self.port}")
        sent = {"Origin": f"http://{host}", **headers}
        return self.request("/api/session", {field: self.token if token is None else token}, token=None, **sent)

    def session(self, **headers: str) -> dict[str, str]:
        """Sign in; return the headers of a session, which a browser sends to the `Host` in `headers`."""
        answer = self.sign_in(**headers)
        assert answer.status == 200, answer
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0], "X_Lmpool_Key": answer.json["key"]}


class Stream:
    """A client of the event stream `/api/stream`, which reads frames as a page does.

    Args:
        service: the service that sends the stream.
        headers: headers of a session, with "_" for "-"; without headers, the token is sent.
    """

    def __init__(self, service: WebService, **headers: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", service.port), DEADLINE_S)
        sent = headers or {"Authorization": f"Bearer {TOKEN}"}
        lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items()]
        head = f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n{''.join(lines)}\r\n"
        self._socket.sendall(head.encode())
        self._lines = self._socket.makefile("rb")
        self.status = int(self._lines.readline().split()[1])

    def frame(self) -> Any:
        """Read the next frame of the stream."""
        for line in self._lines:
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the stream has ended")

    def read_to_end(self) -> None:
        """Read until the service ends the stream."""
        for _ in self._lines:
            pass

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._socket.close()


def static_files() -> list[Path]:
    """Return the static files of the pages, without third-party files."""
    return sorted((Path(__file__).parents[2] / "producer/lmpool/web/static").glob("*.*"))

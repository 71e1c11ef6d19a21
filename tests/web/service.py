"""`lmpool web` as a process, and what asks it over HTTP."""

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
    """An answer over HTTP: status, headers in small letters, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What the body says."""
        return json.loads(self.body)


class WebService:
    """One `lmpool web` for a pool, ended with it.

    Args:
        pool: whose.
        options: more options of the command.
        port: where it listens; 0 for any that is free.
        token: the token; None to have the service make one.

    Attributes:
        url: the address that it has printed.
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

    def ask(
        self, path: str, body: Any = None, *, token: str | None = TOKEN, method: str = "", **headers: str
    ) -> Answer:
        """Ask once; with a body by POST. `headers` have "_" for "-"."""
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
        """Sign in as a page does that a browser has by the `Host` of `headers`."""
        host = headers.get("Host", f"127.0.0.1:{self.port}")
        sent = {"Origin": f"http://{host}", **headers}
        return self.ask("/api/session", {field: self.token if token is None else token}, token=None, **sent)

    def session(self, **headers: str) -> dict[str, str]:
        """The headers that a browser sends that has signed in, by the `Host` of `headers`."""
        answer = self.sign_in(**headers)
        assert answer.status == 200, answer
        return {"Cookie": answer.headers["set-cookie"].partition(";")[0], "X_Lmpool_Key": answer.json["key"]}


class Stream:
    """A page that watches, without a browser.

    Args:
        service: what it asks.
        headers: those of a session, with "_" for "-"; the token is sent where there are none.
    """

    def __init__(self, service: WebService, **headers: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", service.port), DEADLINE_S)
        sent = headers or {"Authorization": f"Bearer {TOKEN}"}
        lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items()]
        asked = f"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n{''.join(lines)}\r\n"
        self._socket.sendall(asked.encode())
        self._lines = self._socket.makefile("rb")
        self.status = int(self._lines.readline().split()[1])

    def frame(self) -> Any:
        """The next frame."""
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
    """The files of the pages that are ours."""
    return sorted((Path(__file__).parents[2] / "producer/lmpool/web/static").glob("*.*"))

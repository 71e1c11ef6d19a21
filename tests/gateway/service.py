"""Starts `lmpool http` as a process for tests, and sends requests to it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from tests.support.pool import Pool, WorkerProcess, lmpool_command
from tests.web.service import Answer, WebService


class GatewayService(WebService):
    """An `lmpool http` process for a pool; the process ends with the pool.

    Args:
        pool: the pool.
        options: more options of the command.
        token: the gateway's token; "" for none.

    Attributes:
        base: the URL of the gateway, without a slash at the end.
    """

    def __init__(self, pool: Pool, *options: str, token: str = "") -> None:
        self.token = token
        log = pool.folder / f"http-{len(pool.workers)}.log"
        command = [*lmpool_command(), "http", "--port", "0", "--redis", pool.url, "--prefix", pool.prefix, *options]
        self.process = WorkerProcess(command, log, {"LMPOOL_HTTP_TOKEN": token})
        pool.workers.append(self.process)
        self.process.until_says("serving the pool at ")
        self.url = re.findall(r"http://\S+", self.process.text)[0]
        self.base = self.url.rstrip("/")
        self.port = urlsplit(self.url).port or 0

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send a body with the gateway's token, if it has one. In names of headers, "_" stands for "-"."""
        return self.request(path, body, token=self.token or None, **headers)

    def sent(self, path: str, **body: Any) -> Any:
        """The JSON of the response to a request that must succeed."""
        answer = self.post(path, body)
        assert answer.status == 200, answer
        return answer.json

    def metric(self, line: str) -> float:
        """The value of a metric, 0 if the gateway has none; `line` is its name with its labels."""
        page = self.request("/metrics", token=self.token or None).body.decode()
        return next((float(text.rpartition(" ")[2]) for text in page.splitlines() if text.startswith(line + " ")), 0.0)

"""The child's side of the line protocol: one JSON request per line on stdin, one JSON response per line on stdout.

The module imports only the standard library, because programs without lmpool use it too (`benchmarks/peers`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[..., Awaitable[Any]]

_MAX_LINE_BYTES = 64 * 2**20  # Max bytes of a request line, enough for some thousand prompts.


async def serve(handlers: dict[str, Handler]) -> None:
    """Respond to requests until stdin ends.

    A request is `{"do": name, ...}`: the name of a handler and its keyword arguments. The response is the handler's
    result. The first line of stdout (null) reports that this process is ready. An exception ends the process, and its
    traceback is written to stderr, which is the log.
    """
    # Redirect stdout to stderr: output of a library must not mix with the responses.
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = await _lines_of_stdin()
    _write(responses, None)
    while line := await requests.readline():
        request = json.loads(line)
        _write(responses, await handlers[request.pop("do")](**request))


async def _lines_of_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _write(responses: Any, response: Any) -> None:
    responses.write(json.dumps(response) + "\n")
    responses.flush()

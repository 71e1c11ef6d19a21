"""The child's end of the line protocol: one JSON request a line on stdin, one JSON answer a line on stdout.

Imports nothing but the standard library: the peers' processes use it in an environment without lmpool.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Handler = Callable[..., Awaitable[Any]]

_LONGEST_LINE = 64 * 2**20


async def serve(handlers: dict[str, Handler]) -> None:
    """Answer requests until stdin ends.

    A request is `{"do": name, ...}`; the rest of it are the keyword arguments of the handler of that name, and
    the handler's result is the answer. The first line that is sent, null, says that this process is ready. An
    exception ends the process, and its traceback is in the log that stderr goes to.
    """
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = await _lines_of_stdin()
    _say(answers, None)
    while line := await requests.readline():
        request = json.loads(line)
        _say(answers, await handlers[request.pop("do")](**request))


async def _lines_of_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _say(answers: Any, answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()

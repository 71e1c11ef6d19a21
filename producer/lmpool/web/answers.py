"""What all routes have in common: reading a request's JSON, and errors as answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lmpool.broker.server import without_advice
from lmpool.errors import (
    DeadlineExceeded,
    InvalidPrompt,
    LMPoolError,
    ServerError,
    ServerUnreachable,
    SettingsError,
    printable,
    to_json,
)

T = TypeVar("T")

MAX_BYTES = 256 * 1024
"""Most bytes of a request's body."""

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (SettingsError, 400),
    (InvalidPrompt, 400),
    # Models, adapters, nodes, vocabularies.
    (LookupError, 404),
    (DeadlineExceeded, 504),
    (ServerError, 503),
)

Handler = Callable[[Request], Awaitable[Any]]


class Refused(LMPoolError):
    """A request that is not looked at, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def json_answer(value: Any, status: int = 200) -> Response:
    """A value as JSON in ASCII."""
    return Response(to_json(value, separators=(",", ":")), status, media_type="application/json")


def answers(handle: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A route that sends what `handle` returns: a response as it is, and anything else as JSON.

    An error of lmpool becomes `{"error": text}` with the status that fits it.
    """

    async def route(request: Request) -> Response:
        try:
            answer = await handle(request)
            return answer if isinstance(answer, Response) else json_answer(answer)
        except Refused as error:
            return json_answer({"error": str(error)}, error.status)
        except LMPoolError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 502)
            return json_answer({"error": printable(_told(error))}, status)

    return route


def _told(error: LMPoolError) -> str:
    """What is said in a browser, where nobody can name a server."""
    if not isinstance(error, ServerUnreachable):
        return str(error)
    return f"`lmpool web` does not reach its server ({without_advice(error)}): this page goes on when it does"


async def read_body(request: Request, kind: type[T]) -> T:
    """The JSON of a request, checked against a class of msgspec.

    Raises:
        Refused: it is too large, or malformed; says where.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise Refused(413, f"a request of more than {MAX_BYTES} bytes: ask about a shorter text")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, printable(f"no such request: {error}")) from error

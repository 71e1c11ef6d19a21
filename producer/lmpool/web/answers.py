"""Helpers of all routes: read a request's JSON, and turn errors into responses."""

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
"""Max bytes of a request's body: a text for a page is much shorter."""

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (SettingsError, 400),
    (InvalidPrompt, 400),
    # Unknown models, adapters, nodes and vocabularies.
    (LookupError, 404),
    (DeadlineExceeded, 504),
    (ServerError, 503),
)

Handler = Callable[[Request], Awaitable[Any]]


class Refused(LMPoolError):
    """A refused request, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def json_answer(value: Any, status: int = 200) -> Response:
    """Return a value as JSON in ASCII."""
    return Response(to_json(value, separators=(",", ":")), status, media_type="application/json")


def answers(handle: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Make a route of `handle`: it sends a response unchanged and any other value as JSON.

    An `LMPoolError` becomes `{"error": text}` with a fitting status.
    """

    async def route(request: Request) -> Response:
        try:
            answer = await handle(request)
            return answer if isinstance(answer, Response) else json_answer(answer)
        except Refused as error:
            return json_answer({"error": str(error)}, error.status)
        except LMPoolError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 502)
            return json_answer({"error": printable(_shown(error))}, status)

    return route


def _shown(error: LMPoolError) -> str:
    """Return the text for a browser, whose user cannot name another server."""
    if not isinstance(error, ServerUnreachable):
        return str(error)
    return f"`lmpool web` cannot reach its server ({without_advice(error)}): this page continues when it can"


async def read_body(request: Request, kind: type[T]) -> T:
    """Read the JSON of a request into a msgspec class.

    Raises:
        Refused: it is too large or malformed.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise Refused(413, f"the request has more than {MAX_BYTES} bytes: shorten the text")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, printable(f"invalid request: {error}")) from error

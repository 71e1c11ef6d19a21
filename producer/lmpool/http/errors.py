"""Errors as responses: the HTTP status of each exception, and the format of errors in each dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.json import encode
from starlette.responses import Response

from lmpool import errors
from lmpool.broker.server import without_advice
from lmpool.web.guard import Refused

RETRY_AFTER_S = 1
"""Seconds until a client shall send a request again that exceeded a limit: most limits end within a second."""

_STATUS: dict[int, tuple[type[Exception], ...]] = {  # The first match counts: some classes are parents of others.
    400: (errors.SettingsError, errors.InvalidPrompt, errors.UnknownTokenizer, errors.AmbiguousModel),
    404: (errors.UnknownModel, errors.UnknownAdapter),
    429: (errors.QueueFull,),
    503: (errors.NoWorker, errors.ServerError),
    504: (errors.DeadlineExceeded,),
}
_KINDS = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "BadRequestError", 413: "BadRequestError", 429: "RateLimitError",
}  # fmt: skip


def openai_error(status: int, name: str, text: str) -> Any:
    """The format of OpenAI and vLLM."""
    kind = _KINDS.get(status, "InternalServerError")
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


def sglang_error(status: int, name: str, text: str) -> Any:
    """The format of SGLang."""
    return {"error": {"message": text}}


def trl_error(status: int, name: str, text: str) -> Any:
    """The format of FastAPI, with which TRL's server is written."""
    return {"detail": text}


def own_error(status: int, name: str, text: str) -> Any:
    """The format of lmpool's own routes: the name of the exception, as in `lmpool.errors`, and its text."""
    return {"error": {"type": name, "message": text}}


_SHAPES: dict[str, Callable[[int, str, str], Any]] = {
    "/generate": sglang_error,
    "/get_sequence_logprobs/": trl_error,
    "/v1/rows": own_error,
    "/v1/positions": own_error,
}
"""The paths whose errors do not have OpenAI's format -> a function of status, name of the exception, and text."""


def status_of(error: Exception) -> int:
    """The HTTP status of an exception."""
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, errors.UnknownModel) and error.is_loading:
        return 503
    return next((status for status, kinds in _STATUS.items() if isinstance(error, kinds)), 500)


def describe(path: str, error: Exception) -> Any:
    """An exception in the format of the dialect that a path belongs to."""
    text = str(error)
    if not isinstance(error, errors.LMPoolError):  # A bug, whose text helps only those who can read the log.
        text = f"the gateway failed with {type(error).__name__}; its log has the details"
    if isinstance(error, errors.ServerError):  # Advice on server URLs does not help a client of the gateway.
        text = f"the gateway cannot use its Redis server ({without_advice(error)})"
    shape = _SHAPES.get(path, openai_error)
    return shape(status_of(error), type(error).__name__, errors.printable(text, keep="\n"))


def error_response(path: str, error: Exception) -> Response:
    """The response for an exception. Statuses 429 and 503 have the header Retry-After."""
    status = status_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode(describe(path, error)), status, headers, "application/json")

"""Control access to the web service: the token, browsers' sessions, and protection against pages of other sites.

The routes use `answers` and `read_body`, which limit requests and turn errors into responses.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmpool import errors
from lmpool.broker.server import without_advice

T = TypeVar("T")

MAX_BYTES = 256 * 1024
"""Max bytes of a request's body; texts for a page are much shorter."""

HEALTH_PATHS = ("/healthz", "/readyz")
"""Paths for health probes, which need no token or session."""

KEY_HEADER = "X-Lmpool-Key"
"""HTTP header in which a page sends the key of its session."""

MAX_SESSIONS = 1000
"""Max sessions, to limit memory. A new session beyond the limit ends the oldest session."""

SESSION_S = 30 * 24 * 3600
"""Seconds until a browser must sign in again: 30 days."""

_SESSION_PATH, _SESSIONS_PATH = "/api/session", "/api/sessions"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,}")  # A shorter token could be guessed; headers exclude other characters.
_COOKIE = "lmpool-web"
_HOW = "sign in on the page with the token of `lmpool web`, or send Authorization: Bearer TOKEN"
_WRONG_TOKEN = (
    "the token is wrong: each start of `lmpool web` generates a new one unless LMPOOL_WEB_TOKEN or --token sets it; "
    f"{_HOW}"
)
_LINK_USED = (
    "this address was used before; it signs in one browser, once. Type the token that `lmpool web` printed below the "
    "address, or restart `lmpool web`"
)
_WRONG_LINK = (
    "the token in this address is not valid: only the address that `lmpool web` printed at its last start signs in, "
    "once. Type the token here; in an address it would stay in the browser's history"
)

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (errors.SettingsError, 400),
    (errors.InvalidPrompt, 400),
    # Status 404 for unknown models, adapters, nodes and vocabularies.
    (LookupError, 404),
    (errors.DeadlineExceeded, 504),
    (errors.ServerError, 503),
)


def check_token(token: str) -> None:
    """Raise `SettingsError` if a token is too short, or contains characters that a header cannot contain."""
    if token and not _TOKEN.fullmatch(token):
        text = "token: it must have at least 16 letters, digits and -_.~: try `openssl rand -hex 32`"
        raise errors.SettingsError(text)


class Refused(errors.LMPoolError):
    """A refused request, with its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def json_answer(value: Any, status: int = 200) -> Response:
    """Return a value as JSON in ASCII."""
    return Response(errors.to_json(value, separators=(",", ":")), status, media_type="application/json")


def answers(handle: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Make a route of `handle`: it sends a response unchanged and any other value as JSON.

    An `LMPoolError` becomes `{"error": text}` with an HTTP status that fits the error.
    """

    async def route(request: Request) -> Response:
        try:
            answer = await handle(request)
            return answer if isinstance(answer, Response) else json_answer(answer)
        except errors.LMPoolError as error:
            text, status = str(error), next((code for kind, code in _STATUS if isinstance(error, kind)), 502)
            if isinstance(error, errors.ServerUnreachable):  # Advice on server URLs does not help in a browser.
                text = f"`lmpool web` cannot reach its server ({without_advice(error)}): this page retries"
            return json_answer({"error": errors.printable(text)}, getattr(error, "status", status))

    return route


async def read_body(request: Request, kind: type[T]) -> T:
    """Read the JSON of a request into a msgspec class; raises `Refused` if the JSON is too large or malformed."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BYTES:
            raise Refused(413, f"the request has more than {MAX_BYTES} bytes: shorten the text")
    try:
        return msgspec.json.decode(bytes(data), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, errors.printable(f"invalid request: {error}")) from error


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The token, or the link token from the page's address."""

    token: str = ""
    link_token: str = ""


class Sessions:
    """The sessions of browsers, which are in memory: a restart of the service ends all sessions.

    A session has two secrets, a cookie and a key, and each request needs both. Scripts cannot read the cookie
    (`HttpOnly`), but browsers send it to all ports of the host, where other programs may read it. The key is in the
    storage of the page's origin, which pages on other ports cannot read; the page sends the key in a header.

    Attributes:
        token: the secret of browsers and programs.
        is_own_token: whether this process generated the token and must print it.
        link_token: part of an address that signs in one browser, once; "" unless `is_own_token`.
    """

    def __init__(self, token: str = "") -> None:
        self.is_own_token = not token
        self.token = token or secrets.token_urlsafe()
        self.link_token = secrets.token_urlsafe() if self.is_own_token else ""
        self._used_link_token = ""
        # Digest of a session's cookie -> (digest of its key, expiry). Because these are digests, the time of
        # a lookup reveals nothing about the secrets.
        self._open: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def begin(self, token: str = "", link_token: str = "") -> tuple[str, str]:
        """Sign a browser in; return the cookie and the key of the new session.

        An address may contain only the link token, which works once, because browsers keep addresses in their history.

        Raises:
            Refused: neither token is valid.
        """
        if not link_token:
            if not _is_equal(token, self.token):
                raise Refused(401, _WRONG_TOKEN)
        elif self.link_token and _is_equal(link_token, self.link_token):
            self._used_link_token, self.link_token = self.link_token, ""
        else:
            is_used = self._used_link_token and _is_equal(link_token, self._used_link_token)
            raise Refused(401, _LINK_USED if is_used else _WRONG_LINK)
        cookie, key = secrets.token_urlsafe(), secrets.token_urlsafe()
        self._open[_digest(cookie)] = _digest(key), time.monotonic() + SESSION_S
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return cookie, key

    def end(self, scope: Scope) -> None:
        """End the session of a request's browser."""
        self._open.pop(_digest(_sent_cookie(scope)), None)

    def is_program(self, scope: Scope) -> bool:
        """Whether a request has the token in its Authorization header."""
        scheme, _, bearer = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and _is_equal(bearer.strip(), self.token)

    def is_allowed(self, scope: Scope) -> bool:
        """Whether a request has the token, or both secrets of a session."""
        if self.is_program(scope):
            return True
        key, until = self._open.get(_digest(_sent_cookie(scope)), (b"", 0.0))
        shown = _digest(Headers(scope=scope).get(KEY_HEADER, ""))
        return hmac.compare_digest(shown, key) and time.monotonic() < until

    @property
    def routes(self) -> list[Route]:
        """`POST /api/session` signs in, `DELETE /api/session` signs out, `DELETE /api/sessions` ends all sessions."""

        async def sign_in(request: Request) -> Response:
            shown = await read_body(request, SignIn)
            cookie, key = self.begin(shown.token, shown.link_token)
            self.end(request.scope)
            response, name = json_answer({"key": key}), _cookie_name(request.scope)
            # Any client may claim that a proxy ends TLS: a false claim only makes the client's own cookie unusable.
            forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
            is_encrypted = "https" in (request.url.scheme, forwarded)
            response.set_cookie(name, cookie, max_age=SESSION_S, httponly=True, samesite="strict", secure=is_encrypted)
            return response

        async def sign_out(request: Request) -> dict[str, str]:
            self.end(request.scope)
            if request.scope["path"] == _SESSIONS_PATH:
                self._open.clear()
            return {}

        ending = [Route(path, answers(sign_out), methods=["DELETE"]) for path in (_SESSION_PATH, _SESSIONS_PATH)]
        return [Route(_SESSION_PATH, answers(sign_in), methods=["POST"]), *ending]


class Guard:
    """Refuses requests without token or session, and adds security headers.

    The files of the pages are public: these files contain no data, and a browser needs them to sign in.

    A page of another site can make a browser send requests here with the session's cookie. So a request without the
    token must name an allowed host, which excludes other sites' DNS names that point to this address. A request that
    changes data or uses the pool must come from a page of this service. Browsers never send a Bearer token on their
    own, so probes and autoscalers may use any host name.

    Args:
        app: the application to protect.
        sessions: the token and the sessions of browsers.
        public: paths of the pages' files.
        hosts: allowed host names, in addition to `localhost` and IP addresses.
    """

    def __init__(self, app: ASGIApp, sessions: Sessions, public: Collection[str], hosts: Collection[str]) -> None:
        self._app = app
        self._sessions = sessions
        self._public = frozenset(public)
        self._hosts = frozenset({"localhost", *(host.lower() for host in hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_strictly(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = None if scope["path"] in HEALTH_PATHS else self._refuse(scope)
        await (refusal or self._app)(scope, receive, send_strictly)

    def _refuse(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request; None if the request is allowed."""
        if self._sessions.is_program(scope):
            return None
        headers, is_reading = Headers(scope=scope), scope["method"] in ("GET", "HEAD")
        name, _ = host_and_port(headers.get("host", ""))
        if name not in self._hosts and not is_address(name):
            text = "this host name is not allowed: start `lmpool web` with --allow-host NAME to allow it"
            return PlainTextResponse(text, 421)
        is_signing_in = scope["path"] == _SESSION_PATH and scope["method"] == "POST"
        is_public = is_signing_in or (is_reading and scope["path"] in self._public)
        if not is_public and not self._sessions.is_allowed(scope):
            text = _WRONG_TOKEN if "authorization" in headers else f"the token is missing: {_HOW}"
            if _sent_cookie(scope):
                text = f"this browser is not signed in: {_HOW}"
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        origin = headers.get("origin", "").partition("://")[2]
        if not is_reading and origin.lower() != headers["host"].lower():
            return PlainTextResponse("this request must come from a page of this service", 403)
        return None


def is_address(name: str) -> bool:
    """Whether a host is an IP address; all addresses are allowed: another site can point only a DNS name here."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_equal(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), secret.encode())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _sent_cookie(scope: Scope) -> str:
    # `SimpleCookie` would drop all cookies if another program of the host had set a malformed cookie.
    return cookie_parser(Headers(scope=scope).get("cookie", "")).get(_cookie_name(scope), "")


def _cookie_name(scope: Scope) -> str:
    """Return a cookie name that only this service uses, because browsers send cookies to all ports of a host.

    The name contains two ports: services behind one proxy listen on different ports, and browsers reach services behind
    tunnels or in containers on different ports. A name made from the token would leave one cookie per start.
    """
    _, own_port = scope.get("server") or ("", None)
    _, requested_port = host_and_port(Headers(scope=scope).get("host", ""))
    return f"{_COOKIE}-{own_port or 0}-{requested_port}"


def host_and_port(host: str) -> tuple[str, int]:
    """Return the lowercase name and the port of a `Host` header; "" for a missing name, 0 for a missing port."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower(), parts.port or 0
    except ValueError:
        return "", 0

"""Who may ask: the token, the sessions of browsers, and what pages of other sites may not do."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmpool.web.answers import Refused, answers, json_answer, read_body

HEALTH_PATHS = ("/healthz", "/readyz")
"""Paths that need no token: probes have none."""

KEY_HEADER = "X-Lmpool-Key"
"""Header in which a page sends the key of its session."""

MAX_SESSIONS = 1000
"""Browsers that are signed in at once; the one that signed in first is signed out for one more. Bounds the memory."""

SESSION_S = 30 * 24 * 3600
"""Seconds until a browser must sign in again."""

_SESSION_PATH = "/api/session"
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
_COOKIE = "lmpool-web"
_HOW = "sign in on the page with the token of `lmpool web`, or send it as Authorization: Bearer TOKEN"
_NO_TOKEN = f"a token is needed: {_HOW}"
_WRONG_TOKEN = (
    "the token is wrong: each start of `lmpool web` makes a new one, unless LMPOOL_WEB_TOKEN or --token sets it; "
    f"{_HOW}"
)
_NOT_SIGNED_IN = f"this browser is not signed in, or was signed out: {_HOW}"
_LINK_USED = (
    "this address was used before: it signs in one browser, once. Type the token that `lmpool web` printed below the "
    "address, or start `lmpool web` again"
)
_WRONG_LINK = (
    "the token in this address signs no browser in: only the address that `lmpool web` printed at its last start does, "
    "once. Type the token here; an address with it would stay in the browser's history"
)


def new_token() -> str:
    """256 random bits in characters that a URL and a header accept."""
    return secrets.token_urlsafe(32)


class Sessions:
    """The browsers that are signed in. They are kept in memory, so a restart of the service signs all of them out.

    A session has two secrets, and each request needs both. No script reads the cookie (`HttpOnly`), but browsers send
    it to every port of the host, where another program may collect it. The key is in the storage of the page's origin,
    which other ports do not read, and the page sends it in a header.

    Args:
        token: the secret that signs browsers in and that programs send; "" to make one.

    Attributes:
        token: the secret.
        is_own_token: whether it was made here, so that it must be shown to be known.
        link_token: signs in one browser, once, as part of an address; "" when `is_own_token` is False.
    """

    def __init__(self, token: str = "") -> None:
        self.is_own_token = not token
        self.token = token or new_token()
        self.link_token = new_token() if self.is_own_token else ""
        self._used_link_token = ""
        # Digest of the cookie -> digest of the key, and until when. Digests, because the time of a
        # look-up reveals nothing about the secret.
        self._open: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def begin(self, token: str = "", link_token: str = "") -> tuple[str, str]:
        """Sign a browser in; returns its cookie and its key.

        Args:
            token: the token, as typed on the page.
            link_token: the token in the address of the page. Only the unused link token will do: the browser's history
                keeps addresses.

        Raises:
            Refused: neither will do.
        """
        if not link_token:
            if not _is_equal(token, self.token):
                raise Refused(401, _WRONG_TOKEN)
        elif self._used_link_token and _is_equal(link_token, self._used_link_token):
            raise Refused(401, _LINK_USED)
        elif self.link_token and _is_equal(link_token, self.link_token):
            self._used_link_token, self.link_token = self.link_token, ""
        else:
            raise Refused(401, _WRONG_LINK)
        cookie, key = new_token(), new_token()
        self._open[_digest(cookie)] = _digest(key), time.monotonic() + SESSION_S
        while len(self._open) > MAX_SESSIONS:
            self._open.popitem(last=False)
        return cookie, key

    def end(self, scope: Scope) -> None:
        """Sign out the browser that sends a request."""
        self._open.pop(_digest(_sent_cookie(scope)), None)

    def end_all(self) -> None:
        """Sign all browsers out."""
        self._open.clear()

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
        """`POST /api/session` signs in, `DELETE` signs out, and `DELETE /api/sessions` signs all browsers out."""
        return [
            Route(_SESSION_PATH, answers(self._sign_in), methods=["POST"]),
            Route(_SESSION_PATH, answers(self._sign_out), methods=["DELETE"]),
            Route("/api/sessions", answers(self._sign_all_out), methods=["DELETE"]),
        ]

    async def _sign_in(self, request: Request) -> Response:
        shown = await read_body(request, SignIn)
        cookie, key = self.begin(shown.token, shown.link_token)
        self.end(request.scope)
        response = json_answer({"key": key})
        response.set_cookie(
            _cookie_name(request.scope),
            cookie,
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=_is_encrypted(request),
        )
        return response

    async def _sign_out(self, request: Request) -> dict[str, str]:
        self.end(request.scope)
        return {}

    async def _sign_all_out(self, _: Request) -> dict[str, str]:
        self.end_all()
        return {}


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The token, or the one in the address of the page."""

    token: str = ""
    link_token: str = ""


class Guard:
    """Refuses requests without a token or a session, and adds the headers that keep a browser strict.

    The files of the pages are public: they hold no data, and a browser needs them to sign in.

    A page of another site can have a browser send requests here, with its cookie. So a request without the token must
    name a host that is allowed (a name that another site has pointed at this address is refused), and one that changes
    anything, or makes the pool work, must come from a page of this service. A browser sends no Bearer token on its own,
    so probes and autoscalers may use any name of the service.

    Args:
        app: the application to guard.
        sessions: the token, and the browsers that are signed in.
        public: paths of the pages' files.
        hosts: names by which browsers may call this service, next to IP addresses.
    """

    def __init__(
        self, app: ASGIApp, sessions: Sessions, public: Collection[str] = (), hosts: Collection[str] = ()
    ) -> None:
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
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = None if scope["path"] in HEALTH_PATHS else self._refuse(scope)
        await (refusal or self._app)(scope, receive, send_strictly)

    def _refuse(self, scope: Scope) -> Response | None:
        """The response to a request that is refused; None for one that is allowed."""
        if self._sessions.is_program(scope):
            return None
        headers, is_reading = Headers(scope=scope), scope["method"] in ("GET", "HEAD")
        if not self._is_ours(headers.get("host", "")):
            text = "this service is not called by that name: start it with --allow-host NAME to have it answer"
            return PlainTextResponse(text, 421)
        is_signing_in = scope["path"] == _SESSION_PATH and scope["method"] == "POST"
        is_public = is_signing_in or (is_reading and scope["path"] in self._public)
        if not is_public and not self._sessions.is_allowed(scope):
            text = _NOT_SIGNED_IN if _sent_cookie(scope) else _WRONG_TOKEN if "authorization" in headers else _NO_TOKEN
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        if not is_reading and not _is_same_origin(headers):
            return PlainTextResponse("this must come from a page of this service", 403)
        return None

    def _is_ours(self, host: str) -> bool:
        name, _ = _host_and_port(host)
        if name in self._hosts:
            return True
        try:
            # An address is no name that another site could point here.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_equal(shown: str, secret: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), secret.encode())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _sent_cookie(scope: Scope) -> str:
    # `SimpleCookie` would read none where another program of the host has set one that it takes for malformed.
    return cookie_parser(Headers(scope=scope).get("cookie", "")).get(_cookie_name(scope), "")


def _is_encrypted(request: Request) -> bool:
    """Whether the browser speaks TLS, to this service or to a proxy that says so.

    The header is accepted from any client: a false one costs its sender only the use of its own cookie.
    """
    forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return request.url.scheme == "https" or forwarded == "https"


def _cookie_name(scope: Scope) -> str:
    """The name of the cookie of this service alone, for browsers send cookies to all ports of a host.

    By two ports: the one that this service listens at, which several behind one proxy do not share, and the one that
    the browser asks, which several tunnels or containers do not, though all of them listen at the same. Not by the
    token: then every start would leave another cookie behind.
    """
    _, listens = scope.get("server") or ("", None)
    _, asked = _host_and_port(Headers(scope=scope).get("host", ""))
    return f"{_COOKIE}-{listens or 0}-{asked}"


def _host_and_port(host: str) -> tuple[str, int]:
    """What a `Host` names, in small letters, and its port; "" and 0 where it does not."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "").lower(), parts.port or 0
    except ValueError:
        return "", 0


def _is_same_origin(headers: Headers) -> bool:
    origin = headers.get("origin", "")
    try:
        return bool(origin) and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False

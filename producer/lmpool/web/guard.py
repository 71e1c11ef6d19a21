"""Who may ask: the token, the cookie that it becomes, and what pages of other sites may not do."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH_PATHS = ("/healthz", "/readyz")
"""What anybody may ask: probes have no token."""

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
_COOKIE_S = 30 * 24 * 3600
_HOW = "open the URL that `lmpool web` has printed last, or send Authorization: Bearer TOKEN"
_NO_TOKEN = f"a token is needed: {_HOW}"
_WRONG_TOKEN = (
    "the token is wrong: each start of `lmpool web` makes a new one, unless LMPOOL_WEB_TOKEN or --token says which; "
    f"{_HOW}"
)
# What a cookie is made for, so that it is nothing else that the token may ever be the key of.
_LABEL = b"lmpool web: cookie"


class Guard:
    """Lets those in who know the token, and gives every answer the headers that keep a browser strict.

    A page of another site can have a browser send requests here, with its cookie. So what comes with a cookie must name
    a host of ours (a name that somebody has pointed at this address is refused), and what changes anything, or makes
    the pool work, must come from a page of ours. A Bearer token is nothing that a browser sends by itself: for it both
    checks are left out, so probes and scalers may use whatever name they know the service by.

    Args:
        app: what is guarded.
        token: the token.
        hosts: names by which browsers may call this service, beside IP addresses of its own machine.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = token.encode()
        # Whoever reads a cookie, in a browser's files or a proxy's log, has no token for programs; and a new token ends
        # all cookies of the old one.
        self._cookie = hmac.digest(self._token, _LABEL, hashlib.sha256).hex()
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
        """The answer to a request that goes no further; None for one that does."""
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if not self._is_ours(headers.get("host", "")):
            text = "this service is not called by that name: start it with --allow-host NAME to have it answer"
            return PlainTextResponse(text, 421)
        asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if any(name == "token" and self._is_token(value) for name, value in asked):
            return self._with_cookie(scope, [pair for pair in asked if pair[0] != "token"])
        has_token = scheme.lower() == "bearer" or any(name == "token" for name, _ in asked)
        shown = _cookie(headers.get("cookie", ""), _cookie_name(scope))
        if not hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), self._cookie.encode()):
            text = _WRONG_TOKEN if has_token or shown else _NO_TOKEN
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers):
            return PlainTextResponse("this must come from a page of this service", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self._token)

    def _is_ours(self, host: str) -> bool:
        name, _ = _host_and_port(host)
        if name in self._hosts:
            return True
        try:
            # No name, so nobody's to point elsewhere.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _with_cookie(self, scope: Scope, left: list[tuple[str, str]]) -> Response:
        """To the same address without the token, which is not to stay in the history or in a picture of the screen."""
        query = f"?{urlencode(left)}" if left else ""
        # Only the last part of the path: a whole one that begins with two slashes would be another host.
        name = scope["path"].rpartition("/")[2]
        response = RedirectResponse(f"./{name}{query}", 303)
        response.set_cookie(
            _cookie_name(scope),
            self._cookie,
            max_age=_COOKIE_S,
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
        )
        return response


def _cookie_name(scope: Scope) -> str:
    """The name of the cookie of this service alone, for browsers send cookies to all ports of a host.

    By two ports: the one that this service listens at, which several behind one proxy do not share, and the one that
    the browser asks, which several tunnels or containers do not, though all of them listen at the same. Not by the
    token: then every start would leave another cookie behind.
    """
    _, listens = scope.get("server") or ("", None)
    _, asked = _host_and_port(Headers(scope=scope).get("host", ""))
    return f"{_COOKIE}-{listens or 0}-{asked}"


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


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

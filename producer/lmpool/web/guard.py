"""Who may ask: the token, the cookie that it becomes, and what pages of other sites may not do."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "lmpool-web"
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
_COOKIE_S = 30 * 24 * 3600


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
        if not self._is_token(_cookie(headers.get("cookie", ""))):
            text = "a token is needed: open the URL that `lmpool web` has printed, or send Authorization: Bearer TOKEN"
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        if scope["method"] not in ("GET", "HEAD") and not _is_same_origin(headers):
            return PlainTextResponse("this must come from a page of this service", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogatepass"), self._token)

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
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
            COOKIE,
            self._token.decode(),
            max_age=_COOKIE_S,
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
        )
        return response


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_same_origin(headers: Headers) -> bool:
    origin = headers.get("origin", "")
    try:
        return bool(origin) and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False

"""Access control of `lmpool web`: it refuses requests with a wrong token, session, host name, origin or size."""

from __future__ import annotations

import contextlib
import functools
import http.server
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, expect

from lmpool.web import guard, server
from tests.support.pool import DEADLINE_S, Pool, run_lmpool, until
from tests.web.browser import CHROMIUM, CHROMIUM_ARGUMENTS
from tests.web.service import TOKEN, Stream, WebService, static_files

GET = ("/api/stream", "/api/history", "/api/models", "/api/settings", "/api/dead", "/api/demand/syn", "/nothing")
POST = ("/api/text", "/api/row", "/api/trie", "/api/dead/retry", "/api/dead/drop")


@pytest.fixture
def service(pool: Pool) -> WebService:
    """A service of a pool without workers."""
    return WebService(pool)


def end(service: WebService) -> None:
    service.process.signal(signal.SIGINT)
    service.process.wait()


def test_requests_without_the_token_are_refused(service: WebService) -> None:
    for token in (None, "", TOKEN[:-1], TOKEN + "x", "é" * 20):
        for path in GET:
            assert service.request(path, token=token and token.encode().decode("latin-1")).status == 401, (path, token)
        for path in POST:
            assert service.request(path, {}, token=token and token.encode().decode("latin-1")).status == 401, (
                path,
                token,
            )
        for path in ("/api/session", "/api/sessions"):
            answer = service.request(path, token=token and token.encode().decode("latin-1"), method="DELETE")
            assert answer.status == 401, (path, token)
    for wrong in ("", TOKEN[:-1], TOKEN + "x", "é" * 20):
        assert service.sign_in(wrong).status == 401, wrong
        assert service.sign_in(wrong, field="link_token").status == 401, wrong
    assert service.sign_in(TOKEN, field="link_token").status == 401
    assert service.request("/api/models", token=None).body.startswith(b"the token is missing: ")
    wrong_token = b"the token is wrong: each start of `lmpool web` generates a new one unless LMPOOL_"
    assert service.request("/api/models", token="x").body.startswith(wrong_token)
    # The service refuses a token in an address, which would stay in the browser's history and a proxy's log.
    assert service.request(f"/api/models?token={TOKEN}", token=None).status == 401
    assert service.request("/healthz", token=None).status == 200
    assert service.request("/readyz", token=None).status in (200, 503)
    assert TOKEN not in service.process.text


def test_a_generated_token_is_printed_and_a_configured_one_is_not(pool: Pool) -> None:
    assert TOKEN not in WebService(pool).process.text
    made = WebService(pool, token=None)
    (token,) = re.findall(r"with the token (\S+)", made.process.text)
    assert made.request("/api/models", token=token).status == 200


def test_the_address_signs_in_one_browser_once(pool: Pool) -> None:
    service = WebService(pool, token=None)
    link_token = service.url.partition("?token=")[2]
    assert service.request("/api/models", token=link_token).status == 401, "the link token is not valid for programs"
    (token,) = re.findall(r"with the token (\S+)", service.process.text)
    in_address = service.sign_in(token, field="link_token")
    assert (in_address.status, "stay in the browser's history" in in_address.json["error"]) == (401, True)
    assert service.sign_in(link_token).status == 401
    assert service.sign_in(link_token, field="link_token").status == 200
    second = service.sign_in(link_token, field="link_token")
    assert (second.status, second.json["error"].partition(";")[0]) == (401, "this address was used before")
    assert service.sign_in(token).status == 200, "other browsers sign in with the token"


def test_a_request_needs_both_secrets_of_a_session(service: WebService) -> None:
    session, other = service.session(), service.session()
    assert service.request("/api/models", token=None, **session).status == 200
    name, _, cookie = session["Cookie"].partition("=")
    key = session["X_Lmpool_Key"]
    for wrong in (
        {"Cookie": session["Cookie"]},
        {"X_Lmpool_Key": key},
        {**session, "X_Lmpool_Key": key[:-1]},
        {**session, "X_Lmpool_Key": other["X_Lmpool_Key"]},
        {**session, "X_Lmpool_Key": cookie},
        {**session, "Cookie": f"{name}={key}"},
        {**session, "Cookie": f"{name}={TOKEN}"},
        {**session, "Cookie": f"{name}="},
    ):
        answer = service.request("/api/models", token=None, **wrong)
        assert answer.status == 401, wrong
    assert service.request("/api/models", token=cookie).status == 401
    assert service.request("/api/models", token=key).status == 401
    assert service.sign_in(cookie).status == service.sign_in(key).status == 401


def test_scripts_cannot_read_the_cookie_and_it_is_secure_with_tls(service: WebService) -> None:
    plain = service.sign_in().headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(plain)
    assert "Secure" not in plain
    # Sign in through a proxy that terminates TLS: the page's origin is https, the service's is http.
    origin = f"https://127.0.0.1:{service.port}"
    assert "; Secure" in service.sign_in(X_Forwarded_Proto="https", Origin=origin).headers["set-cookie"]


def test_signing_out_or_stopping_the_service_ends_sessions(pool: Pool) -> None:
    service = WebService(pool)
    sessions = [service.session() for _ in range(3)]
    own = {"Origin": service.base}

    def allowed() -> list[bool]:
        return [service.request("/api/models", token=None, **session).status == 200 for session in sessions]

    assert service.request("/api/session", token=None, method="DELETE", **sessions[0]).status == 403, (
        "the request has no origin"
    )
    watching = Stream(service, **sessions[0])
    watching.frame()
    assert service.request("/api/session", token=None, method="DELETE", **sessions[0], **own).status == 200
    assert allowed() == [False, True, True]
    watching.read_to_end()
    assert service.request("/api/sessions", method="DELETE").status == 200
    assert allowed() == [False, False, False]
    session = service.session()
    end(service)
    again = WebService(pool, port=service.port)
    assert again.request("/api/models", token=None, **session).status == 401


def test_one_session_too_many_ends_the_oldest_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_SESSIONS", 2)
    sessions = guard.Sessions(TOKEN)
    begun = [sessions.begin(TOKEN) for _ in range(3)]
    scopes = [
        {"type": "http", "headers": [(b"cookie", f"lmpool-web-0-0={c}".encode()), (b"x-lmpool-key", k.encode())]}
        for c, k in begun
    ]
    assert [sessions.is_allowed(scope) for scope in scopes] == [False, True, True]


def test_services_on_one_host_have_different_cookies(pool: Pool) -> None:
    services = [WebService(pool, "--allow-host", "pool.example", token=token) for token in (TOKEN, TOKEN[::-1])]
    # Reach the services at two ports of one host, then under one host name of a proxy.
    for hosts in ([f"127.0.0.1:{service.port}" for service in services], ["pool.example"] * 2):
        sessions = [service.session(Host=host) for service, host in zip(services, hosts, strict=True)]
        # A browser sends both cookies to both services: it separates cookies by host, but not by port.
        both = "; ".join(session["Cookie"] for session in sessions)
        for service, session, host in zip(services, sessions, hosts, strict=True):
            sent = {**session, "Cookie": both, "Host": host}
            assert service.request("/api/models", token=None, **sent).status == 200, host
    # Reach services through tunnels at ports 1 and 2 of localhost: their cookies must have different names.
    names = {services[0].session(Host=f"localhost:{port}")["Cookie"].partition("=")[0] for port in (1, 2)}
    assert len(names) == 2


def test_a_malformed_cookie_of_another_program_ends_no_session(service: WebService) -> None:
    session = service.session()
    for foreign in ('settings={"a": 1}', "a b=c", '"', "=", "x;;"):
        for cookies in (f"{foreign}; {session['Cookie']}", f"{session['Cookie']}; {foreign}"):
            sent = {**session, "Cookie": cookies}
            assert service.request("/api/models", token=None, **sent).status == 200, cookies


def test_other_host_names_are_refused(pool: Pool) -> None:
    service = WebService(pool, "--allow-host", "pool.example")
    for host, status in {
        "127.0.0.1": 200,
        f"localhost:{service.port}": 200,
        "[::1]:80": 200,
        "Pool.example": 200,
        "evil.example": 421,
        "localhost,evil": 421,
        "127.0.0.1.evil.example": 421,
        "[": 421,
        "": 421,
    }.items():
        assert service.request("/", token=None, Host=host).status == status, host
        assert service.sign_in(Host=host).status == status, host
    # The service accepts any host name with the token in a header, because pages of other sites cannot send it.
    assert service.request("/", Host="evil.example").status == 200


def test_requests_from_pages_of_other_sites_are_refused(service: WebService) -> None:
    session = service.session()
    for path in POST:
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{service.port + 1}", "http://["):
            assert service.request(path, {}, token=None, Origin=origin, **session).status == 403, (path, origin)
        assert service.request(path, {}, token=None, **session).status == 403
        assert service.request(path, b"{}", token=None, Origin=service.base, **session).status in (400, 403)
    refused = service.request("/api/text", {}, token=None, Origin=service.base, **session)
    assert "invalid request" in refused.json["error"]
    assert service.sign_in(Origin="http://evil.example").status == 403


def test_every_response_has_the_security_headers(service: WebService) -> None:
    paths = ("/", "/nothing", "/healthz", "/api/models", "/api/settings")
    for answer in [service.request(path, token=token) for path in paths for token in (TOKEN, None)]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "cache-control" in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/uplot/../../app.py",
        "/static/%00",
        "/static/",
        "/static/pool.html/",
        "/etc/passwd",
        "/" + "a" * 5000,
        "/healthz/../api/models",
        "//healthz",
        "/healthz%2f..%2fapi%2fmodels",
        "//evil.example/",
        "/%0d%0aX-Evil:1",
        "/%5C%5Cevil.example",
    ],
)
def test_no_path_reaches_other_files(service: WebService, path: str) -> None:
    answer = service.request(path)
    assert answer.status in (307, 404)
    assert b"import" not in answer.body
    assert "x-evil" not in answer.headers
    assert "evil.example" not in answer.headers.get("location", "").partition("?")[0].removeprefix(service.base)
    assert service.request(path, token=None).status == 401


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "http://x/api/models", {}, 421),
        ("TRACE", "/", {}, 401),
        ("OPTIONS", "/api/row", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}, 401),
        ("HEAD", "/api/models", {}, 401),
        ("GET", "/api/stream", {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Key": "x"}, 401),
        ("POST", "/", {}, 401),
    ],
)
def test_unusual_requests_are_refused(
    service: WebService, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = service.request(path, token=None, method=method, **headers)
    assert answer.status == status
    assert not any(name.startswith("access-control-") for name in answer.headers)


class Hostile(http.server.BaseHTTPRequestHandler):
    """A hostile web site, which records the cookies that it receives."""

    page = ""
    cookies: list[str]

    def do_GET(self) -> None:
        """Send the page."""
        self.cookies.append(self.headers.get("Cookie", ""))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.page.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def hostile_site(host: str, page: str) -> Iterator[tuple[str, list[str]]]:
    """Run a site at an address of this machine; return its URL and the list of cookies that it receives."""
    cookies: list[str] = []
    handler = type("Site", (Hostile,), {"page": page, "cookies": cookies})
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}/", cookies
        finally:
            server.shutdown()
            thread.join()


ATTACKS = """<iframe src="BASE/"></iframe><script>
const tried = (path, options) => fetch("BASE" + path, { credentials: "include", ...options });
const outcome = (fetching) => fetching.then((answer) => answer.type + answer.status, () => "blocked");
window.done = Promise.all([
  outcome(tried("/api/models")),
  outcome(tried("/api/session", { method: "POST", body: '{"token":"x"}' })),
  outcome(tried("/api/sessions", { method: "DELETE" })),
  outcome(tried("/api/row", { method: "POST", headers: { "X-Lmpool-Key": "x" }, body: "{}" })),
  outcome(tried("/api/dead/drop", { method: "POST", mode: "no-cors", body: '{"model":"syn","ids":["1-1"]}' })),
]);
</script>"""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_page_of_another_port_or_site_can_read_nothing(pool: Pool, browser: Browser, host: str) -> None:
    service = WebService(pool, "--allow-changes")
    page = ATTACKS.replace("BASE", service.base)
    with hostile_site(host, page) as (url, cookies), contextlib.closing(browser.new_context()) as context:
        signed_in = context.new_page()
        signed_in.goto(f"{service.base}/")
        signed_in.get_by_label("Token", exact=True).fill(TOKEN)
        signed_in.get_by_role("button", name="Sign in").click()
        expect(signed_in.locator("#state")).to_have_text("live")
        other = context.new_page()
        other.goto(url)
        assert other.evaluate("window.done") == ["blocked"] * 5
        assert [frame.url for frame in other.frames[1:]] != [f"{service.base}/"], (
            "other sites cannot show the page in a frame"
        )
        assert other.evaluate("Object.keys(localStorage)") == []
        # On one host, the browser has sent the cookie to the hostile site's port; the cookie alone gives no access.
        (cookie,) = context.cookies()
        sent = "; ".join(cookies)
        assert (cookie["value"] in sent) == (host == "127.0.0.1")
        replayed = f"{cookie['name']}={cookie['value']}"
        stolen = {"Cookie": replayed, "Origin": service.base}
        assert service.request("/api/models", token=None, **stolen).status == 401
        assert service.request("/api/row", {"model": "syn", "ids": [1]}, token=None, **stolen).status == 401
        as_key = {"Cookie": replayed, "X_Lmpool_Key": cookie["value"]}
        assert service.request("/api/models", token=None, **as_key).status == 401


def test_no_valid_token_stays_in_the_files_of_a_browser(pool: Pool, browser: Browser, tmp_path: Path) -> None:
    service = WebService(pool, token=None)
    (token,) = re.findall(r"with the token (\S+)", service.process.text)
    link_token = service.url.partition("?token=")[2]
    launched = browser.browser_type.launch_persistent_context(
        tmp_path / "profile", executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS
    )
    with contextlib.closing(launched) as context:
        page = context.new_page()
        page.goto(service.url)
        expect(page.locator("#state")).to_have_text("live")
        assert page.url == f"{service.base}/"
        # Sign out, then sign in again by typing the token.
        page.get_by_role("button", name="Sign out", exact=True).click()
        page.get_by_label("Token", exact=True).fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#state")).to_have_text("live")
        page.goto(f"{service.base}/explorer")
    files = [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert [path.name for path in files if token.encode() in path.read_bytes()] == []
    assert service.sign_in(link_token, field="link_token").status == 401, "the link token in the history is used up"


def test_pages_have_no_inline_script_or_style_and_name_no_other_host() -> None:
    for file in static_files():
        text = file.read_text("utf-8")
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)) - {"http://www.w3.org"}
        assert hosts == set(), file.name
        assert "innerHTML" not in text
        if file.suffix == ".html":
            assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text) == [], file.name


def test_a_weak_token_and_a_port_in_use_are_refused(service: WebService) -> None:
    done = run_lmpool("web", "--token", "short")
    assert done.returncode == 2
    assert done.stderr.startswith("lmpool: --token: it must have at least 16 ")
    done = run_lmpool("web", "--token", TOKEN + "; Domain=evil.example")
    assert done.returncode == 2
    done = run_lmpool("web", "--port", str(service.port))
    assert done.stderr.startswith(
        f"lmpool: --port: cannot listen on 127.0.0.1:{service.port}: another program uses it. "
    )
    assert (done.stderr.count(str(service.port)), "or pass --port N" in done.stderr) == (1, True)


def test_idle_connections_are_closed_when_there_are_too_many(service: WebService) -> None:
    with contextlib.ExitStack() as stack:
        stream = Stream(service)
        stack.callback(stream.close)
        for number in range(server.MAX_CONNECTIONS + 200):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), DEADLINE_S))
            # Send nothing, a part of a request's head, or a head without its body.
            head = "POST /api/session HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            connection.sendall(("", "GET /", head)[number % 3].encode())
        assert service.request("/healthz").status == 200
        assert service.request("/api/models").status == 200
        open_now = len(list(Path(f"/proc/{service.process.process.pid}/fd").iterdir()))
        assert open_now < server.MAX_CONNECTIONS + 100, "other descriptors remain for Redis and files"
        before = stream.frame()["number"]
        assert stream.frame()["number"] > before, "the page still gets frames"


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
WITH_TOKEN = HEAD + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


@contextlib.contextmanager
def served(app: Any) -> Iterator[Any]:
    """Serve an application with the connection limits of `lmpool web`; return the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        protocol: Any = functools.partial(server.HttpConnection, guard.Sessions(TOKEN).is_allowed)
        serving = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_level="error"))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            serving.should_exit = True
            thread.join()


async def answer_none(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize(
    ("limit", "request_sent"), [("request_s", HEAD), ("request_s", HEAD + b"\r\n"), ("response_s", WITH_TOKEN)]
)
def test_a_request_and_its_response_have_time_limits(
    monkeypatch: pytest.MonkeyPatch, limit: str, request_sent: bytes
) -> None:
    monkeypatch.setattr(server.HttpConnection, limit, 0.2)
    with served(answer_none) as address, socket.create_connection(address, DEADLINE_S) as connection:
        connection.sendall(request_sent)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b"", "the service closes the connection"


def test_connections_without_token_are_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.HttpConnection, "max_connections", 3)
    arrived = threading.Semaphore(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        arrived.release()
        await answer_none(scope, receive, send)

    with served(app) as address, contextlib.ExitStack() as stack:

        def connect(request: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(address, DEADLINE_S))
            connection.sendall(request)
            assert arrived.acquire(timeout=DEADLINE_S), "the connection is accepted"
            return connection

        first = connect(WITH_TOKEN)
        without = [connect(HEAD + b"\r\n") for _ in range(2)]
        others = [connect(WITH_TOKEN) for _ in range(2)]
        for connection in without:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b"", "the service closes the connection"
        for connection in (first, *others):
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def is_listening(service: WebService) -> bool:
    """Whether the service accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", service.port), 1).close()
    except ConnectionError:
        return False
    return True


def test_a_second_ctrl_c_ends_the_service_without_a_traceback(service: WebService) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        head = f"POST /api/text HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n"
        # Never send the body: after the response "100 Continue", the service waits for the body.
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        service.process.signal(signal.SIGINT)
        until(lambda: not is_listening(service), "the service has received the first signal")
        service.process.signal(signal.SIGINT)
        assert service.process.wait() == 130
    assert "Traceback" not in service.process.text


def test_ctrl_c_ends_the_service_while_a_page_watches(service: WebService) -> None:
    stream = Stream(service)
    stream.frame()
    service.process.signal(signal.SIGINT)
    assert service.process.wait() in (0, 130)
    assert "Traceback" not in service.process.text
    stream.close()

"""Who may ask `lmpool web`, by which name, and from which page; whatever else is refused."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from tests.support.pool import Pool, run_lmpool, until
from tests.web.service import TOKEN, Stream, WebService, static_files

GET = ("/", "/explorer", "/static/pool.js", "/api/stream", "/api/history", "/api/models", "/api/settings", "/api/dead")
POST = ("/api/text", "/api/row", "/api/trie", "/api/dead/retry", "/api/dead/drop")


@pytest.fixture
def service(pool: Pool) -> WebService:
    """One without workers."""
    return WebService(pool)


def test_nothing_is_told_without_the_token(service: WebService) -> None:
    for token in (None, "", TOKEN[:-1], TOKEN + "x", "é" * 20):
        for path in GET:
            assert service.ask(path, token=token and token.encode().decode("latin-1")).status == 401, (path, token)
        for path in POST:
            assert service.ask(path, {}, token=token and token.encode().decode("latin-1")).status == 401, (path, token)
    assert service.ask(f"/?token={TOKEN[:-1]}", token=None).status == 401
    name, _, value = service.cookie().partition("=")
    for wrong in ("", "wrong", value[:-1], value + "0", "é".encode().decode("latin-1"), TOKEN):
        assert service.ask("/", token=None, Cookie=f"{name}={wrong}").status == 401, wrong
    # Whoever has one is told that it is wrong, and why that may be.
    assert service.ask("/", token=None).body.startswith(b"a token is needed: ")
    for answer in (service.ask("/", token="x"), service.ask("/", token=None, Cookie=f"{name}=wrong")):
        assert answer.body.startswith(b"the token is wrong: each start of `lmpool web` makes a new one, unless LMPOOL_")
    assert service.ask("/healthz", token=None).status == 200
    assert service.ask("/readyz", token=None).status in (200, 503)
    assert TOKEN not in service.process.text.replace(service.url, "")


def test_the_token_of_the_url_becomes_a_cookie_that_no_script_and_no_other_site_uses(service: WebService) -> None:
    answer = service.ask(f"/explorer?token={TOKEN}&x=1", token=None)
    assert answer.status == 303
    assert answer.headers["location"] == "./explorer?x=1"
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert service.ask("/", token=None, Cookie=cookie.partition(";")[0]).status == 200


def test_a_cookie_is_no_token_and_ends_with_the_token_that_it_was_made_of(pool: Pool) -> None:
    service = WebService(pool)
    cookie = service.cookie()
    stolen = cookie.partition("=")[2]
    assert TOKEN not in cookie
    assert service.ask("/", token=stolen).status == 401
    assert service.ask(f"/?token={stolen}", token=None).status == 401
    service.process.signal(signal.SIGINT)
    service.process.wait()
    again = WebService(pool, port=service.port)
    assert again.ask("/", token=None, Cookie=cookie).status == 200
    again.process.signal(signal.SIGINT)
    again.process.wait()
    other = WebService(pool, port=service.port, token=TOKEN[::-1])
    assert other.ask("/", token=None, Cookie=cookie).status == 401


def test_services_on_one_host_have_cookies_of_their_own(pool: Pool) -> None:
    services = [WebService(pool, "--allow-host", "pool.example", token=token) for token in (TOKEN, TOKEN[::-1])]
    # Side by side, and behind one proxy by paths.
    for hosts in ([f"127.0.0.1:{service.port}" for service in services], ["pool.example"] * 2):
        # What a browser sends to each of them: it tells hosts apart, but no ports.
        both = "; ".join(service.cookie(Host=host) for service, host in zip(services, hosts, strict=True))
        for service, host in zip(services, hosts, strict=True):
            assert service.ask("/", token=None, Cookie=both, Host=host).status == 200, host
    # By tunnels to two machines, where both may listen at this port.
    names = {services[0].cookie(Host=f"localhost:{port}").partition("=")[0] for port in (1, 2)}
    assert len(names) == 2


@pytest.mark.parametrize("path", ["//evil.example/", "/%2f%2fevil.example/", "/\\evil.example/"])
def test_nobody_is_sent_to_another_host(service: WebService, path: str) -> None:
    location = service.ask(f"{path}?token={TOKEN}", token=None).headers.get("location", "./")
    assert location.startswith("./")
    assert not location.startswith(".//")


def test_names_of_others_are_not_answered(pool: Pool) -> None:
    service = WebService(pool, "--allow-host", "pool.example")
    # That of each port that is asked below.
    cookie = "; ".join(service.cookie(Host=f"localhost{port}") for port in ("", ":80", f":{service.port}"))
    for host, status in {
        "127.0.0.1": 200,
        f"localhost:{service.port}": 200,
        "[::1]:80": 200,
        "Pool.example": 200,
        "evil.example": 421,
        "127.0.0.1.evil.example": 421,
        "[": 421,
        "": 421,
    }.items():
        assert service.ask("/", token=None, Cookie=cookie, Host=host).status == status, host
    # A token in a header comes from a program, which no page of another site can be.
    assert service.ask("/", Host="evil.example").status == 200


def test_pages_of_other_sites_can_make_the_pool_do_nothing(service: WebService) -> None:
    cookie = service.cookie()
    own = f"http://127.0.0.1:{service.port}"
    for path in POST:
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{service.port + 1}", "http://["):
            assert service.ask(path, {}, token=None, Cookie=cookie, Origin=origin).status == 403, (path, origin)
        assert service.ask(path, {}, token=None, Cookie=cookie).status == 403
        assert service.ask(path, b"{}", token=None, Cookie=cookie, Origin=own).status in (400, 403)
    assert "no such request" in service.ask("/api/text", {}, token=None, Cookie=cookie, Origin=own).json["error"]


def test_every_answer_keeps_the_browser_strict(service: WebService) -> None:
    for answer in (service.ask("/"), service.ask("/", token=None), service.ask("/nothing"), service.ask("/healthz")):
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
    ],
)
def test_no_path_leads_out_of_the_pages(service: WebService, path: str) -> None:
    answer = service.ask(path)
    assert answer.status in (307, 404)
    assert b"import" not in answer.body


def test_pages_have_no_script_and_no_style_of_their_own_and_name_no_other_host() -> None:
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
    assert done.stderr.startswith("lmpool: --token: it must be at least 16 ")
    done = run_lmpool("web", "--token", TOKEN + "; Domain=evil.example")
    assert done.returncode == 2
    done = run_lmpool("web", "--port", str(service.port))
    assert done.stderr.startswith(f"lmpool: --port: cannot listen at 127.0.0.1:{service.port}: another program does; ")
    assert (done.stderr.count(str(service.port)), "or pass --port N" in done.stderr) == (1, True)


def is_listening(service: WebService) -> bool:
    """Whether it takes connections."""
    try:
        socket.create_connection(("127.0.0.1", service.port), 1).close()
    except ConnectionError:
        return False
    return True


def test_a_second_ctrl_c_ends_it_without_a_traceback_of_what_it_cuts_off(service: WebService) -> None:
    with socket.create_connection(("127.0.0.1", service.port)) as asking:
        head = f"POST /api/text HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n"
        # Its body never comes, and once this is answered the service is at the request.
        asking.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert asking.recv(100).startswith(b"HTTP/1.1 100 ")
        service.process.signal(signal.SIGINT)
        until(lambda: not is_listening(service), "it has heard the first")
        service.process.signal(signal.SIGINT)
        assert service.process.wait() == 130
    assert "Traceback" not in service.process.text


def test_ctrl_c_ends_it_while_a_page_watches(service: WebService) -> None:
    stream = Stream(service)
    stream.frame()
    service.process.signal(signal.SIGINT)
    assert service.process.wait() in (0, 130)
    assert "Traceback" not in service.process.text
    stream.close()

"""TLS with a private certificate authority: rows of any size arrive, and clients without a valid certificate fail."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import socket
import ssl
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import redis.asyncio as redis_async
import trustme
from redis.asyncio import RedisCluster

from lmpool.broker import server as broker_server
from lmpool.broker.server import Server
from lmpool.embedded import server_binary
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerError, ServerUnreachable, SettingsError, UnknownModel
from lmpool.producer import Producer, SyncProducer
from lmpool.synthetic import synthetic_row
from tests.shared.broker.secure_server import SHIPPED, SecureServer, password_of
from tests.support.pool import DEADLINE_S, WorkerProcess, lmpool_command, run_lmpool, until
from tests.support.scrape import free_port

V = 152_064
SECRET = "s3cr3t"
CONNECT_S = 60.0
"""Seconds to connect: on a busy machine, the TLS handshake takes longer than redis-py's default of five seconds."""
WORKER = ("worker", "syn", "--backend", "synthetic", "--vocab-size", "64")
STATUS = ("status",)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """A server with TLS, and certificates that the server must refuse."""
    made = SecureServer(tmp_path_factory.mktemp("s"))
    made.certify("stranger", trustme.CA(), "client")
    made.certify("expired", made.authority, "client", not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    with made.running():
        yield made


async def test_large_rows_arrive_bit_for_bit(server: SecureServer, tmp_path: Path) -> None:
    options = ("--vocab-size", str(V), "--encoding", "f32")
    environment = {"LMPOOL_REDIS_URL": server.url("worker")}
    command = [*lmpool_command(), "worker", "big", "--backend", "synthetic", *options]
    worker = WorkerProcess(command, tmp_path / "log", environment)
    try:
        worker.until_says("serving ")
        prompts = [[i] for i in range(6)]
        rows = np.stack([synthetic_row(prompt, vocab_size=V) for prompt in prompts])
        folder = server.folder
        client: redis_async.Redis = redis_async.Redis(
            host="localhost",
            port=server.port,
            username="producer",
            password=password_of("producer"),
            ssl=True,
            ssl_ca_certs=str(folder / "server.ca.crt"),
            ssl_certfile=str(folder / "client.crt"),
            ssl_keyfile=str(folder / "client.key"),
            socket_connect_timeout=CONNECT_S,
        )
        for place in (server.url("producer"), client, redis.Redis.from_url(server.url("producer"))):
            async with Producer("big", redis=place, cache_bytes=0) as producer:
                assert np.array_equal(await producer.batch_logprobs(prompts), rows)
                assert np.array_equal(await producer.logprobs(prompts[1], targets=[V - 1]), rows[1][-1:])
        with SyncProducer("big", redis=server.url("producer")) as sync:
            assert np.array_equal(sync.logprobs(prompts[2]), rows[2])
        assert SECRET not in worker.text
        assert f"rediss://localhost:{server.port}" in worker.text
    finally:
        worker.end()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """A cluster of one master with TLS."""
    with SecureServer(tmp_path_factory.mktemp("c"), is_cluster=True).running() as running:
        yield running


async def test_clients_of_a_cluster_with_tls_are_taken_over(cluster: SecureServer, tmp_path: Path) -> None:
    def place(role: str) -> str:
        return cluster.url(role).replace("rediss://", "rediss+cluster://")

    environment = {"LMPOOL_REDIS_URL": place("worker")}
    worker = WorkerProcess([*lmpool_command(), *WORKER], tmp_path / "log", environment)
    try:
        worker.until_says("serving ")
        url, options = cluster.url("producer"), options_of(cluster)
        for client_or_url in (
            place("producer"),
            RedisCluster.from_url(url),
            RedisCluster(**options),
            redis.RedisCluster.from_url(url),
            redis.RedisCluster(**options),
        ):
            async with Producer("syn", redis=client_or_url, cache_bytes=0) as producer:
                assert np.array_equal(await producer.logprobs([1]), synthetic_row([1], vocab_size=64))
    finally:
        worker.end()


def options_of(server: SecureServer, host: str = "localhost") -> dict[str, Any]:
    """Options for a client of redis-py that connects to the server with TLS."""
    files = {"ssl_ca_certs": "server.ca.crt", "ssl_certfile": "client.crt", "ssl_keyfile": "client.key"}
    user = {"username": "producer", "password": password_of("producer"), "ssl": True}
    user["socket_connect_timeout"] = CONNECT_S
    return {"host": host, "port": server.port, **user, **{name: str(server.folder / files[name]) for name in files}}


# redis-py 5 compares the certificate's host only on request: its settings then say False, which lmpool must override.
@pytest.mark.parametrize("says", [None, True, False], ids=["of this redis-py", "told to", "of redis-py 5"])
@pytest.mark.parametrize("kind", [redis.Redis, redis_async.Redis, RedisCluster])
async def test_a_client_for_another_host_than_the_certificates_is_refused(
    server: SecureServer, cluster: SecureServer, kind: type, says: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if says is False:
        monkeypatch.setattr(broker_server, "_CHECKS_HOST", False)
    chosen = {} if says is None else {"ssl_check_hostname": says}
    client = kind(**options_of(cluster if kind is RedisCluster else server, "127.0.0.2"), **chosen)
    with pytest.raises(ServerUnreachable, match="not valid for '127.0.0.2'"):
        await Producer("syn", redis=client, timeout=60).logprobs([1])


@pytest.mark.parametrize("trust", [{"ssl_check_hostname": False}, {"ssl_cert_reqs": "none"}], ids=str)
@pytest.mark.parametrize("kind", [redis.Redis, redis_async.Redis, RedisCluster])
async def test_a_client_can_accept_any_host(
    server: SecureServer, cluster: SecureServer, kind: type, trust: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_server, "_CHECKS_HOST", True)
    options = {"ssl_check_hostname": False, **trust}
    client = kind(**options_of(cluster if kind is RedisCluster else server, "127.0.0.2"), **options)
    with pytest.raises(UnknownModel):
        await Producer("missing", redis=client, timeout=60).open()


@pytest.fixture(scope="module")
def as_described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    """A server whose certificates were made as docker/redis/README.md says, for this machine's name."""
    made = SecureServer(tmp_path_factory.mktemp("d"))
    page = (SHIPPED / "README.md").read_text("utf-8")
    (way,) = re.findall(r"^ *```sh\n( *openssl .*?)```", page, re.MULTILINE | re.DOTALL)
    commands = way.replace("redis.example.org", "localhost")
    subprocess.run(["sh", "-ec", commands], cwd=made.folder, check=True, capture_output=True)
    (made.folder / "ca.crt").rename(made.folder / "server.ca.crt")
    with made.running():
        yield made


def handshake(server: SecureServer, certificate: str) -> bytes:
    """Connect with a certificate, with checks as strict as Python 3.13's; return the reply to a PING."""
    context = ssl.create_default_context(cafile=server.folder / "server.ca.crt")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(server.folder / f"{certificate}.crt", server.folder / f"{certificate}.key")
    plain = socket.create_connection(("localhost", server.port))
    with plain, context.wrap_socket(plain, server_hostname="localhost") as secure:
        secure.sendall(b"PING\r\n")
        return secure.recv(100)


async def test_the_certificates_of_the_page_pass_strict_verification(as_described: SecureServer) -> None:
    assert handshake(as_described, "client").startswith(b"-NOAUTH")
    with pytest.raises(UnknownModel):
        await Producer("missing", redis=as_described.url("producer"), timeout=60).open()


def test_the_certificates_of_the_page_serve_one_purpose_each(as_described: SecureServer) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):  # If the server closes at once, its alert may be lost.
        handshake(as_described, "server")
    until(lambda: "certificate verify failed" in as_described.log, "the server says why it has refused it")
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", "server.ca.crt", "-purpose"]
    for name in ("server", "client"):
        for purpose in ("sslserver", "sslclient"):
            command = [*verify, purpose, f"{name}.crt"]
            done = subprocess.run(command, cwd=as_described.folder, capture_output=True, check=False)
            assert (done.returncode == 0) == (purpose == f"ssl{name}"), done.stderr


def bad_urls(server: SecureServer) -> dict[str, tuple[str, type[LMPoolError], str]]:
    """Clients that must be refused: name -> URL, exception and text."""

    def url(role: str = "producer", **options: str | None) -> str:
        return server.url(role, files={name: value and str(server.folder / value) for name, value in options.items()})

    wrong = server.url("producer", password=f"{SECRET}-wrong")
    cases: dict[str, tuple[str, type[LMPoolError], str]] = {
        "wrong password": (wrong, AuthenticationFailed, "invalid username-password pair"),
        "unknown user": (server.url("nobody"), AuthenticationFailed, "invalid username-password pair"),
        "user that is off": (server.url("default"), AuthenticationFailed, "invalid username-password pair"),
        "no certificate": (url(ssl_certfile=None, ssl_keyfile=None), LMPoolError, r"ssl_certfile= and ssl_keyfile="),
        "another's certificate": (
            url(ssl_certfile="stranger.crt", ssl_keyfile="stranger.key"),
            AuthenticationFailed,
            r"does not accept this client certificate \(unknown ca\)",
        ),
        "expired certificate": (
            url(ssl_certfile="expired.crt", ssl_keyfile="expired.key"),
            AuthenticationFailed,
            r"does not accept this client certificate \(.*expired\)",
        ),
        "wrong authority": (url(ssl_ca_certs="stranger.ca.crt"), ServerUnreachable, r"is not trusted: .*ssl_ca_certs="),
        "no authority": (url(ssl_ca_certs=None), ServerUnreachable, r"is not trusted: .*ssl_ca_certs="),
        "other host": (server.url("producer", host="127.0.0.1"), ServerUnreachable, "not valid for '127.0.0.1'"),
        "no such file": (url(ssl_keyfile="nowhere.key"), SettingsError, r"ssl_keyfile cannot be read: .*nowhere.key"),
        "no TLS": (re.sub("rediss(.*)[?].*", r"redis\1", url()), ServerUnreachable, "no Redis server answers"),
        "unknown option": (f"{url()}&colour=red", SettingsError, "malformed: 'colour' is not known"),
        "nearly an option": (f"{url()}&soket_timeout=5", SettingsError, "malformed: 'soket_timeout' is not known$"),
        "bad port": (url().replace(f":{server.port}/", ":port/"), SettingsError, "host or port is malformed"),
    }
    return cases


CASES = ("wrong password", "unknown user", "user that is off", "no certificate", "another's certificate",
         "expired certificate", "wrong authority", "no authority", "other host", "no such file", "no TLS",
         "unknown option", "nearly an option", "bad port")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_refused_client_gets_the_reason_at_once(server: SecureServer, case: str) -> None:
    url, kind, text = bad_urls(server)[case]
    with pytest.raises(kind, match=text) as caught:
        # The request fails at once, not at its deadline of 3600 s.
        await asyncio.wait_for(Producer("syn", redis=url, timeout=3600).logprobs([1]), DEADLINE_S)
    message = str(caught.value)
    assert "\n" not in message
    for shown in (message, repr(caught.value), *map(str, _causes(caught.value))):
        assert SECRET not in shown


async def test_a_refused_client_gets_the_reason_although_the_first_connection_is_reset(server: SecureServer) -> None:
    url, kind, text = bad_urls(server)["expired certificate"]
    resets = 0

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        if not resets:
            resets += 1
            client = writer.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        ahead, back = await asyncio.open_connection("localhost", server.port)
        await asyncio.gather(pipe(reader, back), pipe(ahead, writer))

    front = await asyncio.start_server(forward, "localhost", 0, family=socket.AF_INET)
    async with front:
        port = front.sockets[0].getsockname()[1]
        redis_url = url.replace(f":{server.port}/", f":{port}/")
        with pytest.raises(kind, match=text):
            await asyncio.wait_for(Producer("syn", redis=redis_url, timeout=3600).logprobs([1]), DEADLINE_S)
    assert resets == 1


@pytest.mark.parametrize(
    ("case", "arguments"),
    [("wrong password", WORKER), ("no certificate", WORKER), ("wrong authority", STATUS), ("bad port", STATUS)],
)
def test_a_refused_command_ends_with_one_line(server: SecureServer, case: str, arguments: tuple[str, ...]) -> None:
    url, _, text = bad_urls(server)[case]
    # With LMPOOL_TRACEBACK, a refused command still prints one line without a password.
    assert re.search(text, refused([*arguments, "--redis", url], LMPOOL_TRACEBACK="1"))


def test_an_unreachable_server_is_named_without_its_password(server: SecureServer) -> None:
    url = server.url("worker").replace(f":{server.port}/", ":1/")
    assert "no Redis server answers at rediss://localhost:1: " in refused([*STATUS], LMPOOL_REDIS_URL=url)
    assert SECRET not in repr(Server(url)) + str(Server(url)) + repr(Producer(redis=url))


async def test_errors_of_a_server_without_tls_and_with_few_databases_are_explained(short_dir: Path) -> None:
    port = free_port()
    command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--databases", "2", "--save", ""]
    command += ["--unixsocket", str(short_dir / "s")]
    plain = subprocess.Popen(command, cwd=short_dir, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(port), "the server answers")
        with pytest.raises(ServerUnreachable, match=r"no Redis server answers at rediss://.*; is it a port with TLS\?"):
            await Producer(redis=f"rediss://127.0.0.1:{port}", timeout=60).open()
        with pytest.raises(ServerError, match=rf"redis://127.0.0.1:{port} has no database 2: `databases`"):
            await Producer(redis=f"redis://127.0.0.1:{port}/2", timeout=60).open()
        with pytest.raises(ServerError, match="has no database 99: `databases` in its settings"):
            await Producer(redis=f"unix://{short_dir}/s?db=99", timeout=60).open()
        with pytest.raises(ServerError, match="is no Redis Cluster: name it as redis://HOST:PORT"):
            await Producer(redis=f"redis+cluster://127.0.0.1:{port}", timeout=60).open()
    finally:
        plain.kill()
        plain.wait()


def answers(port: int) -> bool:
    """Whether a server on this machine accepts connections at a port."""
    with contextlib.suppress(redis.ConnectionError), redis.Redis(port=port) as client:
        return bool(client.ping())
    return False


def refused(arguments: list[str], **environment: str) -> str:
    """Run an `lmpool` command that must end with exit code 2 and one line of output; return this line."""
    done = run_lmpool(*arguments, **environment)
    assert SECRET not in done.stdout + done.stderr
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("lmpool: ")]
    return line


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes, in the order of a traceback."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def test_a_broken_connection_is_explained(server: SecureServer) -> None:
    error = Server(server.url("producer")).explain(redis.ConnectionError("Connection closed by server."))
    assert isinstance(error, ServerUnreachable)
    assert "certificate" not in str(error)

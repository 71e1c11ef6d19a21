"""lmpool explains errors of servers and connections in sentences that say what the user must do."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis as redis_sync
from redis.exceptions import RedisError, ResponseError

from lmpool.broker import replies
from lmpool.broker.server import Server
from lmpool.embedded import EmbeddedServer
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerError, ServerUnreachable
from tests.support.pool import PATIENCE

WRITE = "return redis.call('SET', KEYS[1], 1)"
READ = "return redis.call('GET', KEYS[1])"
LIST = "return redis.call('LPUSH', KEYS[1], 1)"
TAKE = "return redis.call('XREADGROUP', 'GROUP', 'g', 'c', 'STREAMS', KEYS[1], '>')"
# Server settings that cause an error: name -> (value during the test, value after the test).
FULL = {"maxmemory-policy": ("noeviction", "noeviction"), "maxmemory": ("1", "0")}
ALONE = {"min-replicas-to-write": ("1", "0")}
STALE = {"replica-serve-stale-data": ("no", "yes")}
CASES: dict[str, tuple[tuple[Any, ...], str, str, dict[str, tuple[str, str]]]] = {
    "NOGROUP": (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "none", ">"), TAKE, "has no queue of this model: ", {}),
    "WRONGTYPE": (("LPUSH", "text", 1), LIST, "has another type of value under a key of the pool: ", {}),
    "NOSCRIPT": (("EVALSHA", "0" * 40, 0), "", "has lost the pool's scripts", {}),
    "OOM": (("SET", "a", 1), WRITE, "has no memory left and may evict no key: ", FULL),
    "NOREPLICAS": (("SET", "a", 1), WRITE, "accepts no writes because too few replicas follow it", ALONE),
    "READONLY": (("SET", "a", 1), WRITE, "is a replica and accepts no writes: ", {}),
    "MASTERDOWN": (("GET", "text"), READ, "is a replica that has lost its primary: ", STALE),
    "unknown command": (("FLY",), "", "lacks a command that the pool needs: ", {}),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server for this module, whose settings and users a test may change."""
    with EmbeddedServer(folder=tmp_path_factory.mktemp("s") / "r") as server:
        yield server


def explained(server: Server, client: redis_sync.Redis, *command: Any) -> LMPoolError:
    """Run a command that fails; return the error in lmpool's explained form."""
    with pytest.raises(RedisError) as caught:
        client.execute_command(*command)  # type: ignore[no-untyped-call]
    return server.explain(caught.value)


@pytest.mark.parametrize("code", CASES)
def test_a_refusal_is_a_sentence_with_the_server_s_text_in_and_outside_of_scripts(
    own: EmbeddedServer, code: str
) -> None:
    command, script, sentence, settings = CASES[code]
    server = Server(own.url)
    with redis_sync.Redis.from_url(own.url, **PATIENCE) as client:
        client.set("text", 1)
        key = "text" if code in ("WRONGTYPE", "MASTERDOWN") else "none"
        commands = [command, *([("EVAL", script, 1, key)] if script else [])]
        try:
            if code in ("READONLY", "MASTERDOWN"):
                client.execute_command("REPLICAOF", "127.0.0.1", 1)
            for name, (there, _) in settings.items():
                client.config_set(name, there)
            errors = [explained(server, client, *words) for words in commands]
        finally:
            for name, (_, back) in settings.items():
                client.config_set(name, back)
            client.execute_command("REPLICAOF", "NO", "ONE")
    for error in errors:
        assert type(error) is ServerError
        assert str(error).startswith(f"{server} {sentence}")
        assert re.search(rf"\({code} .*\)$", str(error))
        assert "user_script" not in str(error)


def test_a_command_that_lost_bytes_may_be_repeated_on_a_new_connection(own: EmbeddedServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(own.url.removeprefix("unix://"))
        connection.sendall(b"*1\r\nPING\r\n")
        text = connection.recv(1000).decode()
    assert "Protocol error" in text
    assert replies.code_of(ResponseError(text.removeprefix("-").strip())) in replies.NOT_NOW


def test_missing_rights_and_wrong_passwords_have_different_errors(own: EmbeddedServer) -> None:
    server = Server(own.url)
    with redis_sync.Redis.from_url(own.url, **PATIENCE) as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">right", "~a*", "+get", "+eval")
        client.config_set("requirepass", "secret")
        told = []
        try:
            for user, command, sentence in [
                ("bob:right", ("SET", "a", 1), "refuses a command that this user may not run"),
                ("bob:right", ("GET", "b"), "refuses a command that this user may not run"),
                ("bob:right", ("EVAL", WRITE, 1, "a"), "refuses a command that this user may not run"),
                ("bob:wrong", ("GET", "a"), "refuses this user or password"),
                (":", ("GET", "a"), "requires a password"),
            ]:
                url = own.url.replace("unix://", f"unix://{user}@") if user != ":" else own.url
                with redis_sync.Redis.from_url(url, **PATIENCE) as other:
                    error = explained(server, other, *command)
                assert type(error) is AuthenticationFailed
                assert str(error).startswith(f"{server} {sentence}")
                assert "user_script" not in str(error)
                told.append(str(error))
        finally:
            client.config_set("requirepass", "")
        assert told[1].endswith("; is this the prefix of its pool, and a user for this part of it?")


# Forms of an error's text: outside a script, then within a script in Redis 6.2, Redis 7.0 and Valkey.
WRAPPED = [
    "{}",
    "{} script: on @user_script:1.",
    "{} script: 88eb99ba83ee8ed5b1d71ebd53418510762a9dc2, on @user_script:17.",
    "Error running script (call to f_ffb2c6): @user_script:1: {}",
    "ERR Error running script (call to f_ffb2c6): @user_script:1: @user_script: 1: -{}",
]


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("NOGROUP No such key 'k' or consumer group 'workers'", "has no queue of this model"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "has no memory left"),
        ("READONLY You can't write against a read only replica.", "is a replica and accepts no writes"),
        ("MISCONF Valkey is configured to save RDB snapshots", "accepts no writes because it could not save its data"),
        ("LOADING Redis is loading the dataset in memory", "is reading its data from disk"),
        ("BUSY Redis is busy running a script.", "is busy with a script"),
        ("CLUSTERDOWN Hash slot not served", "belongs to a cluster that is down"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "is moving these keys to another master"),
    ],
)
def test_text_about_a_script_is_removed(wrapped: str, text: str, sentence: str) -> None:
    error = ResponseError(wrapped.format(text))
    assert replies.words(error) == text
    assert str(Server("redis://h:7").explain(error)).startswith(f"redis://h:7 {sentence}")
    assert str(Server("redis://h:7").explain(error)).endswith(f"({text})")


def cut(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answer(text: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(text)
        connection.recv(1000)
        connection.close()

    return send


CUT = "the server, or a device on the way to it, has closed the connection; with TLS"
STRANGERS: dict[str, tuple[Callable[[socket.socket], None], type[LMPoolError], str]] = {
    "one that cuts": (cut, ServerUnreachable, CUT),
    "one that closes": (lambda connection: connection.close(), ServerUnreachable, CUT),
    "one of the web": (
        answer(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ServerError,
        "does not speak the protocol of Redis: ",
    ),
    "a full one": (answer(b"-ERR max number of clients reached\r\n"), ServerUnreachable, "raise its maxclients"),
    "a protected one": (answer(b"-DENIED Redis is running in protected mode\r\n"), ServerError, "(protected mode): "),
    "one with an open primary": (answer(b"-MISCONF Errors writing\r\n"), ServerError, "could not save its data"),
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_other_programs_at_the_address_are_recognised(kind: str) -> None:
    behave, expected, sentence = STRANGERS[kind]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=lambda: behave(listening.accept()[0]), daemon=True).start()
        server = Server(f"redis://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(RedisError) as caught:
            await server.client().ping()
    error = server.explain(caught.value)
    assert sentence in str(error)
    assert type(error) is expected


async def test_a_connection_that_is_closed_at_once_is_recognised() -> None:
    """The error is the same whether the server closes the connection before or after the client writes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(f"redis://127.0.0.1:{listening.getsockname()[1]}")
        pool: Any = server.client().connection_pool
        connection = await pool.get_connection()
        # The event loop does not run between the cut and the write, so it writes to a cut connection.
        cut(listening.accept()[0])
        with pytest.raises(RedisError) as caught:
            await connection.send_command("PING")
    assert "while writing" in str(caught.value)
    assert CUT in str(server.explain(caught.value))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1:1", "nothing listens there: does the server run, and are host and port right?"),
        ("redis://no-such-host.invalid", "no host has this name"),
        ("unix:///no-such.sock", "there is no such socket: has the server ended?"),
    ],
)
async def test_an_unreachable_server_has_a_reason(url: str, why: str) -> None:
    for connect in (Server(url).client().ping, Server(url).open):
        with pytest.raises((RedisError, ServerUnreachable)) as caught:
            await connect()
        assert f"no Redis server answers at {url}" in str(Server(url).explain(caught.value))
        assert why in str(Server(url).explain(caught.value))

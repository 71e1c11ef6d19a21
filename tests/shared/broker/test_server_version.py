"""Old servers with known vulnerabilities cause one warning line in workers and in `lmpool status`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from lmpool import embedded
from lmpool.broker.server import Server
from lmpool.broker.server_checks import _product, check_server, doubt_of, read_version
from lmpool.embedded import EmbeddedServer
from lmpool.testing.front import Front
from tests.producer.cli.test_cli import on
from tests.shared.broker.secure_server import installed_server
from tests.support.pool import Pool

LINE = "may lack the fixes of CVE-2025-49844"


@pytest.mark.parametrize(
    ("product", "version", "is_doubted"),
    [
        ("redis", "6.2.19", True),
        ("redis", "6.2.20", False),
        ("redis", "6.0.20", True),
        ("redis", "7.0.15", True),
        ("redis", "7.2.10", True),
        ("redis", "7.2.11", False),
        ("redis", "7.4.5", True),
        ("redis", "7.4.11", False),
        ("redis", "8.0.3", True),
        ("redis", "8.0.4", False),
        ("redis", "8.2.1", True),
        ("redis", "8.2.2", False),
        ("redis", "8.4.0", False),
        ("redis", "8.10.1", False),
        ("redis", "255.255.255", False),
        ("valkey", "7.2.10", True),
        ("valkey", "7.2.11", False),
        ("valkey", "8.0.5", True),
        ("valkey", "8.0.6", False),
        ("valkey", "8.1.3", True),
        ("valkey", "8.1.4", False),
        ("valkey", "9.0.0", False),
        ("valkey", "9.1.2-rc1", False),
        # Servers for which lmpool lists no vulnerability.
        ("keydb", "6.3.4", False),
        ("fakeredis", "2.40.0", False),
        ("redis", "", False),
        ("redis", "seven", False),
        ("redis", "7.0", False),
        ("redis", "7.0.1234567", False),
        ("", "7.0.15", False),
    ],
)
def test_old_versions_are_distinguished_from_fixed_ones(product: str, version: str, is_doubted: bool) -> None:
    doubt = doubt_of(product, version)
    assert (doubt is not None) == is_doubted
    if doubt is not None:
        assert f"the server is {product.capitalize()} {version} and {LINE}" in doubt
        assert "\n" not in doubt


@pytest.mark.parametrize(
    "reply",
    [
        None,
        7,
        b"x",
        [],
        {},
        [b"server"],
        [[b"server"], b"redis"],
        [b"server", 7, b"version", None],
        [b"server", b"redis", b"version", b"7.0.15\x1b[2J"],
        {b"server": b"redis", b"version": b"7.0.15\n"},
        {b"server": b"redis", b"version": b"7" * 10**6},
        {7: b"redis", (): b"7.0.15"},
        ResponseError("x"),
    ],
)
def test_a_server_without_a_version_causes_no_warning(reply: Any) -> None:
    assert doubt_of(*_product(reply)) is None


async def test_a_server_without_hello_causes_no_warning(short_dir: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b"-ERR unknown command\r\n")
        writer.close()

    async with await asyncio.start_unix_server(refuse, short_dir / "s"):
        assert await read_version(Server(f"unix://{short_dir}/s")) == ("", "")


async def test_the_pool_in_memory_causes_no_warning(short_dir: Path) -> None:
    async with Front(short_dir / "s"):
        for protocol in (2, 3):
            assert not any(
                LINE in doubt for doubt in (await check_server(Server(f"unix://{short_dir}/s?protocol={protocol}")))[1]
            )


@pytest.fixture(params=["embedded", "debian", "6.2"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of server program that the test runs."""
    return str(request.param)


@pytest.fixture
def old_or_new(kind: str, short_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool on a server of the kind `kind`."""
    monkeypatch.delenv(embedded.BINARY_VARIABLE, raising=False)
    if kind != "embedded":
        monkeypatch.setenv(embedded.BINARY_VARIABLE, installed_server(kind))
    with EmbeddedServer(memory_bytes=1 << 28, folder=short_dir / "s") as server:
        pool = Pool(server.url, "level", tmp_path)
        yield pool
        pool.end()


def test_workers_and_status_print_one_line_about_an_old_server(old_or_new: Pool, kind: str) -> None:
    lines = 0 if kind == "embedded" else 1
    assert old_or_new.start().text.count(LINE) == lines
    for arguments in (("status",), ("status", "--json")):
        done = on(old_or_new, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(LINE) == len(done.stderr.splitlines()) == lines
    assert [model["name"] for model in json.loads(done.stdout)] == ["syn"]

"""The address of a server: its URL, the options and errors of TLS, and which master of a cluster has a key."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import redis.cluster as redis_sync
from redis import Redis, exceptions
from redis.asyncio import connection as connections
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.crc import key_slot
from redis.exceptions import RedisClusterException

from lmpool.broker.connection_classes import UNNAMED, connection_class
from lmpool.errors import ServerUnreachable, SettingsError

Place = tuple[str, int]
"""Host and port of a node."""

CLUSTER = "+cluster"
"""What the scheme of a cluster's URL ends with."""

# What a client's own options may hold that connections to any node take.
_OPTIONS = ("username", "password", "credential_provider", "client_name", "protocol", "socket_connect_timeout",
            "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_TRUST = ("ssl_cert_reqs", "ssl_check_hostname")
_WITH_TLS = (AsyncSSLConnection, SSLConnection)

_MAX_NODES = 100

_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")
# What may be told of an address: a host with a port that is a number, and a path.
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]?|[^:/]*)(:\d*)?(/.*)?", re.IGNORECASE)

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
# What a server says of our certificate, by the names that OpenSSL has for its alerts.
_ALERTS = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "CERTIFICATE_EXPIRED", "CERTIFICATE_REVOKED", "BAD_CERTIFICATE",
           "UNSUPPORTED_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED")  # fmt: skip
# What a client does that was told nothing of it: redis-py 5 takes any host's certificate.
_CHECKS_HOST: bool = inspect.signature(Redis).parameters["ssl_check_hostname"].default


def client_settings(client: RedisCluster | redis_sync.RedisCluster) -> tuple[list[Place], dict[str, Any], bool]:
    """The nodes that a cluster client was told of, the options of its connections, and whether they speak TLS."""
    nodes = [(str(node.host), int(node.port)) for node in client.nodes_manager.startup_nodes.values()]
    given = client.connection_kwargs if isinstance(client, RedisCluster) else client.nodes_manager.connection_kwargs
    # The options about trust say something by being off, too.
    options = {
        name: value
        for name, value in given.items()
        if (value and (name in _OPTIONS or name.startswith("ssl_"))) or name in _TRUST
    }
    kind = given.get("connection_class")
    is_tls = bool(given.get("ssl")) or (isinstance(kind, type) and issubclass(kind, _WITH_TLS))
    return nodes, options, is_tls


class _Client(RedisCluster):
    """A client whose errors are all redis-py's: those about the whole cluster are of no class that others have."""

    async def initialize(self, *args: Any, **kwargs: Any) -> RedisCluster:
        """Find the nodes."""
        try:
            return await super().initialize(*args, **kwargs)
        except RedisClusterException as error:
            raise exceptions.ConnectionError(f"the cluster cannot be used: {error}") from error

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command on the master that has its key."""
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise exceptions.ConnectionError(f"the cluster cannot be used: {error}") from error


class Cluster:
    """Knows which master serves which slot, and reads it anew when it has been told that this has changed.

    Args:
        nodes: some nodes, of which one must answer.
        options: of the connections to them, as redis-py calls them.
        is_tls: whether they speak TLS.
    """

    def __init__(self, nodes: Sequence[Place], options: Mapping[str, Any], *, is_tls: bool) -> None:
        self.nodes = list(nodes)
        self._options = {**options, "ssl": True} if is_tls else dict(options)
        self._places: dict[int, Place] | None = None
        self._forgotten = 0
        self._reading = asyncio.Lock()

    def client(self, reply_timeout_s: float) -> RedisCluster:
        """A client for control messages: of any keys, and following those that move."""
        client = _Client(
            startup_nodes=[ClusterNode(host, port) for host, port in self.nodes],
            retry=Retry(NoBackoff(), 0),
            socket_timeout=reply_timeout_s,
            **UNNAMED,
            **self._options,
        )
        # It takes no class of connections; those that it finds get one from these options.
        kind = connection_class(client.connection_kwargs["connection_class"])
        client.connection_kwargs["connection_class"] = kind
        for node in client.nodes_manager.startup_nodes.values():
            node.connection_class = cast(type[connections.Connection], kind)
        return client

    async def place(self, key: bytes) -> Place:
        """The master that serves a key.

        Raises:
            ServerUnreachable: nobody does at present.
            RedisError, OSError: no node answers.
        """
        places = self._places
        if places is None:
            async with self._reading:
                places = self._places
                if places is None:
                    forgotten = self._forgotten
                    places = await self._read()
                    if forgotten == self._forgotten:  # Else somebody has been told meanwhile that they have changed.
                        self._places = places
        slot = key_slot(key)
        place = places.get(slot)
        if place is None:
            self.forget()
            raise ServerUnreachable(f"no master of the cluster at {self} serves slot {slot} at present")
        return place

    async def _read(self) -> dict[int, Place]:
        client = self.client(5.0)
        try:
            await client.initialize()
            served = {
                slot: (str(nodes[0].host), int(nodes[0].port))
                for slot, nodes in client.nodes_manager.slots_cache.items()
            }
        finally:
            await client.aclose()
        # Those that were named at first may be gone one day.
        self.nodes = list(dict.fromkeys([*served.values(), *self.nodes]))[:_MAX_NODES]
        return served

    def forget(self) -> None:
        """Read the places anew when they are needed next."""
        self._places = None
        self._forgotten += 1

    def __str__(self) -> str:
        host, port = self.nodes[0]
        return f"{host}:{port}"


def parse_url(url: str) -> dict[str, Any]:
    """What redis-py is to be told of the server that a URL names.

    Raises:
        SettingsError: the URL is malformed. Its password is not in the message.
    """
    fault = _fault(url)
    if not fault:
        try:
            return dict(connections.parse_url(url))
        except ValueError as error:
            fault = str(error)  # Of a good address only an option can be bad: redis-py tells its name, not its value.
    # Outside of any handler: a traceback must not repeat the URL as a cause.
    raise SettingsError(f"redis: {mask(url)!r} is not a Redis URL: {fault}")


def _fault(url: str) -> str:
    """What is wrong with the address in a URL, not in urllib's words, which repeat the password. "" when it is good."""
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in _SCHEMES:
        return f"it must begin with redis://, rediss://, unix:// or redis{CLUSTER}://"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "its host or port is malformed (in a password, percent-encode : / ? # [ ] @)"
    if parts.fragment:
        return "a # must be written as %23"
    if parts.scheme == "unix":
        return "" if parts.path else "the path of the socket is missing"
    database = parts.path.strip("/")
    return "" if not database or database.isdecimal() else "after the host comes the number of a database"


def cluster_nodes(url: str) -> tuple[list[Place], str]:
    """The nodes that the URL of a cluster names, and the URL of the first of them; none for another URL.

    Raises:
        SettingsError: as `parse_url`, or a database is named: a cluster has one only.
    """
    scheme, mark, rest = url.partition("://")
    if not scheme.lower().endswith(CLUSTER) or scheme.lower() not in _SCHEMES:
        return [], url
    place, *tail = re.split("([/?#].*)", rest, maxsplit=1)
    user, at, hosts = place.rpartition("@")
    urls = [f"{scheme[: -len(CLUSTER)]}{mark}{user}{at}{host}{''.join(tail)}" for host in hosts.split(",")]
    parsed = [parse_url(node_url) for node_url in urls]
    if any(options.get("db") for options in parsed):
        raise SettingsError(f"redis: {mask(url)!r}: a cluster has one database only, number 0")
    return [(options.get("host", "localhost"), options.get("port", 6379)) for options in parsed], urls[0]


def mask(url: str) -> str:
    """A URL without user, password and options; what cannot be told from a password is left out too."""
    scheme, mark, rest = url.partition("://")
    if not scheme.replace("+", "").isalnum():
        scheme, mark, rest = "", "", url
    place, *options = re.split("[?#]", rest, maxsplit=1)
    if options and "@" in options[0]:
        return f"{scheme}{mark}…"  # The password may reach up to there.
    _, at, place = place.rpartition("@")
    if not _PLACE.fullmatch(place):
        place = place.partition(":")[0] + ":…"
    return f"{scheme}{mark}{'…@' if at else ''}{place}{'?…' if options else ''}"


def check_files(settings: Mapping[str, Any]) -> None:
    """Refuse certificates and keys that cannot be read: the system's error would not say which.

    Raises:
        SettingsError: with the option's name and the file.
    """
    for name in _FILES:
        if not (path := settings.get(name)):
            continue
        try:
            if name == "ssl_ca_path":
                os.scandir(path).close()
            else:
                Path(path).open("rb").close()
        except OSError as error:
            raise SettingsError(f"redis: {name} cannot be read: {path} ({error.strerror})") from None


def check_host(settings: dict[str, Any], *, of_client: bool) -> None:
    """Compare the host with the certificate, unless URL or client say otherwise: redis-py 5 does not do so by itself.

    Args:
        settings: of connections with TLS.
        of_client: they are those of a client, in which the default of redis-py stands for what it was not told.
    """
    if settings.get("ssl_cert_reqs", "required") in ("none", None, ssl.CERT_NONE):
        return
    chosen = settings.get("ssl_check_hostname")
    if chosen is None or (of_client and chosen is _CHECKS_HOST is False):
        settings["ssl_check_hostname"] = True


def refusal(chain: Iterable[BaseException]) -> str:
    """What a server has against our certificate, and what to do; "" when that is not the matter."""
    reason = _reason(chain)
    if not any(name in reason for name in _ALERTS):
        return ""
    if "CERTIFICATE_REQUIRED" in reason:
        return "it wants a client certificate: name one with ssl_certfile= and ssl_keyfile="
    return f"it does not accept this client certificate ({_words(reason)}): see ssl_certfile="


def fault(chain: Iterable[BaseException], *, has_certificate: bool) -> str:
    """Why no TLS connection could be made, and what to do; "" when that is not the matter.

    Args:
        chain: the exception and those that led to it.
        has_certificate: whether we show the server a certificate.
    """
    for error in chain:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return f"the server's certificate is not trusted: {why}; see ssl_ca_certs= and the name of the host"
        if isinstance(error, ssl.SSLError):
            return f"the handshake failed ({_words(error.reason or str(error))}); is it a port with TLS?"
        # The alert that says so may be lost when the server closes at once.
        if isinstance(error, ConnectionResetError) and not has_certificate:
            return "the server has cut it; does it want a client certificate? see ssl_certfile= and ssl_keyfile="
    return ""


def _reason(chain: Iterable[BaseException]) -> str:
    """OpenSSL's name for what the other side has complained of, "" when it has not."""
    for error in chain:
        if isinstance(error, ssl.SSLError) and error.reason and "ALERT" in error.reason:
            return error.reason
    return ""


def _words(reason: str) -> str:
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()

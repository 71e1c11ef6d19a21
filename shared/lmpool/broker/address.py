"""The address of a server: its URL, the options and errors of TLS, and the nodes of a cluster."""

from __future__ import annotations

import inspect
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.cluster as redis_sync
from redis import Redis
from redis.asyncio import connection as connections
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection

from lmpool.errors import SettingsError

Place = tuple[str, int]
"""Host and port of a node."""

CLUSTER = "+cluster"
"""The end of the scheme in the URL of a cluster."""

# Options of a cluster client that connections to each node take.
_OPTIONS = ("username", "password", "credential_provider", "client_name", "protocol", "socket_connect_timeout",
            "socket_keepalive", "socket_keepalive_options")  # fmt: skip
_TRUST = ("ssl_cert_reqs", "ssl_check_hostname")
_WITH_TLS = (AsyncSSLConnection, SSLConnection)

_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")
# The part of an address that may be shown: a host, a numeric port, and a path.
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]?|[^:/]*)(:\d*)?(/.*)?", re.IGNORECASE)

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
# OpenSSL's names of the alerts with which a server rejects our certificate.
_ALERTS = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "CERTIFICATE_EXPIRED", "CERTIFICATE_REVOKED", "BAD_CERTIFICATE",
           "UNSUPPORTED_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED")  # fmt: skip
# The default of redis-py: version 5 does not check the host in a certificate.
_CHECKS_HOST: bool = inspect.signature(Redis).parameters["ssl_check_hostname"].default


def client_settings(client: RedisCluster | redis_sync.RedisCluster) -> tuple[list[Place], dict[str, Any], bool]:
    """The first nodes of a cluster client, the options of its connections, and whether they use TLS."""
    nodes = [(str(node.host), int(node.port)) for node in client.nodes_manager.startup_nodes.values()]
    given = client.connection_kwargs if isinstance(client, RedisCluster) else client.nodes_manager.connection_kwargs
    # For the options about trust, a false value matters too.
    options = {
        name: value
        for name, value in given.items()
        if (value and (name in _OPTIONS or name.startswith("ssl_"))) or name in _TRUST
    }
    kind = given.get("connection_class")
    is_tls = bool(given.get("ssl")) or (isinstance(kind, type) and issubclass(kind, _WITH_TLS))
    return nodes, options, is_tls


def parse_url(url: str) -> dict[str, Any]:
    """The options of redis-py for the server of a URL.

    Raises:
        SettingsError: the URL is malformed. Its password is not in the message.
    """
    fault = _fault(url)
    if not fault:
        try:
            return dict(connections.parse_url(url))
        except ValueError as error:
            fault = str(error)  # Only an option can be wrong here. redis-py names it without its value.
    # Outside of the handler: the traceback must not show the URL with its password as a cause.
    raise SettingsError(f"redis: {mask(url)!r} is not a Redis URL: {fault}")


def _fault(url: str) -> str:
    """The fault of the address in a URL, or "". urllib's own message would repeat the password."""
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
    """The nodes in the URL of a cluster, and the URL of the first one; no nodes for another URL.

    Raises:
        SettingsError: as `parse_url`, or the URL names a database: a cluster has one only.
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
    """A URL without user, password and options, and without anything that could be part of a password."""
    scheme, mark, rest = url.partition("://")
    if not scheme.replace("+", "").isalnum():
        scheme, mark, rest = "", "", url
    place, *options = re.split("[?#]", rest, maxsplit=1)
    if options and "@" in options[0]:
        return f"{scheme}{mark}…"  # The password may extend to there.
    _, at, place = place.rpartition("@")
    if not _PLACE.fullmatch(place):
        place = place.partition(":")[0] + ":…"
    return f"{scheme}{mark}{'…@' if at else ''}{place}{'?…' if options else ''}"


def check_files(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for a certificate or key that cannot be read, with the option and the file."""
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
    """Have the host compared with the certificate, unless the URL or the client disables it: redis-py 5 does not.

    `of_client`: the settings are those of a client, where redis-py's default may stand for no choice.
    """
    if settings.get("ssl_cert_reqs", "required") in ("none", None, ssl.CERT_NONE):
        return
    chosen = settings.get("ssl_check_hostname")
    if chosen is None or (of_client and chosen is _CHECKS_HOST is False):
        settings["ssl_check_hostname"] = True


def refusal(chain: Iterable[BaseException]) -> str:
    """Why a server rejects our certificate, and what to do; "" for other errors."""
    reason = _reason(chain)
    if not any(name in reason for name in _ALERTS):
        return ""
    if "CERTIFICATE_REQUIRED" in reason:
        return "it wants a client certificate: name one with ssl_certfile= and ssl_keyfile="
    return f"it does not accept this client certificate ({_words(reason)}): see ssl_certfile="


def fault(chain: Iterable[BaseException], *, has_certificate: bool) -> str:
    """Why a TLS connection failed, and what to do; "" for other errors. `chain` has the exception and its causes."""
    for error in chain:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return f"the server's certificate is not trusted: {why}; see ssl_ca_certs= and the name of the host"
        if isinstance(error, ssl.SSLError):
            return f"the handshake failed ({_words(error.reason or str(error))}); is it a port with TLS?"
        # If the server closes at once, its alert may be lost.
        if isinstance(error, ConnectionResetError) and not has_certificate:
            return "the server has cut it; does it want a client certificate? see ssl_certfile= and ssl_keyfile="
    return ""


def _reason(chain: Iterable[BaseException]) -> str:
    """OpenSSL's name of the alert that the other side sent, or ""."""
    for error in chain:
        if isinstance(error, ssl.SSLError) and error.reason and "ALERT" in error.reason:
            return error.reason
    return ""


def _words(reason: str) -> str:
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()

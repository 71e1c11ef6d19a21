"""The URL of a server: what it says, what is wrong with it, and what of it may be shown."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import connection as connections

from lmpool.broker.cluster import Place
from lmpool.errors import SettingsError

CLUSTER = "+cluster"
"""What the scheme of a cluster's URL ends with."""

_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")
# What may be told of an address: a host with a port that is a number, and a path.
_PLACE = re.compile(r"(\[[0-9a-f:.]*\]?|[^:/]*)(:\d*)?(/.*)?", re.IGNORECASE)


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
    """What is wrong with the address in a URL, in our words: urllib's repeat the password. "" when it is good."""
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
    parsed = [parse_url(one) for one in urls]
    if any(one.get("db") for one in parsed):
        raise SettingsError(f"redis: {mask(url)!r}: a cluster has one database only, number 0")
    return [(one.get("host", "localhost"), one.get("port", 6379)) for one in parsed], urls[0]


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

"""Whether a server suits a pool: one that is so old that whoever may run scripts, as every user of a pool may, can take
it over does not, nor one whose memory is not set up for it.
"""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import RedisError

from lmpool.broker.line import CommandLine
from lmpool.broker.server import Server
from lmpool.broker.server_memory import read_memory
from lmpool.errors import LMPoolError

Version = tuple[int, int, int]

# The first of each branch without CVE-2025-49844 and CVE-2025-46817, and so without CVE-2024-46981, which is older.
# Branches after the last have begun without them.
_FIXED: dict[str, tuple[Version, ...]] = {
    "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
}
_VERSION = re.compile(r"(\d{1,5})\.(\d{1,5})\.(\d{1,5})(?!\d)")
_MOST_TEXT = 64


def doubt_of(product: str, version: str) -> str | None:
    """What is to be said of a server of this version.

    Args:
        product: as the server calls itself; of others than Redis and Valkey nothing is known.
        version: as it says.

    Returns:
        A sentence without an end, or None when there is nothing to say.
    """
    found, fixed = _VERSION.match(version), _FIXED.get(product)
    if found is None or fixed is None:
        return None
    major, minor, patch = map(int, found.groups())
    if (major, minor) > fixed[-1][:2] or any((major, minor) == one[:2] and patch >= one[2] for one in fixed):
        return None
    levels = ", ".join(".".join(map(str, one)) for one in fixed)
    return (
        f"the server is {product.capitalize()} {version} and may lack the fixes of CVE-2025-49844, CVE-2025-46817 and "
        f"CVE-2024-46981, which let whoever may run scripts take it over: run {levels} or newer, unless your "
        "distribution has fixed this version"
    )


async def read_doubt(server: Server) -> str | None:
    """Ask a server for its version, of a cluster one master; what is to be said of it, as `doubt_of` does.

    HELLO is allowed to every user, and tells Valkey's own version, where INFO shows much that is nobody's business.
    """
    line = CommandLine(server)
    try:
        told = _told(await line.call(b"HELLO"))
    except LMPoolError:
        return None  # A proxy may know no HELLO. A server that cannot be used is told of by whoever needs it.
    finally:
        line.close()
    return doubt_of(told.get("server", ""), told.get("version", ""))


async def read_doubts(server: Server) -> list[str]:
    """Whether a server can be used, and what is to be said of its version and its memory: sentences without an end.

    Raises:
        ServerError: it cannot be used.
    """
    # With a client of its own: a connection that idles while the model loads may be cut meanwhile.
    redis = server.client()
    try:
        await redis.ping()
        memory = await read_memory(redis)
    except (RedisError, OSError) as error:
        raise server.explain(error) from error
    finally:
        await redis.aclose()
    doubts = (await read_doubt(server), memory and memory.doubt())
    return [doubt for doubt in doubts if doubt]


def _told(reply: Any) -> dict[str, str]:
    """What a server says of itself; RESP2 and RESP3 nest it differently. What is no short text is left out."""
    if isinstance(reply, list):
        reply = dict(zip(reply[::2], reply[1::2], strict=False)) if all(map(_is_plain, reply[::2])) else {}
    if not isinstance(reply, dict):
        return {}
    return {
        name.decode("ascii", "replace"): value.decode("ascii", "replace")
        for name, value in reply.items()
        if _is_plain(name) and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    return isinstance(value, bytes) and len(value) <= _MOST_TEXT and value.isascii() and value.decode().isprintable()

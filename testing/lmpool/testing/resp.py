"""Replies as RESP puts them on the wire."""

from __future__ import annotations

from typing import Any

from fakeredis._helpers import SimpleError, SimpleString


def encode_reply(value: Any, protocol: int) -> bytes:
    """A reply of fakeredis as bytes.

    Args:
        value: what a command brought, its status and error replies still marked as such.
        protocol: 2 or 3: what the client speaks.

    Raises:
        TypeError: a value that RESP has no form for.
    """
    parts: list[bytes] = []
    _append(parts, value, protocol)
    return b"".join(parts)


def _append(parts: list[bytes], value: Any, protocol: int) -> None:
    match value:
        case bytes():
            parts += (b"$%d\r\n" % len(value), value, b"\r\n")
        case None:
            parts.append(b"_\r\n" if protocol == 3 else b"$-1\r\n")
        case bool() if protocol == 3:
            parts.append(b"#t\r\n" if value else b"#f\r\n")
        case int():
            parts.append(b":%d\r\n" % value)
        case SimpleString():
            parts.append(b"+%b\r\n" % value.value)
        case SimpleError():
            parts.append(b"-%b\r\n" % value.value.replace("\r", " ").replace("\n", " ").encode())
        case float() if protocol == 3:
            parts.append(b",%.17g\r\n" % value)
        case str() | float():
            _append(parts, str(value).encode(), protocol)
        case dict():
            parts.append(b"%%%d\r\n" % len(value) if protocol == 3 else b"*%d\r\n" % (2 * len(value)))
            for pair in value.items():
                for one in pair:
                    _append(parts, one, protocol)
        case list() | tuple() | set() | frozenset():
            parts.append(
                (b"~%d\r\n" if protocol == 3 and isinstance(value, (set, frozenset)) else b"*%d\r\n") % len(value)
            )
            for one in value:
                _append(parts, one, protocol)
        case _:
            raise TypeError(f"a reply of the type {type(value).__name__} cannot be sent")

"""Reading stream replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def stream_entries(reply: Any) -> Sequence[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of an XREAD or XREADGROUP of one stream, in whatever shape redis-py returns them."""
    if not reply:
        return []
    entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
    # An entry that was deleted while it was pending has no fields.
    return [(entry, fields) for entry, fields in entries if fields is not None]

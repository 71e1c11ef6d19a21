"""Reading the replies of XREAD and XREADGROUP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def stream_entries(reply: Any) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a read of one stream: entry id, fields. RESP2 and RESP3 nest them differently."""
    if not reply:
        return
    entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
    for entry, fields in entries:
        # An entry that was deleted while it was pending has no fields.
        if fields is not None:
            yield entry, dict(zip(fields[::2], fields[1::2], strict=True))

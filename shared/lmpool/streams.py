"""Reading the replies of XREAD and XREADGROUP."""

from __future__ import annotations

from typing import Any

from lmpool.checks import shown
from lmpool.errors import ProtocolError


def stream_entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries of a read of one stream: entry id, fields. RESP2 and RESP3 nest them differently.

    Raises:
        ProtocolError: it is no such reply, as when bytes of it were lost on the way.
    """
    if not reply:
        return []
    try:
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        # An entry that was deleted while it was pending has no fields.
        found = [
            (entry, dict(zip(fields[::2], fields[1::2], strict=True)))
            for entry, fields in entries
            if fields is not None
        ]
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"no reply to a read of a stream: {shown(reply)}") from error
    for entry, read in found:
        if not all(isinstance(one, bytes) for one in (entry, *read, *read.values())):
            raise ProtocolError(f"no reply to a read of a stream: {shown(reply)}")
    return found

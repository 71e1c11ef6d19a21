"""Reading the replies of XREAD and XREADGROUP."""

from __future__ import annotations

from typing import Any

from lmpool.errors import ProtocolError
from lmpool.settings import shown

Fields = dict[bytes, bytes]
"""What an entry of a stream says, by name."""

_BYTES = {bytes}


def stream_entries(reply: Any) -> list[tuple[bytes, Fields]]:
    """The entries of a read of one stream: entry id, fields. RESP2 and RESP3 nest them differently.

    Raises:
        ProtocolError: it is no such reply, as when bytes of it were lost on the way.
    """
    if not reply:
        return []
    found = []
    try:
        for entry, fields in next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]:
            # An entry that was deleted while it was pending has no fields.
            if fields is None:
                continue
            if type(entry) is not bytes or set(map(type, fields)) != _BYTES:
                raise TypeError
            found.append((entry, dict(zip(fields[::2], fields[1::2], strict=True))))
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(f"no reply to a read of a stream: {shown(reply)}") from error
    return found

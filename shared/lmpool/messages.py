"""Control messages: MessagePack with explicit size limits, never pickle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack

from lmpool.errors import ProtocolError

_VERSION = 2
MAX_JOB_BYTES = 16 * 1024 * 1024
"""Most bytes of an encoded job."""

_MAX_ERROR_TEXT = 4096
_MAX_FIELDS = 8


class Job(NamedTuple):
    """What a producer asks of a worker. The digest is not carried: the worker derives it from the ids.

    Attributes:
        ids: the prompt as little-endian uint32 bytes.
        adapter: name of the adapter, or "".
        fingerprint: the fingerprint that the producer expects the row to have.
        overwrite: replace a row that is stored already (it was found to be corrupt).
        ask: what is wanted instead of the row (`lmpool.asks`), encoded; b"" for the row itself.
    """

    ids: bytes
    adapter: str
    fingerprint: str
    overwrite: bool = False
    ask: bytes = b""

    def pack(self) -> bytes:
        """The job as MessagePack; ids and ask are one `bin` each."""
        (packed,) = pack_jobs([self])
        return packed


def pack_jobs(jobs: Iterable[Job]) -> list[bytes]:
    """Jobs as MessagePack; at a fraction of the time of one by one, for each packer has a large buffer."""
    packer = msgpack.Packer()
    return [packer.pack((_VERSION, *job)) for job in jobs]


_JOB_TYPES = (int, bytes, str, str, bool, bytes)


def unpack_job(data: bytes) -> Job:
    """Read a job.

    Raises:
        ProtocolError: too large, not MessagePack, or not a job of this wire version.
    """
    values = unpack_flat(data, MAX_JOB_BYTES, "job")
    # True and 1.0 equal 1 too, so types are compared, and exactly.
    if type(values) is list and tuple(map(type, values)) == _JOB_TYPES and values[0] == _VERSION:
        return Job._make(values[1:])
    raise ProtocolError(f"not a job of version {_VERSION}: {described(values)}")


class Failure(NamedTuple):
    """Why a job ended without a row.

    Attributes:
        kind: name of an exception class of `lmpool.errors`.
        text: its message.
    """

    kind: str
    text: str

    def pack(self) -> bytes:
        """The failure as MessagePack."""
        packed: bytes = msgpack.packb((_VERSION, self.kind, self.text[:_MAX_ERROR_TEXT]))
        return packed


def unpack_failure(data: bytes) -> Failure:
    """Read a failure.

    Raises:
        ProtocolError: too large, not MessagePack, or not a failure of this wire version.
    """
    values = unpack_flat(data, 8 * _MAX_ERROR_TEXT, "failure")
    if type(values) is list and tuple(map(type, values)) == (int, str, str) and values[0] == _VERSION:
        return Failure._make(values[1:])
    raise ProtocolError(f"not a failure of version {_VERSION}: {described(values)}")


def _flat(values: list[Any]) -> list[Any]:
    """Refuses lists in lists as soon as the first is read: a tree of them takes far more memory than bytes."""
    if list in map(type, values):
        raise ValueError("a list within a list")
    return values


def described(value: object) -> str:
    """What a message holds, for an error: texts and bytes are cut before they are printed, for each may have 16 MB."""
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"[:80]
    return repr(value[:40] if isinstance(value, (str, bytes)) else value)[:80]


def unpack_flat(data: bytes, limit: int, what: str) -> Any:
    """Read a MessagePack array of up to 8 numbers, texts and bytes.

    Raises:
        ProtocolError: over `limit` bytes, not MessagePack, or with anything else in it.
    """
    if len(data) > limit:
        raise ProtocolError(f"a {what} of {len(data)} bytes is over the limit of {limit}")
    try:
        return msgpack.unpackb(
            data,
            max_array_len=_MAX_FIELDS,
            max_map_len=0,
            max_ext_len=0,
            max_bin_len=limit,
            max_str_len=limit,
            list_hook=_flat,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a {what} does not decode: {error}") from error

"""Jobs and failures: messages in MessagePack with explicit size limits, never pickle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgpack
import msgspec

from lmpool.errors import ProtocolError

WIRE_VERSION = 7
"""Version of everything that processes say to each other but rows, whose version is their own: a pool has one.

It stands in each job, in each failure and in the info of each model. Raise it with a change of any message, or of the
name or the meaning of a Redis key.
"""

MAX_JOB_BYTES = 16 * 1024 * 1024
"""Most bytes of an encoded job."""

_MAX_ERROR_TEXT = 4096
_MAX_FIELDS = 8


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message that travels as a MessagePack array: its tag, if the class has one, and then its fields."""

    def pack(self) -> bytes:
        """The message as MessagePack; bytes are one `bin` each."""
        packed: bytes = msgpack.packb(msgspec.to_builtins(self, builtin_types=(bytes,)))
        return packed


M = TypeVar("M", bound=Message)


class Job(Message, frozen=True, tag=WIRE_VERSION):
    """A prompt that a client has a worker compute. The digest is not carried: the worker derives it from the ids.

    Attributes:
        ids: the prompt as little-endian uint32 bytes.
        adapter: name of the adapter, or "".
        fingerprint: the fingerprint that the producer expects the row to have.
        overwrite: replace a row that is stored already (it was found to be corrupt).
        query: what is wanted instead of the row (`lmpool.protocol.query`), encoded; b"" for the row itself.
        host: whose shared memory the client reads (`lmpool.rows.shared_memory.host_token`); b"" for the row itself.
    """

    ids: bytes
    adapter: str
    fingerprint: str
    overwrite: bool = False
    query: bytes = b""
    host: bytes = b""


class TracedJob(Job, frozen=True, tag=WIRE_VERSION):
    """A job whose client traces its requests: with one field more, which others leave out.

    Attributes:
        traceparent: the W3C trace context of the request, as anybody may have written it: to be read by who traces.
    """

    traceparent: str = ""


def _head(kind: type[Job]) -> bytes:
    """How an array of so many fields begins, the wire version before them."""
    return bytes([0x90 + 1 + len(kind.__struct_fields__), WIRE_VERSION])


_ENCODER = msgspec.msgpack.Encoder()
_JOB_HEAD, _TRACED_HEAD = _head(Job), _head(TracedJob)
_JOB_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Job]] = {
    _JOB_HEAD: msgspec.msgpack.Decoder(Job),
    _TRACED_HEAD: msgspec.msgpack.Decoder(TracedJob),
}


def pack_jobs(jobs: Iterable[Job]) -> list[bytes]:
    """Jobs as MessagePack."""
    encode = _ENCODER.encode
    return [encode(job) for job in jobs]


def with_traceparent(packed: bytes, traceparent: str) -> bytes:
    """A job as `pack_jobs` has packed it, made a `TracedJob`."""
    return b"".join((_TRACED_HEAD, packed[len(_JOB_HEAD) :], _ENCODER.encode(traceparent)))


def unpack_job(data: bytes) -> Job:
    """Read a job; a `TracedJob` where the client traces.

    Raises:
        ProtocolError: too large, not MessagePack, or not a job of this wire version.
    """
    head = data[: len(_JOB_HEAD)]
    decoder = _JOB_DECODERS.get(head)
    if decoder is not None and len(data) <= MAX_JOB_BYTES:
        try:
            # With types and the number of fields given there is no tree to be read: a fifth of the time of the rest.
            return decoder.decode(data)
        except (ValueError, RecursionError):
            pass  # What is wrong with it is said below.
    values = unpack_flat(data, MAX_JOB_BYTES, "job")
    _check_version(values, "a job of")
    return checked(TracedJob if head == _TRACED_HEAD else Job, values, "a job")


class Failure(Message, frozen=True, tag=WIRE_VERSION):
    """Why a job ended without a row.

    Attributes:
        kind: name of an exception class of `lmpool.errors`.
        text: its message.
    """

    kind: str
    text: str

    def pack(self) -> bytes:
        """The failure as MessagePack, its text cut."""
        packed: bytes = msgpack.packb((WIRE_VERSION, self.kind, self.text[:_MAX_ERROR_TEXT]))
        return packed


def unpack_failure(data: bytes) -> Failure:
    """Read a failure.

    Raises:
        ProtocolError: too large, not MessagePack, or not a failure of this wire version.
    """
    values = unpack_flat(data, 8 * _MAX_ERROR_TEXT, "failure")
    _check_version(values, "a failure of")
    return checked(Failure, values, "a failure")


def _check_version(values: Any, kind: str) -> None:
    """Refuse a message of another release, which says its wire version first.

    Raises:
        ProtocolError: with both versions.
    """
    if type(values) is list and values and type(values[0]) is int and values[0] != WIRE_VERSION:
        raise ProtocolError(other_version(kind, values[0]))


def other_version(kind: str, version: int) -> str:
    """What to say of something that is of another wire version."""
    return f"{kind} wire version {version}, and this release of lmpool speaks {WIRE_VERSION}: run the same on all sides"


def checked(kind: type[M], values: Any, name: str) -> M:
    """Values that `unpack_flat` has read as a message.

    Raises:
        ProtocolError: another tag, too few or too many fields, or one of another type or out of its bounds.
    """
    try:
        # Unless it is told that bytes come as bytes, msgspec takes a text for their base64.
        message = msgspec.convert(values, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not {name}: {described(values)}: {error}") from error
    # For msgspec, fields with defaults may be missing, and others may follow.
    expected = len(kind.__struct_fields__) + (kind.__struct_config__.tag is not None)
    if len(values) != expected:
        raise ProtocolError(f"not {name}: {described(values)}: expected {expected} fields, got {len(values)}")
    return message


def _flat(values: list[Any]) -> list[Any]:
    """Refuses lists in lists as soon as the first is read: a tree of them takes far more memory than bytes."""
    for value in values:
        if type(value) is list:
            raise ValueError("a list within a list")
    return values


def described(value: object) -> str:
    """The values of a message for an error: texts and bytes are cut before they are printed: each may have 16 MB."""
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"[:80]
    return repr(value[:40] if isinstance(value, (str, bytes)) else value)[:80]


def unpack_flat(data: bytes, limit: int, name: str) -> Any:
    """Read a MessagePack array of up to 8 numbers, texts and bytes.

    Raises:
        ProtocolError: over `limit` bytes, not MessagePack, or with anything else in it.
    """
    if len(data) > limit:
        raise ProtocolError(f"a {name} of {len(data)} bytes is over the limit of {limit}")
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
        raise ProtocolError(f"a {name} does not decode: {error}") from error

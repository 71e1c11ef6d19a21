"""Prompts, jobs and failures. Prompts: from any value of the caller to uint32 bytes and a digest, checked once.

Messages are in MessagePack with explicit size limits, never pickled.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.errors import EmptyPrompt, NotTokenIds, PromptTooLong, ProtocolError, SettingsError, TokenOutOfRange
from lmpool.settings import shown

WIRE_VERSION = 7
"""Version of all messages except rows, which have their own. All processes of a pool have the same.

Each job, failure and model info has it. Raise it with a change of any message, or of the name or the meaning of a
Redis key.
"""

MAX_JOB_BYTES = 16 * 1024 * 1024
"""Max bytes of an encoded job."""

DIGEST_SIZE = 16
"""Bytes of a digest."""

_MAX_ERROR_TEXT = 4096  # Characters of the text of a failure.
_MAX_FIELDS = 8  # Of a message; the largest has that many.
_MAX_SHOWN = 120  # Characters of a value in an error.
_MAX_KEY = 64  # Bytes of a key of BLAKE2b.
_LITTLE_ENDIAN = np.dtype("<u4")
_ENCODING = "`await producer.encode(text)` (SyncProducer: no await) or tokenizer.encode(text)"
_TEXT = (str, bytes, bytearray, memoryview, mmap)
_ARRAY_IS_U4LE = array("I", [1]).tobytes() == b"\x01\x00\x00\x00"


class Prompt(NamedTuple):
    """A checked prompt, and the result that is requested for it.

    Attributes:
        ids: the token ids as little-endian uint32 bytes.
        digest: 128-bit BLAKE2b of `ids`, keyed by the adapter; of the query too if there is one.
        adapter: its name, or "".
        query: the request for something else than the row (`lmpool.protocol.query`), encoded; b"" for the row.
        length: numbers in the result of `query`; 0 for the row.
        generated: max tokens that `query` generates; 0 unless it is for a continuation.
    """

    ids: bytes
    digest: bytes
    adapter: str = ""
    query: bytes = b""
    length: int = 0
    generated: int = 0

    def with_query(self, query: bytes, length: int, generated: int = 0) -> Prompt:
        """The same prompt with a query."""
        return Prompt(self.ids, query_digest(self.digest, query), self.adapter, query, length, generated)


def digest_of(ids: bytes, adapter: str = "") -> bytes:
    """The digest of a prompt: 128-bit BLAKE2b of its uint32 bytes, keyed by the adapter (none: without a key)."""
    if not adapter:
        return hashlib.blake2b(ids, digest_size=DIGEST_SIZE).digest()
    name = adapter.encode()
    key = name if len(name) <= _MAX_KEY else hashlib.blake2b(name).digest()
    return hashlib.blake2b(ids, digest_size=DIGEST_SIZE, key=key).digest()


def query_digest(digest: bytes, query: bytes) -> bytes:
    """The digest of a prompt with a query: 128-bit BLAKE2b of the query, keyed by the prompt's digest."""
    return hashlib.blake2b(query, digest_size=DIGEST_SIZE, key=digest).digest()


def encode_prompt(ids: Any, *, vocab_size: int, max_tokens: int, adapter: str = "") -> Prompt:
    """Check a prompt against a model's limits and encode it.

    Args:
        ids: list, tuple, another sequence of integers or any 1-D integer array (numpy, torch) of token ids.
        vocab_size: V; ids must be below it.
        max_tokens: longest prompt that the model accepts.
        adapter: name of the adapter, or "".

    Raises:
        NotTokenIds: not a flat sequence of integers.
        EmptyPrompt: no ids.
        PromptTooLong: more than `max_tokens` ids.
        TokenOutOfRange: an id is negative or at least `vocab_size`.
    """
    if type(ids) is list or type(ids) is tuple:
        data, low, high, count = _from_sequence(ids, max_tokens)
    else:
        data, low, high, count = _from_other(ids, max_tokens)
    if count == 0:
        raise EmptyPrompt("the prompt is empty: it needs at least 1 token id")
    if count > max_tokens:
        raise _too_long(count, max_tokens)
    if low < 0 or high >= vocab_size:
        raise _out_of_range(low if low < 0 else high, vocab_size)
    return Prompt(data, digest_of(data, adapter), adapter)


def list_prompts(prompts: Iterable[Any]) -> list[Any]:
    """Several prompts, each as `encode_prompt` takes it, or a 2-D array, as a list; the prompts are not checked.

    Raises:
        SettingsError: text, or nothing that can be iterated over.
    """
    # A 0-D array has `__iter__` too.
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise SettingsError(f"prompts: {type(prompts).__name__} is not a sequence of prompts")
    return list(prompts)


def not_token_ids(ids: Any) -> NotTokenIds:
    """The error for a value that is no sequence of token ids; it says where the value may contain some."""
    if isinstance(ids, _TEXT):
        return NotTokenIds(f"the prompt is text, {_described(ids)}: pass its token ids, {_ENCODING}")
    hint = ""
    if isinstance(ids, Mapping) and "input_ids" in ids:
        inputs = ids["input_ids"]
        has_rows = getattr(inputs, "ndim", 1) == 2 or (isinstance(inputs, list) and list in map(type, inputs))
        hint = f'; pass its ["input_ids"]{"[0]" if has_rows else ""}'
    elif isinstance(getattr(ids, "ids", None), list):
        hint = "; pass its .ids"  # An `Encoding` of the library `tokenizers`.
    elif isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        hint = "; where several prompts are given, one alone is [ids]"
    return NotTokenIds(f"the prompt is {_described(ids)}: it must be a sequence of token ids{hint}")


def decode_ids(data: bytes) -> NDArray[np.uint32]:
    """The ids of an encoded prompt: a read-only uint32 array of shape (n,)."""
    return np.frombuffer(data, _LITTLE_ENDIAN)


def check_encoded(data: bytes, *, vocab_size: int, max_tokens: int) -> None:
    """Check ids that arrived over the wire against a model's limits.

    Raises:
        EmptyPrompt, NotTokenIds, PromptTooLong, TokenOutOfRange: as `encode_prompt`.
    """
    if not data:
        raise EmptyPrompt("the prompt is empty: it needs at least 1 token id")
    if len(data) % 4:
        raise NotTokenIds(f"{len(data)} bytes are not a whole number of uint32 ids")
    if len(data) // 4 > max_tokens:
        raise _too_long(len(data) // 4, max_tokens)
    high = int(decode_ids(data).max())
    if high >= vocab_size:
        raise _out_of_range(high, vocab_size)


def _too_long(count: int, max_tokens: int) -> PromptTooLong:
    return PromptTooLong(f"the prompt has {count} tokens: this model takes at most {max_tokens}")


def _out_of_range(token: int, vocab_size: int) -> TokenOutOfRange:
    return TokenOutOfRange(
        f"token id {shown(token, _MAX_SHOWN)} is out of range: this model's ids go from 0 to {vocab_size - 1}"
    )


def _from_sequence(ids: Sequence[Any], max_tokens: int) -> tuple[bytes, int, int, int]:
    """The bytes of a list or tuple, a lower bound that is negative only if an id is, the largest id, and the number.

    numpy would take several times as long at these lengths.
    """
    if not ids:
        return b"", 0, 0, 0
    if len(ids) > max_tokens:
        raise _too_long(len(ids), max_tokens)
    if set(map(type, ids)) != {int}:
        ids = [_as_int(value, index) for index, value in enumerate(ids)]
    try:
        packed = array("I", ids)
    except OverflowError:
        return b"", min(ids), max(ids), len(ids)
    high = max(ids)
    if not _ARRAY_IS_U4LE:
        return np.asarray(ids, _LITTLE_ENDIAN).tobytes(), 0, high, len(ids)
    return packed.tobytes(), 0, high, len(ids)


def _as_int(value: Any, index: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    # Samplers return 0-D arrays and tensors among others.
    if getattr(value, "shape", None) == () and (number := np.asarray(value)).dtype.kind in "iu":
        return int(number)
    hint = f"; encode text by {_ENCODING}" if isinstance(value, (str, bytes)) else _one_of_several(value)
    raise NotTokenIds(f"element {index} of the prompt is {_described(value)}: token ids are integers{hint}")


def _from_other(ids: Any, max_tokens: int) -> tuple[bytes, int, int, int]:
    """As `_from_sequence`, for arrays and other sequences."""
    if isinstance(ids, _TEXT):
        raise not_token_ids(ids)
    if hasattr(ids, "__array__") or hasattr(ids, "__array_interface__") or hasattr(ids, "__dlpack__"):
        return _from_array(ids)
    kind = type(ids)
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")) or isinstance(ids, Mapping):
        raise not_token_ids(ids)
    # numpy would turn bools into integers.
    try:
        values = list(ids) if len(ids) <= max_tokens else ids
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise NotTokenIds(f"the prompt is {_described(ids)}: {error}") from error
    return _from_sequence(values, max_tokens)


def _from_array(ids: Any) -> tuple[bytes, int, int, int]:
    try:
        values = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotTokenIds(f"the prompt is {_described(ids)}: {error}") from error
    if not values.ndim:
        raise not_token_ids(ids)
    if values.ndim != 1:
        raise NotTokenIds(f"the prompt has shape {values.shape}: one prompt is 1-D{_one_of_several(values)}")
    if values.size == 0:
        return b"", 0, 0, 0
    if values.dtype.kind not in "iu":
        raise NotTokenIds(f"the prompt's dtype is {values.dtype}: token ids are integers")
    return values.astype(_LITTLE_ENDIAN).tobytes(), int(values.min()), int(values.max()), values.size


def _one_of_several(value: Any) -> str:
    """A hint for a caller that passes several prompts, as tokenizers return them, in place of one."""
    if not hasattr(value, "__len__"):
        return ""
    return "; pass one of its rows, such as ids[0], or use batch_logprobs for several prompts"


def _described(value: object) -> str:
    return f"{shown(value, _MAX_SHOWN)} ({type(value).__name__})"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message that is encoded as a MessagePack array: its tag, if the class has one, and then its fields."""

    def pack(self) -> bytes:
        """The message as MessagePack; each bytes object is one `bin`."""
        packed: bytes = msgpack.packb(msgspec.to_builtins(self, builtin_types=(bytes,)))
        return packed


M = TypeVar("M", bound=Message)


class Job(Message, frozen=True, tag=WIRE_VERSION):
    """A prompt for a worker to compute. It does not carry the digest: the worker derives it from the ids.

    Attributes:
        ids: the prompt as little-endian uint32 bytes.
        adapter: name of the adapter, or "".
        fingerprint: the fingerprint that the producer expects the row to have.
        overwrite: replace a stored row, because it was corrupt.
        query: the request for something else than the row (`lmpool.protocol.query`), encoded; b"" for the row.
        host: the host whose shared memory the client reads (`lmpool.rows.shared_memory.host_token`); b"" for none.
    """

    ids: bytes
    adapter: str
    fingerprint: str
    overwrite: bool = False
    query: bytes = b""
    host: bytes = b""


class TracedJob(Job, frozen=True, tag=WIRE_VERSION):
    """A job of a client that traces its requests, with the W3C trace context as a further field.

    Any client may have written the field, so only workers that trace read it.
    """

    traceparent: str = ""


def _head(kind: type[Job]) -> bytes:
    """The first bytes of an encoded job: the length of the array and the wire version."""
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
    """A job as `pack_jobs` has packed it, turned into a `TracedJob`."""
    return b"".join((_TRACED_HEAD, packed[len(_JOB_HEAD) :], _ENCODER.encode(traceparent)))


def unpack_job(data: bytes) -> Job:
    """Read a job; a `TracedJob` if the client traces.

    Raises:
        ProtocolError: too large, not MessagePack, or not a job of this wire version.
    """
    head = data[: len(_JOB_HEAD)]
    decoder = _JOB_DECODERS.get(head)
    if decoder is not None and len(data) <= MAX_JOB_BYTES:
        try:
            # Types and number of fields are known, so no tree has to be built: a fifth of the time of the code below.
            return decoder.decode(data)
        except (ValueError, RecursionError):
            pass  # The code below finds the reason.
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
        """The failure as MessagePack, with its text truncated."""
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
    """Refuse a message of another release. Its first value is its wire version."""
    if type(values) is list and values and type(values[0]) is int and values[0] != WIRE_VERSION:
        raise ProtocolError(other_version(kind, values[0]))


def other_version(kind: str, version: int) -> str:
    """The text of an error about another wire version."""
    return f"{kind} wire version {version}, and this release of lmpool speaks {WIRE_VERSION}: run the same on all sides"


def checked(kind: type[M], values: Any, name: str) -> M:
    """The message in values from `unpack_flat`.

    Raises:
        ProtocolError: another tag or number of fields, or a field of another type or out of its bounds.
    """
    try:
        # Without builtin_types, msgspec would read a text as the base64 of bytes.
        message = msgspec.convert(values, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not {name}: {described(values)}: {error}") from error
    # msgspec accepts missing fields that have defaults, and further fields.
    expected = len(kind.__struct_fields__) + (kind.__struct_config__.tag is not None)
    if len(values) != expected:
        raise ProtocolError(f"not {name}: {described(values)}: expected {expected} fields, got {len(values)}")
    return message


def _flat(values: list[Any]) -> list[Any]:
    """Refuse nested lists as soon as the first is read: they take far more memory than bytes."""
    if list in map(type, values):
        raise ValueError("a list within a list")
    return values


def described(value: object) -> str:
    """The values of a message for an error. Texts and bytes are cut before they are formatted: each may have 16 MB."""
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

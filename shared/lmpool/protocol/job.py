"""Encode and check prompts, jobs and failures; a caller's prompt becomes uint32 bytes and a digest.

Messages are encoded as MessagePack with explicit size limits, never with pickle.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping
from mmap import mmap
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.errors import EmptyPrompt, NotTokenIds, PromptTooLong, ProtocolError, SettingsError, TokenOutOfRange
from lmpool.settings import shown

WIRE_VERSION = 8
"""Version of all messages except rows, which have their own version. Each job, failure, datagram and model info has it.

Processes may use one pool if their versions differ by at most 1. Increase the version by 1 for a change that processes
of the version before may ignore, such as a new field. Increase it by 2 for any other change of a message, or of the
name or meaning of a Redis key: processes of the versions before and after then refuse each other.
"""

_FIRST_VERSION = 8  # Version of the first release, 0.2.0; no release reads older messages.

READABLE = range(max(_FIRST_VERSION, WIRE_VERSION - 1), WIRE_VERSION + 2)
"""Versions of the messages that this release reads. It reads them as its own version, and ignores unknown fields."""

MAX_JOB_BYTES = 16 * 1024 * 1024
"""Max bytes of an encoded job."""

DIGEST_SIZE = 16
"""Bytes of the digest of a prompt, a query or a token set."""

_MAX_ERROR_TEXT = 4096  # Max characters of the text of a failure.
_MAX_SHOWN = 120  # Max characters of a value in an error message.
_MAX_KEY = 64  # Max bytes of a BLAKE2b key.
_LITTLE_ENDIAN = np.dtype("<u4")
_ENCODING = "`await producer.encode(text)` (SyncProducer: no await) or tokenizer.encode(text)"
_TEXT = (str, bytes, bytearray, memoryview, mmap)


class Prompt(NamedTuple):
    """A checked prompt, and the result that is requested for it."""

    ids: bytes  # The token ids as little-endian uint32 bytes.
    digest: bytes  # 128-bit BLAKE2b of `ids`, keyed by the adapter; with a query see `query_digest`.
    adapter: str = ""  # Name of the adapter in jobs; "" for none.
    query: bytes = b""  # Encoded query (`lmpool.protocol.query`) for a result other than the row; b"" for the row.
    length: int = 0  # Numbers in the result of `query`; 0 for the row.
    generated: int = 0  # Max tokens that `query` generates; 0 if the query is not for a continuation.

    def with_query(self, query: bytes, length: int, generated: int = 0) -> Prompt:
        """This prompt with a query."""
        return Prompt(self.ids, query_digest(self.digest, query), self.adapter, query, length, generated)


def digest_of(ids: bytes, adapter: str = "") -> bytes:
    """The digest of a prompt: 128-bit BLAKE2b of its uint32 bytes, keyed by the adapter (no key without an adapter)."""
    if not adapter:  # The usual case, in two thirds of the time.
        return hashlib.blake2b(ids, digest_size=DIGEST_SIZE).digest()
    key = adapter.encode()
    if len(key) > _MAX_KEY:
        key = hashlib.blake2b(key).digest()
    return hashlib.blake2b(ids, digest_size=DIGEST_SIZE, key=key).digest()


def query_digest(digest: bytes, query: bytes) -> bytes:
    """The digest of a prompt with a query: 128-bit BLAKE2b of the query, keyed by the prompt's digest."""
    return hashlib.blake2b(query, digest_size=DIGEST_SIZE, key=digest).digest()


def encode_prompt(ids: Any, *, vocab_size: int, max_tokens: int, adapter: str = "") -> Prompt:
    """Check a prompt against a model's limits and encode it.

    `ids` is a list, a tuple, another sequence of integers, or a 1-D integer array (numpy, torch). Raises `NotTokenIds`,
    `EmptyPrompt`, `PromptTooLong` or `TokenOutOfRange`.
    """
    if type(ids) is not list and type(ids) is not tuple:
        ids = _as_sequence(ids, max_tokens)
    _check_length(len(ids), max_tokens)
    if isinstance(ids, np.ndarray):
        data, low, high = ids.astype(_LITTLE_ENDIAN).tobytes(), int(ids.min()), int(ids.max())
    else:  # For a list of the usual length, numpy would take several times as long as `array`.
        if set(map(type, ids)) != {int}:
            ids = [_as_int(value, index) for index, value in enumerate(ids)]
        data, low, high = b"", 0, max(ids)
        try:
            packed = array("I", ids)
            if sys.byteorder == "big":
                packed.byteswap()
            data = packed.tobytes()
        except OverflowError:
            low = min(ids)
    _check_range(low, high, vocab_size)
    return Prompt(data, digest_of(data, adapter), adapter)


def list_prompts(prompts: Iterable[Any]) -> list[Any]:
    """A list of the prompts in an iterable or in the rows of a 2-D array; the prompts are not checked.

    Raises `SettingsError` for text, the output of a tokenizer, or a value that cannot be iterated over.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        raise SettingsError(f'prompts: {type(prompts).__name__} is not a sequence of prompts; pass its ["input_ids"]')
    # A 0-D array has `__iter__` too, but cannot be iterated over.
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise SettingsError(f"prompts: {type(prompts).__name__} is not a sequence of prompts")
    return list(prompts)


def not_token_ids(ids: Any) -> NotTokenIds:
    """The error for a value that is no sequence of token ids; its text names a part of the value that may be one."""
    if isinstance(ids, _TEXT):
        return NotTokenIds(f"the prompt is text, {_described(ids)}: pass its token ids, {_ENCODING}")
    hint = ""
    if isinstance(ids, Mapping) and "input_ids" in ids:
        inputs = ids["input_ids"]
        has_rows = getattr(inputs, "ndim", 1) == 2 or (isinstance(inputs, list) and list in map(type, inputs))
        hint = f'; pass its ["input_ids"]{"[0]" if has_rows else ""}'
    elif isinstance(getattr(ids, "ids", None), list):
        hint = "; pass its .ids"  # The value is an `Encoding` of the library `tokenizers`.
    elif isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        hint = "; where several prompts are given, one alone is [ids]"
    return NotTokenIds(f"the prompt is {_described(ids)}: it must be a sequence of token ids{hint}")


def decode_ids(data: bytes) -> NDArray[np.uint32]:
    """The ids of an encoded prompt: a read-only uint32 array of shape (n,)."""
    return np.frombuffer(data, _LITTLE_ENDIAN)


def check_encoded(data: bytes, *, vocab_size: int, max_tokens: int) -> None:
    """Check ids that arrived over the wire against a model's limits; raises as `encode_prompt`."""
    if len(data) % 4:
        raise NotTokenIds(f"{len(data)} bytes are not a whole number of uint32 ids")
    _check_length(len(data) // 4, max_tokens)
    _check_range(0, int(decode_ids(data).max()), vocab_size)


def _check_length(count: int, max_tokens: int) -> None:
    if not count:
        raise EmptyPrompt("the prompt is empty: it needs at least 1 token id")
    if count > max_tokens:
        raise PromptTooLong(f"the prompt has {count} tokens: this model takes at most {max_tokens}")


def _check_range(low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        token = shown(low if low < 0 else high, _MAX_SHOWN)
        raise TokenOutOfRange(f"token id {token} is out of range: this model's ids go from 0 to {vocab_size - 1}")


def _as_int(value: Any, index: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    # Samplers may return each token as a 0-D array or tensor.
    if getattr(value, "shape", None) == () and (number := np.asarray(value)).dtype.kind in "iu":
        return int(number)
    hint = f"; encode text by {_ENCODING}" if isinstance(value, (str, bytes)) else _one_of_several(value)
    raise NotTokenIds(f"element {index} of the prompt is {_described(value)}: token ids are integers{hint}")


def _as_sequence(ids: Any, max_tokens: int) -> Any:
    """Convert a value to a 1-D array of integers or a list; a sequence that is too long is returned unchanged."""
    is_array = hasattr(ids, "__array__") or hasattr(ids, "__array_interface__") or hasattr(ids, "__dlpack__")
    is_sequence = hasattr(type(ids), "__len__") and hasattr(type(ids), "__getitem__") and not isinstance(ids, Mapping)
    if isinstance(ids, _TEXT) or not (is_array or is_sequence):
        raise not_token_ids(ids)
    try:
        if not is_array:  # Do not use numpy, which would turn bools into integers.
            return list(ids) if len(ids) <= max_tokens else ids
        values = np.asarray(ids)
    except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:
        raise NotTokenIds(f"the prompt is {_described(ids)}: {error}") from error
    if not values.ndim:
        raise not_token_ids(ids)
    if values.ndim != 1:
        raise NotTokenIds(f"the prompt has shape {values.shape}: one prompt is 1-D{_one_of_several(values)}")
    if values.size and values.dtype.kind not in "iu":
        raise NotTokenIds(f"the prompt's dtype is {values.dtype}: token ids are integers")
    return values


def _one_of_several(value: Any) -> str:
    """A hint for a caller that passed several prompts, as tokenizers return them, instead of one prompt."""
    if not hasattr(value, "__len__"):
        return ""
    return "; pass one of its rows, such as ids[0], or use batch_logprobs for several prompts"


def _described(value: object) -> str:
    return f"{shown(value, _MAX_SHOWN)} ({type(value).__name__})"


_ENCODER = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message that is encoded as a MessagePack array: its tag, if the class has one, and then its fields.

    A later release may add fields at the end, which decoders ignore.
    """

    def pack(self) -> bytes:
        """The message as MessagePack; each bytes object becomes a value of the type `bin`."""
        return _ENCODER.encode(self)

    def check(self) -> None:
        """Raise `ProtocolError` if the values of fields contradict each other."""


M = TypeVar("M", bound=Message)


class Job(Message, frozen=True, tag=WIRE_VERSION):
    """A prompt for a worker to compute. A job does not contain the digest: the worker computes it from the ids."""

    ids: bytes  # The prompt as little-endian uint32 bytes.
    adapter: str  # Name of the adapter, or "".
    fingerprint: str  # Fingerprint of the model (`ModelInfo.fingerprint`) that the producer expects.
    overwrite: bool = False  # Whether to replace the stored row, because a client found it corrupt.
    query: bytes = b""  # Encoded query (`lmpool.protocol.query`) for a result other than the row; b"" for the row.
    host: bytes = b""  # The host (`host_token`) whose shared memory the client reads; b"" for none.
    socket: bytes = b""  # Name of the client's socket (`lmpool.rows.datagram`) for this job's row; b"" for none.


class TracedJob(Job, frozen=True, tag=WIRE_VERSION):
    """A job of a client that traces its requests, with the W3C trace context as an additional field.

    Any client can write this field, so only workers that trace read it. New fields of jobs must follow this field.
    """

    traceparent: str = ""


class Failure(Message, frozen=True, tag=WIRE_VERSION):
    """Why a job ended without a row."""

    kind: str  # Name of an exception class of `lmpool.errors`.
    text: str  # Message of the exception.

    def pack(self) -> bytes:
        """The failure as MessagePack, with its text truncated."""
        return _ENCODER.encode((WIRE_VERSION, self.kind, self.text[:_MAX_ERROR_TEXT]))


_TRACED_HEAD = TracedJob(b"", "", "").pack()[:2]  # Two bytes: the length of the array, and the version.
_JOBS = msgspec.msgpack.Decoder(Job)
_TRACED_JOBS: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(TracedJob)
_FAILURES = msgspec.msgpack.Decoder(Failure)


def pack_jobs(jobs: Iterable[Job]) -> list[bytes]:
    """Jobs as MessagePack."""
    return list(map(_ENCODER.encode, jobs))


def with_traceparent(packed: bytes, traceparent: str) -> bytes:
    """Turn a job that `pack_jobs` has packed into a packed `TracedJob`."""
    return b"".join((_TRACED_HEAD, packed[len(_TRACED_HEAD) :], _ENCODER.encode(traceparent)))


def unpack_job(data: bytes) -> Job:
    """Decode a job, which is a `TracedJob` if the client traces. Raises `ProtocolError` for bytes that are no job."""
    return unpack(_TRACED_JOBS if data and data[0] >= _TRACED_HEAD[0] else _JOBS, data, MAX_JOB_BYTES, "a job")


def unpack_failure(data: bytes) -> Failure:
    """Decode a failure. Raises `ProtocolError` for bytes that are no failure."""
    return unpack(_FAILURES, data, 8 * _MAX_ERROR_TEXT, "a failure")


def other_version(kind: str, version: int, own: int = WIRE_VERSION) -> str:
    """The text of an error about a message with a wire version that is not in `READABLE`."""
    advice = "run releases whose versions differ by at most 1 on all sides (docs/upgrade.md)"
    return f"{kind} wire version {version}, and this release of lmpool speaks {own}: {advice}"


def unpack(decoder: msgspec.msgpack.Decoder[M], data: bytes, limit: int, name: str) -> M:
    """Decode a message from a process that is not trusted; raises `ProtocolError` for bytes that are no such message.

    Decoders know the types of all fields, so they build no objects for unexpected values. Missing last fields get their
    defaults, and unknown last fields are ignored.
    """
    if len(data) > limit:
        raise ProtocolError(f"{name} of {len(data)} bytes is over the limit of {limit}")
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        tag = decoder.type.__struct_config__.tag
        if isinstance(tag, int) and len(data) > 1 and data[0] >> 4 == 9 and tag != data[1] < 0x80:
            if tag == WIRE_VERSION and data[1] in READABLE:
                return unpack(decoder, b"".join((data[:1], bytes([tag]), data[2:])), limit, name)
            raise ProtocolError(other_version(f"{name} of", data[1], tag)) from error
        raise ProtocolError(f"not {name}: {error!s:.100}") from error

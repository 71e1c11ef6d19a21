"""Prompts: from whatever the caller holds to uint32 bytes and a digest, checked once."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import EmptyPrompt, NotTokenIds, PromptTooLong, TokenOutOfRange

DIGEST_SIZE = 16
"""Bytes of a digest."""

_LITTLE_ENDIAN = np.dtype("<u4")
_ARRAY_IS_U4LE = array("I", [1]).tobytes() == b"\x01\x00\x00\x00"


class Prompt(NamedTuple):
    """A validated prompt.

    Attributes:
        ids: the token ids as little-endian uint32 bytes.
        digest: 128-bit BLAKE2b of `ids`, keyed by the adapter.
    """

    ids: bytes
    digest: bytes


def digest_of(ids: bytes, adapter: str = "") -> bytes:
    """The name of a prompt: 128-bit BLAKE2b of its uint32 bytes, keyed by the adapter (none: not keyed)."""
    return hashlib.blake2b(ids, digest_size=DIGEST_SIZE, key=_adapter_key(adapter)).digest()


def _adapter_key(adapter: str) -> bytes:
    if not adapter:
        return b""
    name = adapter.encode()
    return name if len(name) <= 64 else hashlib.blake2b(name).digest()


def encode_prompt(ids: Any, *, vocab_size: int, max_tokens: int, adapter: str = "") -> Prompt:
    """Check a prompt against a model's limits and encode it.

    Args:
        ids: list, tuple or any 1-D integer array (numpy, torch) of token ids.
        vocab_size: V; ids must be below it.
        max_tokens: longest prompt that the model takes.
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
        data, low, high, count = _from_array(ids)
    if count == 0:
        raise EmptyPrompt("the prompt is empty: it needs at least 1 token id")
    if count > max_tokens:
        raise _too_long(count, max_tokens)
    if low < 0 or high >= vocab_size:
        raise TokenOutOfRange(
            f"token id {low if low < 0 else high} is out of range: this model's ids go from 0 to {vocab_size - 1}"
        )
    return Prompt(data, digest_of(data, adapter))


def decode_ids(data: bytes) -> NDArray[np.uint32]:
    """The ids of an encoded prompt: a read-only uint32 array of shape (n,)."""
    return np.frombuffer(data, _LITTLE_ENDIAN)


def check_encoded(data: bytes, *, vocab_size: int, max_tokens: int) -> None:
    """Check ids that came over the wire against a model's limits.

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
        raise TokenOutOfRange(f"token id {high} is out of range: this model's ids go from 0 to {vocab_size - 1}")


def _too_long(count: int, max_tokens: int) -> PromptTooLong:
    return PromptTooLong(f"the prompt has {count} tokens: this model takes at most {max_tokens}")


def _from_sequence(ids: list[Any] | tuple[Any, ...], max_tokens: int) -> tuple[bytes, int, int, int]:
    """Lists and tuples: numpy would cost several times as much at these lengths."""
    if not ids:
        return b"", 0, 0, 0
    if len(ids) > max_tokens:
        raise _too_long(len(ids), max_tokens)
    if set(map(type, ids)) != {int}:
        ids = [_as_int(value, index) for index, value in enumerate(ids)]
    low, high = min(ids), max(ids)
    if low < 0 or high > 0xFFFFFFFF:
        return b"", low, high, len(ids)
    packed = array("I", ids)
    if not _ARRAY_IS_U4LE:
        return np.asarray(ids, _LITTLE_ENDIAN).tobytes(), low, high, len(ids)
    return packed.tobytes(), low, high, len(ids)


def _as_int(value: Any, index: int) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise NotTokenIds(
        f"element {index} of the prompt is {_shown(value)} ({type(value).__name__}): token ids are integers"
    )


def _from_array(ids: Any) -> tuple[bytes, int, int, int]:
    if isinstance(ids, (str, bytes, bytearray)):
        raise NotTokenIds(
            f"the prompt is text, {_shown(ids)}: encode it with the model's tokenizer and pass the token ids"
        )
    try:
        values = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotTokenIds(f"the prompt is {_shown(ids)} ({type(ids).__name__}): {error}") from error
    if values.ndim != 1:
        raise NotTokenIds(
            f"the prompt has shape {values.shape}: one prompt is 1-D; use batch_logprobs for several"
            if values.ndim
            else f"the prompt is {_shown(ids)} ({type(ids).__name__}): it must be a sequence of token ids"
        )
    if values.size == 0:
        return b"", 0, 0, 0
    if values.dtype.kind not in "iu":
        raise NotTokenIds(f"the prompt's dtype is {values.dtype}: token ids are integers")
    return values.astype(_LITTLE_ENDIAN).tobytes(), int(values.min()), int(values.max()), values.size


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Prompts: from whatever the caller holds to uint32 bytes and a digest, checked once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import EmptyPrompt, NotTokenIds, PromptTooLong, SettingsError, TokenOutOfRange
from lmpool.settings import shown

DIGEST_SIZE = 16
"""Bytes of a digest."""

_LITTLE_ENDIAN = np.dtype("<u4")
_MAX_SHOWN = 120
_ENCODING = "`await producer.encode(text)` (SyncProducer: no await) or tokenizer.encode(text)"
_TEXT = (str, bytes, bytearray, memoryview, mmap)
_ARRAY_IS_U4LE = array("I", [1]).tobytes() == b"\x01\x00\x00\x00"


class Prompt(NamedTuple):
    """A validated prompt, and what is wanted of it.

    Attributes:
        ids: the token ids as little-endian uint32 bytes.
        digest: 128-bit BLAKE2b of `ids`, keyed by the adapter; of the query too when there is one.
        adapter: its name, or "".
        query: what is wanted instead of the row (`lmpool.protocol.query`), encoded; b"" for the row itself.
        length: entries of the answer to `query`; 0 for the row itself.
        generated: how many tokens `query` may generate; 0 if it is not for a continuation.
    """

    ids: bytes
    digest: bytes
    adapter: str = ""
    query: bytes = b""
    length: int = 0
    generated: int = 0

    def with_query(self, query: bytes, length: int, generated: int = 0) -> Prompt:
        """The same prompt with a query, whose answer has `length` entries and takes up to `generated` tokens."""
        return Prompt(self.ids, query_digest(self.digest, query), self.adapter, query, length, generated)


def digest_of(ids: bytes, adapter: str = "") -> bytes:
    """The name of a prompt: 128-bit BLAKE2b of its uint32 bytes, keyed by the adapter (none: not keyed)."""
    if not adapter:
        return hashlib.blake2b(ids, digest_size=DIGEST_SIZE).digest()
    return hashlib.blake2b(ids, digest_size=DIGEST_SIZE, key=_adapter_key(adapter)).digest()


def query_digest(digest: bytes, query: bytes) -> bytes:
    """The name of what is wanted of a prompt instead of its row: 128-bit BLAKE2b of the query, keyed by the prompt."""
    return hashlib.blake2b(query, digest_size=DIGEST_SIZE, key=digest).digest()


def _adapter_key(adapter: str) -> bytes:
    name = adapter.encode()
    return name if len(name) <= 64 else hashlib.blake2b(name).digest()


def encode_prompt(ids: Any, *, vocab_size: int, max_tokens: int, adapter: str = "") -> Prompt:
    """Check a prompt against a model's limits and encode it.

    Args:
        ids: list, tuple, another sequence of integers or any 1-D integer array (numpy, torch) of token ids.
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
        data, low, high, count = _from_other(ids, max_tokens)
    if count == 0:
        raise EmptyPrompt("the prompt is empty: it needs at least 1 token id")
    if count > max_tokens:
        raise _too_long(count, max_tokens)
    if low < 0 or high >= vocab_size:
        raise _out_of_range(low if low < 0 else high, vocab_size)
    return Prompt(data, digest_of(data, adapter), adapter)


def list_prompts(prompts: Iterable[Any]) -> list[Any]:
    """Several prompts, which may be gone through more than once; they are not checked themselves.

    Args:
        prompts: prompts, each as `encode_prompt` takes it, or a 2-D array.

    Raises:
        SettingsError: text, or nothing that can be iterated over.
    """
    # An array of no axes has `__iter__` all the same.
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise SettingsError(f"prompts: {type(prompts).__name__} is not a sequence of prompts")
    return list(prompts)


def not_token_ids(ids: Any) -> NotTokenIds:
    """The error for a value that is no sequence of token ids at all; it says where the value may have some."""
    if isinstance(ids, _TEXT):
        return NotTokenIds(f"the prompt is text, {_described(ids)}: pass its token ids, {_ENCODING}")
    hint = ""
    if isinstance(ids, Mapping) and "input_ids" in ids:
        inputs = ids["input_ids"]
        has_rows = getattr(inputs, "ndim", 1) == 2 or (isinstance(inputs, list) and list in map(type, inputs))
        hint = f'; pass its ["input_ids"]{"[0]" if has_rows else ""}'
    elif isinstance(getattr(ids, "ids", None), list):
        hint = "; pass its .ids"  # What the library `tokenizers` gives.
    elif isinstance(ids, (int, np.integer)) and not isinstance(ids, bool):
        hint = "; where several prompts are given, one alone is [ids]"
    return NotTokenIds(f"the prompt is {_described(ids)}: it must be a sequence of token ids{hint}")


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
        raise _out_of_range(high, vocab_size)


def _too_long(count: int, max_tokens: int) -> PromptTooLong:
    return PromptTooLong(f"the prompt has {count} tokens: this model takes at most {max_tokens}")


def _out_of_range(token: int, vocab_size: int) -> TokenOutOfRange:
    return TokenOutOfRange(
        f"token id {shown(token, _MAX_SHOWN)} is out of range: this model's ids go from 0 to {vocab_size - 1}"
    )


def _from_sequence(ids: Sequence[Any], max_tokens: int) -> tuple[bytes, int, int, int]:
    """Lists and tuples: numpy would cost several times as much at these lengths.

    Returns:
        the ids' bytes, a bound below them that is negative only where an id is, the largest, and how many there are.
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
    # Arrays and tensors of no dimension are among what samplers return.
    if getattr(value, "shape", None) == () and (number := np.asarray(value)).dtype.kind in "iu":
        return int(number)
    text = isinstance(value, (str, bytes))
    hint = f"; encode text by {_ENCODING}" if text else _one_of_several(value)
    raise NotTokenIds(f"element {index} of the prompt is {_described(value)}: token ids are integers{hint}")


def _from_other(ids: Any, max_tokens: int) -> tuple[bytes, int, int, int]:
    """Arrays, and whatever else can be read like a list."""
    if isinstance(ids, _TEXT):
        raise not_token_ids(ids)
    if hasattr(ids, "__array__") or hasattr(ids, "__array_interface__") or hasattr(ids, "__dlpack__"):
        return _from_array(ids)
    kind = type(ids)
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")) or isinstance(ids, Mapping):
        raise not_token_ids(ids)
    # Not through numpy, which makes integers of bools.
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
    if values.ndim != 1:
        if not values.ndim:
            raise not_token_ids(ids)
        raise NotTokenIds(f"the prompt has shape {values.shape}: one prompt is 1-D{_one_of_several(values)}")
    if values.size == 0:
        return b"", 0, 0, 0
    if values.dtype.kind not in "iu":
        raise NotTokenIds(f"the prompt's dtype is {values.dtype}: token ids are integers")
    return values.astype(_LITTLE_ENDIAN).tobytes(), int(values.min()), int(values.max()), values.size


def _one_of_several(value: Any) -> str:
    """A hint for whoever has passed several prompts, as tokenizers give them, in place of one."""
    if not hasattr(value, "__len__"):
        return ""
    return "; pass one of its rows, such as ids[0], or use batch_logprobs for several prompts"


def _described(value: object) -> str:
    return f"{shown(value, _MAX_SHOWN)} ({type(value).__name__})"

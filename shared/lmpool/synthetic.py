"""Synthetic models: rows that depend only on seed, adapter and prompt, so that tests can check every bit.

A synthetic row consists of the rotated quarters of one of a few base rows. Rotating permutes the values, so a row has
the logZ of its base row, and drawing a row costs one copy. The logits of the base rows are bfloat16 numbers, so a row
is the same in F32 and in BF16.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmpool.protocol.job import encode_prompt
from lmpool.protocol.row import narrow_to_bf16, widen_bf16
from lmpool.settings import check_number
from lmpool.vocabulary import MAX_TOKENS, Vocabulary

_BASES = 8  # Number of base rows of a model: few, so that all base rows fit into the processor's cache.
_PARTS = 4  # Number of parts of a row (quarters) that are rotated independently.
# Parts of a prompt's hash: the number of a base row, and the rotation of each quarter.
_HASHED = Struct(f"<H{_PARTS}I")
_HASHES = np.dtype([("base", "<u2"), ("turns", "<u4", _PARTS)])

FEW_TOKENS = 1024
"""Max entries of rows that are drawn together; longer rows are faster to draw one by one."""

_SINGLE_BYTES_FROM = 512  # Min number of tokens of a vocabulary that contains all single bytes.
_LETTERS = np.frombuffer(b"aeinorstlcdhmupgbfyw", np.uint8)
_MIN_WORD = 2  # Min bytes of a word; tokens of a synthetic vocabulary are words or single bytes.
_MAX_WORD = 12  # Max bytes of a word.
_STEMS = 64  # Number of words that do not continue an earlier word.
_MAX_ADDED = 4  # Max bytes that a word adds to an earlier word.
_MAX_CUT = 5  # Max bytes that are cut from the end of an earlier word before bytes are added.


class BaseRow(NamedTuple):
    """One base row. Each quarter is stored twice in succession, so that a rotated quarter is one slice."""

    logprobs: list[NDArray[np.float32]]  # Per quarter: log-probabilities, (2 * size,).
    bits: list[NDArray[np.uint16]]  # Per quarter: bfloat16 bits of the logits, (2 * size,).
    log_z: np.float32  # The log-sum-exp of all logits.
    sizes: list[int]  # Per quarter: its length, but at least 1.


@lru_cache(maxsize=8)
def base_rows(vocab_size: int, seed: int) -> list[BaseRow]:
    """The base rows of a synthetic model."""
    generator, bases = np.random.Generator(np.random.PCG64(seed)), []
    for _ in range(_BASES):
        draws = generator.standard_normal(vocab_size, dtype=np.float32) * np.float32(3)
        bits = narrow_to_bf16(draws)
        logits = widen_bf16(bits)
        log_z = np.float32(np.logaddexp.reduce(logits.astype(np.float64)))
        logprobs = [np.tile(part, 2) for part in np.array_split(logits - log_z, _PARTS)]
        quarters = [np.tile(part, 2) for part in np.array_split(bits, _PARTS)]
        bases.append(BaseRow(logprobs, quarters, log_z, [max(1, len(part) // 2) for part in quarters]))
    return bases


class _Table(NamedTuple):
    """All base rows of a synthetic model with few tokens, in a form for drawing several rows at once."""

    logprobs: NDArray[np.float32]  # (bases * 2 V,): the base rows; each quarter is stored twice, as in `BaseRow`.
    bits: NDArray[np.uint16]  # (bases * 2 V,): bfloat16 bits of the logits in the same order.
    log_z: NDArray[np.float32]  # (bases,): logZ of each base row.
    sizes: NDArray[np.uint32]  # (quarters,): the length of each quarter.
    quarter: NDArray[np.intp]  # (V,): the quarter that each token belongs to.
    place: NDArray[np.intp]  # (V,): the index of each token in its base row without rotation.


@lru_cache(maxsize=8)
def _table(vocab_size: int, seed: int) -> _Table:
    bases = base_rows(vocab_size, seed)
    lengths = [len(part) // 2 for part in bases[0].logprobs]
    quarter = np.repeat(np.arange(_PARTS), lengths)
    # Add the length of each quarter before the token's quarter, because each quarter is stored twice.
    place = np.arange(vocab_size) + np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    logprobs = np.concatenate([part for base in bases for part in base.logprobs])
    bits = np.concatenate([part for base in bases for part in base.bits])
    log_z = np.array([base.log_z for base in bases], np.float32)
    return _Table(logprobs, bits, log_z, np.array(bases[0].sizes, np.uint32), quarter, place)


# The row that a prompt gets: a base row, and the rotation of each quarter.
Draw = tuple[BaseRow, tuple[int, ...]]


def draw(ids: bytes, vocab_size: int, seed: int, revision: str = "") -> Draw:
    """Choose the row of an encoded prompt; `revision` is the revision of its adapter, or "" without an adapter."""
    number, *turns = _HASHED.unpack(_hash(ids, seed, revision))
    base = base_rows(vocab_size, seed)[number % _BASES]
    return base, tuple([turn % size for turn, size in zip(turns, base.sizes, strict=True)])


def draw_few_tokens(
    prompts: Iterable[tuple[bytes, str]], vocab_size: int, seed: int, *, bits: bool = False
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Draw the rows of several prompts for a model of at most `FEW_TOKENS` tokens, much faster than one by one.

    Takes encoded prompts, each with the revision of its adapter ("" for none). Returns float32 log-probabilities, or
    with `bits` the bfloat16 bits of the logits, (n, V), and the float32 logZ of the logits (n,).
    """
    hashes = b"".join([_hash(ids, seed, revision) for ids, revision in prompts])
    numbers, table = np.frombuffer(hashes, _HASHES), _table(vocab_size, seed)
    bases = numbers["base"].astype(np.intp) % _BASES
    at = (numbers["turns"] % table.sizes).astype(np.intp).take(table.quarter, axis=1)
    at += table.place
    at += 2 * vocab_size * bases[:, None]
    return (table.bits if bits else table.logprobs).take(at), table.log_z[bases]


def _hash(ids: bytes, seed: int, revision: str) -> bytes:
    return blake2b(ids, digest_size=_HASHED.size, key=_hash_key(seed, revision)).digest()


@lru_cache(maxsize=64)
def _hash_key(seed: int, revision: str) -> bytes:
    # Hash the revision, so that it may have any length.
    adapter = blake2b(revision.encode(), digest_size=32).digest() if revision else b""
    return seed.to_bytes(8, "little", signed=True) + adapter


def fill(out: NDArray[Any], parts: list[NDArray[Any]], shifts: tuple[int, ...]) -> None:
    """Rotate the parts by `shifts`, and write them one after the other into `out` of shape (V,)."""
    at = 0
    for part, shift in zip(parts, shifts, strict=True):
        size = len(part) // 2
        out[at : at + size] = part[shift : shift + size]
        at += size


def synthetic_row(
    prompt: Iterable[int], *, vocab_size: int, seed: int = 0, adapter_revision: str = ""
) -> NDArray[np.float32]:
    """The row that a synthetic worker returns for a prompt.

    Args:
        prompt: token ids, each below `vocab_size`.
        vocab_size: V, the number of tokens.
        seed: the worker's `--seed`.
        adapter_revision: revision of the adapter that the prompt names (`Producer.adapters`); "" for none.

    Returns:
        float32 log-probabilities of shape (V,) whose exponentials sum to 1.

    Raises:
        InvalidPrompt: the prompt is empty or has ids outside the vocabulary.
    """
    ids = encode_prompt(list(prompt), vocab_size=vocab_size, max_tokens=2**31).ids
    base, shifts = draw(ids, vocab_size, seed, adapter_revision)
    row = np.empty(vocab_size, np.float32)
    fill(row, base.logprobs, shifts)
    return row


def synthetic_vocabulary(vocab_size: int, seed: int = 0) -> Vocabulary:
    """The vocabulary of a synthetic worker.

    It resembles a real vocabulary: token 0 is empty, the 256 single bytes follow if V is at least 512, and the other
    tokens are words of 2 to 12 bytes with shared prefixes. Half of the words begin with a space, and some occur twice.

    Args:
        vocab_size: V, the number of tokens.
        seed: the worker's `--seed`.

    Raises:
        SettingsError: `vocab_size` is not a whole number from 1 to `lmpool.vocabulary.MAX_TOKENS`.
    """
    check_number("vocab_size", vocab_size, 1, MAX_TOKENS)
    tokens = [b"", *(bytes([value]) for value in range(256 if vocab_size >= _SINGLE_BYTES_FROM else 0))]
    generator = np.random.Generator(np.random.PCG64(seed))
    return Vocabulary(tokens + _draw_words(generator, vocab_size - len(tokens)))


def _draw_words(generator: np.random.Generator, count: int) -> list[bytes]:
    """Draw words that share prefixes: except for the first words, each begins like an earlier word."""
    words = np.zeros((count, _MAX_WORD), np.uint8)
    lengths = np.full(count, _MIN_WORD, np.uint8)
    columns, done = np.arange(_MAX_WORD), min(count, _STEMS)
    words[:done, :_MIN_WORD] = _LETTERS[generator.integers(0, len(_LETTERS), (done, _MAX_WORD), np.uint8)][
        :, :_MIN_WORD
    ]
    words[:done:2, 0] = ord(" ")
    while done < count:
        # Double the number of words in each round.
        new = slice(done, min(count, 2 * done))
        size = new.stop - done
        earlier = generator.integers(0, done, size)
        cut = generator.integers(0, _MAX_CUT + 1, size)
        kept = np.maximum(_MIN_WORD, lengths[earlier] - cut)
        ends = np.minimum(_MAX_WORD, kept + generator.integers(1, _MAX_ADDED + 1, size))
        letters = _LETTERS[generator.integers(0, len(_LETTERS), (size, _MAX_WORD), np.uint8)]
        drawn = np.where(columns < ends[:, None], letters, 0)
        words[new] = np.where(columns < kept[:, None], words[earlier], drawn)
        lengths[new] = ends
        done = new.stop
    # numpy removes zeros at the ends of byte strings, and so the zeros that pad the words.
    tokens: list[bytes] = words.view(f"S{_MAX_WORD}")[:, 0].tolist()
    return tokens

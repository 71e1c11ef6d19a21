"""The probability that a text goes on with given bytes, summed over all token sequences that spell the bytes.

Tokens cover the bytes b if their bytes, joined, begin with b, and the bytes of all tokens but the last do not. So
the last token of a cover follows a sequence s that spells a proper prefix of b, and begins with the bytes that remain:

    P(b) = sum over all s that spell a proper prefix u of b:  P(s) * P(the next token begins with b[len(u):])

Each sequence s needs its own row, because a row depends on the tokens of its prompt. The tokens below a trie node are
consecutive in the order of their bytes, so the next tokens that begin with some bytes are a slice of this order.

The search starts with the empty sequence. Reading the row of a sequence adds a term to the sum, and replaces the
sequence by the longer ones that still spell a proper prefix. Covers through different sequences exclude each other. So
the mass that is missing in the sum is at most the sum of P(s) over all sequences whose rows have not been read.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import gather
from lmpool.errors import InvalidVocabulary, SettingsError
from lmpool.producer.client.queries import Queries
from lmpool.protocol.job import decode_ids
from lmpool.protocol.row import Row
from lmpool.settings import check_kind, check_known, check_number
from lmpool.vocabulary import Vocabulary

MAX_CONTINUATION_BYTES = 4096
"""Max bytes of a continuation: the search keeps all its prefixes, about 18 MB for the longest."""

MAX_PREFIX_BYTES = 64 * 2**20
"""Max bytes of all prefixes of all continuations of a call, which a pass of the search reads."""

DEFAULT_MAX_ROWS = 1024
"""Rows that a call requests at most by default."""

# Rows requested at once with a tolerance. An engine computes 32 short continuations of one prompt in about one step,
# and more rows at once would often be rows that are not needed.
_ROWS_AT_ONCE = 32
_MAX_ROWS_AT_ONCE = 1024  # Rows requested at once without a tolerance: then all rows are needed.
# Log-probability that one byte of text is expected to cost, about that of unlikely text. The search prefers a sequence
# of 10 bytes with log-probability -30 to one of 1 byte with log-probability -15, so that it soon reaches the end.
_NATS_PER_BYTE = 2.0
_MANY = 10**12  # Numbers of rows from this one on are not printed: they may have a thousand digits.


class ByteOptions(TypedDict, total=False):
    """Options of `Producer.mass_of_bytes`.

    Attributes:
        tolerance: 0 (default) for the exact sum. Otherwise the call ends as soon as the missing mass is at most
            `tolerance` times the mass found, for each continuation, or when it has requested `max_rows` rows.
        max_rows: max rows that the call requests (default 1,024). The exact sum needs one row for each token sequence
            that spells a proper prefix of a continuation: about 30 for 6 bytes of English, 300 for 12, 400,000 for 24.
        vocabulary: the byte string of every token id, with b"" for tokens that end the text. By default the model's
            vocabulary, with b"" for the special tokens of the tokenizer that the workers publish.
    """

    tolerance: float
    max_rows: int
    vocabulary: Vocabulary | Iterable[bytes] | None


class ByteMass(NamedTuple):
    """The result of `Producer.mass_of_bytes` for n continuations.

    Attributes:
        logprobs: the logarithm of the mass found, float64 (n,): a lower bound, which is exact if `upper` is equal.
        upper: the logarithm of the mass found plus the mass that may be missing, float64 (n,): an upper bound.
    """

    logprobs: NDArray[np.float64]
    upper: NDArray[np.float64]


class _Sequence(NamedTuple):
    """A token sequence that spells a proper prefix of a continuation, and whose row has not been read."""

    logprob: float
    text: bytes
    tokens: tuple[int, ...]


class _Step(NamedTuple):
    """Tokens that lead from one text to a longer text: tokens that spell the added bytes, or that begin with these."""

    text: bytes
    tokens: NDArray[np.int64]


def read_texts(continuations: Iterable[bytes], options: ByteOptions) -> list[bytes]:
    """Return the continuations of a call as plain bytes, and check its options."""
    check_known(options, ByteOptions.__annotations__)
    check_number("tolerance", options.get("tolerance", 0.0), 0, 1, whole=False)
    check_number("max_rows", options.get("max_rows", DEFAULT_MAX_ROWS), 1)
    is_one = isinstance(continuations, (str, bytes, bytearray))
    texts = list(check_kind("continuations", None if is_one else continuations, Iterable, "a list of byte strings"))
    for index, text in enumerate(texts):
        if len(check_kind(f"continuations[{index}]", text, bytes, "bytes")) > MAX_CONTINUATION_BYTES:
            found = f"{len(text):,} bytes; the limit is {MAX_CONTINUATION_BYTES:,}: split the text"
            raise SettingsError(f"continuations[{index}]: has {found}")
    if (size := sum(len(text) * (len(text) + 1) // 2 for text in texts)) > MAX_PREFIX_BYTES:
        found = f"their prefixes have {size:,} bytes; the limit is {MAX_PREFIX_BYTES:,}"
        raise SettingsError(f"continuations: {found}: request fewer or shorter ones in one call")
    return list(map(bytes, texts))  # A subclass of bytes may have another hash, such as genlm's `Token`.


class Spellings:
    """The proper prefixes of some continuations, and the tokens that lead from each prefix to longer texts."""

    def __init__(self, vocabulary: Vocabulary, continuations: Iterable[bytes]) -> None:
        self.continuations = dict.fromkeys(continuations)
        self._vocabulary = vocabulary
        self._longer: dict[bytes, set[bytes]] = {}
        for whole in self.continuations:
            for end in range(len(whole)):
                self._longer.setdefault(whole[:end], set()).add(whole[: end + 1])
        self.steps = cache(self._steps)

    def _steps(self, text: bytes) -> tuple[list[_Step], list[_Step]]:
        """Return the steps to continuations, with tokens that begin with the added bytes, and those to their prefixes.

        The tokens of the second kind of steps spell the added bytes exactly.
        """
        ends, prefixes = [], []
        todo = sorted(self._longer[text])
        while todo:
            longer = todo.pop()
            spelling, beginning = self._tokens(longer[len(text) :])
            if not beginning.size:
                continue
            if longer in self.continuations:
                ends.append(_Step(longer, beginning))
            if longer in self._longer:
                todo += sorted(self._longer[longer])
                if spelling.size:
                    prefixes.append(_Step(longer, spelling))
        return ends, prefixes

    def _tokens(self, added: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens whose bytes are `added`, and the tokens whose bytes begin with `added`."""
        order, tokens = self._vocabulary.order, self._vocabulary.tokens
        low = bisect_left(order, added, key=tokens.__getitem__)
        high = bisect_right(order, added, low, key=lambda token: tokens[token][: len(added)])
        return order[low : bisect_right(order, added, low, high, key=tokens.__getitem__)], order[low:high]

    def count(self) -> int:
        """Return the number of token sequences that spell a proper prefix of a continuation: rows of the exact sum."""
        counts = Counter({b"": 1})
        for text in sorted(self._longer, key=len):
            for step in self.steps(text)[1] if counts[text] else ():
                counts[step.text] += counts[text] * len(step.tokens)
        return sum(counts[text] for text in self._longer)


class Search:
    """The sum of one call: the mass found so far, and the token sequences whose rows have not been read."""

    def __init__(self, queries: Queries, ids: list[int], spellings: Spellings, tolerance: float, max_rows: int) -> None:
        self._queries = queries
        self._ids = ids
        self._spellings = spellings
        self._limit = math.log(tolerance) if tolerance else -math.inf
        self._rows_left = max_rows
        # The mass found of each continuation, as a logarithm.
        self._found = {text: -math.inf if text else 0.0 for text in spellings.continuations}
        # Dicts in place of sets, so that equal calls add in the same order.
        self._unread: dict[bytes, dict[_Sequence, None]] = {b"": {_Sequence(0.0, b"", ()): None}}

    @classmethod
    async def prepare(cls, queries: Queries, ids: Any, texts: list[bytes], options: ByteOptions) -> Self:
        """Check the prompt and the number of rows, before any row is requested."""
        base = decode_ids(queries.encode(ids).ids).tolist()
        tolerance, max_rows = options.get("tolerance", 0.0), options.get("max_rows", DEFAULT_MAX_ROWS)
        vocabulary = options.get("vocabulary")
        if vocabulary is None:
            vocabulary = await queries.session.vocabularies.spelling(queries.deadline)

        def spell() -> tuple[Spellings, int]:
            known = vocabulary if isinstance(vocabulary, Vocabulary) else Vocabulary(vocabulary)
            if len(known) != queries.vocab_size:
                sizes = f"has {len(known):,} tokens; this model's rows have {queries.vocab_size:,} entries"
                raise InvalidVocabulary(f"vocabulary: {sizes}: give the byte string of every token id")
            spellings = Spellings(known, texts)
            return spellings, 0 if tolerance else spellings.count()

        # Sorting a vocabulary takes a tenth of a second, so do not block the event loop.
        spellings, count = await asyncio.to_thread(spell)
        if count > max_rows:
            rows = f"{count:,}" if count < _MANY else "a trillion or more"
            needed = f"the exact sum needs {rows} rows, one for each token sequence; the limit is {max_rows:,}"
            raise SettingsError(f"max_rows: {needed}: raise max_rows, or pass tolerance=0.001")
        return cls(queries, base, spellings, tolerance, max_rows)

    async def run(self) -> None:
        """Read rows until the missing mass is small enough, or `max_rows` rows have been read."""
        fingerprint = self._queries.session.info.fingerprint
        while chosen := self._choose():
            self._rows_left -= len(chosen)
            for sequence in chosen:
                del self._unread[sequence.text][sequence]
            for masses, longer in await gather(map(self._read, chosen)):
                for text, mass in masses:
                    self._found[text] = float(np.logaddexp(self._found[text], mass))
                for sequence in longer:
                    self._unread.setdefault(sequence.text, {})[sequence] = None
        self._queries.check_same_model(fingerprint)

    def result(self, texts: Sequence[bytes]) -> ByteMass:
        """Return the mass found of each continuation, and the upper bounds."""
        # Rounding can make a probability of 1 a little larger.
        found = {
            text: (min(0.0, mass), min(0.0, np.logaddexp(mass, self._missing(text))))
            for text, mass in self._found.items()
        }
        values = np.array([found[text] for text in texts], np.float64).reshape(-1, 2)
        return ByteMass(values[:, 0].copy(), values[:, 1].copy())

    def _sequences(self, text: bytes) -> list[_Sequence]:
        """Return the unread sequences that spell a proper prefix of a text, the least likely first."""
        return sorted(each for end in range(len(text)) for each in self._unread.get(text[:end], ()))

    def _missing(self, text: bytes) -> float:
        return float(np.logaddexp.reduce([sequence.logprob for sequence in self._sequences(text)] or [-np.inf]))

    def _choose(self) -> list[_Sequence]:
        """Return the sequences whose rows are read next: those that the tolerance does not allow to leave out."""
        needed = set[_Sequence]()
        for text, found in self._found.items():
            sequences = self._sequences(text)
            if sequences:
                # The missing mass if only the least likely sequence is left out, the least likely two, and so on.
                left_out = np.logaddexp.accumulate([sequence.logprob for sequence in sequences])
                needed.update(sequences[int(np.searchsorted(left_out, self._limit + found, side="right")) :])
        most = min(self._rows_left, _MAX_ROWS_AT_ONCE if self._limit == -math.inf else _ROWS_AT_ONCE)
        # Sort ties by the sequence itself, so that equal calls add in the same order.
        return sorted(needed, key=lambda each: (-each.logprob - _NATS_PER_BYTE * len(each.text), each))[:most]

    async def _read(self, sequence: _Sequence) -> tuple[list[tuple[bytes, float]], list[_Sequence]]:
        """Read a row; return what it adds to the mass of continuations, and the sequences of one more token."""
        row = await self._queries.row(self._queries.encode([*self._ids, *sequence.tokens]))
        ends, prefixes = self._spellings.steps(sequence.text)
        masses = [(step.text, sequence.logprob + _log_sum(row, step.tokens)) for step in ends]
        longer = [
            _Sequence(sequence.logprob + logprob, step.text, (*sequence.tokens, token))
            for step in prefixes
            for token, logprob in zip(step.tokens.tolist(), row[step.tokens].tolist(), strict=True)
            if logprob > -math.inf
        ]
        return masses, longer


def _log_sum(row: Row, tokens: NDArray[np.int64]) -> float:
    return float(np.logaddexp.reduce(row[tokens], dtype=np.float64))

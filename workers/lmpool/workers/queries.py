"""Queries that a worker answers from rows: rows in the cache, or rows that the backend has just computed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from lmpool.broker.registries import look_up_tokens
from lmpool.errors import (
    CorruptRow,
    LMPoolError,
    ProtocolError,
    ServerError,
    SettingsError,
    SourceMissing,
    UnknownTokenSet,
    WorkerError,
)
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import (
    MassQuery,
    PickQuery,
    SampleQuery,
    TopQuery,
    TrieQuery,
    mass_of,
    pack_token,
    pack_top,
    sample,
    top,
)
from lmpool.protocol.row import Row, RowBlock, VectorBlock, decode_row
from lmpool.protocol.token_set import TokenSet, name_in, unpack_tokens
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of
from lmpool.workers.execution.in_flight import EntriesByDigest, InFlightPrompt, StreamEntry
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.trie import TrieInputs, answer

# Max tokens of all cached sets of tokens together, which take 32 MiB.
_MAX_CACHED_TOKENS = 1 << 22
_NO_TRIES = Failure(SourceMissing.__name__, "this worker has no tries: send the query to a trie worker")
# Failures of a trie query that mean that the cache has no readable row.
_ROW_MISSING = (SourceMissing.__name__, CorruptRow.__name__)

Answer = NDArray[np.float32] | Failure


@dataclass(eq=False)
class TokenSets:
    """Looks up the sets of tokens that queries name, and caches the most recently used sets.

    Args:
        redis: the server that has the named sets.
        keys: the deployment's keys.
        vocab_size: number of tokens of the model's vocabulary.
    """

    redis: Redis
    keys: Keys
    vocab_size: int

    def __post_init__(self) -> None:
        self._named: OrderedDict[bytes, TokenSet] = OrderedDict()

    async def read(self, packed: bytes) -> TokenSet | LMPoolError:
        """Return the set of tokens that a query carries or names, or the error if it cannot be read."""
        name = name_in(packed)
        try:
            if name is None:
                return unpack_tokens(packed, self.vocab_size)
            if (tokens := self._named.get(name)) is None:
                tokens = self._named[name] = await look_up_tokens(self.redis, self.keys, name, self.vocab_size)
        except (ProtocolError, UnknownTokenSet) as error:
            return error
        except NoPermissionError as error:
            return ServerError(f"the worker's Redis user may not read sets of tokens: {error}")
        self._named.move_to_end(name)
        while len(self._named) > 1 and sum(len(cached.ids) for cached in self._named.values()) > _MAX_CACHED_TOKENS:
            self._named.popitem(last=False)
        return tokens


@dataclass(eq=False)
class QueryAnswerer:
    """Answers queries about one model's rows: top-k, samples, masses, and values of trie nodes.

    Args:
        trie_inputs: fetches rows and tries.
        publisher: publishes the answers.
        info: the model's info.
        token_sets: fetches the sets of tokens that queries name.
    """

    trie_inputs: TrieInputs
    publisher: Publisher
    info: ModelInfo
    token_sets: TokenSets

    def __post_init__(self) -> None:
        self._fingerprint, self._vocab_size = self.info.fingerprint, self.info.vocab_size
        self._has_tries = self.info.answers_tries

    async def answer_from_cache(self, prompts: Sequence[InFlightPrompt]) -> dict[InFlightPrompt, Sequence[StreamEntry]]:
        """Answer queries from rows in the cache, and mark the prompts whose cached row is damaged.

        Returns:
            prompt -> its ended entries. The other prompts must be computed.
        """
        waiting = {prompt.digest: list(prompt.entries.values()) for prompt in prompts}
        ended, damaged = await self._answer(waiting, None)
        for prompt in prompts:
            prompt.is_damaged = prompt.is_damaged or prompt.digest in damaged
        answered = {prompt: [entry for entry in waiting[prompt.digest] if entry in ended] for prompt in prompts}
        return {prompt: entries for prompt, entries in answered.items() if entries}

    async def answer(self, entries: EntriesByDigest, block: RowBlock) -> None:
        """Answer queries from the rows of a block, and end their entries; `entries`: digest of a row -> entries."""
        await self._answer(entries, await asyncio.to_thread(_decode_rows, block, entries))

    async def _answer(
        self, entries: EntriesByDigest, rows: Mapping[bytes, Row] | None
    ) -> tuple[set[StreamEntry], set[bytes]]:
        """Answer queries from `rows`, or from the rows in the cache if `rows` is None.

        Returns:
            the ended entries, and the digests of rows in the cache that are damaged.
        """
        tries, picks, damaged = dict[bytes, TrieQuery](), dict[bytes, dict[bytes, PickQuery]](), set[bytes]()
        for digest, waiting in entries.items():
            for entry in waiting:
                if isinstance(entry.query, TrieQuery):
                    tries[entry.digest] = replace(entry.query, rows=self._fingerprint, source=digest)
                elif entry.query is not None:
                    picks.setdefault(digest, {})[entry.digest] = entry.query
        answers = await self._answer_tries(tries, rows, damaged) if tries else {}
        if picks:
            if rows is None:
                load_rows = partial(self.trie_inputs.rows, self._fingerprint, picks, self._vocab_size)
                cached = await self.publisher.retry(load_rows)
                damaged |= {digest for digest, row in cached.items() if isinstance(row, CorruptRow)}
                rows = {digest: row for digest, row in cached.items() if isinstance(row, np.ndarray)}
            queries = {name: (query, rows[row]) for row in picks.keys() & rows for name, query in picks[row].items()}
            sets = await self._read_sets([query.allowed for query, _ in queries.values()])
            answers |= await asyncio.to_thread(_pick_all, queries, sets)
        ended = [entry for waiting in entries.values() for entry in waiting if entry.digest in answers]
        await self._publish(ended, answers)
        return set(ended), damaged

    async def set_tokens(self, prompts: Sequence[InFlightPrompt]) -> dict[InFlightPrompt, Failure]:
        """Put the tokens of named sets into queries for positions; return the prompts whose set cannot be used."""
        sets = await self._read_sets([allowed_in(prompt) for prompt in prompts])
        failures: dict[InFlightPrompt, Failure] = {}
        for prompt in prompts:
            if prompt.positions is None or not (packed := allowed_in(prompt)):
                continue
            try:
                prompt.positions = prompt.positions.among(_members(sets[packed], prompt.positions.top).ids)
            except (LMPoolError, *QUERY_ERRORS) as error:
                failures[prompt] = _failure(error)
        return failures

    async def _read_sets(self, packed: Iterable[bytes]) -> Mapping[bytes, TokenSet | LMPoolError]:
        wanted = set(filter(None, packed))

        async def read() -> dict[bytes, TokenSet | LMPoolError]:
            return {name: await self.token_sets.read(name) for name in wanted}

        return await self.publisher.retry(read) if wanted else {}

    async def _answer_tries(
        self, queries: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None, damaged: set[bytes]
    ) -> dict[bytes, Answer]:
        """Answer trie queries, by digest of the answer. Leave out queries whose cached row is missing or damaged."""
        if not self._has_tries:
            return dict.fromkeys(queries, _NO_TRIES)
        fill = partial(self.trie_inputs.fill, queries, rows, vocab_size=self._vocab_size)
        inputs, failures = await self.publisher.retry(fill)
        if rows is None:
            damaged |= {queries[digest].source for digest, why in failures.items() if why.kind == CorruptRow.__name__}
            absent = {queries[digest].source for digest, why in failures.items() if why.kind in _ROW_MISSING}
            failures = {digest: why for digest, why in failures.items() if queries[digest].source not in absent}
            inputs = {digest: given for digest, given in inputs.items() if given.query.source not in absent}
        block, failed = await asyncio.to_thread(answer, inputs) if inputs else (None, {})
        answers: dict[bytes, Answer] = {**failures}
        if block is not None:
            answers.update(zip(block.digests, block.vectors, strict=True))
        return answers | {digest: Failure(WorkerError.__name__, text) for digest, text in failed.items()}

    async def _publish(self, ended: Sequence[StreamEntry], answers: Mapping[bytes, Answer]) -> None:
        """Publish answers and failures; `answers`: digest of an answer -> answer or failure."""
        waiting: dict[bytes, list[StreamEntry]] = defaultdict(list)
        for entry in ended:
            waiting[entry.digest].append(entry)
        vectors = {digest: vector for digest, vector in answers.items() if isinstance(vector, np.ndarray)}
        if vectors:
            overwrite = {entry.digest for entry in ended if entry.overwrite}
            await self.publisher.publish(VectorBlock(list(vectors), list(vectors.values())), waiting, overwrite)
        failures = {digest: failure for digest, failure in answers.items() if isinstance(failure, Failure)}
        if failures:
            failing = [entry.failing(failure) for digest, failure in failures.items() for entry in waiting[digest]]
            await self.publisher.fail(failing)


def allowed_in(job: BackendJob) -> bytes:
    """The packed set of tokens in a query for positions; b"" without a set, or if the query has its tokens already."""
    return b"" if job.positions is None else job.positions.allowed


def logits_from_rows(rows: Mapping[InFlightPrompt, RowBlock]) -> dict[InFlightPrompt, NDArray[np.float32]]:
    """Answer queries for logits and logZ from 16-bit rows. A query that raises is left to the backend."""
    answers = {}
    for prompt, block in rows.items():
        try:
            assert prompt.positions is not None
            assert block.log_z is not None
            answers[prompt] = prompt.positions.of(block.logits(0)[None], block.log_z, np.empty(0, np.uint32)).ravel()
        except QUERY_ERRORS as error:
            failure_of(error)
    return answers


def _pick_all(
    queries: Mapping[bytes, tuple[PickQuery, Row]], sets: Mapping[bytes, TokenSet | LMPoolError]
) -> dict[bytes, Answer]:
    """Answer queries, by digest of the answer. Call it in a thread: a row of a large vocabulary takes a millisecond."""
    answers: dict[bytes, Answer] = {}
    for digest, (query, row) in queries.items():
        try:
            count = query.k if isinstance(query, TopQuery) else 1
            answers[digest] = _pick(query, row, _members(sets[query.allowed], count) if query.allowed else None)
        except (LMPoolError, *QUERY_ERRORS) as error:
            answers[digest] = _failure(error)
    return answers


def _failure(error: Exception) -> Failure:
    """The failure that the client of a query receives: lmpool's own errors unchanged, other errors as `WorkerError`."""
    if isinstance(error, LMPoolError):
        return Failure(type(error).__name__, str(error))
    return Failure(WorkerError.__name__, f"the worker failed on this query: {failure_of(error)}")


def _pick(query: PickQuery, row: Row, tokens: TokenSet | None) -> NDArray[np.float32]:
    """Answer a query from a row, or only from the row's entries of `tokens`.

    Raises:
        NoProbability: no token can be drawn.
    """
    ids = None if tokens is None else tokens.ids
    match query:
        case MassQuery():
            assert ids is not None
            return np.array([mass_of(row, ids)])
        case SampleQuery():
            return pack_token(sample(row, query, ids))
        case _:
            return pack_top(top(row, query.k, ids))


def _members(tokens: TokenSet | LMPoolError, count: int) -> TokenSet:
    """Check that a set of tokens was read and has at least `count` tokens; return the set.

    Raises:
        LMPoolError: the set cannot be read.
        SettingsError: the set has fewer tokens.
    """
    if isinstance(tokens, LMPoolError):
        raise tokens
    if count > len(tokens.ids):
        raise SettingsError(f"k: {count} must be from 1 to {len(tokens.ids)}: so many tokens are allowed")
    return tokens


def _decode_rows(block: RowBlock, digests: Collection[bytes]) -> dict[bytes, Row]:
    """Decode the rows `digests` of a block, as clients decode them."""
    size = block.numbers.shape[1]
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), size)
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

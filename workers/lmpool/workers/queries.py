"""Queries that a worker answers from rows: rows in the cache, or rows that the backend has just computed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from lmpool import errors
from lmpool.broker.registries import look_up_tokens
from lmpool.errors import LMPoolError
from lmpool.protocol import picks
from lmpool.protocol import query as picking
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import EntriesQuery, MassQuery, PickQuery, SampleQuery, TopQuery, TrieQuery
from lmpool.protocol.row import Row, RowBlock, VectorBlock, decode_row
from lmpool.protocol.token_set import name_in, unpack_tokens
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of
from lmpool.workers.execution.in_flight import EntriesByDigest, InFlightPrompt, StreamEntry
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.trie import ByteLRU, TrieInputs, answer

_MAX_CACHED_BYTES = 32 * 2**20  # Max bytes of all cached sets of tokens together.
_NO_TRIES = Failure(errors.SourceMissing.__name__, "this worker has no tries: send the query to a trie worker")
# Failures of a trie query that mean that the cache has no readable row.
_ROW_MISSING = (errors.SourceMissing.__name__, errors.CorruptRow.__name__)

Answer = NDArray[np.float32] | Failure
TokenIds = NDArray[np.int64]
TokenSets = Mapping[bytes, TokenIds | LMPoolError]  # Set of tokens, as packed in a query -> token ids or error.


@dataclass(eq=False)
class QueryAnswerer:
    """Answers queries about one model's rows: top-k, samples, masses, and values of trie nodes."""

    trie_inputs: TrieInputs  # Fetches rows and tries.
    publisher: Publisher
    info: ModelInfo
    redis: Redis  # Client of the server that stores the sets of tokens that queries name.
    keys: Keys

    def __post_init__(self) -> None:
        self._fingerprint, self._vocab_size = self.info.fingerprint, self.info.vocab_size
        self._named_sets = ByteLRU[bytes, TokenIds](_MAX_CACHED_BYTES)

    async def answer_from_cache(self, prompts: Sequence[InFlightPrompt]) -> dict[InFlightPrompt, Sequence[StreamEntry]]:
        """Answer queries from rows in the cache, and mark the prompts whose cached row is damaged.

        Returns:
            prompt -> its ended entries. The backend must compute the prompts that are not in this mapping.
        """
        waiting = {prompt.digest: list(prompt.entries.values()) for prompt in prompts}
        ended, damaged = await self._answer(waiting, None)
        for prompt in prompts:
            prompt.is_damaged = prompt.is_damaged or prompt.digest in damaged
        answered = {prompt: [entry for entry in waiting[prompt.digest] if entry in ended] for prompt in prompts}
        return {prompt: entries for prompt, entries in answered.items() if entries}

    async def answer(self, entries: EntriesByDigest, blocks: Sequence[RowBlock]) -> None:
        """Answer queries from the rows of blocks, and end their entries; `entries`: digest of a row -> entries."""
        await self._answer(entries, await asyncio.to_thread(_decode_rows, blocks, entries))

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
                damaged |= {digest for digest, row in cached.items() if isinstance(row, errors.CorruptRow)}
                rows = {digest: row for digest, row in cached.items() if isinstance(row, np.ndarray)}
            queries = {name: (query, rows[row]) for row in picks.keys() & rows for name, query in picks[row].items()}
            sets = await self._read_sets([allowed_by(query) for query, _ in queries.values()])
            answers |= await asyncio.to_thread(_pick_all, queries, sets)
        ended = [entry for waiting in entries.values() for entry in waiting if entry.digest in answers]
        waiting_for: dict[bytes, list[StreamEntry]] = defaultdict(list)
        for entry in ended:
            waiting_for[entry.digest].append(entry)
        if vectors := {digest: vector for digest, vector in answers.items() if isinstance(vector, np.ndarray)}:
            overwrite = {entry.digest for entry in ended if entry.overwrite}
            await self.publisher.publish(VectorBlock(list(vectors), list(vectors.values())), waiting_for, overwrite)
        failures = [(entry, answer) for entry in ended if isinstance(answer := answers[entry.digest], Failure)]
        if failures:
            await self.publisher.fail([entry.failing(failure) for entry, failure in failures])
        return set(ended), damaged

    async def set_tokens(self, prompts: Sequence[InFlightPrompt]) -> dict[InFlightPrompt, Failure]:
        """Put the tokens of named sets into queries for positions; return the prompts whose set cannot be used."""
        sets = await self._read_sets([allowed_in(prompt) for prompt in prompts])
        failures: dict[InFlightPrompt, Failure] = {}
        for prompt in prompts:
            if prompt.positions is None or not (packed := allowed_in(prompt)):
                continue
            try:
                prompt.positions = prompt.positions.among(_members(sets[packed], prompt.positions.top))
            except (LMPoolError, *QUERY_ERRORS) as error:
                failures[prompt] = _failure(error)
        return failures

    async def _read_sets(self, packed: Iterable[bytes]) -> TokenSets:
        """The token ids of sets that queries carry or name; an error for a set that cannot be read."""

        async def read(packed: bytes) -> TokenIds | LMPoolError:
            try:
                if (name := name_in(packed)) is None:
                    return unpack_tokens(packed, self._vocab_size).ids
                if (ids := self._named_sets.get(name)) is None:
                    ids = (await look_up_tokens(self.redis, self.keys, name, self._vocab_size)).ids
                    self._named_sets.put(name, ids)
            except (errors.ProtocolError, errors.UnknownTokenSet) as error:
                return error
            except NoPermissionError as error:
                return errors.ServerError(f"the worker's Redis user may not read sets of tokens: {error}")
            return ids

        return {each: await self.publisher.retry(partial(read, each)) for each in set(packed) if each}

    async def _answer_tries(
        self, queries: Mapping[bytes, TrieQuery], rows: Mapping[bytes, Row] | None, damaged: set[bytes]
    ) -> dict[bytes, Answer]:
        """Answer trie queries (by digest of the answer), except queries whose cached row is missing or damaged."""
        if not self.info.answers_tries:
            return dict.fromkeys(queries, _NO_TRIES)
        fill = partial(self.trie_inputs.fill, queries, rows, vocab_size=self._vocab_size)
        inputs, failures = await self.publisher.retry(fill)
        if rows is None:
            corrupt = errors.CorruptRow.__name__
            damaged |= {queries[digest].source for digest, why in failures.items() if why.kind == corrupt}
            absent = {queries[digest].source for digest, why in failures.items() if why.kind in _ROW_MISSING}
            failures = {digest: why for digest, why in failures.items() if queries[digest].source not in absent}
            inputs = {digest: given for digest, given in inputs.items() if given.query.source not in absent}
        block, failed = await asyncio.to_thread(answer, inputs) if inputs else (None, {})
        answers: dict[bytes, Answer] = {**failures}
        if block is not None:
            answers.update(zip(block.digests, block.vectors, strict=True))
        return answers | {digest: Failure(errors.WorkerError.__name__, text) for digest, text in failed.items()}


def allowed_by(query: PickQuery) -> bytes:
    """The packed set of tokens that a query may return; b"" for all tokens."""
    return b"" if isinstance(query, EntriesQuery) else query.allowed


def allowed_in(job: BackendJob) -> bytes:
    """The packed set of tokens in a query for positions; b"" without a set, or if the query has its tokens already."""
    return b"" if job.positions is None else job.positions.allowed


def logits_from_rows(rows: Mapping[InFlightPrompt, RowBlock]) -> dict[InFlightPrompt, NDArray[np.float32]]:
    """Answer queries for logits and logZ from 16-bit rows. A query that fails here is left to the backend."""
    answers = {}
    for prompt, block in rows.items():
        try:
            assert prompt.positions is not None
            assert block.log_z is not None
            logits = block.logits(0)[None]
            answers[prompt] = prompt.positions.of(logits, block.log_z, prompt.span, np.empty(0, np.uint32)).ravel()
        except QUERY_ERRORS as error:
            failure_of(error)
    return answers


def _pick_all(queries: Mapping[bytes, tuple[PickQuery, Row]], sets: TokenSets) -> dict[bytes, Answer]:
    """Answer queries, by digest of the answer. Call it in a thread: a query about a large row takes a millisecond."""
    answers: dict[bytes, Answer] = {}
    for digest, (query, row) in queries.items():
        try:
            count = query.k if isinstance(query, TopQuery) else 1
            ids = _members(sets[allowed], count) if (allowed := allowed_by(query)) else None
            match query:
                case EntriesQuery():
                    answers[digest] = picks.tempered(row[None], query.temperature)[0, query.target_ids]
                case MassQuery():
                    assert ids is not None
                    answers[digest] = np.array([picks.mass_of(row, ids)])
                case SampleQuery():
                    answers[digest] = picking.pack_token(picks.sample(row, query, ids))
                case _:
                    answers[digest] = picking.pack_top(picks.top(row, query.k, ids))
        except (LMPoolError, *QUERY_ERRORS) as error:
            answers[digest] = _failure(error)
    return answers


def _failure(error: Exception) -> Failure:
    """The failure that the client of a query receives: lmpool's own errors unchanged, other errors as `WorkerError`."""
    if isinstance(error, LMPoolError):
        return Failure(type(error).__name__, str(error))
    return Failure(errors.WorkerError.__name__, f"the worker failed on this query: {failure_of(error)}")


def _members(tokens: TokenIds | LMPoolError, count: int) -> TokenIds:
    """The tokens of a set; raises the error of a set that was not read, or `SettingsError` for fewer than `count`."""
    if isinstance(tokens, LMPoolError):
        raise tokens
    if count > len(tokens):
        raise errors.SettingsError(f"k: {count} must be from 1 to {len(tokens)}: so many tokens are allowed")
    return tokens


def _decode_rows(blocks: Sequence[RowBlock], digests: Collection[bytes]) -> dict[bytes, Row]:
    """Decode the rows `digests` of blocks, as clients decode them."""
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), block.numbers.shape[1])
        for block in blocks
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

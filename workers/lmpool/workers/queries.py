"""Queries: answered instead of sending a row, from a row in the cache or from one that was just computed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
    sample_of,
    top,
    top_of,
)
from lmpool.protocol.row import Row, RowBlock, VectorBlock, decode_row
from lmpool.protocol.token_set import TokenSet, name_in, unpack_tokens
from lmpool.workers.execution.contract import QUERY_ERRORS, BackendJob, failure_of
from lmpool.workers.queue.consumer import InFlightJob, InFlightJobs, JobsByDigest
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.trie.backend import answer
from lmpool.workers.trie.inputs import TrieInput, TrieInputs

# Of all sets that are kept: 32 MiB.
_MAX_IDS = 1 << 22
_NO_TRIES = Failure(SourceMissing.__name__, "this worker has no tries: ask a trie worker")
_ABSENT = (SourceMissing.__name__, CorruptRow.__name__)


class QueryAnswerer:
    """Answers queries about one model's rows.

    Args:
        trie_inputs: brings rows and tries.
        publisher: takes the answers.
        info: the model's info; says whether its workers have tries.
        token_sets: brings the sets that queries are about.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo, token_sets: TokenSets) -> None:
        self._tries = TrieQueryAnswerer(trie_inputs, publisher, info)
        self._sampler = Sampler(trie_inputs, publisher, info, token_sets)

    async def answer_from_cache(self, jobs: JobsByDigest, in_flight: InFlightJobs) -> dict[bytes, list[bytes]]:
        """Answer queries about rows that are in the cache, without the backend.

        Args:
            jobs: the jobs with the queries, by prompt.
            in_flight: is told which rows in the cache are damaged.

        Returns:
            the entry ids of the jobs that were ended, by prompt; where jobs are left, the row is to be computed.
        """
        ended: dict[bytes, list[bytes]] = {}
        tries, picks = _by_kind(jobs)
        for kind, answerer in ((tries, self._tries), (picks, self._sampler)):
            for prompt in await answerer.answer_from_cache(kind, in_flight) if kind else ():
                ended.setdefault(prompt, []).extend(kind[prompt])
        return ended

    async def answer(self, jobs: JobsByDigest, block: RowBlock) -> None:
        """Answer queries about the rows of a block, and end the jobs."""
        rows = await asyncio.to_thread(_rows_of, block, jobs)
        tries, picks = _by_kind(jobs)
        if tries:
            await self._tries.answer(tries, rows)
        if picks:
            await self._sampler.answer(picks, rows)

    async def with_tokens(self, jobs: Sequence[BackendJob]) -> tuple[list[BackendJob], dict[bytes, Failure]]:
        """Have jobs about positions name the tokens that they are about, in place of a set; see `Sampler.with_tokens`.

        Returns:
            the jobs, and by the digests of the others why they cannot be done.
        """
        return await self._sampler.with_tokens(jobs)


class TokenSets:
    """The sets of tokens that queries are about.

    Args:
        redis: has those that are named.
        keys: the deployment's key names.
        vocab_size: V.
    """

    def __init__(self, redis: Redis, keys: Keys, vocab_size: int) -> None:
        self._redis = redis
        self._keys = keys
        self._vocab_size = vocab_size
        self._named: OrderedDict[bytes, TokenSet] = OrderedDict()

    async def of(self, packed: Iterable[bytes]) -> dict[bytes, TokenSet | LMPoolError]:
        """Sets as queries carry them -> these, or why one cannot be had."""
        return {some: await self._read(some) for some in packed}

    async def _read(self, packed: bytes) -> TokenSet | LMPoolError:
        name = name_in(packed)
        try:
            if name is None:
                return unpack_tokens(packed, self._vocab_size)
            if (tokens := self._named.get(name)) is None:
                tokens = self._named[name] = await look_up_tokens(self._redis, self._keys, name, self._vocab_size)
        except (ProtocolError, UnknownTokenSet) as error:
            return error
        except NoPermissionError as error:
            return ServerError(f"the worker may not read sets of tokens: {error}")
        self._named.move_to_end(name)
        while len(self._named) > 1 and sum(len(some.ids) for some in self._named.values()) > _MAX_IDS:
            self._named.popitem(last=False)
        return tokens


class Sampler:
    """Answers queries for largest entries, drawn tokens, and what some tokens have together.

    Args:
        trie_inputs: brings rows from the cache.
        publisher: takes the answers.
        info: the model's info.
        token_sets: brings the sets that queries are about.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo, token_sets: TokenSets) -> None:
        self._token_sets = token_sets
        self._trie_inputs = trie_inputs
        self._publisher = publisher
        self._fingerprint = info.fingerprint
        self._vocab_size = info.vocab_size

    async def answer_from_cache(self, jobs: JobsByDigest, in_flight: InFlightJobs) -> Collection[bytes]:
        """See `QueryAnswerer.answer_from_cache`.

        Returns:
            the prompts whose rows were there; the others are to be computed.
        """
        replies = await self._publisher.retry(lambda: self._trie_inputs.rows(self._fingerprint, jobs, self._vocab_size))
        rows: dict[bytes, Row] = {}
        for prompt, row in replies.items():
            if isinstance(row, np.ndarray):
                rows[prompt] = row
            elif isinstance(row, CorruptRow):
                in_flight.mark_damaged(prompt)
        await self.answer({prompt: jobs[prompt] for prompt in rows}, rows)
        return rows

    async def answer(self, jobs: JobsByDigest, rows: Mapping[bytes, Row]) -> None:
        """Answer queries about these rows, and end the jobs."""
        queries = [job.query for group in jobs.values() for job in group.values()]
        sets = await self._sets([query.allowed for query in queries if isinstance(query, PickQuery)])
        picked = await asyncio.to_thread(_pick_all, jobs, rows, sets)
        by_answer, overwrite = _by_answer(jobs)
        answers = {digest: answer for digest, answer in picked.items() if isinstance(answer, np.ndarray)}
        if answers:
            await self._publisher.publish(VectorBlock(list(answers), list(answers.values())), by_answer, overwrite)
        failures = {digest: answer for digest, answer in picked.items() if isinstance(answer, Failure)}
        await _fail(self._publisher, by_answer, failures)

    async def with_tokens(self, jobs: Sequence[BackendJob]) -> tuple[list[BackendJob], dict[bytes, Failure]]:
        """See `QueryAnswerer.with_tokens`."""
        sets = await self._sets([allowed_in(job) for job in jobs])
        ready, failures = list[BackendJob](), dict[bytes, Failure]()
        for job in jobs:
            query, packed = job.positions, allowed_in(job)
            if query is None or not packed:
                ready.append(job)
                continue
            try:
                tokens = _members(sets[packed], query.top)
                ready.append(job._replace(positions=query.among(tokens.ids)))
            except (LMPoolError, *QUERY_ERRORS) as error:
                failures[job.digest] = _failure(error)
        return ready, failures

    async def _sets(self, packed: Iterable[bytes]) -> Mapping[bytes, TokenSet | LMPoolError]:
        """The sets that queries carry, but for b"", or why one cannot be had."""
        wanted = set(filter(None, packed))
        return await self._publisher.retry(lambda: self._token_sets.of(wanted)) if wanted else {}


class TrieQueryAnswerer:
    """Answers queries for values of trie nodes; where the worker has no tries, tells clients that trie workers do.

    Args:
        trie_inputs: brings tries.
        publisher: takes the answers.
        info: the model's info; says whether its workers have tries.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo) -> None:
        self._trie_inputs = trie_inputs
        self._publisher = publisher
        self._fingerprint = info.fingerprint
        self._vocab_size = info.vocab_size
        self._has_tries = info.answers_tries

    async def answer_from_cache(self, jobs: JobsByDigest, in_flight: InFlightJobs) -> Collection[bytes]:
        """See `QueryAnswerer.answer_from_cache`.

        Returns:
            the prompts that need no row any more; those of the others are to be computed.
        """
        queries = self._queries(jobs)
        if not self._has_tries:
            await self._finish(jobs, {}, dict.fromkeys(queries, _NO_TRIES))
            return jobs.keys()
        inputs, failures = await self._publisher.retry(
            lambda: self._trie_inputs.fill(queries, vocab_size=self._vocab_size)
        )
        absent = set()
        for digest, failure in failures.items():
            prompt = queries[digest].source
            if failure.kind in _ABSENT:
                absent.add(prompt)
            if failure.kind == CorruptRow.__name__:
                in_flight.mark_damaged(prompt)
        known = {prompt: group for prompt, group in jobs.items() if prompt not in absent}
        await self._finish(
            known,
            {digest: trie_input for digest, trie_input in inputs.items() if trie_input.query.source in known},
            {digest: failure for digest, failure in failures.items() if queries[digest].source in known},
        )
        return known.keys()

    async def answer(self, jobs: JobsByDigest, rows: Mapping[bytes, Row]) -> None:
        """Answer queries about these rows, and end the jobs."""
        queries = self._queries(jobs)
        if not self._has_tries:
            await self._finish(jobs, {}, dict.fromkeys(queries, _NO_TRIES))
            return
        fill = partial(self._trie_inputs.fill, queries, rows, vocab_size=self._vocab_size)
        await self._finish(jobs, *await self._publisher.retry(fill))

    def _queries(self, jobs: JobsByDigest) -> dict[bytes, TrieQuery]:
        """Digest of the answer -> query, which names its row."""
        return {
            job.digest: replace(job.query, rows=self._fingerprint, source=prompt)
            for prompt, group in jobs.items()
            for job in group.values()
            if isinstance(job.query, TrieQuery)
        }

    async def _finish(
        self, jobs: JobsByDigest, inputs: Mapping[bytes, TrieInput], failures: dict[bytes, Failure]
    ) -> None:
        """Compute and publish answers; end the jobs."""
        by_answer, overwrite = _by_answer(jobs)
        answers, failed = await asyncio.to_thread(answer, inputs) if inputs else (None, {})
        if answers is not None:
            await self._publisher.publish(answers, by_answer, overwrite)
        failures |= {digest: Failure(WorkerError.__name__, text) for digest, text in failed.items()}
        await _fail(self._publisher, by_answer, failures)


async def _fail(publisher: Publisher, by_answer: JobsByDigest, failures: Mapping[bytes, Failure]) -> None:
    if failures:
        await publisher.fail(
            [job.failing(failure) for digest, failure in failures.items() for job in by_answer[digest].values()]
        )


def _pick_all(
    jobs: JobsByDigest, rows: Mapping[bytes, Row], sets: Mapping[bytes, TokenSet | LMPoolError]
) -> dict[bytes, NDArray[np.float32] | Failure]:
    """Digest of the answer -> answer; in a thread, for a row of a large vocabulary takes a millisecond."""
    queries = {job.digest: (job.query, rows[prompt]) for prompt, group in jobs.items() for job in group.values()}
    picked: dict[bytes, NDArray[np.float32] | Failure] = {}
    for digest, (query, row) in queries.items():
        try:
            assert isinstance(query, PickQuery)
            most = query.k if isinstance(query, TopQuery) else 1
            picked[digest] = _pick(query, row, _members(sets[query.allowed], most) if query.allowed else None)
        except (LMPoolError, *QUERY_ERRORS) as error:
            picked[digest] = _failure(error)
    return picked


def _failure(error: Exception) -> Failure:
    """What the client of a query is sent: errors of this package as they are, others as `WorkerError`."""
    if isinstance(error, LMPoolError):
        return Failure(type(error).__name__, str(error))
    return Failure(WorkerError.__name__, f"the worker failed on this query: {failure_of(error)}")


def _pick(query: PickQuery, row: Row, tokens: TokenSet | None) -> NDArray[np.float32]:
    """What is picked from a row, or from its entries of some tokens.

    Raises:
        NoProbability: nothing can be drawn.
    """
    if isinstance(query, MassQuery):
        assert tokens is not None
        return np.array([mass_of(row, tokens.ids)])
    if isinstance(query, SampleQuery):
        return pack_token(sample(row, query.how) if tokens is None else sample_of(row, query.how, tokens.ids))
    return pack_top(top(row, query.k) if tokens is None else top_of(row, query.k, tokens.ids))


def _members(tokens: TokenSet | LMPoolError, count: int) -> TokenSet:
    """A set, of whose tokens so many are wanted.

    Raises:
        LMPoolError: why it cannot be had.
        SettingsError: it does not have so many.
    """
    if isinstance(tokens, LMPoolError):
        raise tokens
    if count > len(tokens.ids):
        raise SettingsError(f"k: {count} must be from 1 to {len(tokens.ids)}: so many tokens are allowed")
    return tokens


def allowed_in(job: BackendJob) -> bytes:
    """The set of tokens that a job about positions carries; b"" where it carries none, or has its tokens."""
    return b"" if job.positions is None else job.positions.allowed


def _by_kind(jobs: JobsByDigest) -> tuple[JobsByDigest, JobsByDigest]:
    """The jobs that want values of trie nodes, and those that want what a sampler picks; both by prompt."""
    tries: dict[bytes, dict[bytes, InFlightJob]] = {}
    picks: dict[bytes, dict[bytes, InFlightJob]] = {}
    for prompt, group in jobs.items():
        for entry_id, job in group.items():
            kind = tries if isinstance(job.query, TrieQuery) else picks
            kind.setdefault(prompt, {})[entry_id] = job
    return tries, picks


def _by_answer(jobs: JobsByDigest) -> tuple[JobsByDigest, set[bytes]]:
    """The jobs by the digest of their answer, and the answers that must replace what is stored."""
    by_answer: dict[bytes, dict[bytes, InFlightJob]] = {}
    overwrite = set()
    for group in jobs.values():
        for entry_id, job in group.items():
            by_answer.setdefault(job.digest, {})[entry_id] = job
            if job.overwrite:
                overwrite.add(job.digest)
    return by_answer, overwrite


def _rows_of(block: RowBlock, digests: Collection[bytes]) -> dict[bytes, Row]:
    """Some rows of a block, as clients read them."""
    size = block.numbers.shape[1]
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), size)
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

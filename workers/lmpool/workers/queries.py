"""Queries: what is answered instead of a row, where the row is computed or from the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lmpool.errors import CorruptRow, SourceMissing, WorkerError
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import PickQuery, TopQuery, TrieQuery, pack_token, pack_top, sample, top
from lmpool.protocol.row import RowBlock, VectorBlock, decode_row
from lmpool.rows.cache import Row
from lmpool.workers.queue.consumer import EntriesByPrompt, Holdings, Taken, by_answer
from lmpool.workers.queue.publisher import Ending, Publisher
from lmpool.workers.trie.backend import answer
from lmpool.workers.trie.inputs import TrieInput, TrieInputs


class Sampler:
    """Answers what is picked from one model's rows.

    Args:
        trie_inputs: brings rows from the cache.
        publisher: takes the answers.
        info: the model's info.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo) -> None:
        self._trie_inputs = trie_inputs
        self._publisher = publisher
        self._fingerprint = info.fingerprint
        self._vocab_size = info.vocab_size

    async def answer_cached(self, asks: EntriesByPrompt, held: Holdings) -> Collection[bytes]:
        """Answer what is asked of rows that are in the cache, without the backend.

        Args:
            asks: what is asked.
            held: is told which rows in the cache are damaged.

        Returns:
            the prompts whose rows were there; the others are to be computed.
        """
        found = await self._publisher.insist(lambda: self._trie_inputs.rows(self._fingerprint, asks, self._vocab_size))
        rows: dict[bytes, Row] = {}
        for prompt, row in found.items():
            if isinstance(row, np.ndarray):
                rows[prompt] = row
            elif isinstance(row, CorruptRow) and prompt in held:
                held[prompt].is_damaged = True
        await self.answer({prompt: asks[prompt] for prompt in rows}, rows)
        return rows

    async def answer(self, asks: EntriesByPrompt, rows: Mapping[bytes, Row]) -> None:
        """Answer what is asked of these rows, and end the jobs."""
        answers = await asyncio.to_thread(_pick_all, asks, rows)
        if not answers:
            return
        entries, overwrite = by_answer(asks)
        await self._publisher.publish(VectorBlock(list(answers), list(answers.values())), entries, overwrite)


def _pick_all(asks: EntriesByPrompt, rows: Mapping[bytes, Row]) -> dict[bytes, NDArray[np.float32]]:
    """Name of the answer -> answer; in a thread, for a row of a large vocabulary takes a millisecond."""
    wants: dict[bytes, tuple[bytes, Taken]] = {
        wanted.digest: (prompt, wanted) for prompt, ours in asks.items() for wanted in ours.values()
    }
    return {name: _pick(wanted.query, rows[prompt]) for name, (prompt, wanted) in wants.items()}


def _pick(query: object, row: Row) -> NDArray[np.float32]:
    assert isinstance(query, PickQuery)
    return pack_top(top(row, query.k)) if isinstance(query, TopQuery) else pack_token(sample(row, query.how))


_NO_TRIES = Failure(SourceMissing.__name__, "this worker has no tries: ask a trie worker")
_ABSENT = (SourceMissing.__name__, CorruptRow.__name__)


class TrieQueryAnswerer:
    """Answers what tries are asked of one model's rows.

    Args:
        trie_inputs: brings tries.
        publisher: takes the answers.
        info: the model's info.
        is_able: this worker answers; otherwise it tells clients that trie workers do.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo, *, is_able: bool) -> None:
        self._trie_inputs = trie_inputs
        self._publisher = publisher
        self._fingerprint = info.fingerprint
        self._vocab_size = info.vocab_size
        self._is_able = is_able

    async def answer_cached(self, asks: EntriesByPrompt, held: Holdings) -> Collection[bytes]:
        """Answer what is asked of rows that are in the cache, without the backend.

        Args:
            asks: what is asked.
            held: is told which rows in the cache are damaged.

        Returns:
            the prompts that need no row any more; those of the others are to be computed.
        """
        named = self._named(asks)
        if not self._is_able:
            await self._finish(asks, {}, dict.fromkeys(named, _NO_TRIES))
            return asks.keys()
        inputs, failures = await self._publisher.insist(
            lambda: self._trie_inputs.fill(named, vocab_size=self._vocab_size)
        )
        absent = set()
        for name, failure in failures.items():
            prompt = named[name].source
            if failure.kind in _ABSENT:
                absent.add(prompt)
            if failure.kind == CorruptRow.__name__ and prompt in held:
                held[prompt].is_damaged = True
        known = {prompt: wants for prompt, wants in asks.items() if prompt not in absent}
        inputs = {name: one for name, one in inputs.items() if one.query.source in known}
        await self._finish(known, inputs, {name: one for name, one in failures.items() if named[name].source in known})
        return known.keys()

    async def answer(self, asks: EntriesByPrompt, rows: Mapping[bytes, Row]) -> None:
        """Answer what is asked of these rows, and end the jobs."""
        named = self._named(asks)
        if not self._is_able:
            await self._finish(asks, {}, dict.fromkeys(named, _NO_TRIES))
            return
        fill = partial(self._trie_inputs.fill, named, rows, vocab_size=self._vocab_size)
        await self._finish(asks, *await self._publisher.insist(fill))

    def _named(self, asks: EntriesByPrompt) -> dict[bytes, TrieQuery]:
        """The asks by the names of their answers, each with the name of its row."""
        return {
            wanted.digest: replace(wanted.query, rows=self._fingerprint, source=prompt)
            for prompt, wants in asks.items()
            for wanted in wants.values()
            if isinstance(wanted.query, TrieQuery)
        }

    async def _finish(
        self, asks: EntriesByPrompt, inputs: Mapping[bytes, TrieInput], failures: dict[bytes, Failure]
    ) -> None:
        """Compute and publish answers; end the jobs."""
        entries, overwrite = by_answer(asks)
        answers, failed = await asyncio.to_thread(answer, inputs) if inputs else (None, {})
        if answers is not None:
            await self._publisher.publish(answers, entries, overwrite)
        failures |= {name: Failure(WorkerError.__name__, text) for name, text in failed.items()}
        endings = [Ending(entry, name, failure) for name, failure in failures.items() for entry in entries[name]]
        if endings:
            await self._publisher.end(endings)


_Kind = dict[bytes, dict[bytes, Taken]]


class QueryAnswerer:
    """Answers what is asked of one model's rows.

    Args:
        trie_inputs: brings rows and tries.
        publisher: takes the answers.
        info: the model's info; says whether its workers have tries.
    """

    def __init__(self, trie_inputs: TrieInputs, publisher: Publisher, info: ModelInfo) -> None:
        self._tries = TrieQueryAnswerer(trie_inputs, publisher, info, is_able=info.answers_tries)
        self._picked = Sampler(trie_inputs, publisher, info)

    async def answer_cached(self, asks: EntriesByPrompt, held: Holdings) -> dict[bytes, list[bytes]]:
        """Answer what is asked of rows that are in the cache, without the backend.

        Args:
            asks: what is asked.
            held: is told which rows in the cache are damaged.

        Returns:
            the entries that were ended, by prompt; where entries are left, the row is to be computed.
        """
        ended: dict[bytes, list[bytes]] = {}
        tries, picks = _by_kind(asks)
        for some, answerer in ((tries, self._tries), (picks, self._picked)):
            for prompt in await answerer.answer_cached(some, held) if some else ():
                ended.setdefault(prompt, []).extend(some[prompt])
        return ended

    async def answer(self, asks: EntriesByPrompt, block: RowBlock) -> None:
        """Answer what is asked of the rows of a block, and end the jobs."""
        rows = await asyncio.to_thread(_rows_of, block, asks)
        tries, picks = _by_kind(asks)
        if tries:
            await self._tries.answer(tries, rows)
        if picks:
            await self._picked.answer(picks, rows)


def _by_kind(asks: EntriesByPrompt) -> tuple[EntriesByPrompt, EntriesByPrompt]:
    """What is asked of tries, and what is picked."""
    kinds: tuple[_Kind, _Kind] = {}, {}
    for prompt, wants in asks.items():
        for entry, wanted in wants.items():
            kinds[not isinstance(wanted.query, TrieQuery)].setdefault(prompt, {})[entry] = wanted
    return kinds


def _rows_of(block: RowBlock, digests: Collection[bytes]) -> dict[bytes, Row]:
    """Some rows of a block, as clients read them."""
    size = block.numbers.shape[1]
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), size)
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

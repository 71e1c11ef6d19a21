"""Values of tries that are asked of a model's rows: answered where the row is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial

from msgspec.structs import replace

from lmpool.errors import CorruptRow, SourceMissing, WorkerError
from lmpool.protocol.job import Failure
from lmpool.protocol.model_info import ModelCard
from lmpool.protocol.query import TrieAsk
from lmpool.rows.cache import Row
from lmpool.workers.held import Asks, Holdings, by_answer
from lmpool.workers.queue.publisher import Ending, Publisher
from lmpool.workers.trie.compute import answer
from lmpool.workers.trie.inputs import Larder
from lmpool.workers.trie.trie_inputs import TrieInputs

_NO_TRIES = Failure(SourceMissing.__name__, "this worker has no tries: ask a trie worker")
_ABSENT = (SourceMissing.__name__, CorruptRow.__name__)


class AskedTries:
    """Answers what tries are asked of one model's rows.

    Args:
        larder: brings tries.
        publisher: takes the answers.
        card: the model's card.
        is_able: this worker answers; otherwise it tells clients that trie workers do.
    """

    def __init__(self, larder: Larder, publisher: Publisher, card: ModelCard, *, is_able: bool) -> None:
        self._larder = larder
        self._publisher = publisher
        self._fingerprint = card.fingerprint
        self._vocab_size = card.vocab_size
        self._is_able = is_able

    async def answer_cached(self, asks: Asks, held: Holdings) -> Collection[bytes]:
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
        inputs, failures = await self._publisher.insist(lambda: self._larder.fill(named, vocab_size=self._vocab_size))
        absent = set()
        for name, failure in failures.items():
            prompt = named[name].source
            if failure.kind in _ABSENT:
                absent.add(prompt)
            if failure.kind == CorruptRow.__name__ and prompt in held:
                held[prompt].is_damaged = True
        known = {prompt: wants for prompt, wants in asks.items() if prompt not in absent}
        inputs = {name: one for name, one in inputs.items() if one.ask.source in known}
        await self._finish(known, inputs, {name: one for name, one in failures.items() if named[name].source in known})
        return known.keys()

    async def answer(self, asks: Asks, rows: Mapping[bytes, Row]) -> None:
        """Answer what is asked of these rows, and end the jobs."""
        named = self._named(asks)
        if not self._is_able:
            await self._finish(asks, {}, dict.fromkeys(named, _NO_TRIES))
            return
        fill = partial(self._larder.fill, named, rows, vocab_size=self._vocab_size)
        await self._finish(asks, *await self._publisher.insist(fill))

    def _named(self, asks: Asks) -> dict[bytes, TrieAsk]:
        """The asks by the names of their answers, each with the name of its row."""
        return {
            wanted.digest: replace(wanted.ask, rows=self._fingerprint, source=prompt)
            for prompt, wants in asks.items()
            for wanted in wants.values()
            if isinstance(wanted.ask, TrieAsk)
        }

    async def _finish(self, asks: Asks, inputs: Mapping[bytes, TrieInputs], failures: dict[bytes, Failure]) -> None:
        """Compute and publish answers; end the jobs."""
        entries, overwrite = by_answer(asks)
        answers, failed = await asyncio.to_thread(answer, inputs) if inputs else (None, {})
        if answers is not None:
            await self._publisher.publish(answers, entries, overwrite)
        failures |= {name: Failure(WorkerError.__name__, text) for name, text in failed.items()}
        endings = [Ending(entry, name, failure) for name, failure in failures.items() for entry in entries[name]]
        if endings:
            await self._publisher.end(endings)

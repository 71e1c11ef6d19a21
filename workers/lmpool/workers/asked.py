"""What is asked of a model's rows instead of the rows: answered where the row is computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

import numpy as np
from redis.exceptions import RedisError

from lmpool.asks import TrieAsk
from lmpool.card import ModelCard
from lmpool.errors import CorruptRow, LMPoolError, SourceMissing, WorkerError
from lmpool.messages import Failure
from lmpool.rowcache import Row, RowCache
from lmpool.rows import RowBlock, decode_row
from lmpool.workers.held import Wanted
from lmpool.workers.publisher import Ending, Publisher
from lmpool.workers.tries.desk import answer
from lmpool.workers.tries.larder import Larder

_log = logging.getLogger("lmpool.worker")

Asks = Mapping[bytes, Mapping[bytes, Wanted]]
"""Digest of a prompt -> entry of the queue -> what it wants."""


class Asked:
    """Answers what is asked of one model's rows.

    Args:
        larder: brings tries.
        rows: the model's cache.
        publisher: takes the answers.
        card: the model's card.
        is_able: this worker answers; otherwise it tells clients that trie workers do.
    """

    def __init__(self, larder: Larder, rows: RowCache, publisher: Publisher, card: ModelCard, *, is_able: bool) -> None:
        self._larder = larder
        self._rows = rows
        self._publisher = publisher
        self._fingerprint = card.fingerprint
        self._is_able = is_able

    async def answer_cached(self, asks: Asks) -> dict[bytes, list[bytes]]:
        """Answer what is asked of rows that can be had from the cache; returns the entries that were answered."""
        if not self._is_able:
            return {}
        found: dict[bytes, Row] = {}

        def take(digest: bytes, row: Row | CorruptRow | None) -> None:
            if isinstance(row, np.ndarray):
                found[digest] = row

        try:
            await self._rows.get_many(list(asks), take)
        except (RedisError, OSError, LMPoolError) as error:
            # Not tried again: what lies there may be nothing that can be read, and a row can be computed.
            _log.warning("cached rows are not used: %s", error)
        known = {digest: wants for digest, wants in asks.items() if digest in found}
        await self.answer(known, found)
        return {digest: list(wants) for digest, wants in known.items()}

    async def answer(self, asks: Asks, rows: Mapping[bytes, Row]) -> None:
        """Answer what is asked of some rows, and end the jobs."""
        wants = [(prompt, entry, wanted) for prompt, ours in asks.items() for entry, wanted in ours.items()]
        entries: dict[bytes, list[bytes]] = {}
        named: dict[bytes, TrieAsk] = {}
        for prompt, entry, wanted in wants:
            entries.setdefault(wanted.digest, []).append(entry)
            if wanted.ask is not None:
                named[wanted.digest] = wanted.ask._replace(rows=self._fingerprint, source=prompt)
        if not self._is_able:
            failure = Failure(SourceMissing.__name__, "this worker has no tries: ask a trie worker")
            await self._end(entries, dict.fromkeys(named, failure))
            return
        inputs, failures = await self._publisher.insist(lambda: self._larder.fill(named, rows))
        answers, failed = await asyncio.to_thread(answer, inputs)
        if answers is not None:
            overwrite = {wanted.digest for _, _, wanted in wants if wanted.overwrite}
            await self._publisher.publish(answers, entries, overwrite)
        failures |= {name: Failure(WorkerError.__name__, text) for name, text in failed.items()}
        await self._end(entries, failures)

    async def _end(self, entries: Mapping[bytes, list[bytes]], failures: Mapping[bytes, Failure]) -> None:
        endings = [Ending(entry, name, failure) for name, failure in failures.items() for entry in entries[name]]
        if endings:
            await self._publisher.end(endings)


def rows_of(block: RowBlock, digests: Collection[bytes]) -> dict[bytes, Row]:
    """Some rows of a block, as clients read them."""
    size = block.numbers.shape[1]
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), size)
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

"""What is picked from a model's rows instead of the rows: answered where the row is computed, or from the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from lmpool.errors import CorruptRow
from lmpool.protocol.model_info import ModelCard
from lmpool.protocol.query import PickAsk, TopAsk
from lmpool.protocol.row import VectorBlock
from lmpool.protocol.sampling import pack_token, pack_top, sample, top
from lmpool.rows.cache import Row
from lmpool.workers.held import Asks, Holdings, by_answer
from lmpool.workers.queue.consumer import Taken
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.trie.inputs import Larder


class Picked:
    """Answers what is picked from one model's rows.

    Args:
        larder: brings rows from the cache.
        publisher: takes the answers.
        card: the model's card.
    """

    def __init__(self, larder: Larder, publisher: Publisher, card: ModelCard) -> None:
        self._larder = larder
        self._publisher = publisher
        self._fingerprint = card.fingerprint
        self._vocab_size = card.vocab_size

    async def answer_cached(self, asks: Asks, held: Holdings) -> Collection[bytes]:
        """Answer what is asked of rows that are in the cache, without the backend.

        Args:
            asks: what is asked.
            held: is told which rows in the cache are damaged.

        Returns:
            the prompts whose rows were there; the others are to be computed.
        """
        found = await self._publisher.insist(lambda: self._larder.rows(self._fingerprint, asks, self._vocab_size))
        rows: dict[bytes, Row] = {}
        for prompt, row in found.items():
            if isinstance(row, np.ndarray):
                rows[prompt] = row
            elif isinstance(row, CorruptRow) and prompt in held:
                held[prompt].is_damaged = True
        await self.answer({prompt: asks[prompt] for prompt in rows}, rows)
        return rows

    async def answer(self, asks: Asks, rows: Mapping[bytes, Row]) -> None:
        """Answer what is asked of these rows, and end the jobs."""
        answers = await asyncio.to_thread(_pick_all, asks, rows)
        if not answers:
            return
        entries, overwrite = by_answer(asks)
        await self._publisher.publish(VectorBlock(list(answers), list(answers.values())), entries, overwrite)


def _pick_all(asks: Asks, rows: Mapping[bytes, Row]) -> dict[bytes, NDArray[np.float32]]:
    """Name of the answer -> answer; in a thread, for a row of a large vocabulary takes a millisecond."""
    wants: dict[bytes, tuple[bytes, Taken]] = {
        wanted.digest: (prompt, wanted) for prompt, ours in asks.items() for wanted in ours.values()
    }
    return {name: _pick(wanted.ask, rows[prompt]) for name, (prompt, wanted) in wants.items()}


def _pick(ask: object, row: Row) -> NDArray[np.float32]:
    assert isinstance(ask, PickAsk)
    return pack_top(top(row, ask.k)) if isinstance(ask, TopAsk) else pack_token(sample(row, ask.how))

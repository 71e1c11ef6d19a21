"""What is asked of a model's rows instead of the rows: tries' values, and what is picked from them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import numpy as np

from lmpool.protocol.model_info import ModelCard
from lmpool.protocol.query import TrieAsk
from lmpool.protocol.row import RowBlock, decode_row
from lmpool.rows.cache import Row
from lmpool.workers.asked_tries import AskedTries
from lmpool.workers.held import Asks, Holdings
from lmpool.workers.picked import Picked
from lmpool.workers.queue.consumer import Taken
from lmpool.workers.queue.publisher import Publisher
from lmpool.workers.trie.inputs import Larder

_Kind = dict[bytes, dict[bytes, Taken]]


class Asked:
    """Answers what is asked of one model's rows.

    Args:
        larder: brings rows and tries.
        publisher: takes the answers.
        card: the model's card; says whether its workers have tries.
    """

    def __init__(self, larder: Larder, publisher: Publisher, card: ModelCard) -> None:
        self._tries = AskedTries(larder, publisher, card, is_able=card.answers_tries)
        self._picked = Picked(larder, publisher, card)

    async def answer_cached(self, asks: Asks, held: Holdings) -> dict[bytes, list[bytes]]:
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

    async def answer(self, asks: Asks, block: RowBlock) -> None:
        """Answer what is asked of the rows of a block, and end the jobs."""
        rows = await asyncio.to_thread(_rows_of, block, asks)
        tries, picks = _by_kind(asks)
        if tries:
            await self._tries.answer(tries, rows)
        if picks:
            await self._picked.answer(picks, rows)


def _by_kind(asks: Asks) -> tuple[Asks, Asks]:
    """What is asked of tries, and what is picked."""
    kinds: tuple[_Kind, _Kind] = {}, {}
    for prompt, wants in asks.items():
        for entry, wanted in wants.items():
            kinds[not isinstance(wanted.ask, TrieAsk)].setdefault(prompt, {})[entry] = wanted
    return kinds


def _rows_of(block: RowBlock, digests: Collection[bytes]) -> dict[bytes, Row]:
    """Some rows of a block, as clients read them."""
    size = block.numbers.shape[1]
    return {
        digest: decode_row(np.frombuffer(bytearray(block.encode(index)), np.uint8), size)
        for index, digest in enumerate(block.digests)
        if digest in digests
    }

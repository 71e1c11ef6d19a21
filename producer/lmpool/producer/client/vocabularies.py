"""The vocabularies of a pool, as one session reads and registers them."""

from __future__ import annotations

import asyncio

from lmpool.broker.vocabulary_registry import look_up, register
from lmpool.errors import UnknownVocabulary
from lmpool.producer.client.connections import TROUBLE, Channel
from lmpool.producer.deadline import Deadline
from lmpool.protocol.keys import Keys
from lmpool.vocabulary import Vocabulary


class Vocabularies:
    """Reads and registers for one session.

    Args:
        channel: the connections, and the model.
        keys: the deployment's key names.
    """

    def __init__(self, channel: Channel, keys: Keys) -> None:
        self._channel = channel
        self._keys = keys
        self._sending = asyncio.Lock()
        self._sent: dict[str, float] = {}

    async def of_model(self, deadline: Deadline) -> Vocabulary:
        """What the model's tokens stand for.

        Raises:
            UnknownVocabulary: its workers publish none.
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        card = self._channel.model.card
        if not card.vocabulary:
            raise UnknownVocabulary(
                f"the model {card.name!r} publishes no vocabulary, for its workers found no tokenizer that tells "
                "the bytes of its tokens: pass the byte strings yourself"
            )
        try:
            async with deadline.limit():
                return await look_up(self._channel.redis, self._keys, card.vocabulary)
        except TROUBLE as error:
            raise self._channel.explain(error) from error

    async def register(self, vocabulary: Vocabulary, deadline: Deadline) -> None:
        """Have the pool know a vocabulary that a worker has just said it does not know.

        Raises:
            ServerError, DeadlineExceeded: the server cannot be used, or not in time.
        """
        time = asyncio.get_running_loop().time
        since = time()
        try:
            # One at a time: all who use a vocabulary for the first time hear at once that the pool does not know it,
            # and the first of them sends it for all.
            async with deadline.limit(), self._sending:
                if self._sent.get(vocabulary.digest, since) <= since:
                    # Whatever the pool has under its name, the worker could not read it.
                    await register(self._channel.redis, self._keys, vocabulary, anew=True)
                    self._sent[vocabulary.digest] = time()
        except TROUBLE as error:
            raise self._channel.explain(error) from error

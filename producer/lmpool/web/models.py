"""The models that the explorer asks: a producer for each, its tokenizer, and the trie over its vocabulary."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from lmpool.errors import LMPoolError, PromptTooLong, SettingsError, UnknownVocabulary, printable
from lmpool.producer import Producer
from lmpool.producer.tokenizer import Tokenizer, find_tokenizer
from lmpool.producer.trie import PooledTrie

MOST_TOKENS = 4096
"""Most tokens of a text: a page with more is no use to anybody."""

_MOST_MODELS = 8
_CACHE_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 30.0
_MOST_TEXT = 60


class ExploredModel:
    """One model.

    Args:
        producer: asks it, and is open.

    Attributes:
        producer: as above.
    """

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._fingerprint = ""
        self._tokenizer: Tokenizer | None = None
        self._trie: PooledTrie | None = None
        self._making = asyncio.Lock()

    async def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, found once: that which its workers publish, else one that is here.

        Raises:
            SettingsError: it has none, or it cannot be loaded here.
        """
        async with self._making:
            self._forget_others()
            if self._tokenizer is None:
                self._tokenizer = await find_tokenizer(self.producer, otherwise="type token ids such as 1,2,3")
            return self._tokenizer

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            SettingsError: the model has no tokenizer, or the text has no token.
        """
        tokenizer = await self.tokenizer()
        ids = await asyncio.to_thread(tokenizer.encode, text)
        if not ids:
            raise SettingsError("text: it has no token: type something")
        return [int(token) for token in ids]

    async def decode(self, ids: Sequence[int]) -> str | None:
        """The text of token ids; None where the model has no tokenizer."""
        try:
            tokenizer = await self.tokenizer()
        except LMPoolError:
            return None
        return tokenizer.decode(list(ids))

    def check_length(self, ids: Sequence[int]) -> None:
        """Refuse a text that is too long for a page, or for the model.

        Raises:
            PromptTooLong: with both numbers.
        """
        most = min(MOST_TOKENS, self.producer.model.max_prompt_tokens)
        if len(ids) > most:
            raise PromptTooLong(f"a text of {len(ids)} tokens: {most} is the most here; shorten it")

    async def trie(self) -> PooledTrie:
        """The trie over the model's vocabulary, built once.

        Raises:
            UnknownVocabulary: its workers publish none.
            LMPoolError: as `Producer.trie`.
        """
        async with self._making:
            self._forget_others()
            if self._trie is None:
                self._trie = await self.producer.trie()
            return self._trie

    def _forget_others(self) -> None:
        """Another model may be served by this name now."""
        if (fingerprint := self.producer.model.fingerprint) != self._fingerprint:
            self._fingerprint, self._tokenizer, self._trie = fingerprint, None, None

    async def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """What tokens stand for, as it can be shown: by the model's vocabulary, else by its tokenizer, else nothing."""
        wanted = set(ids)
        try:
            vocabulary = (await self.trie()).structure.vocabulary
        except UnknownVocabulary:
            try:
                tokenizer = await self.tokenizer()
            except LMPoolError:
                return dict.fromkeys(wanted, "")
            return {token: shown_text(tokenizer.decode([token])) for token in wanted}
        # A model may have more rows than tokens.
        return {token: shown_bytes(vocabulary[token]) if token < len(vocabulary) else "" for token in wanted}


def shown_bytes(data: bytes) -> str:
    r"""Bytes as text; those that are no UTF-8 as `\xff`."""
    return shown_text(data.decode("utf-8", "backslashreplace"))


def shown_text(text: str) -> str:
    """A token as a page shows it: line breaks and tabs stay, what would not be seen is escaped, the rest is cut."""
    return printable(text[: _MOST_TEXT + 1], keep="\n\t")[: 6 * _MOST_TEXT]


class Models:
    """The models that are being explored, the one asked last at the end.

    Args:
        redis: URL of the server, or None for the default.
        prefix: prefix of the pool's keys.
    """

    def __init__(self, redis: str | None, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._models: OrderedDict[str, ExploredModel] = OrderedDict()

    async def get(self, name: str) -> ExploredModel:
        """A model that is served.

        Raises:
            SettingsError: the name is none.
            UnknownModel, ServerError: it is not served, or the server cannot be used.
        """
        if (known := self._models.get(name)) is not None:
            self._models.move_to_end(name)
            return known
        producer = Producer(
            name,
            redis=self._redis,
            prefix=self._prefix,
            timeout=_TIMEOUT_S,
            cache_bytes=_CACHE_BYTES,
            when_full="raise",
        )
        try:
            await producer.open()
        except LMPoolError:
            await producer.close()
            raise
        # Another request may have opened one meanwhile.
        known = self._models.setdefault(name, ExploredModel(producer))
        if known.producer is not producer:
            await producer.close()
        while len(self._models) > _MOST_MODELS:
            await self._models.popitem(last=False)[1].producer.close()
        return known

    async def close(self) -> None:
        """Close all of them."""
        while self._models:
            await self._models.popitem()[1].producer.close()

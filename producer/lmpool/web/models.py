"""The models that the explorer asks: a producer for each, its tokenizer, and the trie over its vocabulary."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lmpool.aio import end_tasks, finish, join_task
from lmpool.errors import LMPoolError, PromptTooLong, SettingsError, UnknownVocabulary, printable
from lmpool.producer import Producer
from lmpool.producer.tokenizer import TOKENIZERS, Tokenizer, find_tokenizer
from lmpool.producer.trie import PooledTrie

MAX_TOKENS = 4096
"""Most tokens of a text: a page with more is no use to anybody."""

MAX_MODELS = 8
"""Models that are kept open while nobody asks them."""

_CACHE_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 30.0
_ENCODE_S = 10.0  # A text for a page is encoded within milliseconds by any tokenizer that is not hostile.
_MAX_TEXT = 60


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
            UnknownTokenizer, DeadlineExceeded: its tokenizer fails on the text, or takes too long.
        """
        tokenizer = await self.tokenizer()
        ids = await TOKENIZERS.encode(tokenizer, text, _ENCODE_S)
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
        most = min(MAX_TOKENS, self.producer.model.max_prompt_tokens)
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
    return printable(text[: _MAX_TEXT + 1], keep="\n\t")[: 6 * _MAX_TEXT]


@dataclass(slots=True)
class _Known:
    """A model that is asked, or was.

    Attributes:
        opening: one for all that want it.
        users: how many use it now, or wait for its opening.
    """

    opening: asyncio.Task[ExploredModel]
    users: int = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a producer to be closed."""
        return self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None


class Models:
    """The models that are being explored, the one asked last at the end.

    Each has a producer, which is opened once, whoever asks meanwhile. Those that nobody uses at the moment are closed,
    the one asked longest ago first, until no more than `MAX_MODELS` are left.

    Args:
        redis: URL of the server, or None for the default.
        prefix: prefix of the pool's keys.
    """

    def __init__(self, redis: str | None, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._models: OrderedDict[str, _Known] = OrderedDict()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ExploredModel]:
        """A model that is served; it stays open for as long as the block takes.

        Raises:
            SettingsError: the name is none.
            UnknownModel, ServerError: it is not served, or the server cannot be used.
        """
        known = self._models.get(name) or self._begin(name)
        self._models.move_to_end(name)
        known.users += 1
        try:
            yield await join_task(known.opening)
        finally:
            known.users -= 1
            await self._close_unused()

    def _begin(self, name: str) -> _Known:
        known = self._models[name] = _Known(asyncio.create_task(self._open(name)))
        known.opening.add_done_callback(lambda _: self._forget_failed(name, known))
        return known

    async def _open(self, name: str) -> ExploredModel:
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
        except BaseException:
            await producer.close()
            raise
        return ExploredModel(producer)

    def _forget_failed(self, name: str, known: _Known) -> None:
        """Have the next request try again; those that wait for this opening get its failure."""
        if not known.is_open and self._models.get(name) is known:
            del self._models[name]

    async def _close_unused(self) -> None:
        while len(self._models) > MAX_MODELS:
            unused = next((name for name, known in self._models.items() if known.is_open and not known.users), None)
            if unused is None:
                return
            await finish(self._models.pop(unused).opening.result().producer.close())

    async def close(self) -> None:
        """Close all of them."""
        models = list(self._models.values())
        self._models.clear()
        await end_tasks(known.opening for known in models)
        for known in models:
            if known.is_open:
                await known.opening.result().producer.close()

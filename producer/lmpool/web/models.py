"""The models of the explorer: one producer per model, with its tokenizer and the trie over its vocabulary."""

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
"""Max tokens of a text: a page with more is unusable."""

MAX_MODELS = 8
"""Max producers kept open without requests in flight."""

_CACHE_BYTES = 64 * 1024 * 1024  # Bytes of rows kept per model.
_TIMEOUT_S = 30.0  # Seconds until a request of a page fails.
_ENCODE_S = 10.0  # Seconds for encoding a text: only a hostile tokenizer needs more than milliseconds.
_MAX_TEXT = 60  # Max characters shown of a token.


class ExploredModel:
    """A model with an open producer."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._fingerprint = ""
        self._tokenizer: Tokenizer | None = None
        self._trie: PooledTrie | None = None
        self._making = asyncio.Lock()

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the workers publish, else a local one.

        Raises:
            SettingsError: the model has none, or it cannot be loaded here.
        """
        async with self._making:
            self._check_fingerprint()
            if self._tokenizer is None:
                self._tokenizer = await find_tokenizer(self.producer, otherwise="type token ids such as 1,2,3")
            return self._tokenizer

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises:
            SettingsError: the model has no tokenizer, or the text has no token.
            UnknownTokenizer, DeadlineExceeded: the tokenizer fails on the text, or takes too long.
        """
        tokenizer = await self.tokenizer()
        ids = await TOKENIZERS.encode(tokenizer, text, _ENCODE_S)
        if not ids:
            raise SettingsError("text: it has no token: type something")
        return [int(token) for token in ids]

    async def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of token ids, or None if the model has no tokenizer."""
        try:
            tokenizer = await self.tokenizer()
        except LMPoolError:
            return None
        return tokenizer.decode(list(ids))

    def check_length(self, ids: Sequence[int]) -> None:
        """Check that a text is not too long for a page or for the model.

        Raises:
            PromptTooLong: it is.
        """
        limit = min(MAX_TOKENS, self.producer.model.max_prompt_tokens)
        if len(ids) > limit:
            raise PromptTooLong(f"the text has {len(ids)} tokens; this page accepts at most {limit}. Shorten it")

    async def trie(self) -> PooledTrie:
        """Return the trie over the model's vocabulary.

        Raises:
            UnknownVocabulary: the workers publish no vocabulary.
            LMPoolError: see `Producer.trie`.
        """
        async with self._making:
            self._check_fingerprint()
            if self._trie is None:
                self._trie = await self.producer.trie()
            return self._trie

    def _check_fingerprint(self) -> None:
        """Drop tokenizer and trie if another model is now served under this name."""
        if (fingerprint := self.producer.model.fingerprint) != self._fingerprint:
            self._fingerprint, self._tokenizer, self._trie = fingerprint, None, None

    async def texts(self, ids: Sequence[int]) -> dict[int, str]:
        """Return printable texts of tokens, from the vocabulary, else from the tokenizer, else empty."""
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
    r"""Return bytes as text; invalid UTF-8 becomes `\xff`."""
    return shown_text(data.decode("utf-8", "backslashreplace"))


def shown_text(text: str) -> str:
    """Return a token for a page: keep line breaks and tabs, escape invisible characters, cut long texts."""
    return printable(text[: _MAX_TEXT + 1], keep="\n\t")[: 6 * _MAX_TEXT]


@dataclass(slots=True)
class _Entry:
    """A model with the task that opens its producer, and the number of requests that use it or wait for it."""

    opening: asyncio.Task[ExploredModel]
    users: int = 0

    @property
    def is_open(self) -> bool:
        """Whether its producer is open."""
        return self.opening.done() and not self.opening.cancelled() and self.opening.exception() is None


class Models:
    """The models of the explorer, least recently used first.

    Concurrent requests share one producer per model. When more than `MAX_MODELS` are open, the least recently used ones
    without requests are closed.

    Args:
        redis: URL of the server, or None for the default.
        prefix: prefix of the pool's keys.
    """

    def __init__(self, redis: str | None, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._models: OrderedDict[str, _Entry] = OrderedDict()

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ExploredModel]:
        """Open a model and keep it open during the block.

        Raises:
            SettingsError: the name is invalid.
            UnknownModel, ServerError: the model is not served, or the server cannot be used.
        """
        known = self._models.get(name) or self._begin(name)
        self._models.move_to_end(name)
        known.users += 1
        try:
            yield await join_task(known.opening)
        finally:
            known.users -= 1
            await self._close_unused()

    def _begin(self, name: str) -> _Entry:
        known = self._models[name] = _Entry(asyncio.create_task(self._open(name)))
        known.opening.add_done_callback(lambda _: self._remove_failed(name, known))
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

    def _remove_failed(self, name: str, known: _Entry) -> None:
        """Remove a model that failed to open, so that the next request tries again."""
        if not known.is_open and self._models.get(name) is known:
            del self._models[name]

    async def _close_unused(self) -> None:
        while len(self._models) > MAX_MODELS:
            unused = next((name for name, known in self._models.items() if known.is_open and not known.users), None)
            if unused is None:
                return
            await finish(self._models.pop(unused).opening.result().producer.close())

    async def close(self) -> None:
        """Close all models."""
        models = list(self._models.values())
        self._models.clear()
        await end_tasks(known.opening for known in models)
        for known in models:
            if known.is_open:
                await known.opening.result().producer.close()

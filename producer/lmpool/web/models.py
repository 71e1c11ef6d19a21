"""Hold one open producer per model, for services whose requests name models."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from lmpool.aio import finish
from lmpool.producer import Producer
from lmpool.producer.tokenizer import Tokenizer, find_tokenizer

MAX_MODELS = 8
"""Max models whose producers stay open while they have no requests in flight."""

CACHE_BYTES = 64 * 1024 * 1024
"""Max bytes of cached rows per model, unless the service has another limit."""

_TIMEOUT_S = 30.0  # Seconds until a request fails.


class OpenModel:
    """A model with its producer and its tokenizer."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.is_kept = False  # Whether the producer stays open without requests.
        self.users = 0  # Number of requests that use the model or wait for it.
        self._made: dict[tuple[str, str], Any] = {}
        self._making = asyncio.Lock()

    async def once(self, kind: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Make a value once per fingerprint: another model may be served under the name later."""
        async with self._making:
            key = self.producer.model.fingerprint, kind
            if key not in self._made:
                self._made[key] = await make()
            return self._made[key]

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the workers publish, else a local tokenizer; see `find_tokenizer`."""
        find = partial(find_tokenizer, self.producer, otherwise="type token ids such as 1,2,3")
        tokenizer: Tokenizer = await self.once("tokenizer", find)
        return tokenizer


M = TypeVar("M", bound=OpenModel)


class Models(Generic[M]):
    """The models of a service, least recently used first.

    Concurrent requests share one producer per model. When more than `MAX_MODELS` models are open, the least recently
    used models without requests are closed.

    Args:
        kind: class of the models.
        redis: URL of the server, or None, as for `Producer`.
        prefix: prefix of the pool's keys.
        options: more arguments of `Producer`.
    """

    def __init__(self, kind: Callable[[Producer], M], redis: str | None, prefix: str, **options: Any) -> None:
        self._kind = kind
        self._options: dict[str, Any] = {"redis": redis, "prefix": prefix, "timeout": _TIMEOUT_S}
        self._options |= {"cache_bytes": CACHE_BYTES, "when_full": "raise", **options}
        self._models: OrderedDict[str | None, M] = OrderedDict()

    def __iter__(self) -> Iterator[M]:
        return iter(list(self._models.values()))

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[M]:
        """Open a model (None: the only one) and keep it open during the block; raises as `Producer.open`."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = self._kind(Producer(name, **self._options))
        self._models.move_to_end(name)
        model.users += 1
        try:
            await model.producer.open()
            model.is_kept = name is not None  # Without a name, the next request may be for another model.
            yield model
        finally:
            model.users -= 1
            while unneeded := [name for name, model in self._models.items() if self._is_unneeded(model)]:
                await finish(self._models.pop(unneeded[0]).producer.close())

    def _is_unneeded(self, model: M) -> bool:
        return not model.users and (len(self._models) > MAX_MODELS or not model.is_kept)

    async def close(self) -> None:
        """Close all models."""
        while self._models:
            await self._models.popitem()[1].producer.close()

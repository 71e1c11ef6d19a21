"""Awaitable weights: the requests of one turn of the event loop are computed as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from lmpool.producer.genlm.tries import ParallelTokenCharacterTrie, TokenCharacterTrie
from lmpool.producer.together import shared
from lmpool.settings import check_choice

_Op = Literal["sum", "max"]


class AsyncTokenCharacterTrie:
    """A trie whose concurrent requests are batched, by operation.

    A request with weights that cannot be used fails alone; what fails a batch reaches all who await it, and nothing
    after it. It computes in the event loop's thread. It may be used in one event loop after another, and needs neither
    `start` nor `cleanup`: between requests it holds no task.

    Attributes:
        trie: what computes.
    """

    def __init__(self, trie: TokenCharacterTrie) -> None:
        self.trie = trie
        self._open: dict[_Op, _Batch] = {}

    @classmethod
    def from_vocab(cls, vocab: Sequence[Any], backend: str = "parallel", **kwargs: Any) -> AsyncTokenCharacterTrie:
        """Make the trie of a vocabulary.

        Args:
            vocab: the items, as `TokenCharacterTrie` takes them.
            backend: "parallel" for `ParallelTokenCharacterTrie`, "sequential" for `TokenCharacterTrie`.
            kwargs: further arguments of that class.

        Raises:
            SettingsError: another backend.
            InvalidVocabulary: as `TokenCharacterTrie`.
        """
        check_choice("backend", backend, ("sequential", "parallel"))
        kind = TokenCharacterTrie if backend == "sequential" else ParallelTokenCharacterTrie
        return cls(kind(vocab, **kwargs))

    async def weight_sum(self, ws: Any) -> NDArray[Any]:
        """The sum of the weights below every node; see `TokenCharacterTrie.weight_sum`."""
        return await self._request("sum", ws)

    async def weight_max(self, ws: Any) -> NDArray[Any]:
        """The greatest weight below every node; see `TokenCharacterTrie.weight_max`."""
        return await self._request("max", ws)

    def start(self) -> None:
        """Nothing: the first request of a turn starts its batch. It is here for those who call genlm-backend's."""

    async def cleanup(self) -> None:
        """Wait for the batches that this event loop has yet to compute."""
        loop = asyncio.get_running_loop()
        if waiting := [batch.task for batch in self._open.values() if batch.task.get_loop() is loop]:
            await asyncio.wait(waiting)

    def shutdown(self) -> None:
        """Cancel the requests that have yet to be computed; later ones are served again."""
        batches, self._open = list(self._open.values()), {}
        for batch in batches:
            if not batch.task.get_loop().is_closed():
                batch.task.cancel()

    async def _request(self, op: _Op, ws: Any) -> NDArray[Any]:
        vector = self.trie.check(ws)
        loop = asyncio.get_running_loop()
        batch = self._open.get(op)
        # An event loop that ended early leaves a batch behind that nobody will compute.
        if batch is None or batch.task.get_loop() is not loop or batch.task.done():
            batch = self._open[op] = _Batch(self._compute, op)
        index = len(batch.vectors)
        batch.vectors.append(vector)
        result: NDArray[Any] = (await shared(batch.task))[index]
        return result

    async def _compute(self, op: _Op, batch: _Batch) -> NDArray[Any]:
        """Close a batch and compute it. Whoever awaits the task gets what this raises."""
        if self._open.get(op) is batch:
            del self._open[op]
        return self.trie.batch_weight_sum(batch.vectors) if op == "sum" else self.trie.batch_weight_max(batch.vectors)


class _Batch:
    """Vectors that wait for their turn of the event loop, and the task that will compute them."""

    def __init__(self, compute: Callable[[_Op, _Batch], Coroutine[Any, Any, NDArray[Any]]], op: _Op) -> None:
        self.vectors: list[NDArray[Any]] = []
        self.task = asyncio.get_running_loop().create_task(compute(op, self))

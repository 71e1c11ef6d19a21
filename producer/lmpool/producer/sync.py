"""The producer without asyncio, usable inside a running event loop too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from lmpool.aio import end_tasks
from lmpool.broker.server import RedisLike, where
from lmpool.errors import LMPoolError, ProducerClosed
from lmpool.producer.client.queries import Expected, Mode
from lmpool.producer.client.requests import ProducerStats
from lmpool.producer.client.session import Priority, WhenAbsent, WhenFull
from lmpool.producer.client.session_per_loop import CopiedAsItself
from lmpool.producer.options import GenerateOptions, PositionOptions, Positions, SampleOptions
from lmpool.producer.producer import Producer
from lmpool.producer.tokenizer import PublishedTokenizer
from lmpool.producer.trie import PooledTrie, TrieOptions
from lmpool.protocol.hidden import Head
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import Continuation, TopK
from lmpool.protocol.row import Values
from lmpool.protocol.token_set import TokenSet
from lmpool.vocabulary import Vocabulary

T = TypeVar("T")

_CLOSED = "this SyncProducer is closed"

Wait = Callable[[Coroutine[Any, Any, Values]], Values]


class SyncTrie(CopiedAsItself):
    """Offers the calls of `PooledTrie` to synchronous code; made by `SyncProducer.trie`.

    Args:
        trie: the trie.
        wait: awaits in the producer's event loop.

    Attributes:
        structure: nodes, prefixes and children (`lmpool.trie.trie.Trie`).
    """

    def __init__(self, trie: PooledTrie, wait: Wait) -> None:
        self._trie = trie
        self._wait = wait
        self.structure = trie.structure

    def __repr__(self) -> str:
        return f"SyncTrie({self.structure!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise LMPoolError(
            "a SyncTrie is its producer's and cannot be pickled: pickle the SyncProducer, and have the unpickled one "
            "make the trie: `producer.trie(vocabulary)`"
        )

    def weight_sum(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """As `PooledTrie.weight_sum`."""
        return self._wait(self._trie.weight_sum(ws, prompt=prompt, **options))

    def weight_max(self, ws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """As `PooledTrie.weight_max`."""
        return self._wait(self._trie.weight_max(ws, prompt=prompt, **options))

    def logsumexp(self, logws: Any = None, *, prompt: Any = None, **options: Unpack[TrieOptions]) -> Values:
        """As `PooledTrie.logsumexp`."""
        return self._wait(self._trie.logsumexp(logws, prompt=prompt, **options))

    def batch_weight_sum(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `PooledTrie.batch_weight_sum`."""
        return self._wait(self._trie.batch_weight_sum(ws, prompts=prompts, **options))

    def batch_weight_max(
        self, ws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `PooledTrie.batch_weight_max`."""
        return self._wait(self._trie.batch_weight_max(ws, prompts=prompts, **options))

    def batch_logsumexp(
        self, logws: Any = None, *, prompts: Iterable[Any] | None = None, **options: Unpack[TrieOptions]
    ) -> Values:
        """As `PooledTrie.batch_logsumexp`."""
        return self._wait(self._trie.batch_logsumexp(logws, prompts=prompts, **options))


class SyncProducer(CopiedAsItself):
    """Offers the calls of `Producer` to synchronous code, by an event loop in a background thread.

    Takes the arguments of `Producer`, and connects at once. It may be called from any number of threads. What is
    pickled is the same as of a `Producer`; an unpickled one is open and connects with its first call.

    Args:
        model, redis, timeout, cache_bytes, prefix, when_full, when_absent, priority, keep_answers, tracing: as
            `Producer`.

    Raises:
        As `Producer` and `Producer.open`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        redis: RedisLike | None = None,
        timeout: float = 60.0,
        cache_bytes: int = 256 * 1024 * 1024,
        prefix: str = "lmpool",
        when_full: WhenFull = "wait",
        when_absent: WhenAbsent = "raise",
        priority: Priority = "interactive",
        keep_answers: bool = True,
        tracing: bool | None = None,
    ) -> None:
        producer = Producer(
            model,
            redis=redis,
            timeout=timeout,
            cache_bytes=cache_bytes,
            prefix=prefix,
            when_full=when_full,
            when_absent=when_absent,
            priority=priority,
            keep_answers=keep_answers,
            tracing=tracing,
        )
        self._start(producer)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _start(self, producer: Producer) -> None:
        """Give a producer a thread with an event loop."""
        self._producer = producer
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="lmpool-producer", daemon=True)
        self._thread.start()
        # Dropped without being closed: in whatever thread the garbage collector runs, so without waiting.
        self._abandoned = weakref.finalize(self, _abandon, self._producer, self._loop)
        self._abandoned.atexit = False

    def _connect(self) -> None:
        """Connect, when it has been made."""
        self._wait_for(self._producer.open())

    def logprobs(
        self,
        ids: Any,
        *,
        targets: Any = None,
        mode: Mode = "logprobs",
        fresh: bool = False,
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """As `Producer.logprobs`."""
        work = self._producer.logprobs(ids, targets=targets, mode=mode, fresh=fresh, adapter=adapter, timeout=timeout)
        return self._wait_for(work)

    def batch_logprobs(
        self,
        prompts: Iterable[Any],
        *,
        targets: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """As `Producer.batch_logprobs`."""
        work = self._producer.batch_logprobs(prompts, targets=targets, mode=mode, adapter=adapter, timeout=timeout)
        return self._wait_for(work)

    def topk(
        self,
        ids: Any,
        k: int,
        *,
        allowed: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> TopK:
        """As `Producer.topk`."""
        work = self._producer.topk(ids, k, allowed=allowed, mode=mode, adapter=adapter, timeout=timeout)
        return self._wait_for(work)

    def batch_topk(
        self,
        prompts: Iterable[Any],
        k: int,
        *,
        allowed: Any = None,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> TopK:
        """As `Producer.batch_topk`."""
        work = self._producer.batch_topk(prompts, k, allowed=allowed, mode=mode, adapter=adapter, timeout=timeout)
        return self._wait_for(work)

    def mass(self, ids: Any, allowed: Any, *, adapter: str = "", timeout: float | None = None) -> float:
        """As `Producer.mass`."""
        return self._wait_for(self._producer.mass(ids, allowed, adapter=adapter, timeout=timeout))

    def batch_mass(
        self, prompts: Iterable[Any], allowed: Any, *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """As `Producer.batch_mass`."""
        return self._wait_for(self._producer.batch_mass(prompts, allowed, adapter=adapter, timeout=timeout))

    def token_set(self, allowed: Any, *, timeout: float | None = None) -> TokenSet:
        """As `Producer.token_set`."""
        return self._wait_for(self._producer.token_set(allowed, timeout=timeout))

    def sample(self, ids: Any, **options: Unpack[SampleOptions]) -> int:
        """As `Producer.sample`."""
        return self._wait_for(self._producer.sample(ids, **options))

    def batch_sample(self, prompts: Iterable[Any], **options: Unpack[SampleOptions]) -> NDArray[np.int64]:
        """As `Producer.batch_sample`."""
        return self._wait_for(self._producer.batch_sample(prompts, **options))

    def generate(
        self, ids: Any, max_tokens: int, *, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """As `Producer.generate`."""
        return self._wait_for(self._producer.generate(ids, max_tokens, n=n, **options))

    def batch_generate(
        self, prompts: Iterable[Any], max_tokens: int, **options: Unpack[GenerateOptions]
    ) -> list[Continuation]:
        """As `Producer.batch_generate`."""
        return self._wait_for(self._producer.batch_generate(prompts, max_tokens, **options))

    def score(
        self,
        prompt: Any,
        continuation: Any,
        *,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> NDArray[np.float32]:
        """As `Producer.score`."""
        return self._wait_for(self._producer.score(prompt, continuation, mode=mode, adapter=adapter, timeout=timeout))

    def batch_score(
        self,
        prompts: Iterable[Any],
        continuations: Iterable[Any],
        *,
        mode: Mode = "logprobs",
        adapter: str = "",
        timeout: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """As `Producer.batch_score`."""
        work = self._producer.batch_score(prompts, continuations, mode=mode, adapter=adapter, timeout=timeout)
        return self._wait_for(work)

    def positions(self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]) -> Expected:
        """As `Producer.positions`."""
        return self._wait_for(self._producer.positions(ids, start, **options))

    def batch_positions(
        self, texts: Iterable[Any], start: int = 0, **options: Unpack[PositionOptions]
    ) -> list[Expected]:
        """As `Producer.batch_positions`."""
        return self._wait_for(self._producer.batch_positions(texts, start, **options))

    def stream_positions(self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]) -> Iterator[Positions]:
        """As `Producer.stream_positions`."""
        parts = self._producer.stream_positions(ids, start, **options)

        async def following() -> Positions | None:
            return await anext(parts, None)

        while (part := self._wait_for(following())) is not None:
            yield part

    def logz(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> float:
        """As `Producer.logz`."""
        return self._wait_for(self._producer.logz(ids, adapter=adapter, timeout=timeout))

    def batch_logz(
        self, prompts: Iterable[Any], *, adapter: str = "", timeout: float | None = None
    ) -> NDArray[np.float32]:
        """As `Producer.batch_logz`."""
        return self._wait_for(self._producer.batch_logz(prompts, adapter=adapter, timeout=timeout))

    def hidden(self, ids: Any, start: int = 0, *, adapter: str = "", timeout: float | None = None) -> NDArray[Any]:
        """As `Producer.hidden`."""
        return self._wait_for(self._producer.hidden(ids, start, adapter=adapter, timeout=timeout))

    def head(self, *, timeout: float | None = None) -> Head:
        """As `Producer.head`."""
        return self._wait_for(self._producer.head(timeout=timeout))

    def warm(self, ids: Any, *, adapter: str = "", timeout: float | None = None) -> None:
        """As `Producer.warm`."""
        self._wait_for(self._producer.warm(ids, adapter=adapter, timeout=timeout))

    def clear_cache(self) -> None:
        """As `Producer.clear_cache`."""
        self._wait_for(self._clear_cache())

    async def _clear_cache(self) -> None:
        # In the thread that uses the cache.
        self._producer.clear_cache()

    def adapters(self, *, timeout: float | None = None) -> dict[str, str]:
        """As `Producer.adapters`."""
        return self._wait_for(self._producer.adapters(timeout=timeout))

    def add_adapter(self, name: str, source: str | Path, *, timeout: float | None = None) -> str:
        """As `Producer.add_adapter`."""
        return self._wait_for(self._producer.add_adapter(name, source, timeout=timeout))

    def remove_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """As `Producer.remove_adapter`."""
        self._wait_for(self._producer.remove_adapter(name, timeout=timeout))

    def trie(self, vocabulary: Vocabulary | Iterable[bytes] | None = None, *, local: bool = False) -> SyncTrie:
        """As `Producer.trie`; the calls of the trie return values instead of awaitables."""
        return SyncTrie(self._wait_for(self._producer.trie(vocabulary, local=local)), self._wait_for)

    def tokenizer(self, *, timeout: float | None = None) -> PublishedTokenizer:
        """As `Producer.tokenizer`."""
        return self._wait_for(self._producer.tokenizer(timeout=timeout))

    def encode(self, text: str, *, add_special_tokens: bool = True, timeout: float | None = None) -> list[int]:
        """As `Producer.encode`."""
        work = self._producer.encode(text, add_special_tokens=add_special_tokens, timeout=timeout)
        return self._wait_for(work)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, timeout: float | None = None) -> str:
        """As `Producer.decode`."""
        return self._wait_for(self._producer.decode(ids, skip_special_tokens=skip_special_tokens, timeout=timeout))

    @property
    def model(self) -> ModelInfo:
        """The info of the model; connects where there is no connection yet.

        Raises:
            As `Producer.open`.
        """
        if not self._producer._is_connected:
            self._wait_for(self._producer.open())
        return self._producer.model

    def stats(self) -> ProducerStats:
        """As `Producer.stats`."""
        return self._producer.stats()

    def close(self) -> None:
        """Close the connections and end the background thread; closing twice does nothing.

        Calls that other threads wait for end with `ProducerClosed`.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._abandoned.detach()
        # In a child it is the parent's; at the interpreter's end its thread has stopped and would never answer.
        if os.getpid() != self._process or sys.is_finalizing():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self._producer)

    def __repr__(self) -> str:
        producer = self._producer
        state = "closed" if self._closed else "open"
        return f"SyncProducer({producer._name!r}, redis={where(producer._redis)!r}, {state})"

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        if sys.is_finalizing():  # Its thread has stopped and would never answer.
            work.close()
            raise ProducerClosed("the interpreter is ending")
        if os.getpid() != self._process:
            work.close()
            raise ProducerClosed("this SyncProducer was made before a fork: make another one in this process")
        with self._closing:  # What is handed over before it is closed is ended with it.
            if self._closed:
                work.close()
                raise ProducerClosed(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ProducerClosed(_CLOSED) from None
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the request must not stay behind.
            raise

    async def _end(self) -> None:
        """End everything in the event loop: whoever waits in another thread must hear of it."""
        await self._producer.close()
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


def _reopened(kind: type[SyncProducer], producer: Producer) -> SyncProducer:
    """A producer that has been pickled; it connects with its first call."""
    reopened = kind.__new__(kind)
    reopened._start(producer)
    return reopened


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """A producer's thread."""
    loop.run_forever()
    loop.close()


def _abandon(producer: Producer, loop: asyncio.AbstractEventLoop) -> None:
    """End a producer and the loop in its thread, without waiting for either."""

    async def end() -> None:
        await producer.close()
        loop.stop()

    with contextlib.suppress(RuntimeError):  # The loop is closed.
        asyncio.run_coroutine_threadsafe(end(), loop)

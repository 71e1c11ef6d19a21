"""The class `SyncProducer`, a pool's client without asyncio, which also works inside a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from lmpool.aio import end_tasks
from lmpool.broker.server import where
from lmpool.errors import DeadlineExceeded, ModelMismatch, ProducerClosed, SettingsError
from lmpool.producer.client.requests import check_timeout
from lmpool.producer.client.session import CopiedAsItself, Session
from lmpool.producer.metrics import Counters, ProducerStats
from lmpool.producer.options import PositionOptions, repeatable
from lmpool.producer.producer import CHANGES_TOO_OFTEN, Producer, check_version
from lmpool.producer.trie import PooledTrie
from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.query import Predictions
from lmpool.vocabulary import Vocabulary

P = ParamSpec("P")
T = TypeVar("T")

_CLOSED = "this SyncProducer is closed"


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Convert a coroutine method to a method with the same parameters, which waits and returns the result.

    The calling thread reads arguments that are iterators: they may call the producer, for which the background thread
    could not wait.
    """

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> T:
        values, options = repeatable(args, kwargs)
        result: T = self._wait_for(method(self._asynchronous, *values, **options))
        return result

    name = method.__qualname__.replace("PartialRows", "Producer")
    call.__doc__ = f"As `{name}`."
    return call


def opened_by(
    make: Callable[P, Producer], method: Callable[[SyncProducer, Producer], None]
) -> Callable[Concatenate[SyncProducer, P], None]:
    """Convert a method that takes a producer to a method that takes the producer's arguments."""

    @wraps(make.__init__)  # Let `help` and the reference show the parameters of `Producer`.
    def call(self: SyncProducer, /, *args: P.args, **kwargs: P.kwargs) -> None:
        method(self, make(*args, **kwargs))

    return call


class SyncTrie(CopiedAsItself):
    """The calls of `PooledTrie` without asyncio; made by `SyncProducer.trie`.

    Attributes:
        structure: nodes, prefixes and children (`lmpool.trie.trie.Trie`).
    """

    def __init__(self, trie: PooledTrie, producer: SyncProducer) -> None:
        self._asynchronous = trie
        self._wait_for = producer._wait_for
        self.structure = trie.structure

    def __repr__(self) -> str:
        return f"SyncTrie({self.structure!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._asynchronous.__reduce__()

    weight_sum = blocking(PooledTrie.weight_sum)
    weight_max = blocking(PooledTrie.weight_max)
    logsumexp = blocking(PooledTrie.logsumexp)
    batch_weight_sum = blocking(PooledTrie.batch_weight_sum)
    batch_weight_max = blocking(PooledTrie.batch_weight_max)
    batch_logsumexp = blocking(PooledTrie.batch_logsumexp)


class SyncProducer(CopiedAsItself):
    """The calls of `Producer` without asyncio, which run in the event loop of a background thread.

    A `SyncProducer` takes the arguments of `Producer`, and connects at once. Any number of threads may use one object.
    A pickle contains the same as a `Producer`'s pickle; the unpickled object is open and connects with its first call.

    Args:
        model, redis, timeout, cache_bytes, prefix, when_full, when_absent, priority, keep_answers, direct, tracing:
            as for `Producer`.

    Raises:
        The exceptions of `Producer` and of `Producer.open`.
    """

    @partial(opened_by, Producer)
    def __init__(self, producer: Producer) -> None:
        self.__setstate__(producer)
        try:
            self._wait_for(producer.open())
        except BaseException:
            self.close()
            raise

    def __getstate__(self) -> Producer:
        return self._asynchronous

    def __setstate__(self, producer: Producer) -> None:
        """Start a thread with an event loop for the producer. An unpickled producer connects with its first call."""
        self._asynchronous = producer
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._pinned: dict[int, SyncProducer] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="lmpool-producer", daemon=True)
        self._thread.start()
        # Also close an object dropped without `close`. The garbage collector may run in any thread, so do not wait.
        self._abandoned = weakref.finalize(self, _abandon, producer, self._loop)
        self._abandoned.atexit = False

    logprobs = blocking(Producer.logprobs)
    batch_logprobs = blocking(Producer.batch_logprobs)
    topk = blocking(Producer.topk)
    batch_topk = blocking(Producer.batch_topk)
    mass = blocking(Producer.mass)
    batch_mass = blocking(Producer.batch_mass)
    mass_of_bytes = blocking(Producer.mass_of_bytes)
    token_set = blocking(Producer.token_set)
    sample = blocking(Producer.sample)
    batch_sample = blocking(Producer.batch_sample)
    generate = blocking(Producer.generate)
    batch_generate = blocking(Producer.batch_generate)
    score = blocking(Producer.score)
    batch_score = blocking(Producer.batch_score)
    positions = blocking(Producer.positions)
    batch_positions = blocking(Producer.batch_positions)
    logz = blocking(Producer.logz)
    batch_logz = blocking(Producer.batch_logz)
    hidden = blocking(Producer.hidden)
    head = blocking(Producer.head)
    warm = blocking(Producer.warm)
    adapters = blocking(Producer.adapters)
    add_adapter = blocking(Producer.add_adapter)
    remove_adapter = blocking(Producer.remove_adapter)
    reach_version = blocking(Producer.reach_version)
    versions = blocking(Producer.versions)
    publish_weights = blocking(Producer.publish_weights)
    tokenizer = blocking(Producer.tokenizer)
    encode = blocking(Producer.encode)
    decode = blocking(Producer.decode)

    def stream_positions(self, ids: Any, start: int = 0, **options: Unpack[PositionOptions]) -> Iterator[Predictions]:
        """As `Producer.stream_positions`, but return an iterator that waits for each part of the result."""
        parts = self._asynchronous.stream_positions(ids, start, **options)

        async def following() -> Predictions | None:
            return await anext(parts, None)

        while (part := self._wait_for(following())) is not None:
            yield part

    def trie(self, vocabulary: Vocabulary | Iterable[bytes] | None = None, *, local: bool = False) -> SyncTrie:
        """As `Producer.trie`, but the calls of the trie return values instead of awaitables."""
        return SyncTrie(self._wait_for(self._asynchronous.trie(vocabulary, local=local)), self)

    def at(self, version: int) -> SyncProducer:
        """As `Producer.at`, but return a `SyncProducer`, which is closed with this one."""
        _ = self.model  # Connect, because only a connected producer knows the name of its model.
        with self._closing:
            if self._closed:
                raise ProducerClosed(_CLOSED)
            self._pinned = {number: other for number, other in self._pinned.items() if not other._closed}
            if check_version(version) not in self._pinned:
                self._pinned[version] = SyncProducer.__new__(SyncProducer)
                self._pinned[version].__setstate__(self._asynchronous._of_version(version))
            return self._pinned[version]

    def versioned(self, ask: Callable[..., T], *args: Any, **options: Any) -> tuple[T, int]:
        """As `Producer.versioned`, for a method of this `SyncProducer`."""
        owner, (values, options) = getattr(ask, "__self__", None), repeatable(args, options)
        if {"version", "min_version"} & options.keys() or (isinstance(owner, SyncProducer) and owner is not self):
            raise SettingsError("versioned: give a method of this producer, without version= and min_version=")
        timeout = options.get("timeout")
        end = time.monotonic() + (self._asynchronous._timeout if timeout is None else check_timeout(timeout))
        while True:
            before = self._weights()
            try:
                answer = ask(*values, **options)
                if self._weights() == before:
                    return answer, before[1].version
            except ModelMismatch:  # The weights may have changed between two parts of the result.
                if self._weights() == before:
                    raise
            if (left := end - time.monotonic()) <= 0:
                raise DeadlineExceeded(CHANGES_TOO_OFTEN)
            if timeout is not None:
                options["timeout"] = left

    def _weights(self) -> tuple[Session | None, ModelInfo]:
        info = self.model  # Read it first: it opens the session.
        return self._asynchronous._sessions.session, info

    def clear_cache(self) -> None:
        """As `Producer.clear_cache`: drop the rows in this producer's own memory."""

        async def clear() -> None:  # This coroutine runs in the thread that uses the cache.
            self._asynchronous.clear_cache()

        self._wait_for(clear())

    @property
    def model(self) -> ModelInfo:
        """The model info; reading it connects if there is no connection yet.

        Raises:
            The exceptions of `Producer.open`.
        """
        if self._asynchronous._sessions.session is None:
            self._wait_for(self._asynchronous.open())
        return self._asynchronous.model

    def stats(self) -> ProducerStats:
        """As `Producer.stats`: return a snapshot of the counters of this producer's requests."""
        return self._asynchronous.stats()

    @property
    def _counters(self) -> Counters:
        return self._asynchronous._counters

    def close(self) -> None:
        """Close the connections and end the background thread; closing twice does nothing.

        Pending calls of other threads raise `ProducerClosed`.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for pinned in self._pinned.values():
            pinned.close()
        self._abandoned.detach()
        # The background thread exists only in the parent of a fork, and has stopped when the interpreter ends.
        if os.getpid() != self._process or sys.is_finalizing():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        """Cancel all tasks of the event loop, so that callers in other threads do not wait forever."""
        await self._asynchronous.close()
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        producer = self._asynchronous
        state = "closed" if self._closed else "open"
        return f"SyncProducer({producer._name!r}, redis={where(producer._redis)!r}, {state})"

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        if sys.is_finalizing():  # Python has stopped the background thread, which would never reply.
            work.close()
            raise ProducerClosed("the interpreter is ending")
        if os.getpid() != self._process:
            work.close()
            raise ProducerClosed("this SyncProducer was made before a fork: make another one in this process")
        if threading.current_thread() is self._thread:
            work.close()
            raise SettingsError("an argument of this SyncProducer's call uses the SyncProducer: pass a list instead")
        with self._closing:  # Hold the lock, so that `close` also ends the call that begins here.
            if self._closed:
                work.close()
                raise ProducerClosed(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ProducerClosed(_CLOSED) from None
        except BaseException:
            future.cancel()  # If Ctrl-C interrupts the wait, cancel the request too.
            raise


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _abandon(producer: Producer, loop: asyncio.AbstractEventLoop) -> None:
    """Close a producer and its event loop without waiting."""

    async def end() -> None:
        await producer.close()
        loop.stop()

    with contextlib.suppress(RuntimeError):  # RuntimeError: the loop is closed already.
        asyncio.run_coroutine_threadsafe(end(), loop)

"""The connection of a language model: one producer a thread for coroutines, one more for synchronous calls."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import weakref
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from lmpool.broker.server import RedisLike
from lmpool.errors import ProducerClosed
from lmpool.producer.client.session import WhenAbsent
from lmpool.producer.deadline import ENDLESS_S, check_timeout
from lmpool.producer.producer import Producer
from lmpool.producer.stats import ProducerStats
from lmpool.producer.sync import SyncProducer


@dataclass(frozen=True, slots=True)
class Address:
    """Which model, where it is, and how to ask for it; the arguments of `Producer`.

    Attributes:
        model: name of the served model; None for the only one.
        redis: URL or redis-py client; None for the environment's, then this user's embedded server.
        timeout: seconds that a request may take; infinity for no deadline.
        cache_bytes: bytes of rows that a producer keeps.
        prefix: prefix of the pool's Redis keys.
        when_absent: what connecting and asking do while no worker serves the model.
    """

    model: str | None = None
    redis: RedisLike | None = field(default=None, repr=False)  # It may hold a password.
    timeout: float = math.inf
    cache_bytes: int = 256 * 1024 * 1024
    prefix: str = "lmpool"
    when_absent: WhenAbsent = "raise"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Producer` and `SyncProducer`."""
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "model"}
        return options | {"timeout": seconds_of(self.timeout)}


def seconds_of(timeout: float) -> float:
    """What a producer is told; infinity is no deadline.

    Raises:
        SettingsError: not a number above 0.
    """
    return ENDLESS_S if timeout == math.inf else check_timeout(timeout)


class LazyProducer(SyncProducer):
    """Connects with its first call and not when it is made, so that it can be closed while it connects."""

    def _connect(self) -> None:
        pass


class Owned(Protocol):
    """What lives as long as a connection."""

    def close(self) -> None:
        """End it; ending it twice does nothing."""
        ...


class Connection:
    """Producers for whoever asks: a coroutine in any event loop, or a synchronous caller in any thread.

    It survives a fork: the child connects for itself, and leaves alone what its parent has open.

    Args:
        address: see `Address`.
        owned: what is closed with it.
    """

    def __init__(self, address: Address, owned: Owned | None = None) -> None:
        self._address = address
        self._owned = owned
        self._start_afresh()
        _connections.add(self)
        atexit.register(self.close)

    def _start_afresh(self) -> None:
        # Two event loops at once are in two threads, and a producer has one session at a time.
        self._of_thread = threading.local()
        self._producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._sync: LazyProducer | None = None
        self._closed = False

    def after_fork(self) -> None:
        """Begin anew in a child process."""
        # Closing them would take descriptors out of the epoll instances that the child shares with its parent.
        _left_to_the_parent.append((self._of_thread, self._sync, self._owned))
        closed = self._closed
        self._owned = None
        self._start_afresh()
        self._closed = closed

    @property
    def producer(self) -> Producer:
        """The producer of coroutines in this thread.

        Raises:
            ProducerClosed: the connection is closed.
        """
        self._check_open()
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is None:
            producer = self._of_thread.producer = Producer(self._address.model, **self._address.options)
            self._producers.add(producer)
        return producer

    @property
    def sync(self) -> LazyProducer:
        """The producer of synchronous callers; connects at the first use.

        Raises:
            ProducerClosed: the connection is closed.
        """
        if (sync := self._sync) is not None:
            return sync
        with self._lock:
            self._check_open()
            if self._sync is None:
                self._sync = LazyProducer(self._address.model, **self._address.options)
            return self._sync

    def forget_rows(self) -> None:
        """Drop the rows that this thread's producers keep."""
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        for one in (producer, self._sync):
            if one is not None:
                one.clear_cache()

    def stats(self) -> ProducerStats:
        """What became of the requests of this thread's producers."""
        total = ProducerStats()
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        for one in (producer, self._sync):
            if one is not None:
                for name, count in asdict(one.stats()).items():
                    total.add(name, count)
        return total

    def close(self) -> None:
        """Close what is open, and what is owned; closing twice does nothing.

        Sessions of event loops end in these, as soon as they run.
        """
        self._closed = True
        for producer in list(self._producers):
            producer.close_soon()
        with self._lock:
            sync, self._sync = self._sync, None
            if sync is not None:
                sync.close()
            if self._owned is not None:
                self._owned.close()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """As `close`, without blocking the event loop."""
        self._closed = True
        producer: Producer | None = getattr(self._of_thread, "producer", None)
        if producer is not None:
            await producer.close()
        await asyncio.to_thread(self.close)

    def abandon(self) -> None:
        """Close without waiting: the garbage collector calls this, in any thread and at any moment."""
        for producer in list(self._producers):
            producer.close_soon()
        if self._sync is None and self._owned is None:
            atexit.unregister(self.close)
            return
        try:
            threading.Thread(target=self.close, name="lmpool-close", daemon=True).start()
        except RuntimeError:  # The interpreter is ending and starts no more threads.
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosed("this PooledLM is closed")


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_left_to_the_parent: list[Any] = []


def _after_fork() -> None:
    for connection in list(_connections):
        connection.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

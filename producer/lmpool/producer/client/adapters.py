"""The adapters of a client's model: the revision, a digest of its weights, that each name stands for at present."""

from __future__ import annotations

import asyncio

from lmpool.aio import copy_error, delays
from lmpool.broker.connection import CommandConnection
from lmpool.broker.registries import KNOWN_FOR_S, AdapterRegistry
from lmpool.errors import DeadlineExceeded, NoWorker, ServerError, UnknownAdapter
from lmpool.producer.client.connections import TROUBLE, Connections
from lmpool.producer.client.requests import Deadline
from lmpool.protocol.adapter import Generation, Registered, qualify
from lmpool.settings import shown

_NEVER = float("-inf")
_IN_USE_S = 60.0
_LOST = "the server has lost the adapters, or has those of other weights"
_FORGETFUL = (
    "the server has forgotten a change of the adapters that this client has read of, as after a failover, and no "
    "worker has written it down again: make the change once more (`lmpool adapters add` or `remove`)"
)


class Adapters:
    """Knows the revisions of the adapters of one session's model.

    A state of the registry may be used for `KNOWN_FOR_S`, counted from before it was read: who replaces an adapter
    waits for as long, so that afterwards nobody asks for the old one, nor takes its rows from a cache. A state that
    lacks a change which was read before is not believed: workers that know of the change write it down again.

    Args:
        connections: the connections.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._known = Registered("", {}, {})
        self._as_of = _NEVER
        self._doubted: tuple[Generation, float] | None = None
        self._used = _NEVER
        self._reading = asyncio.Lock()

    @property
    def registry(self) -> AdapterRegistry:
        """The registry of the model as it is now."""
        connections = self._connections
        return AdapterRegistry(connections.redis, connections.model.keys, connections.model.fingerprint)

    def own_connection(self) -> CommandConnection:
        """A connection for commands that keep one busy; its user closes it."""
        return self._connections.own_connection()

    async def qualified(self, name: object, deadline: Deadline) -> str:
        """What a job calls an adapter: "name@revision".

        Raises:
            UnknownAdapter: the model has no adapter of that name.
            DeadlineExceeded, ServerError: the server does not tell in time.
            ProducerClosed: the producer was closed meanwhile.
        """
        loop = self._loop
        self._used = loop.time()
        if self._is_fresh and isinstance(name, str) and (adapter := self._known.adapters.get(name)) is not None:
            return qualify(name, adapter.revision)
        await self._read_since(loop.time(), deadline)
        if isinstance(name, str) and (adapter := self._known.adapters.get(name)) is not None:
            return qualify(name, adapter.revision)
        served = ", ".join(self._known.adapters) or "none"
        raise UnknownAdapter(
            f"the model {self._connections.model.info.name!r} has no adapter {shown(name)}; it has: {served}"
        )

    async def all(self, deadline: Deadline) -> dict[str, str]:
        """All adapters in service now: name -> revision.

        Raises:
            DeadlineExceeded, ServerError: the server does not tell in time.
        """
        await self._read_since(self._loop.time(), deadline)
        return {name: adapter.revision for name, adapter in self._known.adapters.items()}

    def changed(self, made: Registered) -> None:
        """Take over the registry as a change of this client has made it."""
        self._known, self._as_of = made, _NEVER

    def doubt(self) -> None:
        """Read again before the next use: what is known has turned out to be old."""
        self._as_of = _NEVER

    async def renew(self) -> None:
        """Read again if that is likely to spare a request the time.

        Raises:
            ServerError: the server cannot be used.
        """
        if self._loop.time() - self._used < _IN_USE_S and not self._reading.locked():
            async with self._reading:
                await self._read()

    @property
    def _is_fresh(self) -> bool:
        return (
            self._loop.time() - self._as_of < KNOWN_FOR_S and self._known.owner == self._connections.model.fingerprint
        )

    async def _read_since(self, begin: float, deadline: Deadline) -> None:
        """Read a state that the server has told since `begin`; tries until the deadline."""
        deadline = deadline.bounded()
        error: BaseException | None = None
        doubt = ""
        try:
            async with deadline.limit(), self._reading:
                for wait in delays():
                    self._connections.check_open()
                    if self._as_of >= begin and self._is_fresh:
                        return
                    try:
                        doubt = await self._read()
                        if not doubt:
                            return
                        error = None
                    except TROUBLE as trouble:
                        error = trouble
                        self._connections.note(trouble)
                    await asyncio.sleep(wait)
        except DeadlineExceeded:
            raise
        except TimeoutError as late:
            if error is None and doubt == _FORGETFUL:
                raise ServerError(f"within {deadline.seconds:g} s: {doubt}") from late
            # Who waited for another to read has seen no error.
            if (why := error or self._connections.trouble) is not None:
                raise copy_error(self._connections.explain(why)) from late
            info = self._connections.model.info
            raise NoWorker(
                f"within {deadline.seconds:g} s no worker has said which adapters {info.name!r} has: "
                f"is one running? start it with `{info.start_command}`"
            ) from late

    async def _read(self) -> str:
        """Read once; returns why what the server has is not to be used, "" when it is."""
        begin = self._loop.time()
        fingerprint = self._connections.model.fingerprint
        registered = await self.registry.read()
        if registered.owner != fingerprint:
            return _LOST
        if not self._is_credible(registered, begin):
            return _FORGETFUL
        self._known, self._as_of, self._doubted = registered, begin, None
        return ""

    def _is_credible(self, registered: Registered, now: float) -> bool:
        """Whether nothing is missing that this client has read of, or nobody else knows of it any more.

        Where workers have started anew or somebody has made a change since, and no worker has written down for a lease
        what is missing, the change is gone. A state that is merely older is never believed.
        """
        known = self._known
        if known.owner != registered.owner or known.generation.is_of_a_start or not registered.forgets(known):
            return True
        if self._doubted is None or self._doubted[0] != registered.generation:
            self._doubted = registered.generation, now
        if registered.generation < known.generation and not registered.generation.is_of_a_start:
            return False
        return now - self._doubted[1] > self._connections.model.info.lease_s

"""Look up, add and remove the adapters of a client's model; an adapter's revision is a digest of its weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lmpool import errors
from lmpool.aio import delays
from lmpool.broker.registries import KNOWN_FOR_S, AdapterRegistry
from lmpool.producer.client.discovery import Connections
from lmpool.producer.client.requests import Deadline
from lmpool.protocol import adapter as wire
from lmpool.settings import shown

T = TypeVar("T")

_ADVICE = "changing adapters is a right of its own: name the server as the user `adapters` (docker/redis/users.acl)"

_NEVER = float("-inf")
_IN_USE_S = 60.0  # Seconds for which the session keeps reading the registry after the last request with an adapter.
_CHECK_MARGIN_S = 60.0  # Seconds added to the lifetime of a new adapter's check, because the check's job may run late.
_MAX_SHOWN = 20  # Max adapter names that an error text lists.


class Adapters:
    """Looks up the adapters of one session's model by name; adds, replaces and removes adapters.

    A client may use an entry for `KNOWN_FOR_S` seconds from the start of the read. A call that replaces an entry
    ends only after this time, when no client requests the old weights or reads rows of these from a cache any more.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        # Name -> adapter (None: it was removed), and version of the registry when the entry was read.
        self._known: dict[str, tuple[wire.Adapter | None, int]] = {}
        self._owner = ""
        self._version = 0  # Version of the registry at the last read; entries read at another version are stale.
        self._as_of = _NEVER  # Loop time of the last read of the registry.
        self._used = _NEVER  # Loop time of the last request with an adapter.
        self._reading = asyncio.Lock()

    @property
    def _registry(self) -> AdapterRegistry:
        connections = self._connections
        return AdapterRegistry(connections.redis, connections.model.keys, connections.model.lineage)

    async def qualified(self, name: object, deadline: Deadline) -> str:
        """Return an adapter's name in jobs, "name@revision"; UnknownAdapter if the model has no adapter `name`."""
        self._used = self._loop.time()
        if not isinstance(name, str):
            raise await self._unknown(name, deadline)
        while (adapter := self._fresh(name)) is None:
            if not wire.is_qualified(wire.qualify(name, "0")):
                raise await self._unknown(name, deadline)  # A malformed name has no registry entry.
            if (registered := await self._read([name], deadline)) is not None:
                # Use the entry even if it expired while the event loop was busy: another read would expire too.
                if (adapter := registered.adapters.get(name)) is None:
                    raise await self._unknown(name, deadline)
                break
        return wire.qualify(name, adapter.revision)

    def _fresh(self, name: str) -> wire.Adapter | None:
        """Return the cached entry of a name, or None if the entry is missing or too old."""
        adapter, version = self._known.get(name, (None, 0))
        is_old = version != self._version or self._loop.time() - self._as_of >= KNOWN_FOR_S
        return None if is_old or self._owner != self._connections.model.lineage else adapter

    async def _unknown(self, name: object, deadline: Deadline) -> errors.UnknownAdapter:
        names = list(await self.all(deadline))
        served = ", ".join(names[:_MAX_SHOWN]) or "none"
        if len(names) > _MAX_SHOWN:
            served += f" and {len(names) - _MAX_SHOWN} more"
        model = self._connections.model.info.name
        return errors.UnknownAdapter(f"the model {model!r} has no adapter {shown(name)}; it has: {served}")

    async def all(self, deadline: Deadline) -> dict[str, str]:
        """Return the adapters that requests may name now: name -> revision."""
        registered = await self._read([], deadline)
        assert registered is not None
        return {name: adapter.revision for name, adapter in registered.adapters.items()}

    async def add(
        self, name: str, source: str | Path, check: Callable[[str], Awaitable[object]], deadline: Deadline
    ) -> str:
        """Have one worker load an adapter as a check, then add the adapter to the registry; see `Producer.add_adapter`.

        `check` is called with the adapter's name in jobs, and requests a row with this adapter.
        """
        name, source = wire.check_adapter_name("name", name), _resolved(source)
        nonce = secrets.token_hex(8)
        lifetime_s = deadline.left + _CHECK_MARGIN_S
        for wait in delays():
            begin = partial(self._registry.begin_check, nonce, source, lifetime_s)
            await self._connections.insist(begin, deadline, _ADVICE)
            try:
                await check(wire.qualify(name, wire.CHECK_PREFIX + nonce))
                break
            except errors.AdapterChanged:  # Try again: the server lost the check, or the worker evicted the adapter.
                await asyncio.sleep(wait)
        adapter = await self._connections.insist(lambda: self._registry.read_check(nonce), deadline, _ADVICE)
        if adapter is None or not adapter.revision:
            raise errors.ServerError(f"the server has lost the revision of the adapter {name!r}: add it again")
        await self._change(name, adapter, f"{name!r} is in service", deadline)
        return adapter.revision

    async def remove(self, name: str, deadline: Deadline) -> None:
        """Remove an adapter from the registry; see `Producer.remove_adapter`."""
        wire.check_adapter_name("name", name)
        await self._change(name, None, f"{name!r} is not in service any more", deadline)

    async def _change(self, name: str, adapter: wire.Adapter | None, state: str, deadline: Deadline) -> None:
        """Write an entry to the registry, and wait until no client may use the replaced entry any more."""
        version, wait_s = await self._connections.insist(lambda: self._registry.put(name, adapter), deadline, _ADVICE)
        if not version:  # The registry had no entry to remove.
            raise await self._unknown(name, deadline)
        self._belong_to(self._connections.model.lineage)
        self._known[name] = adapter, version
        self.doubt()
        try:
            async with deadline.limit():
                await asyncio.sleep(wait_s)
        except errors.DeadlineExceeded as error:
            text = f"{state}, but within {deadline.seconds:g} s other clients may still use the previous adapter"
            raise errors.DeadlineExceeded(f"{text}, for {wait_s:.1f} s: allow more time (timeout=)") from error

    def doubt(self) -> None:
        """Read the registry again before the next use of an adapter, because a cached entry was out of date."""
        self._as_of = _NEVER

    async def renew(self) -> None:
        """Read the registry's version while adapters are in use; an unchanged version keeps cached entries usable."""
        begin = self._loop.time()
        if begin - self._used < _IN_USE_S and await self._registry.version() == self._version:
            self._as_of = max(self._as_of, begin)

    async def _read(self, names: Sequence[str], deadline: Deadline) -> wire.Registered | None:
        """Read and cache the entries of `names`, or all entries; None if another request has just read the entries.

        Raises ServerError if an entry is older than at the previous read, which can happen after a failover.
        """

        async def attempt() -> tuple[wire.Registered, str, float] | None:
            async with self._reading:
                if names and all(map(self._fresh, names)):
                    return None
                registry, begin = self._registry, self._loop.time()
                return await registry.read(*names), registry.fingerprint, begin

        read = await self._connections.insist(attempt, deadline)
        if read is None:
            return None
        registered, owner, begin = read
        self._belong_to(owner)
        for name in names or {*registered.adapters, *self._known}:
            known, adapter = self._known.get(name), registered.adapters.get(name)
            version = registered.versions.get(name, registered.version)
            if known is not None and known[0] != adapter and version <= known[1]:
                text = f"the server has lost a change of the adapter {name!r} that this client has read"
                raise errors.ServerError(f"{text}, as after a failover: make the change once more (`lmpool adapters`)")
            if known is not None or adapter is not None:
                self._known[name] = adapter, registered.version
        self._version, self._as_of = registered.version, begin
        return registered

    def _belong_to(self, owner: str) -> None:
        """Discard the cached entries if these entries belong to another model than `owner`."""
        if owner != self._owner:
            self._known.clear()
            self._owner = owner


def _resolved(source: str | Path) -> str:
    """Return a local folder's full path, because workers run in other folders; other sources stay unchanged."""
    text = wire.check_source("source", str(source) if isinstance(source, Path) else source)
    try:
        place = Path(text).expanduser()
        return wire.check_source("source", str(place.resolve())) if place.exists() else text
    except (OSError, RuntimeError, ValueError):  # The text is too long for a path, or begins with an unknown ~user.
        return text

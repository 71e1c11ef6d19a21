"""Adapters: their names, and which of them a model's workers are to serve.

People name an adapter; a job names the very weights, as "name@revision". So rows of different weights never have one
digest, and what is cached for those that were replaced is never asked for again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgpack
from redis.asyncio import Redis

from lmpool import scripts
from lmpool.checks import shown
from lmpool.errors import ProtocolError, SettingsError
from lmpool.hashes import read_hashes
from lmpool.keys import ModelKeys
from lmpool.messages import unpack_flat

MAX_ADAPTERS = 64
"""Adapters that one model may have."""

KNOWN_FOR_S = 2.0
"""For so long a client may use what it has read of a model's adapters; who replaces one waits for as long."""

# "@" divides name and revision, "=" name and folder; control characters and lone surrogates cannot be shown or sent.
_NAME = re.compile(r"[^@,=\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,100}")
_REVISION = re.compile(r"[0-9A-Za-z._-]{1,64}")
_VERSION = 1
_MOST_SOURCE = 4096
_MOST_BYTES = 16 * 1024


def check_adapter_name(field: str, name: object) -> str:
    """The name, if an adapter can have it.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name != name.strip():
        raise SettingsError(
            f"{field}: {shown(name)} must be 1 to 100 characters without @, comma, = and control characters, and "
            "without spaces at its ends"
        )
    return name


def check_source(field: str, source: object) -> str:
    """A folder or hub name, if it can be one.

    Raises:
        SettingsError: with the field's name.
    """
    if not isinstance(source, str) or not source.strip() or len(source.encode("utf-8", "replace")) > _MOST_SOURCE:
        raise SettingsError(f"{field}: {shown(source)} is no folder or hub name of at most {_MOST_SOURCE} bytes")
    if not source.isprintable():
        raise SettingsError(f"{field}: {shown(source)} has characters that cannot be sent or shown")
    return source


def qualify(name: str, revision: str) -> str:
    """What a job calls an adapter: its name and the digest of its weights."""
    return f"{name}@{revision}"


def name_of(qualified: str) -> str:
    """The name that people use."""
    return qualified.rpartition("@")[0]


def revision_of(qualified: str) -> str:
    """The digest of its weights."""
    return qualified.rpartition("@")[2]


def is_qualified(text: str) -> bool:
    """Whether a job may call an adapter so."""
    name, _, revision = text.rpartition("@")
    return bool(_NAME.fullmatch(name) and _REVISION.fullmatch(revision))


class Adapter(NamedTuple):
    """An adapter in service.

    Attributes:
        source: folder or hub name, on the workers' machines.
        revision: digest of its weights.
    """

    source: str
    revision: str

    def pack(self) -> bytes:
        """The adapter as MessagePack."""
        return cast(bytes, msgpack.packb((_VERSION, *self)))


class Offer(NamedTuple):
    """An adapter that the workers are asked to load.

    Attributes:
        source: as `Adapter.source`.
        nonce: names this request.
        revision: digest of its weights, from the first worker that has loaded it; "" before.
    """

    source: str
    nonce: str
    revision: str = ""

    def pack(self) -> bytes:
        """The offer as MessagePack."""
        return cast(bytes, msgpack.packb((_VERSION, *self)))


class Registered(NamedTuple):
    """What the server knows.

    Attributes:
        owner: fingerprint of the model that the adapters are for; "" when the server has lost them.
        adapters: those in service, by name.
        offers: those that the workers are asked to load, by name.
    """

    owner: str
    adapters: dict[str, Adapter]
    offers: dict[str, Offer]


class AdapterRegistry:
    """Reads and changes which adapters a model has.

    Args:
        redis: a client for control messages.
        keys: the model's keys.
        fingerprint: the model's fingerprint.
    """

    def __init__(self, redis: Redis, keys: ModelKeys, fingerprint: str) -> None:
        self._redis = redis
        self._model = keys
        self._keys = [keys.adapters, keys.offers]
        self.fingerprint = fingerprint

    async def read(self) -> Registered:
        """What the server knows now.

        Raises:
            ProtocolError: more than there can be, or something that is none.
        """
        # Workers that start at once may register some too many.
        most = 2 * MAX_ADAPTERS
        try:
            served, offered = await read_hashes(self._redis, self._keys, most_bytes=_MOST_BYTES, most_fields=most)
        except ProtocolError as error:
            text = f"the adapters of this model cannot be read: {error} (there can be {MAX_ADAPTERS} adapters)"
            raise ProtocolError(text) from error
        found = served.pop(b"", b"")
        owner = found.decode("ascii", "replace") if isinstance(found, bytes) else "?"
        adapters = {name: Adapter(*fields) for name, fields in _decode(served, 2)}
        return Registered(owner, adapters, {name: Offer(*fields) for name, fields in _decode(offered, 3)})

    async def offer(self, name: str, offer: Offer, lifetime_s: float) -> bool:
        """Ask the workers to load an adapter; False when the server has lost the model's adapters.

        Raises:
            SettingsError: the model has as many as it may have.
        """
        args = [self.fingerprint, name, offer.pack(), int(lifetime_s * 1000), MAX_ADAPTERS]
        outcome = await scripts.OFFER(self._redis, self._keys, args)
        if outcome == 0:
            raise SettingsError(
                f"adapters: {name!r} is one too many: a model may have {MAX_ADAPTERS}; remove others first"
            )
        return bool(outcome == 1)

    async def fill(self, name: str, offer: Offer, revision: str) -> None:
        """Say which revision an offered adapter has, unless somebody has said so or it is offered no more."""
        filled = offer._replace(revision=revision)
        await scripts.SWAP(self._redis, self._keys[1:], [name, offer.pack(), filled.pack()])

    async def adopt(self, name: str, offer: Offer, known_for_s: float) -> bool:
        """Put an offered adapter in service; False when it is offered no more.

        Args:
            name: of the adapter.
            offer: with its revision.
            known_for_s: for so long clients may still use another one that had the name; see `known_for`.
        """
        adapter = Adapter(offer.source, offer.revision).pack()
        args = [self.fingerprint, name, offer.pack(), adapter, int(known_for_s * 1000)]
        return bool(await scripts.ADOPT(self._redis, [*self._keys, self._model.replaced(name)], args))

    async def known_for(self, name: str) -> float:
        """For how many seconds from now clients may still use another adapter of this name than what is in service.

        Whoever has changed it: the one that did may have given up since, or may wait still.
        """
        left: int = await self._redis.pttl(self._model.replaced(name))
        return max(0, left) / 1000

    async def loading(self, nonce: str) -> set[str]:
        """The workers that have begun to load an offer and have not told how that ended."""
        (found,) = await read_hashes(self._redis, [self._model.trying(nonce)], most_bytes=_MOST_BYTES)
        return {worker.decode("utf-8", "replace") for worker in found}

    async def withdraw(self, name: str, nonce: str) -> None:
        """Take an offer back, if it is still this one."""
        while (offer := (await self.read()).offers.get(name)) is not None and offer.nonce == nonce:
            if await scripts.SWAP(self._redis, self._keys[1:], [name, offer.pack(), b""]):
                return

    async def register(self, name: str, adapter: Adapter) -> bool:
        """Put an adapter in service whose name is free; False when it is not, or no longer."""
        return bool(await scripts.SWAP(self._redis, self._keys[:1], [name, b"", adapter.pack()]))

    async def remove(self, name: str, known_for_s: float) -> bool:
        """Take an adapter out of service, and offers of that name back; False when there was none in service.

        Args:
            name: of the adapter.
            known_for_s: for so long clients may still use it; see `known_for`.
        """
        keys = [*self._keys, self._model.replaced(name)]
        return bool(await scripts.REMOVE(self._redis, keys, [name, int(known_for_s * 1000)]))

    async def restore(self, adapters: Mapping[str, Adapter], *, instead_of: str = "") -> None:
        """Write down all adapters, if the server has lost them, or has those of the model with another fingerprint."""
        args: list[str | bytes] = [self.fingerprint, instead_of]
        for name, adapter in adapters.items():
            args += (name, adapter.pack())
        await scripts.RESTORE(self._redis, self._keys, args)


def _decode(found: dict[bytes, bytes | int], fields: int) -> list[tuple[str, list[str]]]:
    decoded = []
    for key, data in found.items():
        name = key.decode("utf-8", "replace")
        if isinstance(data, int):
            raise ProtocolError(f"what the server has as the adapter {shown(name)} is none: it has {data} bytes")
        values: Any = unpack_flat(data, _MOST_BYTES, "registered adapter")
        is_right = isinstance(values, list) and len(values) == 1 + fields and values[0] == _VERSION
        if not is_right or not all(isinstance(value, str) for value in values[1:]) or not _NAME.fullmatch(name):
            raise ProtocolError(f"what the server has as the adapter {shown(name)} is none: {shown(values, 80)}")
        decoded.append((name, values[1:]))
    return decoded

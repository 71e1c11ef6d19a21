"""The registries of a pool: vocabularies, tokenizers, sets of tokens; the adapters and the versions of each model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.broker.scripts import read_hash
from lmpool.errors import ProtocolError, SettingsError, UnknownTokenizer, UnknownTokenSet, UnknownVocabulary
from lmpool.protocol import adapter as adapters
from lmpool.protocol.adapter import Adapter, Registered
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.token_set import TokenSet, tokens_of_bits
from lmpool.protocol.tokenizer import MAX_PACKED_BYTES, PackedTokenizer, unpack_tokenizer
from lmpool.protocol.version import CHUNK_BYTES, MAX_ENTRIES, PublishedVersions, Version, unpack_version
from lmpool.vocabulary import Vocabulary

MAX_BYTES = 64 * 1024 * 1024  # Max bytes of a packed vocabulary; the limits of vocabularies allow no larger one.
# Seconds for which a client may use a cached entry of the adapter registry; a change waits as long before it returns.
KNOWN_FOR_S = 2.0
MARGIN_S = 0.5  # Additional seconds that a change of an adapter waits, because clocks run at different rates.
_ENTRY_FIELD = b"v"  # The only field of an entry of the registry of versions.
_REGISTRY_TTL_MS = 7 * 24 * 3_600_000  # Lifetime of the registry of versions without workers, as of their queue.
_UNUSED_TTL_MS = 3_600_000  # Lifetime of the stored parts of weights until a worker reads them.
_OWNER_FIELD = "owner"  # Field of the hash `version_states` with the lineage of the model.
_TENSORS_FIELD = "tensors"  # Field of the same hash with the types of the model's tensors.
_MAX_TENSORS_BYTES = 8 * 1024 * 1024  # Max bytes of these types: enough for 100,000 tensors.
_TTL_MS = 24 * 3_600_000  # Lifetime of vocabularies, tokenizers and token sets; workers and clients renew it.


async def register(redis: Redis, keys: Keys, value: Vocabulary | PackedTokenizer, *, anew: bool = False) -> None:
    """Store a vocabulary or a tokenizer for a day; without `anew`, not if the pool has a value of this size."""
    key = (keys.vocabulary if isinstance(value, Vocabulary) else keys.tokenizer)(value.digest)
    is_kept = False
    with suppress(ResponseError):  # The key holds another type than a string.
        size = value.nbytes if isinstance(value, Vocabulary) else len(value.data)
        is_kept = not anew and bool(await redis.pexpire(key, _TTL_MS)) and await redis.strlen(key) == size
    if not is_kept:
        await redis.set(key, value.pack() if isinstance(value, Vocabulary) else value.data, px=_TTL_MS)


async def look_up(redis: Redis, keys: Keys, digest: str) -> Vocabulary:
    """Read a vocabulary, or raise UnknownVocabulary."""
    return unpack_known(await _read(redis, keys.vocabulary(digest), MAX_BYTES), digest)


async def _read(redis: Redis, key: bytes, size: int) -> bytes:
    """Up to `size` bytes of a value; b"" if the key does not exist or holds another type of value."""
    try:
        data = await redis.getrange(key, 0, size - 1)  # GET would read a value of any size.
        return data if isinstance(data, bytes) else b""
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        return b""


def unpack_known(data: bytes, digest: str) -> Vocabulary:
    """Unpack the bytes that the pool has as the vocabulary of a digest (b"" for none), or raise UnknownVocabulary."""
    try:
        vocabulary = Vocabulary.unpack(data)
        if vocabulary.digest != digest:
            raise ProtocolError(f"its value is another: {vocabulary.digest}")
    except ProtocolError as error:
        why = f" ({error})" if data else ""
        text = f"the pool does not know the vocabulary {digest}{why}"
        raise UnknownVocabulary(f"{text}: register it with producer.trie, or request it again later") from error
    return vocabulary


async def look_up_tokenizer(redis: Redis, keys: Keys, digest: str) -> str:
    """Read the `tokenizer.json` of a digest, or raise UnknownTokenizer."""
    data = await _read(redis, keys.tokenizer(digest), MAX_PACKED_BYTES + 1)
    try:
        if not data:
            raise ProtocolError("there is nothing: ask again in a moment, its workers write it down again")
        # Unpack in a thread: unpacking up to 96 MiB would block the event loop.
        return await asyncio.to_thread(unpack_tokenizer, data, digest)
    except ProtocolError as error:
        raise UnknownTokenizer(f"what the pool has as the tokenizer {digest} is none: {error}") from error


async def register_tokens(redis: Redis, keys: Keys, tokens: TokenSet) -> None:
    """Store a set of tokens under its name, a digest, for a day."""
    await redis.set(keys.token_set(tokens.name), tokens.bits, px=_TTL_MS)


async def look_up_tokens(redis: Redis, keys: Keys, name: bytes, vocab_size: int) -> TokenSet:
    """Read the set of tokens with this name, or raise UnknownTokenSet."""
    try:
        return tokens_of_bits(await _read(redis, keys.token_set(name), vocab_size // 8 + 2), vocab_size, name)
    except ProtocolError as error:
        text = f"the pool does not know the set of tokens {name.hex()}"
        raise UnknownTokenSet(f"{text}: register it with producer.token_set") from error


class AdapterRegistry:
    """Reads and changes the adapters of a model, through a client for control messages."""

    def __init__(self, redis: Redis, keys: ModelKeys, fingerprint: str) -> None:
        self.redis = redis
        self.keys = keys
        self.fingerprint = fingerprint

    async def read(self, *names: str) -> Registered:
        """Read the entries of the named adapters, or of all adapters if no name is given."""
        fields = [adapters.OWNER_FIELD, adapters.VERSION_FIELD, *names] if names else []
        limits = {"most_bytes": adapters.MAX_ADAPTER_BYTES, "most_fields": adapters.MAX_ADAPTERS + 2}
        try:
            values = await read_hash(self.redis, self.keys.adapters, fields=fields, **limits)
            return adapters.unpack_registered(values, self.fingerprint)
        except ProtocolError as error:
            raise ProtocolError(f"the adapters of this model cannot be read: {error}") from error

    async def version(self) -> int:
        """Read the version of the registry; 0 for an empty registry."""
        return (await self.read(adapters.VERSION_FIELD)).version

    async def put(self, name: str, adapter: Adapter | None, *, is_new: bool = False) -> tuple[int, float]:
        """Write the entry of an adapter (with `is_new`, only if the name has none); an `adapter` of None removes it.

        Returns:
            the version of the entry (0 if there was no entry to remove), and for how many seconds clients may still use
            another adapter of this name.
        """
        packed = adapter.pack() if adapter else b""
        args = [self.fingerprint, name, packed, adapters.MAX_ADAPTERS, "new" * is_new]
        version, age_ms = await scripts.CHANGE_ADAPTER(self.redis, [self.keys.adapters], args)
        if version < 0:
            limit = f"a model may have {adapters.MAX_ADAPTERS}; remove others"
            raise SettingsError(f"adapters: {name!r} is one too many: {limit}")
        return version, 0.0 if age_ms < 0 else max(0.0, KNOWN_FOR_S + MARGIN_S - age_ms / 1000)

    async def begin_check(self, nonce: str, source: str, lifetime_s: float) -> None:
        """Let workers load an adapter from `source` for jobs that name the adapter by `nonce`."""
        await self.redis.set(self.keys.adapter_check(nonce), Adapter(source).pack(), px=int(lifetime_s * 1000))

    async def end_check(self, nonce: str, adapter: Adapter) -> None:
        """Report the adapter that a worker has loaded, unless the check has expired."""
        await self.redis.set(self.keys.adapter_check(nonce), adapter.pack(), xx=True, keepttl=True)

    async def read_check(self, nonce: str) -> Adapter | None:
        """Read the adapter of a check; it has a revision once a worker has loaded it. None if the check has expired."""
        data = await _read(self.redis, self.keys.adapter_check(nonce), adapters.MAX_ADAPTER_BYTES + 1)
        return adapters.unpack_adapter(data, "the adapter to check") if data else None


class VersionRegistry:
    """Reads and changes the versions of a model's weights (`lmpool.protocol.version`).

    Args:
        redis: a client for control messages.
        keys: the keys of partition 0 of version 0.
    """

    def __init__(self, redis: Redis, keys: ModelKeys) -> None:
        self.redis = redis
        self.keys = keys

    async def read(self) -> PublishedVersions:
        """Read all versions and their states."""
        newest = cast(Any, await self.redis.xrevrange(self.keys.versions, count=MAX_ENTRIES))
        versions: list[Version] = []
        for entry, fields in reversed(newest):
            with suppress(ProtocolError):  # A newer release, or another client, has written the entry.
                versions.append(unpack_version(entry, fields.get(_ENTRY_FIELD, b"")))
        numbers = [str(version.number) for version in versions]
        states = await self._fields(_OWNER_FIELD, *numbers)
        texts = {int(number): states[number].decode("utf-8", "replace") for number in numbers if number in states}
        last = newest[0][0].decode() if newest else "0-0"
        return PublishedVersions(tuple(versions), texts, last, _OWNER_FIELD in states)

    async def tensors(self) -> bytes:
        """Read the packed types of the model's tensors (`lmpool.protocol.tensors`); b"" before a worker wrote them."""
        return (await self._fields(_TENSORS_FIELD)).get(_TENSORS_FIELD, b"")

    async def _fields(self, *names: str) -> dict[str, bytes]:
        found = await read_hash(self.redis, self.keys.version_states, most_bytes=_MAX_TENSORS_BYTES, fields=names)
        return {name.decode("utf-8", "replace"): value for name, value in found.items() if isinstance(value, bytes)}

    async def add(self, version: Version) -> bool:
        """Add a version; False if the registry has a version with this number or a larger one."""
        is_added = True
        try:
            await self.redis.xadd(self.keys.versions, {_ENTRY_FIELD: version.pack()}, id=version.entry)
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            is_added = False
        await self._limit(self.keys.versions)  # An earlier call may have lost the connection after it added the entry.
        return is_added

    async def wait(self, reader: Redis, after: str, block_ms: int) -> None:
        """Wait with the client `reader` until the registry has a later entry than `after`, or for `block_ms`."""
        await reader.xread({self.keys.versions: after}, count=1, block=block_ms)

    async def decide(self, number: int, state: str) -> str:
        """Set the state of a version unless it has one; returns the state that it has now."""
        await self.redis.hsetnx(self.keys.version_states, str(number), state)
        await self._limit(self.keys.version_states)
        return (await self._fields(str(number))).get(str(number), state.encode()).decode("utf-8", "replace")

    async def claim(self, lineage: str, tensors: bytes) -> bool:
        """Write the types of a model's tensors; False if the registry belongs to another `ModelInfo.lineage`."""
        key = self.keys.version_states
        # A registry with an owner has types, also if this worker is killed between two commands.
        await self.redis.hsetnx(key, _TENSORS_FIELD, tensors)
        await self.redis.hsetnx(key, _OWNER_FIELD, lineage)
        if (await self._fields(_OWNER_FIELD)).get(_OWNER_FIELD) != lineage.encode():
            return False
        await self.redis.hset(key, _TENSORS_FIELD, tensors)
        await self.renew()
        return True

    async def renew(self, chain: Iterable[Version] = ()) -> list[Version]:
        """Keep the registry for a week, and the stored files of the versions in `chain`. Workers renew them.

        Returns the versions whose files lack a part.
        """
        for key in (self.keys.version_states, self.keys.versions):
            await self._limit(key)
        lost = []
        for version in chain:
            data = [self.keys.version_data(version.nonce, index) for index in range(version.parts)]
            if not all([await self.redis.pexpire(key, _REGISTRY_TTL_MS) for key in data]):
                lost.append(version)
        return lost

    async def clear(self) -> None:
        """Remove all versions, and the owner of the registry."""
        await self.forget((await self.read()).versions)
        await self.redis.unlink(self.keys.versions, self.keys.version_states)

    async def count_try(self, number: int) -> int:
        """Count a worker that begins to load a version that no worker has served; returns the count."""
        tries = int(await self.redis.hincrby(self.keys.version_states, f"{number}:tries", 1))
        await self._limit(self.keys.version_states)
        return tries

    async def _limit(self, key: bytes) -> None:
        """Let a key that a command may have created expire after a week, unless a worker renews it before."""
        await self.redis.pexpire(key, _REGISTRY_TTL_MS)

    async def take_turn(self, worker_id: str, slots: int, lease_ms: int) -> int | None:
        """Take one of the turns to change the version; returns the slot of the turn, or None if no turn is free."""
        for slot in range(slots):
            if await self.redis.set(self.keys.version_turn(slot), worker_id, nx=True, px=lease_ms):
                return slot
        return None

    async def renew_turn(self, slot: int, worker_id: str, lease_ms: int) -> bool:
        """Keep a turn for another lease, or take the turn again if it has expired.

        Returns False if another worker has the turn.
        """
        key = self.keys.version_turn(slot)
        if await self.redis.get(key) == worker_id.encode():
            return bool(await self.redis.pexpire(key, lease_ms))
        return bool(await self.redis.set(key, worker_id, nx=True, px=lease_ms))

    async def end_turn(self, slot: int, worker_id: str) -> None:
        """Give back a turn, unless it has expired and another worker has taken it."""
        key = self.keys.version_turn(slot)
        if await self.redis.get(key) == worker_id.encode():
            await self.redis.delete(key)

    async def store(self, nonce: str, index: int, data: memoryview) -> None:
        """Store one part of the file of a version, for an hour unless a worker keeps it (`load`)."""
        await self.redis.set(self.keys.version_data(nonce, index), bytes(data), px=_UNUSED_TTL_MS)

    async def load(self, version: Version, index: int) -> bytes:
        """Read one part of the file of a version, and keep it for as long as the registry; b"" if it is not stored."""
        key = self.keys.version_data(version.nonce, index)
        await self.redis.pexpire(key, _REGISTRY_TTL_MS)
        return await _read(self.redis, key, CHUNK_BYTES)

    async def forget(self, versions: Iterable[Version], *, keep_entries: bool = False) -> None:
        """Remove the stored files of versions that no worker needs any more, and their entries and states."""
        for version in versions:
            for index in range(version.parts):
                await self.redis.unlink(self.keys.version_data(version.nonce, index))
            if not keep_entries:
                await self.redis.xdel(self.keys.versions, version.entry)
                await self.redis.hdel(self.keys.version_states, str(version.number), f"{version.number}:tries")

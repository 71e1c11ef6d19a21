"""The registries of a pool: vocabularies, tokenizers and sets of tokens, and the adapters of each model."""

from __future__ import annotations

import asyncio
from contextlib import suppress

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
from lmpool.vocabulary import Vocabulary

MAX_BYTES = 64 * 1024 * 1024  # Max bytes of a packed vocabulary; the limits of vocabularies allow no larger one.
# Seconds for which a client may use a cached entry of the adapter registry; a change waits as long before it returns.
KNOWN_FOR_S = 2.0
MARGIN_S = 0.5  # Additional seconds that a change of an adapter waits, because clocks run at different rates.
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

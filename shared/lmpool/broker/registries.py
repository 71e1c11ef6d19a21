"""The registries of a pool: vocabularies and tokenizers, and the adapters of each model.

Adapters are changed over the very state that was read.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.broker import scripts
from lmpool.broker.connection import CommandConnection
from lmpool.broker.scripts import read_hashes
from lmpool.errors import ProtocolError, SettingsError, UnknownTokenizer, UnknownTokenSet, UnknownVocabulary
from lmpool.protocol.adapter import (
    GENERATION_FIELD,
    MAX_ADAPTER_BYTES,
    MAX_ADAPTERS,
    Adapter,
    Generation,
    Offer,
    Registered,
    decode_registered,
)
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.token_set import TokenSet, tokens_of_bits
from lmpool.protocol.tokenizer import MAX_PACKED_BYTES, PackedTokenizer, unpack_tokenizer
from lmpool.vocabulary import Vocabulary

MAX_BYTES = 64 * 1024 * 1024
"""Max bytes of a packed vocabulary; none is so large."""

KNOWN_FOR_S = 2.0
"""Seconds for which a client may use what it has read of a model's adapters; a change of one waits for as long."""

MARGIN_S = 0.5
"""Seconds that a change of an adapter waits beyond that, for rates of clocks differ."""

_TTL_MS = 24 * 3_600_000  # Lifetime of vocabularies, tokenizers and token sets; workers and clients renew it.


async def register(redis: Redis, keys: Keys, vocabulary: Vocabulary, *, anew: bool = False) -> None:
    """Store a vocabulary for a day, unless the pool has a value of its size. With `anew`, store it in any case."""
    key = keys.vocabulary(vocabulary.digest)
    if anew or not await _keep(redis, key, vocabulary.nbytes):
        await redis.set(key, vocabulary.pack(), px=_TTL_MS)


async def _keep(redis: Redis, key: bytes, size: int) -> bool:
    """Renew the lifetime of a value; False if the pool has none, or one of another size."""
    is_there = await redis.pexpire(key, _TTL_MS)
    try:
        return bool(is_there) and await redis.strlen(key) == size
    except ResponseError:
        return False  # The key holds no string.


async def look_up(redis: Redis, keys: Keys, digest: str) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        UnknownVocabulary: the pool does not have it, or has another value in its place.
    """
    # Not GET: the value may have any size.
    data = await redis.getrange(keys.vocabulary(digest), 0, MAX_BYTES - 1)
    return unpack_known(data if isinstance(data, bytes) else b"", digest)


def unpack_known(data: bytes, digest: str) -> Vocabulary:
    """Unpack the vocabulary of a digest as the pool has it; b"" if it has none.

    Raises:
        UnknownVocabulary: there is none, or it is damaged or another.
    """
    if not data:
        raise UnknownVocabulary(
            f"the pool does not know the vocabulary {digest}, or no longer: register it with producer.trie, or ask "
            "again in a moment"
        )
    try:
        vocabulary = Vocabulary.unpack(data)
    except ProtocolError as error:
        # As this error, so that a client that has the vocabulary stores it again.
        raise UnknownVocabulary(f"what the pool has as the vocabulary {digest} is none: {error}") from error
    if vocabulary.digest != digest:
        raise UnknownVocabulary(f"what the pool has as the vocabulary {digest} is another: {vocabulary.digest}")
    return vocabulary


async def register_tokenizer(redis: Redis, keys: Keys, tokenizer: PackedTokenizer) -> None:
    """Store a tokenizer for a day, unless the pool has a value of its size."""
    key = keys.tokenizer(tokenizer.digest)
    if not await _keep(redis, key, len(tokenizer.data)):
        await redis.set(key, tokenizer.data, px=_TTL_MS)


async def look_up_tokenizer(redis: Redis, keys: Keys, digest: str) -> str:
    """Read the `tokenizer.json` of a digest.

    Raises:
        UnknownTokenizer: the pool does not have it, or has another value in its place.
    """
    try:
        # Not GET: the value may have any size.
        data = await redis.getrange(keys.tokenizer(digest), 0, MAX_PACKED_BYTES)
        if not isinstance(data, bytes) or not data:
            raise ProtocolError("there is nothing: ask again in a moment, its workers write it down again")
        # In a thread: it may have 96 MiB.
        return await asyncio.to_thread(unpack_tokenizer, data, digest)
    except (ProtocolError, ResponseError) as error:
        if isinstance(error, ResponseError) and not str(error).startswith("WRONGTYPE"):
            raise
        raise UnknownTokenizer(f"what the pool has as the tokenizer {digest} is none: {error}") from error


async def register_tokens(redis: Redis, keys: Keys, tokens: TokenSet) -> None:
    """Store a set of tokens under its name for a day."""
    await redis.set(keys.token_set(tokens.name), tokens.bits, px=_TTL_MS)


async def look_up_tokens(redis: Redis, keys: Keys, name: bytes, vocab_size: int) -> TokenSet:
    """Read a set of tokens of a vocabulary.

    Raises:
        UnknownTokenSet: the pool does not have it, or has another value in its place.
    """
    try:
        data = await redis.getrange(keys.token_set(name), 0, vocab_size // 8 + 1)
        return tokens_of_bits(data if isinstance(data, bytes) else b"", vocab_size, name)
    except (ProtocolError, ResponseError) as error:
        if isinstance(error, ResponseError) and not str(error).startswith("WRONGTYPE"):
            raise
        raise UnknownTokenSet(
            f"the pool does not know the set of tokens {name.hex()}, or no longer: register it with producer.token_set"
        ) from error


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
        """The state of the registry that the server has now.

        Raises:
            ProtocolError: more than there can be, or something that is none.
        """
        # Workers that start at once may register some too many.
        most = 2 * MAX_ADAPTERS + 2
        try:
            served, offered = await read_hashes(self._redis, self._keys, most_bytes=MAX_ADAPTER_BYTES, most_fields=most)
        except ProtocolError as error:
            text = f"the adapters of this model cannot be read: {error} (there can be {MAX_ADAPTERS} adapters)"
            raise ProtocolError(text) from error
        owner, named = _text(served.pop(b"", b"")), _text(served.pop(GENERATION_FIELD.encode(), b""))
        generation, _, base = named.partition(" ")
        adapters, offers = dict(sorted(decode_registered(served, Adapter).items())), decode_registered(offered, Offer)
        return Registered(owner, adapters, offers, Generation.parse(generation), Generation.parse(base))

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
        filled = replace(offer, revision=revision)
        await scripts.SWAP(self._redis, self._keys[1:], [name, offer.pack(), filled.pack()])

    async def adopt(self, name: str, offer: Offer, seen: Registered, known_for_s: float) -> Generation | None:
        """Put an offered adapter in service; None when it is offered no more, or the registry is another than `seen`.

        Args:
            name: of the adapter.
            offer: with its revision.
            seen: what the registry was when all workers had loaded it.
            known_for_s: for so long clients may still use another one that had the name; see `known_for`.
        """
        adapter = Adapter(offer.source, offer.revision).pack()
        return await self._change(name, adapter, seen, offer=offer.pack(), known_for_s=known_for_s)

    async def remove(self, name: str, seen: Registered, known_for_s: float) -> Generation | None:
        """Take an adapter out of service, and offers of that name back; None when the registry is another than `seen`.

        Args:
            name: of an adapter in service.
            seen: what the registry was.
            known_for_s: for so long clients may still use it; see `known_for`.
        """
        return await self._change(name, b"", seen, known_for_s=known_for_s)

    async def register(self, name: str, adapter: Adapter, seen: Registered) -> bool:
        """Put an adapter in service whose name is free; False when the registry is another than `seen`."""
        return await self._change(name, adapter.pack(), seen, by_clock=False) is not None

    async def _change(
        self,
        name: str,
        adapter: bytes,
        seen: Registered,
        *,
        offer: bytes = b"",
        known_for_s: float = 0.0,
        by_clock: bool = True,
    ) -> Generation | None:
        keys = [*self._keys, self._model.replaced(name)]
        change, known_ms = secrets.token_hex(8), int(known_for_s * 1000)
        args = [self.fingerprint, str(seen.generation), name, offer, adapter, known_ms, change, "clock" * by_clock]
        made: bytes = await scripts.ADOPT(self._redis, keys, args)
        return Generation.parse(_text(made)) if made else None

    async def confirm(self, connection: CommandConnection, known: Registered, replicas: int, wait_s: float) -> int:
        """How many replicas have a state of the registry, or a later one; 0 when it is not what the server has.

        Args:
            connection: one of the caller's own: a server answers for what was written on the same one.
            known: what the server has.
            replicas: do not wait for more.
            wait_s: do not wait for longer.

        Raises:
            ServerError: the server refuses, or cannot be used.
        """
        raw = await connection.open()
        # The same once more.
        write = (b"EVAL", scripts.SWAP.source, 1, self._keys[0], GENERATION_FIELD, known.named, known.named)
        if not await connection.wait_for(raw, raw.call(write)):
            return 0
        return int(await connection.wait_for(raw, raw.call((b"WAIT", replicas, int(wait_s * 1000)))))

    async def known_for(self, name: str) -> float:
        """For how many seconds from now clients may still use another adapter of this name than what is in service.

        It does not matter which process has changed it: that one may have given up since, or may wait still. While a
        server had forgotten a change, clients may have read of what was before it, whatever the name.
        """
        left: int = await self._redis.pttl(self._model.replaced(""))
        return max(await self.replaced_for(name), left / 1000)

    async def replaced_for(self, name: str) -> float:
        """For how many seconds from now the last change of this name counts as just made."""
        left: int = await self._redis.pttl(self._model.replaced(name))
        return max(0, left) / 1000

    async def loading(self, nonce: str) -> set[str]:
        """The workers that have begun to load an offer and have not told how that ended."""
        (workers,) = await read_hashes(self._redis, [self._model.adapter_trials(nonce)], most_bytes=MAX_ADAPTER_BYTES)
        return {worker.decode("utf-8", "replace") for worker in workers}

    async def withdraw(self, name: str, nonce: str) -> None:
        """Take an offer back, if it is still this one."""
        while (offer := (await self.read()).offers.get(name)) is not None and offer.nonce == nonce:
            if await scripts.SWAP(self._redis, self._keys[1:], [name, offer.pack(), b""]):
                return

    async def create(self, adapters: Mapping[str, Adapter], instead_of: Registered) -> bool:
        """Make the registry of a model that has none; False when it has.

        Args:
            adapters: those in service.
            instead_of: what there was: nothing, or the adapters of other weights under the model's name.
        """
        made = Registered(self.fingerprint, dict(adapters), {}, Generation(0, secrets.token_hex(8)))
        return await self._put(made, instead_of, 0.0)

    async def write_back(self, seen: Registered, instead_of: Registered) -> bool:
        """Write down once more what a server has forgotten; False when somebody has changed what is there meanwhile.

        Args:
            seen: what is to be there.
            instead_of: what there is.
        """
        base = max(seen.generation, instead_of.generation if instead_of.owner == seen.owner else Generation())
        made = seen._replace(generation=Generation(base.number + 1, secrets.token_hex(8)), base=base)
        return await self._put(made, instead_of, KNOWN_FOR_S + MARGIN_S)

    async def _put(self, made: Registered, instead_of: Registered, known_for_s: float) -> bool:
        args: list[str | bytes | int] = [
            instead_of.owner,
            str(instead_of.generation),
            made.owner,
            made.named,
            int(known_for_s * 1000),
        ]
        for name, adapter in made.adapters.items():
            args += (name, adapter.pack())
        keys = [*self._keys, self._model.replaced("")]
        return bool(await scripts.RESTORE(self._redis, keys, args))


def _text(value: bytes | int) -> str:
    """A field of the registry itself; "?" for a value that is too large to be one."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else "?"

"""The vocabularies that a pool knows: packed under their digests, as long as somebody uses them."""

from __future__ import annotations

from redis.asyncio import Redis

from lmpool.errors import UnknownVocabulary
from lmpool.keys import Keys
from lmpool.vocab import Vocabulary

_TTL_MS = 24 * 3_600_000


async def register(redis: Redis, keys: Keys, vocabulary: Vocabulary) -> None:
    """Have the pool know a vocabulary for another day; it travels only when the pool has forgotten it."""
    key = keys.vocabulary(vocabulary.digest)
    pipe = redis.pipeline(transaction=False)
    pipe.pexpire(key, _TTL_MS)
    pipe.strlen(key)
    is_there, size = await pipe.execute(raise_on_error=False)
    # What is there may be something else, even no string.
    if is_there != 1 or size != vocabulary.nbytes:
        await redis.set(key, vocabulary.pack(), px=_TTL_MS)


async def look_up(redis: Redis, keys: Keys, digest: str) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        UnknownVocabulary: the pool does not know it.
        ProtocolError: what is there is no vocabulary.
    """
    data = await redis.get(keys.vocabulary(digest))
    if not isinstance(data, bytes):
        raise UnknownVocabulary(f"the pool does not know the vocabulary {digest}, or no longer: ask again in a moment")
    vocabulary = Vocabulary.unpack(data)
    if vocabulary.digest != digest:
        raise UnknownVocabulary(f"what the pool has as the vocabulary {digest} is another: {vocabulary.digest}")
    return vocabulary

"""The vocabularies that a pool knows: packed under their digests, as long as somebody uses them."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from lmpool.errors import ProtocolError, UnknownVocabulary
from lmpool.protocol.keys import Keys
from lmpool.vocabulary import Vocabulary

_TTL_MS = 24 * 3_600_000
MOST_BYTES = 64 * 1024 * 1024
"""More than any packed vocabulary takes."""


async def register(redis: Redis, keys: Keys, vocabulary: Vocabulary, *, anew: bool = False) -> None:
    """Have the pool know a vocabulary for another day.

    Args:
        redis: a client of the pool's server.
        keys: the deployment's key names.
        vocabulary: travels only when what the pool has is of another size, or nothing.
        anew: send it whatever the pool has, for one that was told that what is there is another.
    """
    key = keys.vocabulary(vocabulary.digest)
    if anew:
        await redis.set(key, vocabulary.pack(), px=_TTL_MS)
        return
    is_there = await redis.pexpire(key, _TTL_MS)
    try:
        size = await redis.strlen(key)
    except ResponseError:
        size = -1  # What is there may be something else, even no string.
    if not is_there or size != vocabulary.nbytes:
        await redis.set(key, vocabulary.pack(), px=_TTL_MS)


async def look_up(redis: Redis, keys: Keys, digest: str) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        UnknownVocabulary: the pool does not know it, or has something else in its place.
    """
    # Not GET: what is there may be of any size.
    data = await redis.getrange(keys.vocabulary(digest), 0, MOST_BYTES - 1)
    return unpack_known(data if isinstance(data, bytes) else b"", digest)


def unpack_known(data: bytes, digest: str) -> Vocabulary:
    """Read what the pool has as a vocabulary; b"" for nothing.

    Raises:
        UnknownVocabulary: it is nothing, no vocabulary, or another.
    """
    if not data:
        raise UnknownVocabulary(
            f"the pool does not know the vocabulary {digest}, or no longer: register it with producer.trie, or ask "
            "again in a moment"
        )
    try:
        vocabulary = Vocabulary.unpack(data)
    except ProtocolError as error:
        # Not as it is: who has the vocabulary puts it right when told that the pool has none.
        raise UnknownVocabulary(f"what the pool has as the vocabulary {digest} is none: {error}") from error
    if vocabulary.digest != digest:
        raise UnknownVocabulary(f"what the pool has as the vocabulary {digest} is another: {vocabulary.digest}")
    return vocabulary

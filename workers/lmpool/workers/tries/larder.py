"""Fetching what trie jobs name: vocabularies, weights, rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from redis.exceptions import ResponseError

from lmpool.asks import TrieAsk
from lmpool.errors import (
    CorruptRow,
    InvalidWeights,
    LMPoolError,
    ProtocolError,
    ServerError,
    SourceMissing,
    UnknownVocabulary,
)
from lmpool.keys import Keys
from lmpool.line import RowLine, RowLines, reply_timeout
from lmpool.messages import Failure
from lmpool.registry import MOST_BYTES, unpack_known
from lmpool.rowlink import Reply, RowLink
from lmpool.rows import Encoding, check_row, decode_row, encoded_size
from lmpool.server import Server
from lmpool.vocab import Vocabulary
from lmpool.weights import SECRET_SIZE, name_of
from lmpool.workers.figures import Figures
from lmpool.workers.settings import WorkerSettings
from lmpool.workers.tries.inputs import TrieInputs, Values
from lmpool.workers.tries.shelf import Shelved, TrieShelf, ValuesShelf

_MGET_BYTES = 8 * 1024 * 1024

_Source = tuple[str, bytes, int]
"""Fingerprint of the model or "", digest of the prompt or name of the weights, and how many numbers it must have."""


class Larder:
    """Brings what trie jobs need, and keeps what other jobs may need too.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        device: where kernels run.
        settings: say how much memory tries and computed values may take.
        figures: counts what is fetched.
    """

    def __init__(
        self, server: Server, keys: Keys, device: str, settings: WorkerSettings, figures: Figures | None = None
    ) -> None:
        self._server = server
        self._keys = keys
        self._device = device
        self._tries = TrieShelf(settings.trie_mb * 2**20)
        # A link for each size: what others have stored as a row or as weights is not to be as large as a vocabulary.
        self._lines = RowLines(server, 0, reply_timeout(settings.lease_s))
        self._vocabularies = RowLines(server, MOST_BYTES, reply_timeout(settings.lease_s))
        self._figures = figures or Figures()
        self._values = ValuesShelf(settings.trie_values_mb * 2**20)

    async def fill(
        self, asks: Mapping[bytes, TrieAsk], rows: Mapping[bytes, Values] | None = None, vocab_size: int | None = None
    ) -> tuple[dict[bytes, TrieInputs], dict[bytes, Failure]]:
        """Bring what jobs need.

        Args:
            asks: name of the answer -> ask.
            rows: digest of a prompt -> its row, of those that need not be fetched.
            vocab_size: V of the rows, when the asks are about rows of one model.

        Returns:
            name of the answer -> inputs, or the reason why it cannot be answered.

        Raises:
            ServerError: the server cannot be used.
        """
        known = rows or {}
        failures: dict[bytes, Failure] = {}
        inputs: dict[bytes, TrieInputs] = {}
        wanted: dict[bytes, _Source] = {}
        tries = await self._find_tries({ask.vocabulary for ask in asks.values()})
        for name, ask in asks.items():
            trie = tries[ask.vocabulary]
            if isinstance(trie, Shelved) and vocab_size not in (None, len(trie.vocabulary)):
                text = f"rows of V = {vocab_size} for a vocabulary of {len(trie.vocabulary)} tokens"
                failures[name] = _failure(InvalidWeights(text))
            elif isinstance(trie, LMPoolError):
                failures[name] = _failure(trie)
            else:
                values = self._values.get((ask.op, ask.rows, ask.source, ask.vocabulary)) if ask.rows else None
                inputs[name] = TrieInputs(ask, trie, known.get(ask.source), values)
                if values is None and ask.source not in known:
                    wanted[name] = ask.rows, ask.source, len(trie.vocabulary)
        found = await self._find_vectors(list(dict.fromkeys(wanted.values()))) if wanted else {}
        for name, source in wanted.items():
            vector = found[source]
            if isinstance(vector, LMPoolError):
                failures[name] = _failure(vector)
                del inputs[name]
            else:
                one = inputs[name]
                inputs[name] = TrieInputs(one.ask, one.trie, vector)
        return inputs, failures

    async def rows(
        self, fingerprint: str, prompts: Iterable[bytes], vocab_size: int
    ) -> dict[bytes, Values | LMPoolError]:
        """Rows of a model from the cache: digest of the prompt -> row, or why there is none.

        Raises:
            ServerError: the server cannot be used.
        """
        found = await self._find_vectors([(fingerprint, prompt, vocab_size) for prompt in prompts])
        return {prompt: row for (_, prompt, _), row in found.items()}

    async def _find_tries(self, digests: Iterable[str]) -> dict[str, Shelved | LMPoolError]:
        found: dict[str, Shelved | LMPoolError] = {}
        for digest in digests:
            trie = self._tries.get(digest)
            if trie is None:
                vocabulary = await self._fetch_vocabulary(digest)
                if isinstance(vocabulary, LMPoolError):
                    found[digest] = vocabulary
                    continue
                # Another fill may have brought it meanwhile.
                trie = self._tries.get(digest) or Shelved(vocabulary, self._device, self._values)
                self._tries.put(digest, trie)
            found[digest] = trie
        return found

    async def _fetch_vocabulary(self, digest: str) -> Vocabulary | LMPoolError:
        # Not GET: a value that is too large would end the connection.
        data = await self._get_range(self._vocabularies, self._keys.vocabulary(digest), MOST_BYTES)
        packed = bytes(data) if isinstance(data, (bytes, np.ndarray)) else b""
        try:
            # In a thread, for a large one takes long.
            return await asyncio.to_thread(unpack_known, packed, digest)
        except UnknownVocabulary as error:
            return error

    async def _find_vectors(self, names: Sequence[_Source]) -> dict[_Source, Values | LMPoolError]:
        """Weights and rows by name, or why they cannot be used."""
        found: dict[_Source, Values | LMPoolError] = {}
        longest = max(length for _, _, length in names)
        count = max(1, _MGET_BYTES // (4 * longest))
        self._lines.allow(_most_bytes(longest))
        for line, numbers in await self._lines.of([self._key(name) for name in names]):
            link = await line.open()
            parts = [[names[one] for one in numbers[at : at + count]] for at in range(0, len(numbers), count)]
            replies = [link.mget([self._key(name) for name in part]) for part in parts]
            for part, reply in zip(parts, replies, strict=True):
                for name, value in zip(part, await self._values_of(line, link, part, reply), strict=True):
                    self._figures.fetched_bytes += len(value) if isinstance(value, (bytes, np.ndarray)) else 0
                    found[name] = _read(value, name)
        return found

    async def _values_of(
        self, line: RowLine, link: RowLink, names: Sequence[_Source], reply: asyncio.Future[list[Reply]]
    ) -> Sequence[object]:
        try:
            values: Sequence[object] = await line.wait_for(link, reply)
        except (ServerError, ProtocolError):  # The latter is what a value over the limit ends the link with.
            return [await self._get_bounded(name) for name in names]
        for value in values:
            if isinstance(value, ResponseError) and line.check(link, value):
                raise self._server.explain(value)
        return values

    async def _get_bounded(self, name: _Source) -> object:
        """One vector by itself: a value that is too large ends the connection for the others too."""
        value = await self._get_range(self._lines, self._key(name), _most_bytes(name[2]))
        return value if isinstance(value, (bytes, np.ndarray)) and len(value) else None

    async def _get_range(self, lines: RowLines, key: bytes, most: int) -> object:
        """The first bytes of a value, or an error of the server as a value."""
        ((line, _),) = await lines.of([key])
        link = await line.open()
        (value,) = await line.wait_for(link, link.call((b"GETRANGE", key, 0, most - 1)))
        if isinstance(value, ResponseError) and line.check(link, value):
            raise self._server.explain(value)
        return value

    def _key(self, name: _Source) -> bytes:
        rows, source, _ = name
        return (self._keys.row(rows) if rows else self._keys.weights()) + source

    def close(self) -> None:
        """Close the connections."""
        self._lines.close()
        self._vocabularies.close()


def _most_bytes(length: int) -> int:
    """What a row or weights may take, and one byte more: what is too long must be told from what is right."""
    return SECRET_SIZE + encoded_size(length, Encoding.F32) + 1


def _read(value: object, name: _Source) -> Values | LMPoolError:
    what = f"the row of prompt {name[1].hex()}" if name[0] else f"the weights {name[1].hex()}"
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if not isinstance(value, np.ndarray):
        return SourceMissing(f"{what} is not in the cache" if name[0] else f"{what} are not in the cache")
    try:
        if name[0]:
            return check_row(decode_row(value, name[2]))
        if name_of(value[:SECRET_SIZE].tobytes()) != name[1]:
            return SourceMissing(f"{what} are not in the cache: somebody else has written there")
        return decode_row(value[SECRET_SIZE:], name[2])
    except ProtocolError as error:
        return CorruptRow(f"{what}: {error}")


def _failure(error: LMPoolError) -> Failure:
    return Failure(type(error).__name__, str(error))

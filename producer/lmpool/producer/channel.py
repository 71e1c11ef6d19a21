"""A producer's connections, and the names that it uses for one model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from redis.exceptions import RedisError

from lmpool.card import ModelCard
from lmpool.errors import CorruptRow, LMPoolError
from lmpool.keys import Keys, ModelKeys
from lmpool.line import CommandLine
from lmpool.producer.flights import FlightTable
from lmpool.producer.lobby import Lobby
from lmpool.rowcache import RedisRows, Row
from lmpool.server import Server

TROUBLE = (RedisError, OSError, LMPoolError)
"""What any use of the server may raise."""


class Channel:
    """Connections of one session.

    Args:
        server: the pool's Redis.
        keys: the deployment's key names.
        flights: take the rows that are fetched.

    Attributes:
        line: connection for the scripts on the path of a request.
        redis: client for what is off that path.
        reader: connection for the blocking reads of the reply stream, used by nothing else.
        lobby: what is served.
        card: the model.
        model: the model's keys.
        reply: this client's reply stream.
        trouble: why the server cannot be used at present, or None.
    """

    card: ModelCard
    model: ModelKeys
    reply: bytes

    def __init__(self, server: Server, keys: Keys, flights: FlightTable) -> None:
        self._server = server
        self._keys = keys
        self._flights = flights
        self._client_id = secrets.token_hex(8)
        self._rows: RedisRows | None = None
        self.redis = server.client()
        self.reader = CommandLine(server)
        self.line = CommandLine(server)
        self.lobby = Lobby(self.redis, keys)
        self.trouble: LMPoolError | None = None

    def adopt(self, card: ModelCard) -> None:
        """Use a model, or the same one with other weights."""
        if self._rows is not None:
            self._rows.close()
        self.card = card
        self._flights.follow(card.fingerprint)
        self.fingerprint = card.fingerprint
        self.model = self._keys.model(card.name)
        self.reply = self.model.reply(self._client_id)
        self.row_prefix = self._keys.row(self.fingerprint)
        self._rows = RedisRows(self._server, self._keys, card)

    async def fetch(self, digests: Sequence[bytes]) -> None:
        """Look for rows in the cache and give what is found to the flights.

        Raises:
            ServerError: the server cannot be used.
        """
        rows = self._rows
        if not digests or rows is None:
            return

        def deliver(digest: bytes, found: Row | CorruptRow | None) -> None:
            # What was fetched from the namespace of other weights must not land after the change.
            if self._rows is rows:
                self._flights.deliver(digest, found)

        await rows.get_many(digests, deliver)
        self.trouble = None

    def note(self, error: BaseException) -> None:
        """Remember why the server cannot be used; a request whose deadline passes tells it."""
        self.trouble = self._server.explain(error)

    def explain(self, error: BaseException) -> LMPoolError:
        """The exception of our tree for one of redis-py's or the system's."""
        return self._server.explain(error)

    async def close(self) -> None:
        """Close all connections."""
        if self._rows is not None:
            self._rows.close()
        self.line.close()
        self.reader.close()
        await self.redis.aclose()

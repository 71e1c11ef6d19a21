"""Read rows from the row servers of workers on other hosts, and through Redis while no row server can be reached.

A client begins with rows through Redis. It uses row servers as soon as it has connected to one. While it uses row
servers, its token in jobs and reply keys has a mark (`shared_memory.reader_token`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from lmpool.broker.connection import Connection
from lmpool.broker.server import Server
from lmpool.errors import AuthenticationFailed, LMPoolError, ServerUnreachable
from lmpool.protocol.job import DIGEST_SIZE
from lmpool.rows.connection import RawRowReceiver, Value
from lmpool.rows.shared_memory import PLACE_SIZE, ROW_KEY_SIZE, ReadCounts

_log = logging.getLogger("lmpool")

_CONNECT_S = 2.0  # Max seconds to connect to a row server; a firewall may discard all packets.
_SILENT_S = 2.0  # Max seconds without a received byte while rows are requested; a frozen worker sends nothing.
_MAX_PEERS = 128  # Max open connections to row servers; the connection that was used least recently is closed.
_IDLE_S = 60.0  # Seconds without a request after which a connection is closed.
_REQUESTS_IN_FLIGHT = 2  # Max requests in flight per row server: the second arrives while the first is decoded.
_MIN_PAUSE_S, _MAX_PAUSE_S = 5.0, 300.0  # Min and max seconds until the next try after a failure; doubled each time.
_MAX_PLACES = 65_536  # Max announced rows whose places are recorded.
# Addresses that every host has, and the text of a server that this client uses over such an address or a Unix socket.
_LOOPBACK = re.compile(rb"127\.|localhost:|\[::1\]:")
_LOCAL = re.compile(r"unix:|[a-z+]+://(127\.|localhost:|\[?::1\]?:)")
_NONCE_SIZE = ROW_KEY_SIZE - DIGEST_SIZE

ReadToken = Callable[[], Awaitable[bytes | None]]


class RowPlace(NamedTuple):
    """The row server and the segment that have a row."""

    address: bytes
    nonce: bytes


class _Peer:
    """A row server, and the connection to it."""

    def __init__(self) -> None:
        self.connection: Connection[RawRowReceiver] | None = None
        self.connecting = asyncio.Lock()
        self.turns = asyncio.Semaphore(_REQUESTS_IN_FLIGHT)
        self.requests = 0  # Number of requests that wait or are in flight.
        self.used_at = asyncio.get_running_loop().time()  # Loop time of the last request.
        self.has_answered = False
        self.next_try_at = 0.0  # Loop time until which no connection is opened after a failure.
        self.pause_s = _MIN_PAUSE_S

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class DirectReader:
    """Reads rows from row servers, for one session.

    Args:
        server: the pool's Redis, whose TLS settings are used for row servers too.
        read_token: reads the pool's token from Redis.
        on_change: called when `is_on` has changed.

    Attributes:
        is_on: whether this client reads rows from row servers at present.
        next_try_at: loop time until which `try_on` must not be called after a failure, at any address.
        counts: counts the rows that were read.
    """

    def __init__(self, server: Server, read_token: ReadToken, on_change: Callable[[], None]) -> None:
        self.is_on, self.next_try_at, self._pause_s = False, 0.0, _MIN_PAUSE_S
        self.counts = ReadCounts()
        self._server = server
        self._read_token = read_token
        self._on_change = on_change
        self._token: bytes | None = None
        self._peers: dict[bytes, _Peer] = {}
        self._places: dict[bytes, RowPlace] = {}
        self._missed: dict[bytes, None] = {}  # Digests of rows that could not be read; a dict keeps their order.
        self._has_warned = False

    # Places of announced rows

    def note(self, address: bytes, digests: Iterable[bytes], places: bytes, awaited: Container[bytes]) -> None:
        """Record the places of the announced rows that are `awaited`; `places` has the order of `digests`."""
        for at, digest in enumerate(digests):
            nonce = places[PLACE_SIZE * at :][:_NONCE_SIZE]
            if digest in awaited and any(nonce):  # Zeros stand for a row that is not in shared memory.
                self._places[digest] = RowPlace(address, nonce)
        while len(self._places) > _MAX_PLACES:  # The first places belong to requests that were cancelled.
            del self._places[next(iter(self._places))]

    def forget(self) -> None:
        """Discard all places, because the client changes to other weights."""
        self._places.clear()
        self._missed.clear()

    def take(self, digests: Sequence[bytes]) -> dict[RowPlace, list[bytes]]:
        """Return and discard the recorded places of rows."""
        found: dict[RowPlace, list[bytes]] = {}
        for digest in digests if self._places else ():
            if place := self._places.pop(digest, None):
                found.setdefault(place, []).append(digest)
        return found

    def take_missed(self, digest: bytes) -> bool:
        """Return and discard whether a row could not be read, so that a worker must store the row itself in Redis."""
        return bool(self._missed) and self._missed.pop(digest, 0) is None

    def _miss(self, digests: Iterable[bytes]) -> None:
        self._missed.update(dict.fromkeys(digests))
        while len(self._missed) > _MAX_PLACES:
            del self._missed[next(iter(self._missed))]

    # Rows

    async def read(self, place: RowPlace, digests: Sequence[bytes], max_bytes: int) -> Sequence[Value]:
        """Read rows of one row server; a value is None if the server does not have the row or cannot be reached."""
        peer, loop = self._peer(place.address), asyncio.get_running_loop()
        connection = None
        peer.requests += 1
        try:
            async with peer.turns:
                async with peer.connecting:  # Let one caller find out that the address cannot be reached.
                    if loop.time() < peer.next_try_at:
                        self._miss(digests)
                        return [None] * len(digests)
                    connection = await self._connect(place.address, peer)
                raw = await connection.open()
                request = (b"MGET", *(place.nonce + digest for digest in digests))
                peer.used_at = loop.time()
                reply = raw.call(request, max_bytes)
                await _until_silent(raw, reply)
                values: Sequence[Value] = await connection.wait_for(raw, reply)
        except LMPoolError as error:
            if peer.connection is connection:  # Otherwise another request on this connection has failed already.
                self._fail(place.address, peer, error)
            self._miss(digests)
            return [None] * len(digests)
        finally:
            peer.requests -= 1
        peer.has_answered, peer.pause_s, peer.used_at = True, _MIN_PAUSE_S, loop.time()
        found = [value for value in values if value is not None]
        self.counts.direct += len(found)
        if len(found) < len(values):
            self._miss(digest for digest, value in zip(digests, values, strict=True) if value is None)
        return values

    def _peer(self, address: bytes) -> _Peer:
        if address not in self._peers:
            self._peers[address] = _Peer()
        return self._peers[address]

    async def _connect(self, address: bytes, peer: _Peer) -> Connection[RawRowReceiver]:
        """Connect with the pool's token, and with a new token if the server refuses the token."""
        if peer.connection is not None:
            return peer.connection
        if _LOOPBACK.match(address) and not _LOCAL.match(str(self._server)):
            # On this host the address belongs to other programs, which must not get the token.
            raise ServerUnreachable("its address is a loopback address: start the worker with --direct-address")
        for is_last in (False, True):
            if self._token is None:
                self._token = await self._read_token()
            if self._token is None:
                raise ServerUnreachable("the pool has no token for row servers")
            server = self._server.row_server(address, self._token, _CONNECT_S)

            async def connect(server: Server = server) -> RawRowReceiver:
                return RawRowReceiver(await server.open())

            connection = Connection[RawRowReceiver](server, connect)
            try:
                await connection.open()
            except AuthenticationFailed:
                self._token = None
                if is_last:
                    raise
            else:
                break
        peer.connection, peer.used_at = connection, asyncio.get_running_loop().time()
        self.close_idle()
        return connection

    def close_idle(self) -> None:
        """Close connections without requests, and discard row servers that could not be reached for long."""
        now = asyncio.get_running_loop().time()
        peers = sorted((peer for peer in self._peers.values() if peer.connection), key=lambda peer: peer.used_at)
        for at, peer in enumerate(peers):
            is_surplus = len(peers) - at > _MAX_PEERS
            if (is_surplus or now - peer.used_at > _IDLE_S) and not peer.requests:
                peer.close()
        for address, peer in list(self._peers.items()):
            if peer.connection is None and now - max(peer.used_at, peer.next_try_at) > _MAX_PAUSE_S:
                del self._peers[address]

    def _fail(self, address: bytes, peer: _Peer, error: LMPoolError) -> None:
        """Close the connection, and use row servers no more if none can be reached."""
        peer.close()
        peer.next_try_at = asyncio.get_running_loop().time() + peer.pause_s
        peer.pause_s = min(2 * peer.pause_s, _MAX_PAUSE_S)
        had_answered, peer.has_answered = peer.has_answered, False
        if had_answered:
            return  # The worker has probably ended.
        self._warn(address, error)
        if not any(other.has_answered for other in self._peers.values()):
            self._turn(on=False)

    def _warn(self, address: bytes, error: LMPoolError) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "rows come through Redis: the row server of a worker at %s cannot be reached: %s"
            _log.warning(text, address.decode("ascii", "replace"), error.__cause__ or error)

    # Turning on and off

    async def try_on(self, address: bytes) -> None:
        """Use row servers if the row server at this address can be reached."""
        peer = self._peer(address)
        if self.is_on or asyncio.get_running_loop().time() < peer.next_try_at:
            return
        async with peer.connecting:
            try:
                await self._connect(address, peer)
            except LMPoolError as error:
                self._fail(address, peer, error)
                # A firewall probably blocks all addresses: do not try each of them at once.
                self.next_try_at = asyncio.get_running_loop().time() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                return
        peer.has_answered, peer.pause_s, self._pause_s = True, _MIN_PAUSE_S, _MIN_PAUSE_S
        self._turn(on=True)

    def _turn(self, *, on: bool) -> None:
        if self.is_on != on:
            self.is_on = on
            if on and self._has_warned:
                self._has_warned = False
                _log.info("rows come from row servers again")
            self._on_change()

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()


async def _until_silent(raw: RawRowReceiver, reply: asyncio.Future[Any]) -> None:
    """Wait for a reply as long as bytes arrive; then close the connection, so that the rows come through Redis."""
    while not reply.done():
        received = raw.received
        try:
            await asyncio.wait([reply], timeout=_SILENT_S)
        except asyncio.CancelledError:
            reply.cancel()  # asyncio would log an error that arrives later, because no caller awaits it.
            raise
        if not reply.done() and raw.received == received:
            raw.close(ServerUnreachable(f"the row server has sent nothing for {_SILENT_S:g} s"))

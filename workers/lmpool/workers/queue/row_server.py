"""A worker's row server: it sends rows of the worker's shared memory over TCP to clients on other hosts.

The server answers the two commands that `RawRowReceiver` needs, in Redis's protocol: AUTH with the pool's token, then
MGET of rows. The key of a row is the nonce of the worker's segment and the digest of the prompt.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from lmpool.broker.connection import CRLF, CommandConnection, pack_command
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError
from lmpool.protocol.keys import ROW_TOKEN_TTL_MS, Keys
from lmpool.rows.segment import SegmentWriter
from lmpool.rows.shared_memory import ROW_KEY_SIZE
from lmpool.workers.settings import WorkerSettings, split_address

_log = logging.getLogger("lmpool.worker")

_TOKEN_SIZE = 32  # Bytes of a pool's token: 128 random bits as hexadecimal digits.
_RENEW_S = 600.0  # Seconds between two renewals of the token in Redis, whose lifetime is a day.
_LOOPBACK = "127.0.0.1"
_MAX_READERS = 512  # Max open connections: each may take 2 MiB of memory and one row, and one file descriptor.
_MAX_UNSENT_BYTES = 1024 * 1024  # With this many unsent bytes, the server copies no more rows for a slow reader.
_MAX_WANTED = 4096  # Max rows that one reader may have requested; a client requests at most 1,024 rows.
_MAX_REQUEST_BYTES = 64 * 1024  # Max bytes of a request: a client requests at most 512 rows, which take 16 KB.
_MAX_COUNT_DIGITS = 5  # Max digits of the number of words in a request.
_TICK_BYTES = 1024 * 1024  # Bytes of rows that are copied for one reader before other tasks of the worker run.
_AUTH_S = 5.0  # Max seconds until a new reader has sent the token.
_SLOW_S = 30.0  # Max seconds without progress of a slow reader, which must read all but 256 KiB in this time.
_IDLE_S = 300.0  # Max seconds between two requests of a reader: its machine may have disappeared.
_TOKEN_CHECK_S = 1.0  # Min seconds between two reads of the token because of a wrong token.
_DISCARD, _KEEP = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)  # Values of SO_LINGER.
_HEAD = b"$4\r\nMGET\r\n"
_MAX_HEAD_BYTES = 1 + _MAX_COUNT_DIGITS + len(CRLF) + len(_HEAD)  # Max bytes of a request before its keys.
_WORD_BYTES = len(pack_command((bytes(ROW_KEY_SIZE),))) - len(b"*1\r\n")  # Bytes of one key in a request.
_AUTH_HEAD = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n" % _TOKEN_SIZE
_AUTH_BYTES = len(_AUTH_HEAD) + _TOKEN_SIZE + len(CRLF)


class RowServer:
    """Listens for readers of a worker's rows, in the worker's event loop, and writes its address into references.

    Attributes:
        served: number of rows that were sent.
    """

    def __init__(
        self,
        redis_server: Server,
        segment: SegmentWriter,
        settings: WorkerSettings,
        redis: Redis,
        connection: CommandConnection,
    ) -> None:
        self.served = 0
        self.readers: set[_Reader] = set()
        self.segment = segment
        self._redis_server = redis_server
        self._settings = settings
        self._redis = redis
        self._connection = connection  # The worker's connection to Redis.
        self._token_key = Keys(settings.prefix).row_token()
        self._token = b""
        self._token_read_at = 0.0
        self._token_reading: asyncio.Task[None] | None = None  # The last read of the token because of a wrong token.
        self._server: asyncio.Server | None = None
        self._memory = memoryview(b"")
        self._last_transport: asyncio.Transport | None = None  # Sends the bytes in `_memory`.
        self._waiting: deque[_Reader] = deque()  # Readers that can receive rows, in the order of their turns.

    async def run(self) -> None:
        """Listen, and renew the token in Redis; returns at once if the worker has no shared memory, or may not listen.

        Raises an error of Redis if it cannot be used; the caller then calls again.
        """
        if self._settings.no_direct or not self.segment.is_wanted:
            return
        try:
            await self._renew_token()
            if self._server is None:
                await self._listen()
            while self._server is not None:
                await asyncio.sleep(_RENEW_S)
                await self._renew_token()
        except NoPermissionError as error:
            self.close()
            user = f"this worker's Redis user may not use {self._token_key.decode()}"
            _log.warning("clients on other hosts read rows through Redis: %s (%s)", user, error)

    async def _listen(self) -> None:
        settings = self._settings
        raw = await self._connection.open()
        needs_tls, tls = self._redis_server.row_server_tls()
        if needs_tls and tls is None:  # Rows must not be readable on a network where Redis uses TLS.
            why = "the URL of Redis has no certificate (ssl_certfile) with which the row server could use TLS"
            _log.info("clients on other hosts read rows through Redis: %s", why)
            return
        host, wanted_port = split_address("direct_address", settings.direct_address)
        host, port = host or raw.local_host or _LOOPBACK, wanted_port or 0
        bind_host, bind_port = split_address("direct_bind", settings.direct_bind)
        bind_host, bind_port = bind_host or host, port if bind_port is None else bind_port
        try:
            loop = asyncio.get_running_loop()
            limit_s = None if tls is None else _AUTH_S  # A stranger may connect and send nothing.
            self._server = await loop.create_server(
                lambda: _Reader(self), bind_host, bind_port, ssl=tls, ssl_handshake_timeout=limit_s
            )
        except OSError as error:
            advice = "choose --direct-bind HOST:PORT; --no-direct turns this message off"
            text = "clients on other hosts read rows through Redis: the row server cannot listen at %s:%d: %s; %s"
            _log.warning(text, bind_host, bind_port, error.strerror or error, advice)
            return
        port = port or int(self._server.sockets[0].getsockname()[1])
        self.segment.address = f"[{host}]:{port}".encode() if ":" in host else f"{host}:{port}".encode()
        _log.info("rows for clients that cannot map this shared memory at %s", self.segment.address.decode())

    async def _renew_token(self) -> None:
        """Read the pool's token; set it if the pool has none. It may have been evicted, and then changed."""
        key, new = self._token_key, secrets.token_hex(_TOKEN_SIZE // 2)
        await self._redis.set(key, new, px=ROW_TOKEN_TTL_MS, nx=True)
        self._token = cast(bytes | None, await self._redis.get(key)) or b""
        await self._redis.pexpire(key, ROW_TOKEN_TTL_MS)

    def give_turn(self, reader: _Reader) -> None:
        """Let a reader send rows in a later event-loop tick; one reader sends in each tick, so that other tasks run."""
        if not reader.has_turn:
            reader.has_turn = True
            self._waiting.append(reader)
            if len(self._waiting) == 1:
                asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        reader = self._waiting.popleft()
        reader.has_turn = False
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        reader.send()
        if reader.can_send:
            self.give_turn(reader)

    def take_memory(self, transport: asyncio.Transport) -> memoryview:
        """Memory for the bytes that a reader is sent in one tick.

        The memory of the last call is used again if it has been sent: new pages take longer than the copy of rows.
        """
        if self._last_transport is None or self._last_transport.get_write_buffer_size():
            self._memory = memoryview(bytearray(_TICK_BYTES + self.segment.row_bytes + _MAX_HEAD_BYTES))
        self._last_transport = transport
        return self._memory

    def accepts(self, sent: bytes) -> bool:
        """Whether a reader has sent the token."""
        return bool(self._token) and hmac.compare_digest(sent, pack_command((b"AUTH", self._token)))

    async def accepts_now(self, sent: bytes) -> bool:
        """Whether a reader has sent the token that the pool has now; reads the token at most once a second."""
        now, reading = asyncio.get_running_loop().time(), self._token_reading
        if reading is None or (reading.done() and now - self._token_read_at >= _TOKEN_CHECK_S):
            self._token_read_at = now
            reading = self._token_reading = asyncio.create_task(self._try_renew_token())
        # All readers wait for one read, which also continues if one of the readers is disconnected.
        await asyncio.shield(reading)
        return self.accepts(sent)

    async def _try_renew_token(self) -> None:
        with suppress(RedisError, OSError, LMPoolError):
            await self._renew_token()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.segment.address = b""
        if self._server is not None:
            self._server.close()
        for reader in list(self.readers):
            reader.close()


class _Reader(asyncio.Protocol):
    """One connection of a client that reads rows."""

    def __init__(self, server: RowServer) -> None:
        self._server = server
        self._received = b""
        self._is_known = False  # Whether the reader has sent the token.
        self._checking: asyncio.Task[None] | None = None
        self.has_turn = False  # Whether the reader is in the server's queue of readers.
        self._wanted: deque[bytes] = deque()  # Keys of rows, and heads of replies: only heads begin with "*".
        self._is_slow = False  # Whether so many bytes are unsent that no more rows are copied.
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
        readers = self._server.readers
        if len(readers) >= _MAX_READERS:
            self._refuse("max number of clients reached")
            return
        readers.add(self)
        self._close_after(_AUTH_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_after(None)
        self._wanted.clear()
        if self._checking is not None:
            self._checking.cancel()
        self._server.readers.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._received += data
        if not self._is_known:
            self._check_token()
            return
        try:
            while (end := self._request_end()) is not None:
                request, self._received = self._received[:end], self._received[end:]
                self._take(request)
        except ValueError:
            self._refuse("the request is no MGET of rows")
        if len(self._received) > _MAX_REQUEST_BYTES or len(self._wanted) > _MAX_WANTED:
            self._refuse("the request is too long")

    def _check_token(self) -> None:
        sent = self._received
        if self._checking is not None or len(sent) > _AUTH_BYTES:
            self._refuse("AUTH with the pool's token must be the first request")
        elif len(sent) == _AUTH_BYTES:
            if self._server.accepts(sent):
                self._welcome()
            else:
                self._checking = asyncio.get_running_loop().create_task(self._check_again(sent))
        elif sent[: len(_AUTH_HEAD)] != _AUTH_HEAD[: len(sent)]:
            self._refuse("AUTH with the pool's token must be the first request")

    async def _check_again(self, sent: bytes) -> None:
        if await self._server.accepts_now(sent):
            self._checking = None
            self._welcome()
        else:
            self._refuse("invalid token", code="WRONGPASS")

    def _welcome(self) -> None:
        self._is_known, self._received = True, b""
        self._close_after(_IDLE_S)
        self._transport.write(b"+OK\r\n")

    def _request_end(self) -> int | None:
        """The size of the first request; None if more bytes of this request must arrive. Raises `ValueError`."""
        received = self._received
        line, mark, rest = received[:_MAX_HEAD_BYTES].partition(CRLF)
        if not mark and len(line) <= 1 + _MAX_COUNT_DIGITS:
            return None
        is_sound = line[:1] == b"*" and line[1:].isdigit() and _HEAD.startswith(rest[: len(_HEAD)])
        if not is_sound or len(line) > 1 + _MAX_COUNT_DIGITS:
            raise ValueError(line)
        end = len(line) + len(mark) + len(_HEAD) + _WORD_BYTES * (int(line[1:]) - 1)
        if end > _MAX_REQUEST_BYTES:
            raise ValueError(line)
        return end if end <= len(received) else None

    def _take(self, request: bytes) -> None:
        """Add the keys of a request to the rows to send. Raises `ValueError` for another request."""
        begin = request.index(_HEAD) + len(_HEAD)
        ends = range(begin + _WORD_BYTES, len(request) + 1, _WORD_BYTES)
        keys = [request[end - ROW_KEY_SIZE - len(CRLF) : end - len(CRLF)] for end in ends]
        if not keys or pack_command((b"MGET", *keys)) != request:
            raise ValueError(request)
        self._wanted.append(b"*%d\r\n" % len(keys))
        self._wanted.extend(keys)
        if not self._is_slow:
            self._server.give_turn(self)

    @property
    def can_send(self) -> bool:
        """Whether rows are wanted that can be sent now."""
        return bool(self._wanted) and not self._is_slow and not self._transport.is_closing()

    def send(self) -> None:
        """Send wanted rows of up to `_TICK_BYTES`."""
        if self.can_send:
            server, row_bytes, end = self._server, self._server.segment.row_bytes, 0
            memory, row_head = server.take_memory(self._transport), b"$%d\r\n" % row_bytes
            while self._wanted and end < _TICK_BYTES:
                key, row_at = self._wanted.popleft(), end + len(row_head)
                if len(key) != ROW_KEY_SIZE:
                    end = _put(memory, end, key)
                elif server.segment.copy_to(memory[row_at : row_at + row_bytes], key):
                    _put(memory, end, row_head)
                    end = _put(memory, row_at + row_bytes, CRLF)
                    server.served += 1
                else:
                    end = _put(memory, end, b"$-1\r\n")
            # Send several rows by one system call: a call for each row would take more processor time.
            # A transport keeps the memory of bytes that it cannot send now: copy the bytes for a slow reader.
            is_slow = self._transport.get_write_buffer_size() > 0
            self._transport.write(bytes(memory[:end]) if is_slow else memory[:end])
        if not self._wanted and not self._is_slow:
            self._close_after(_IDLE_S)

    def pause_writing(self) -> None:
        self._is_slow = True
        self._close_after(_SLOW_S)
        # If the connection is closed now, discard the unsent bytes, which the system would keep for the slow reader.
        self._set_linger(_DISCARD)

    def resume_writing(self) -> None:
        self._is_slow = False
        self._set_linger(_KEEP)
        if self._wanted:
            self._server.give_turn(self)
        else:
            self._close_after(_IDLE_S)

    def _set_linger(self, value: bytes) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, value)

    def _close_after(self, seconds: float | None) -> None:
        """Close the connection after some seconds, or, with None, not at a fixed time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.close)

    def _refuse(self, why: str, code: str = "ERR") -> None:
        if not self._transport.is_closing():
            self._transport.write(f"-{code} {why}\r\n".encode())
            self._transport.close()
            self._wanted.clear()
            self._close_after(_AUTH_S)

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()


def _put(memory: memoryview, at: int, data: bytes) -> int:
    """Write data to memory; returns the place after the data."""
    memory[at : at + len(data)] = data
    return at + len(data)

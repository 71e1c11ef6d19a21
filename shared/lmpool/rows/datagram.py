"""Rows in datagrams: on one host, a worker notifies a client before the server does.

Each client has a Unix datagram socket in Linux's abstract namespace: the socket needs no file and ends with its
process. Jobs contain the socket's name. A datagram carries small rows, or the places of rows in shared memory. Sending
never waits, and a datagram may be lost, so the server always sends the same notification too.

All processes of a machine can list and use abstract sockets. So a client reads only datagrams of processes of its own
user, whose user id the kernel adds to each datagram.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from lmpool.errors import ProtocolError
from lmpool.protocol.job import WIRE_VERSION, Message, unpack
from lmpool.rows.shared_memory import NAME, host_token

MAX_ROWS = 8
"""Max rows in a datagram, which arrive together, so that a client sends its next requests together."""

_MAX_BYTES = 32 * 1024  # Max bytes of a datagram: a value has at most 2 KiB.
_CREDENTIALS = struct.Struct("iII")  # The kernel's ids of the sender: process, user and group.


class RowsReady(Message, frozen=True, tag=WIRE_VERSION):
    """The notification about some rows, or about small answers to queries."""

    fingerprint: str
    worker: bytes  # Name of the worker that computed the rows.
    rows: dict[bytes, bytes]  # Digest -> the encoded row; with `are_places`, the row's place in shared memory.
    are_places: bool


_DECODER = msgspec.msgpack.Decoder(RowsReady)


def unpack_datagram(data: bytes) -> RowsReady:
    """Decode a datagram. Raises `ProtocolError` for bytes that are no datagram."""
    return unpack(_DECODER, data, _MAX_BYTES, "a datagram")


class DatagramSender:
    """Sends datagrams to clients on this host; any thread may use it."""

    def __init__(self) -> None:
        self._host = host_token()
        self._socket = _new_socket()

    def reaches(self, client: bytes) -> bool:
        """Whether the socket `client` is on this host."""
        return bool(self._host) and client.startswith(self._host)

    def send(self, client: bytes, message: RowsReady) -> None:
        """Send a message to the socket `client`, or drop the message if the client has ended or does not read."""
        try:
            self._socket.sendto(message.pack(), _address(client))
        except BlockingIOError:
            # Unread datagrams use up the memory of their socket: with a new socket, other clients can be notified.
            with suppress(OSError):  # Keep the socket if no descriptor is free.
                made = _new_socket()
                self._socket.close()
                self._socket = made
        except OSError:
            pass  # The client has ended, or is in another network namespace.

    def close(self) -> None:
        """Close the socket. Datagrams that were sent are still delivered."""
        self._socket.close()


class DatagramReceiver:
    """Receives the datagrams for one client, from `open` to `close`.

    Attributes:
        name: name of the socket for jobs; b"" while there is no socket.
    """

    def __init__(self) -> None:
        self.name = b""

    def open(self, on_message: Callable[[RowsReady], None]) -> None:
        """Receive datagrams in the running event loop, if this machine lets this process have such a socket."""
        self._on_message, self._loop = on_message, asyncio.get_running_loop()
        if sys.platform != "linux" or not (host := host_token()):
            return
        name = host + secrets.token_hex(8).encode()
        # Without a free descriptor, or in a sandbox that forbids the socket, the server's messages suffice.
        with ExitStack() as cleanup, suppress(OSError):
            self._socket = cleanup.enter_context(_new_socket())
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(_address(name))
            self._loop.add_reader(self._socket, self._receive)
            self.name = name
            cleanup.pop_all()

    def _receive(self) -> None:
        data, added, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        users = [_CREDENTIALS.unpack(item)[1] for _, kind, item in added if kind == socket.SCM_CREDENTIALS]
        if users == [os.getuid()]:
            with suppress(ProtocolError):
                self._on_message(unpack_datagram(data))

    def close(self) -> None:
        """Close the socket."""
        if self.name:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self.name = b""


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _address(name: bytes) -> bytes:
    """The address of a socket in the abstract namespace, which begins with a zero byte."""
    return b"\0" + NAME.encode() + name

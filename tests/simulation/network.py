"""Byte pipes in place of sockets: with latency, partial writes, cuts, and ends that one side does not see."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tests.simulation.loop import PROCESS, Process, SimulatedLoop

_LATENCY_S = (0.00005, 0.0005)  # Range of the latency of a connection.
_MAX_PIECES = 3  # Max pieces in which one write arrives.
_SPLIT = 0.05  # Part of all writes that arrive in pieces.
_REFUSED_S = 0.001  # Seconds until a connection is refused.


class Pipe(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.network, self.process = network, process
        self.context = network.loop.context_of(process)
        self.peer: Pipe
        self.protocol: Any = None
        self.is_half_open = False  # Whether everything that is sent is lost, without a notice.
        self._is_closing, self._is_lost = False, False
        self._is_paused, self._held = False, list[tuple[Callable[..., None], tuple[Any, ...]]]()
        self._arrives_at = 0.0
        self._latency_s = network.loop.random.uniform(*_LATENCY_S)
        process.on_kill.append(self._die)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        held, self._held = self._held, []
        for call, args in held:
            self._receive(call, *args)

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        data, random = bytes(data), self.network.loop.random
        cuts = [0, len(data)]
        if len(data) > 1 and random.random() < _SPLIT:
            cuts = sorted({*cuts, *(random.randrange(1, len(data)) for _ in range(_MAX_PIECES - 1))})
        for start, end in itertools.pairwise(cuts):
            self._send(self.peer._take, data[start:end])

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(self.peer._end, None)
            self.network.loop.call_soon(self._lose, None, context=self.context)

    abort = close

    def cut(self, reason: Exception) -> None:
        """Break the connection: both sides see it now, and data on its way is lost."""
        for end in (self, self.peer):
            if not end._is_lost:
                end._is_closing = True
                self.network.loop.call_soon(end._lose, reason, context=end.context)

    def _die(self) -> None:
        """The process of this end has ended: its system closes the connection."""
        if not self._is_closing:
            self._is_closing = True
            self._send(self.peer._end, None)
        self._is_lost = True
        self.network.pipes.pop(self, None)

    def _send(self, call: Callable[..., None], *args: Any) -> None:
        if self.is_half_open:
            return
        loop, link = self.network.loop, self.network.delay_s
        jitter = loop.random.random() * self._latency_s
        self._arrives_at = max(self._arrives_at, loop.time() + self._latency_s + jitter + loop.random.random() * link)
        loop.call_at(self._arrives_at, self.peer._receive, call, *args, context=self.peer.context)

    def _receive(self, call: Callable[..., None], *args: Any) -> None:
        if self._is_paused or self._held:
            self._held.append((call, args))
        elif not self._is_lost:
            call(*args)

    def _take(self, data: bytes) -> None:
        if self._is_closing:
            return
        protocol = self.protocol
        if not isinstance(protocol, asyncio.BufferedProtocol):
            protocol.data_received(data)
            return
        while data:
            buffer = memoryview(protocol.get_buffer(-1))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            protocol.buffer_updated(count)

    def _end(self, error: Exception | None) -> None:
        if error is None and not self._is_closing and hasattr(self.protocol, "eof_received"):
            self.protocol.eof_received()
        self._is_closing = True
        self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.network.pipes.pop(self, None)
            if self.process.is_alive:
                self.protocol.connection_lost(error)


class Listener:
    """A server that accepts connections at an address."""

    def __init__(self, network: Network, address: str, factory: Callable[[], Any], process: Process) -> None:
        self._network, self._address, self.factory, self.process = network, address, factory, process
        process.on_kill.append(self.close)
        self.sockets: list[Any] = []

    def close(self) -> None:
        """Accept no more connections."""
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]

    async def wait_closed(self) -> None:
        """See `asyncio.Server`."""


class Network:
    """All connections of a simulation.

    Attributes:
        listeners: address -> the server that listens there.
        pipes: the ends of all open connections that clients have opened, in order.
        delay_s: max additional seconds of each write, while links are slow.
    """

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.delay_s = loop, 0.0
        self.listeners: dict[str, Listener] = {}
        self.pipes: dict[Pipe, None] = {}
        loop.network = self

    def listen(self, factory: Callable[[], Any], address: str) -> Listener:
        """Accept connections for the current process."""
        self.listeners[address] = listener = Listener(self, address, factory, PROCESS.get())
        return listener

    async def connect(self, factory: Callable[[], Any], address: str) -> tuple[Pipe, Any]:
        """Open a connection from the current process.

        Raises:
            ConnectionRefusedError: no process listens at the address.
        """
        await asyncio.sleep(_REFUSED_S * self.loop.random.random() + self.delay_s * self.loop.random.random())
        if (listener := self.listeners.get(address)) is None:
            raise ConnectionRefusedError(111, "Connection refused")
        here, there = Pipe(self, PROCESS.get()), Pipe(self, listener.process)
        here.peer, there.peer = there, here
        self.pipes[here] = None
        here.protocol, there.protocol = factory(), listener.factory()
        self.loop.call_soon(there.protocol.connection_made, there, context=there.context)
        here.protocol.connection_made(here)
        return here, here.protocol

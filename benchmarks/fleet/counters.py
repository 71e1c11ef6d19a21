"""The counters of a server, or of a cluster's masters: processor time, commands by name, and bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from lmpool.broker.server import cluster_nodes

_OWN = "info"  # The command that reads the counters, which is not counted.


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server has done since its start, or in a period: see `since`.

    Attributes:
        seconds: length of the period.
        processor_s: processor seconds of each master.
        calls: name of a command -> number of calls. A call inside of a script counts too.
        received: bytes that the masters received.
        sent: bytes that the masters sent.
    """

    seconds: float
    processor_s: tuple[float, ...]
    calls: Counter[str]
    received: float
    sent: float

    def since(self, earlier: Usage) -> Usage:
        """The usage between two readings."""
        return Usage(
            self.seconds - earlier.seconds,
            tuple(now - before for now, before in zip(self.processor_s, earlier.processor_s, strict=True)),
            self.calls - earlier.calls,
            self.received - earlier.received,
            self.sent - earlier.sent,
        )

    @property
    def busiest_s(self) -> float:
        """Processor seconds of the busiest master."""
        return max(self.processor_s)

    @property
    def busiest(self) -> int:
        """Number of the busiest master."""
        return self.processor_s.index(self.busiest_s)


class ServerCounters:
    """Reads the counters of all masters of a server or a cluster."""

    def __init__(self, url: str) -> None:
        self.masters: Sequence[redis.Redis] = _masters(url)

    def read(self) -> Usage:
        """The counters so far."""
        processor_s, calls, received, sent = [], Counter[str](), 0.0, 0.0
        for master in self.masters:
            info: Any = master.info("cpu", "commandstats", "stats")
            processor_s.append(float(info["used_cpu_user"]) + float(info["used_cpu_sys"]))
            received += info["total_net_input_bytes"]
            sent += info["total_net_output_bytes"]
            for name, values in info.items():
                command = name.removeprefix("cmdstat_")
                if command not in (name, _OWN):
                    calls[command] += values["calls"]
        return Usage(time.monotonic(), tuple(processor_s), calls, received, sent)

    def connections(self) -> int:
        """Number of connections of all masters."""
        found: list[Any] = [master.info("clients") for master in self.masters]
        return sum(info["connected_clients"] for info in found)

    def close(self) -> None:
        """Close the connections."""
        for master in self.masters:
            master.close()


def _masters(url: str) -> list[redis.Redis]:
    """A connection to the server, or to each master of a cluster."""
    nodes, _ = cluster_nodes(url)
    if not nodes:
        return [redis.Redis.from_url(url)]
    host, port = nodes[0]
    with redis.RedisCluster(host, port) as cluster:
        places = sorted((node.host, node.port) for node in cluster.get_primaries())
    return [redis.Redis(host, port) for host, port in places]

"""A Redis Cluster on this machine, of three masters unless another number is given, without replicas."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from lmpool.embedded import server_binary
from tests.support.pool import DEADLINE_S, until

_SLOTS = 16_384
_BUS = 10_000


class LocalCluster:
    """Starts and stops the masters; has the methods of `EmbeddedServer` that tests use.

    Args:
        folder: folder for the masters' files.
        memory_bytes: memory limit of each master.
        masters: number of masters.

    Attributes:
        ports: ports of the masters.
    """

    def __init__(self, folder: Path, memory_bytes: int = 1 << 28, masters: int = 3) -> None:
        self._folder = folder
        self._memory = memory_bytes
        self._masters = masters
        self.ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The address of one master, from which clients discover the other masters."""
        return f"redis+cluster://127.0.0.1:{self.ports[0]}"

    @property
    def log_path(self) -> Path:
        """The file with the output of the first master."""
        return self._folder / "0" / "log"

    def start(self) -> None:
        """Start the masters and divide the slots among them; after `stop`, start these masters with their data."""
        is_new = not self.ports
        self.ports = self.ports or _free_ports(self._masters)
        self._processes = [self._start(number) for number in range(self._masters)]
        for port in self.ports:
            until(partial(_answers, port), f"the master on port {port} answers")
        if is_new:
            self._share_slots()
        for port in self.ports:
            until(partial(_is_whole, port, self._masters), "the cluster is whole")

    def stop(self) -> None:
        """End all masters."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(DEADLINE_S)

    def restart(self, number: int) -> None:
        """Kill a master, and start the master again without its data."""
        self._processes[number].kill()
        self._processes[number].wait(DEADLINE_S)
        self._processes[number] = self._start(number)
        until(partial(_answers, self.ports[number]), "the master answers again")

    def signal(self, number: int, signal_number: signal.Signals) -> None:
        """Send a master a signal."""
        self._processes[number].send_signal(signal_number)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        folder = self._folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "bind": "127.0.0.1",
            "port": self.ports[number],
            "dir": folder,
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": 2000,
            "save": "",
            "appendonly": "no",
            "maxmemory": self._memory,
            "maxmemory-policy": "volatile-lru",
            "logfile": folder / "log",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return subprocess.Popen([server_binary(), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _share_slots(self) -> None:
        for number, port in enumerate(self.ports):
            with redis.Redis(port=port) as node:
                first, after = (_SLOTS * (number + i) // self._masters for i in (0, 1))
                node.execute_command("CLUSTER", "ADDSLOTS", *range(first, after))
                node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        with redis.Redis(port=self.ports[0]) as node:
            for port in self.ports[1:]:
                node.execute_command("CLUSTER", "MEET", "127.0.0.1", port)

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_ports(masters: int) -> list[int]:
    """Free ports for the masters; the ports of their cluster buses are free too."""
    ports: list[int] = []
    while len(ports) < masters:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            # Use a lower port if the bus port (port + _BUS) would be above 65,535.
            port = port if port + _BUS < 65_536 else port - 2 * _BUS
            with suppress(OSError), socket.socket() as low:
                if port != probe.getsockname()[1]:
                    low.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + _BUS))
                if port not in ports:
                    ports.append(port)
    return ports


def _answers(port: int) -> bool:
    with suppress(redis.RedisError), redis.Redis(port=port) as node:
        return bool(node.ping())
    return False


def _is_whole(port: int, masters: int) -> bool:
    """Whether a master is connected to all `masters`, and all slots are served."""
    with suppress(redis.RedisError), redis.Redis(port=port) as node:
        info: Any = node.execute_command("CLUSTER", "INFO")
        told = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
        return told.get("cluster_state") == "ok" and int(told.get("cluster_known_nodes", 0)) == masters
    return False

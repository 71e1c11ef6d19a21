"""What a pool leaves on its server, and on its machine, when all its clients and workers have gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from lmpool.protocol.keys import Keys

_TICK_S = 0.05


def leaked_processes(folder: Path) -> list[str]:
    """The processes that still run in a folder, by what they were started with; none where there is no /proc."""
    processes = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:  # It has ended meanwhile.
            continue
        if any(str(folder).encode() in word for word in words):
            processes.append(f"process {place.name}: {b' '.join(words).decode('utf-8', 'replace'):.200}")
    return processes


def settle(client: redis.Redis, keys: Keys, workers: int, seconds: float) -> None:
    """Wait, for so long at most, until the queue is empty and only the live workers are known.

    Clients have gone: what they had queued is computed, and workers that were killed are swept after a lease.
    """
    jobs = keys.model("syn").jobs

    def is_settled() -> bool:
        queued = client.xlen(jobs) or client.zcard(keys.model("syn").backlog)
        return not queued and len(client.xinfo_consumers(jobs, "workers")) == workers

    _wait(is_settled, seconds)


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_TICK_S)


def leaked_keys(client: redis.Redis, keys: Keys, most_ttl_s: float, lease_s: float) -> list[str]:
    """What should not be there: "key: why".

    Rows, vocabularies and a client's reply stream expire, and the empty stream of the queue stays for the next worker.
    A killed worker's heartbeat is given its lease. What is waited for may live as long as a request, and hardly longer.

    Args:
        client: of the server.
        keys: names of the pool's keys.
        most_ttl_s: how long it may be remembered that somebody waits.
        lease_s: how long a heartbeat lives.
    """
    beats = f"{keys.prefix}:worker:*"
    _wait(lambda: not any(client.ttl(key) >= 0 for key in client.scan_iter(beats, 1000)), lease_s + 1)
    jobs = keys.model("syn").jobs
    leaks = []
    for key in client.scan_iter(f"{keys.prefix}:*", 1000):
        name, ttl = key.decode("ascii", "backslashreplace"), client.ttl(key)
        if ttl == -1 and key != jobs:
            leaks.append(f"{name}: never expires")
        elif key.startswith(keys.model("syn").waiting) and ttl > most_ttl_s:
            leaks.append(f"{name}: expires in {ttl} s only")
        elif key.startswith(f"{keys.prefix}:worker:".encode()) and ttl != -2:
            leaks.append(f"{name}: a worker that has gone")
    if client.exists(jobs):
        if length := client.xlen(jobs):
            leaks.append(f"{length} jobs")
        groups: Any = client.xinfo_groups(jobs)
        for group in groups:
            if group["pending"]:
                leaks.append(f"{group['pending']} pending jobs")
            if group["consumers"]:
                leaks.append(f"{group['consumers']} consumers")
    return leaks

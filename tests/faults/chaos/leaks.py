"""Finds keys and processes that are left after all clients and workers of a chaos run have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from lmpool.protocol.keys import GROUP, Keys, ModelKeys

_TICK_S = 0.05


def leaked_processes(folder: Path) -> list[str]:
    """List the running processes whose command line names a folder; the list is empty without /proc."""
    processes = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:  # The process has just ended.
            continue
        if any(str(folder).encode() in word for word in words):
            processes.append(f"process {place.name}: {b' '.join(words).decode('utf-8', 'replace'):.200}")
    return processes


def settle(client: redis.Redis, partitions: Sequence[ModelKeys], workers: int, seconds: float) -> None:
    """Wait until the queue is empty and exactly `workers` workers are registered, each with one lane (job stream).

    When the clients have ended, workers still compute queued prompts, and remove killed workers after a lease.
    """

    def is_settled() -> bool:
        lanes = [lane for model in partitions for lane in lanes_of(client, model)]
        queued = sum(client.zcard(model.backlog) for model in partitions)
        queued += sum(client.xlen(stream) for stream in (*(model.jobs for model in partitions), *lanes))
        used = [model.jobs for model in partitions if client.exists(model.jobs)]
        consumers = sum(len(client.xinfo_consumers(jobs, GROUP)) for jobs in used)
        return not queued and len(lanes) == consumers == workers

    _wait(is_settled, seconds)


def lanes_of(client: redis.Redis, model: ModelKeys) -> list[bytes]:
    """The lanes (workers' job streams) of a partition, also lanes of workers that are not registered."""
    return list(client.scan_iter(model.lane("*"), 1000))


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_TICK_S)


def leaked_keys(
    client: redis.Redis, keys: Keys, partitions: Sequence[ModelKeys], most_ttl_s: float, lease_s: float
) -> list[str]:
    """List the keys that should not exist, each as "key: reason".

    Some keys may exist: rows, vocabularies and reply streams of clients, which expire, and the empty stream of the
    queue. A killed worker's heartbeat lives for its lease, and the key of a waiting client for about as long as its
    request. A worker's lane (job stream) must be removed together with the worker.

    Args:
        client: connection to the server.
        keys: names of the pool's keys.
        partitions: keys of each partition of the model's queue.
        most_ttl_s: max lifetime of keys of waiting clients.
        lease_s: lifetime of a heartbeat.
    """
    beats = f"{keys.prefix}:worker:*"
    _wait(lambda: not any(client.ttl(key) >= 0 for key in client.scan_iter(beats, 1000)), lease_s + 1)
    leaks = []
    for key in client.scan_iter(f"{keys.prefix}:*", 1000):
        name, ttl = key.decode("ascii", "backslashreplace"), client.ttl(key)
        if ttl == -1 and key not in [model.jobs for model in partitions]:
            leaks.append(f"{name}: never expires")
        elif key.startswith(tuple(model.waiting for model in partitions)) and ttl > most_ttl_s:
            leaks.append(f"{name}: expires in {ttl} s only")
        elif key.startswith(f"{keys.prefix}:worker:".encode()) and ttl != -2:
            leaks.append(f"{name}: a worker that has gone")
        elif key.startswith(tuple(model.lane("") for model in partitions)):
            leaks.append(f"{name}: a lane of a worker that has gone")
    for model in partitions:
        for stream in (model.jobs, *lanes_of(client, model)):
            leaks += _left_in(client, stream)
        lengths: Any = client.zrange(model.lanes, 0, -1, withscores=True)
        known = [(worker, length) for worker, length in lengths if worker or length]
        leaks += [f"a lane of {worker!r} is known to have {length:g} jobs" for worker, length in known]
    return leaks


def _left_in(client: redis.Redis, stream: bytes) -> list[str]:
    """List the entries, pending jobs and consumers that are left in a stream of jobs."""
    if not client.exists(stream):
        return []
    name = stream.decode("ascii", "backslashreplace")
    leaks = [f"{name}: {length} jobs"] if (length := client.xlen(stream)) else []
    groups: Any = client.xinfo_groups(stream)
    for group in groups:
        leaks += [f"{name}: {group[left]} {left}" for left in ("pending", "consumers") if group[left]]
    return leaks

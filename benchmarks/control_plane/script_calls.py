"""Measures for how long single calls of the Lua scripts block a server that stores much data."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from lmpool.broker import scripts
from lmpool.protocol.job import Failure
from lmpool.protocol.keys import GROUP, Keys

_KEYS = Keys()
_MODEL = _KEYS.model("m")
_BATCH = 32  # Prompts that a worker may hold.
_LEASE_MS = 15_000  # The default lease of a worker, in ms.
_LONG_MS = 10_000_000  # A lifetime in ms that does not end during the benchmark.
REPEATS = 7  # Min number of calls of each kind that are measured.


class _Queue:
    """A queue with many entries, for the slowest calls of its scripts."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.lanes: dict[bytes, bytes] = {}  # Worker -> key of its lane, the job stream of this worker.

    def empty(self, workers: int = 1) -> None:
        self.client.flushall()
        self.lanes.clear()
        self.client.xgroup_create(_MODEL.jobs, GROUP, id="0", mkstream=True)
        for number in range(workers):
            self.register(f"w{number}", _BATCH)

    def register(self, worker: str, batch: int) -> None:
        self.resize(worker, batch)
        self.client.xgroup_create(_MODEL.lane(worker), GROUP, id="0", mkstream=True)

    def resize(self, worker: str, batch: int) -> None:
        lane = self.lanes[worker.encode()] = _MODEL.lane(worker)
        keys = [_MODEL.workers, _MODEL.jobs, _MODEL.capacity, _MODEL.lanes, lane]
        self.call(scripts.REGISTER, keys, worker, _LEASE_MS, _LONG_MS, GROUP, batch)

    def call(self, script: scripts.Script, keys: Sequence[bytes], *args: Any) -> Any:
        try:
            return self.client.evalsha(script.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            self.client.script_load(script.source)
            return self.client.evalsha(script.sha, len(keys), *keys, *args)

    def ms(self, script: scripts.Script, keys: Sequence[bytes], *args: Any) -> float:
        """Milliseconds for which one call blocks the server."""
        before = self._spent_us()
        self.call(script, keys, *args)
        return (self._spent_us() - before) / 1000

    def _spent_us(self) -> float:
        stats: Any = self.client.info("commandstats")
        return float(stats.get("cmdstat_evalsha", {"usec": 0})["usec"])

    def submit(self, client: str, digests: Sequence[bytes], size: int) -> float:
        keys = [_MODEL.jobs, _MODEL.reply(client), *(_MODEL.waiting + digest for digest in digests)]
        return self.ms(scripts.SUBMIT, keys, 10**6, _LONG_MS, "", 0, len(digests), *[os.urandom(size)] * len(digests))

    def hold(self, count: int) -> list[bytes]:
        """Make a worker hold prompts of 128 tokens; return their stream entries."""
        for at in range(0, count, 5000):
            with self.client.pipeline(transaction=False) as pipe:
                for _ in range(min(5000, count - at)):
                    pipe.xadd(_MODEL.jobs, {"m": b"x" * 540, "u": b"60000"})
                pipe.execute()
        return _take(self, count)


def _digests(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def measure_calls(client: redis.Redis) -> Iterator[str]:
    """Rows of the table: the call, and its median and maximum time in ms."""
    queue = _Queue(client)
    for name, measure in _CALLS.items():
        samples: list[float] = []
        while len(samples) < REPEATS:
            samples += measure(queue)
        yield f"| {name} | {statistics.median(samples):.2f} | {max(samples):.2f} |"
    client.flushall()


def _submit_new(queue: _Queue) -> list[float]:
    queue.empty(100)
    return [queue.submit("a", _digests(scripts.MAX_AT_ONCE), 540) for _ in range(3)][1:]


def _submit_to_backlog(queue: _Queue) -> list[float]:
    queue.empty()
    for client in ("a", "b"):
        queue.submit(client, _digests(200), 540)
    return [queue.submit("c", _digests(scripts.MAX_AT_ONCE), 540) for _ in range(3)]


def _submit_long(queue: _Queue) -> list[float]:
    queue.empty()
    return [queue.submit(client, _digests(16), 32_768) for client in ("a", "b", "c", "d")][1:]


def _submit_longest(queue: _Queue) -> list[float]:
    queue.empty()
    return [queue.submit("a", _digests(1), 524_288)]


def _backlog_of_other_client(size: int) -> Callable[[_Queue], list[float]]:
    def measure(queue: _Queue) -> list[float]:
        queue.empty()
        for _ in range(10):
            queue.submit("a", _digests(200), size)
        first = queue.submit("b", _digests(1), 540)
        return [first, *(queue.ms(scripts.FIND_WORK, [_MODEL.jobs], "", 0, 0) for _ in range(3))]

    return measure


def _move_up(queue: _Queue) -> list[float]:
    queue.empty()
    for client in "abcdefgh":
        queue.submit(client, _digests(200), 4000)
    queue.register("w1", 4096)
    return [queue.ms(scripts.FIND_WORK, [_MODEL.jobs], "", 0, 0) for _ in range(4)]


def _cancel(queue: _Queue) -> list[float]:
    queue.empty()
    digests = _digests(scripts.MAX_AT_ONCE)
    for _ in range(3):
        queue.submit("b", _digests(200), 540)
    queue.submit("a", digests, 540)
    keys = [_MODEL.jobs, _MODEL.reply("a"), *(_MODEL.waiting + digest for digest in digests)]
    return [queue.ms(scripts.CANCEL, keys, GROUP)]


def _claim(is_silent: bool) -> Callable[[_Queue], list[float]]:
    def measure(queue: _Queue) -> list[float]:
        queue.empty()
        queue.hold(100_000)
        lease = 0 if is_silent else _LEASE_MS
        args = (GROUP, "me", lease, 3, 256, 1, 2**24, 2**19, _LONG_MS)
        return [queue.ms(scripts.CLAIM_EXPIRED, [_MODEL.jobs, _MODEL.claim_cursor], *args) for _ in range(REPEATS)]

    return measure


def _finish(queue: _Queue) -> list[float]:
    queue.empty(100)
    digests = _digests(scripts.MAX_AT_ONCE)
    queue.submit("a", digests, 540)
    entries = _take(queue, len(digests))
    return [_finish_ms(queue, entries, digests)]


def _finish_behind_backlog(queue: _Queue) -> list[float]:
    queue.empty()
    for client in ("b", "c", "d"):
        queue.submit(client, _digests(200), 540)
    entries = _take(queue, 3 * _BATCH)
    stored: Any = queue.client.xrange(_MODEL.jobs, entries[0], entries[-1])
    digests = [fields[b"u"].partition(b" ")[2] or os.urandom(16) for _, fields in stored]
    return [_finish_ms(queue, entries, digests)]


def _finish_many_clients(queue: _Queue) -> list[float]:
    queue.empty()
    (digest,) = digests = _digests(1)
    # Submit each prompt from two clients, so that its `waiting:` key is a hash.
    queue.submit("a", digests, 540)
    queue.submit("b", digests, 540)
    queue.client.hset(_MODEL.waiting + digest, mapping={_MODEL.reply(f"{i:016x}"): b"" for i in range(9_998)})
    entries = _take(queue, 1)
    return [_finish_ms(queue, entries, digests) for _ in range(5)]


def _finish_failures(queue: _Queue) -> list[float]:
    queue.empty()
    # Make one worker hold all prompts: `finish.lua` accepts the failure of a job only from the worker that holds it.
    queue.resize("w0", scripts.MAX_AT_ONCE)
    digests = _digests(scripts.MAX_AT_ONCE)
    queue.submit("a", digests, 540)
    entries = _take(queue, len(digests))
    failure = Failure("WorkerError", "x" * 100).pack()
    return [_finish_ms(queue, entries, digests, failure)]


def _finish_ms(queue: _Queue, entries: Sequence[bytes], digests: Sequence[bytes], failure: bytes = b"") -> float:
    rows = [b"lmpool:row:f:" + digest for digest in digests]
    for row in rows:
        queue.client.set(row, b"x")
    args: list[Any] = [GROUP, "f", 1000, 120_000, 10_000, "w0", 0, len(entries), b"", 0, *entries]
    for number in range(1, len(entries) + 1):
        args += [number, failure, 1] if failure else []
    keys = [_MODEL.jobs, _MODEL.dead, *(_MODEL.waiting + digest for digest in digests), *rows]
    return queue.ms(scripts.FINISH, keys, *args)


def _take(queue: _Queue, count: int) -> list[bytes]:
    """Make workers read the shared stream and their lanes; return the entries that they read."""
    entries = _read(queue, b"w0", _MODEL.jobs, count)
    for worker, lane in queue.lanes.items():
        entries += [entry + b" " + worker for entry in _read(queue, worker, lane, count)]
    return entries


def _read(queue: _Queue, worker: bytes, stream: bytes, count: int) -> list[bytes]:
    reply: Any = queue.client.xreadgroup(GROUP, worker.decode(), {stream: ">"}, count=count)
    return [entry for _, entries in reply for entry, _ in entries]


def _renew(queue: _Queue) -> list[float]:
    queue.empty()
    entries = queue.hold(scripts.MAX_AT_ONCE)
    return [queue.ms(scripts.RENEW, [_MODEL.jobs], GROUP, "w0", *entries) for _ in range(REPEATS)]


def _release(queue: _Queue) -> list[float]:
    queue.empty()
    queue.hold(scripts.MAX_AT_ONCE)
    args = (GROUP, "w0", 3_600_000, scripts.MAX_AT_ONCE, "-", 1, "x" * 100, 3_600_000, 1000, "")
    return [queue.ms(scripts.RELEASE, [_MODEL.jobs, _MODEL.reasons], *args) for _ in range(REPEATS)]


def _abandoned(queue: _Queue) -> list[float]:
    queue.empty()
    entries = queue.hold(scripts.MAX_AT_ONCE)
    keys = [_MODEL.jobs, *(_MODEL.waiting + digest for digest in _digests(len(entries)))]
    return [queue.ms(scripts.DROP_UNWANTED, keys, *(value for entry in entries for value in (entry, 1)))]


def _sweep_clients(queue: _Queue) -> list[float]:
    queue.empty()
    for at in range(0, 200_000, 10_000):
        queue.client.zadd(_MODEL.virtual_time, {_MODEL.reply(f"{i:016x}"): i for i in range(at, at + 10_000)})
    queue.client.zadd(_MODEL.virtual_time, {b"": 10**6})
    return [queue.ms(scripts.REMOVE_GONE, _SWEEP_KEYS, GROUP, 200, _LONG_MS, 0) for _ in range(REPEATS)]


def _sweep_workers(queue: _Queue) -> list[float]:
    queue.empty(1000)
    queue.client.zadd(_MODEL.workers, {f"w{number}": 1 for number in range(1000)})
    return [queue.ms(scripts.REMOVE_GONE, _SWEEP_KEYS, GROUP, 200, _LONG_MS, 0) for _ in range(4)]


def _survey(queue: _Queue) -> list[float]:
    queue.empty()
    queue.client.xadd(_MODEL.jobs, {"m": b"x" * (1 << 24)})
    for client in ("b", "c", "d"):
        queue.submit(client, _digests(200), 16_000)
    _take(queue, 1)
    return [queue.ms(scripts.SURVEY, [_MODEL.jobs, _MODEL.dead]) for _ in range(REPEATS)]


def _alive(queue: _Queue) -> list[float]:
    queue.empty()
    queue.client.zadd(_MODEL.workers, {f"w{number}": 10**15 for number in range(10_000)})
    keys = [_MODEL.workers, _MODEL.loading]
    return [queue.ms(scripts.ALIVE, keys, 10**15, 4000) for _ in range(REPEATS)]


def _entries(queue: _Queue) -> list[float]:
    queue.empty()
    keys = [b"lmpool:row:f:" + digest for digest in _digests(16)]
    for key in keys:
        queue.client.set(key, b"LMPR\x01\x00\x00\x00" + (49_152).to_bytes(4, "little") + bytes(4 + 4 * 49_152))
    places = " ".join(f"{16 + 400 * i} {19 + 400 * i}" for i in range(128))
    return [queue.ms(scripts.ENTRIES, keys, 0, *[places] * 16) for _ in range(REPEATS)]


def _fields(queue: _Queue) -> list[float]:
    queue.empty()
    queue.client.hset(_KEYS.models(), mapping={f"model {i}": os.urandom(600) for i in range(4096)})
    return [queue.ms(scripts.FIELDS, [_KEYS.models()], 4096, 1 << 16, 0) for _ in range(REPEATS)]


_SWEEP_KEYS = (_MODEL.jobs, _MODEL.workers, _MODEL.capacity, _MODEL.virtual_time)
_CALLS: dict[str, Callable[[_Queue], list[float]]] = {
    "submit: 200 new prompts of 128 tokens": _submit_new,
    "submit: 200 prompts of 128 tokens into the backlog": _submit_to_backlog,
    "submit: 16 prompts of 8,192 tokens, 512 KiB": _submit_long,
    "submit: one prompt of 131,072 tokens": _submit_longest,
    "submit, refill: 2,000 prompts of 128 tokens of another client come first": _backlog_of_other_client(540),
    "the same, 2,000 tokens each": _backlog_of_other_client(8_000),
    "refill: 1,600 prompts of 1,000 tokens may move up": _move_up,
    "cancel: 200 prompts": _cancel,
    "claim: 100,000 prompts are held": _claim(False),
    "claim: 100,000 prompts are held by dead workers": _claim(True),
    "finish: 200 rows": _finish,
    "finish: 96 rows, 500 prompts in the backlog": _finish_behind_backlog,
    "finish: one row for 9,999 clients": _finish_many_clients,
    "finish: 200 prompts become dead letters": _finish_failures,
    "renew: 200 prompts": _renew,
    "release: 200 prompts, with reasons": _release,
    "abandoned: 200 prompts": _abandoned,
    "sweep: 200,000 clients had prompts in the backlog": _sweep_clients,
    "sweep: 1,000 workers are dead": _sweep_workers,
    "survey: a prompt of 4 million tokens is held": _survey,
    "alive: 10,000 workers, named": _alive,
    "entries: 128 of each of 16 rows": _entries,
    "fields: 4,096 model infos": _fields,
}

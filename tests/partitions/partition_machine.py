"""A state machine for Hypothesis: clients and workers use three partitions of a queue, and masters go down for a while.

Up to three steps run at the same time. The machine sets deadlines into the past, and XCLAIM ends leases.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lmpool.producer.client.discovery import TROUBLE
from lmpool.producer.client.partitions import _of_digest
from lmpool.producer.client.requests import Stage
from lmpool.protocol.job import digest_of, unpack_job
from lmpool.protocol.keys import GROUP, JOB_FIELD
from tests.partitions.partition_actors import INFO, NUMBERS, PARTITIONS, PROMPTS, Client, Masters, Rows, Worker, split

LEASE_MS = int(1000 * INFO.lease_s)
CLIENTS = ("a", "b", "bulk")
MAX_WORKERS = 4
MAX_ROUNDS = 40
PAST_MS = 1  # A deadline that has passed.

# This script reads all keys: key, content, and the delivered entries of a stream.
_LOOK = """
local found = {}
local reads = {
  zset = {'ZRANGE', 0, -1, 'WITHSCORES'}, hash = {'HGETALL'}, string = {'GET'}, stream = {'XRANGE', '-', '+'},
}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local held = kind == 'stream' and redis.pcall('XPENDING', key, ARGV[1], '-', '+', 10000) or {}
  found[#found + 1] = {key, redis.call(reads[kind][1], key, unpack(reads[kind], 2)), held.err and {} or held}
end
return found
"""


@dataclass
class Queue:
    """The content of one partition.

    Attributes:
        jobs: digest of a prompt -> its jobs: entries of streams, and "later" for a job in the backlog.
        held: delivered entry -> (worker that holds the entry, ms since the delivery).
        lanes: worker -> entries in its lane. counted: worker -> recorded length of its lane; "" -> sum.
        serving: workers that take jobs. deadlines: worker -> time in ms after which it counts as lost.
        waiting: digest -> its job, and the reply keys of the clients that wait.
        records: digest -> the recorded partition.
        messages: reply key -> (id, digests) of each message.
    """

    jobs: dict[bytes, list[bytes]] = field(default_factory=dict)
    held: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    lanes: dict[str, list[bytes]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    serving: set[str] = field(default_factory=set)
    deadlines: dict[str, float] = field(default_factory=dict)
    waiting: dict[bytes, tuple[bytes, set[bytes]]] = field(default_factory=dict)
    records: dict[bytes, int] = field(default_factory=dict)
    messages: dict[bytes, list[tuple[bytes, list[bytes]]]] = field(default_factory=dict)

    def add(self, key: bytes, kind: bytes, name: bytes, value: Any, held: list[Any]) -> None:
        """Add the content of one key, whose name is the partition's prefix, `kind`, and ":" and `name` if any."""
        worker = name.decode("utf-8", "replace")
        match kind:
            case b"jobs" | b"lane":
                suffix = b" " + name if kind == b"lane" else b""
                if suffix:
                    self.lanes[worker] = [entry + suffix for entry, _ in value]
                for entry, flat in value:
                    if data := dict(_pairs(flat)).get(JOB_FIELD):
                        self.jobs.setdefault(_digest(data), []).append(entry + suffix)
                self.held |= {entry + suffix: (holder.decode(), idle) for entry, holder, idle, _ in held}
            case b"lanes":
                self.counted = {member.decode(): int(score) for member, score in _pairs(value)}
            case b"workers":
                self.deadlines = {member.decode(): float(score) for member, score in _pairs(value)}
            case b"capacity":
                self.serving = {member.decode() for member, _ in _pairs(value)} - {""}
            case b"backlog" if not name:
                for digest, _ in _pairs(value):
                    self.jobs.setdefault(digest, []).append(b"later")
            case b"waiting" if isinstance(value, bytes):
                reply, _, job = value.partition(b"\n")
                self.waiting[name] = job, {reply}
            case b"waiting":
                fields = dict(_pairs(value))
                self.waiting[name] = fields.get(b"job", b""), fields.keys() - {b"job"}
            case b"partition":
                self.records[name] = int(value)
            case b"reply":
                self.messages[key] = [(entry, split(dict(_pairs(flat))[b"d"])) for entry, flat in value]


@lru_cache
def _digest(data: bytes) -> bytes:
    return digest_of(unpack_job(data).ids)


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


_NUMBER, _COUNT = st.sampled_from(NUMBERS), st.sampled_from([1, 2, 100])
_PICK = st.integers(0, MAX_WORKERS - 1)
_PROMPTS = st.lists(st.sampled_from(range(len(PROMPTS))), min_size=1, max_size=4)
_RARELY = st.sampled_from([False, False, True])
# (weight of a step, name of a method, strategies for the method's arguments)
_Steps = list[tuple[int, str, tuple[st.SearchStrategy[Any], ...]]]
_OF_CLIENTS: _Steps = [
    (6, "submit", (_PROMPTS,)),
    (2, "ask_again", ()),
    (2, "resend", ()),
    (2, "cancel", (_PROMPTS,)),
    (4, "read", ()),
    (3, "poll", ()),
]
_OF_WORKERS: _Steps = [
    (8, "take", (_COUNT, st.booleans())),
    (6, "finish", (_COUNT, _RARELY)),
    (5, "move", (_NUMBER,)),
    (3, "balance", ()),
    (2, "claim", ()),
    (2, "sweep", (st.booleans(),)),
    (1, "beat", ()),
    (1, "drop", ()),
]
_OF_MACHINE: _Steps = [
    (2, "start", (_NUMBER,)),
    (1, "crash", (_PICK,)),
    (1, "freeze", (_PICK,)),
    (1, "lapse", ()),
    (2, "evict", ()),
    (1, "lose_records", (_NUMBER,)),
    (1, "lose_jobs", (_NUMBER,)),
    (1, "go_down", (_NUMBER, st.booleans())),
    (3, "come_up", (_NUMBER,)),
]


def _some(actors: st.SearchStrategy[Any], steps: _Steps) -> list[st.SearchStrategy[Any]]:
    return [
        st.tuples(actors, st.just(name), st.tuples(*values)) for weight, name, values in steps for _ in range(weight)
    ]


# An actor is the name of a client, the number of a worker, or None for a step of the machine.
STEPS = st.one_of(
    _some(st.sampled_from(CLIENTS), _OF_CLIENTS) + _some(_PICK, _OF_WORKERS) + _some(st.none(), _OF_MACHINE)
)


class PartitionMachine(RuleBasedStateMachine):
    """Three clients, up to four workers, and three masters.

    Args:
        url: URL of a server that no other test uses.
        loop: event loop of all clients and workers.
        seen: counts the events of each kind.
    """

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop, seen: Counter[str]) -> None:
        super().__init__()
        self.masters, self.rows, self.loop, self.seen = Masters(url, seen), Rows(), loop, seen
        self.masters.plain.flushall()
        self.look_up = self.masters.plain.register_script(_LOOK)
        self.clients: dict[str, Client] = {}
        self.workers: list[Worker] = []
        self.has_downs, self.is_sound, self.is_alone, self.started = False, False, False, 0
        self.free = set[bytes]()  # Prompts that may have several jobs.
        self.lost = set[bytes]()  # Prompts whose jobs the server has lost.
        self.queues = [Queue() for _ in NUMBERS]

    @initialize(number=st.integers(0, 2**16), places=st.lists(_NUMBER, max_size=MAX_WORKERS), has_downs=st.booleans())
    def begin(self, number: int, places: list[int], has_downs: bool) -> None:
        """Draw the order of concurrent calls, the first workers, and whether masters go down."""

        async def begin() -> None:
            self.clients = {name: Client(name, self.masters, self.rows) for name in CLIENTS}
            for place in places:
                await self.start(place)
            for client in self.clients.values():
                await client.poll()

        random.seed(number)
        self.has_downs = has_downs
        self.loop.run_until_complete(begin())

    @rule(steps=st.lists(STEPS, min_size=1, max_size=3))
    def act(self, steps: list[tuple[str | int | None, str, tuple[Any, ...]]]) -> None:
        """Run steps at the same time; each client and each worker runs one step at a time."""
        self.is_sound, self.is_alone = False, len(steps) == 1

        async def act() -> None:
            await asyncio.gather(*(self._act(*step) for step in steps))

        self.loop.run_until_complete(act())

    async def _act(self, actor: str | int | None, name: str, values: tuple[Any, ...]) -> None:
        with suppress(*TROUBLE):  # Clients and workers repeat their work after an error of the server.
            if actor is None:
                await getattr(self, name)(*values)
            elif by := self.clients[actor] if isinstance(actor, str) else self._worker(actor):
                async with by.lock:
                    await getattr(by, name)(*values)

    def _worker(self, pick: int) -> Worker | None:
        return self.workers[pick % len(self.workers)] if self.workers else None

    # Faults, and time

    async def start(self, number: int, most: int = MAX_WORKERS) -> None:
        """Start a worker, unless there are `most` workers."""
        if len(self.workers) < most:
            self.started += 1
            worker = Worker(f"w{self.started}", self.masters, self.rows, batch=1 + self.started % 2)
            await worker.start(number)  # If the master does not answer, the worker ends.
            self.workers.append(worker)

    async def crash(self, pick: int) -> None:
        if worker := self._worker(pick):
            async with worker.lock:
                if worker in self.workers:
                    self.workers.remove(worker)

    async def freeze(self, pick: int) -> None:
        """A worker misses a lease and continues: other workers take over its jobs, and may remove it."""
        if worker := self._worker(pick):
            self.masters.plain.zadd(PARTITIONS[worker.partition].workers, {worker.name: PAST_MS}, xx=True)
            for entry, (name, _) in self._look()[worker.partition].held.items():
                if name == worker.name:
                    self._end_lease(worker.partition, entry, name)

    async def lapse(self) -> None:
        """A lease passes: live workers renew only their registrations, and the leases of the jobs that they compute."""
        for worker in self.workers:
            worker.wait_for_a_lease()
        live = {(worker.name, worker.partition): worker.held for worker in self.workers}
        for number, queue in enumerate(self._look()):
            for name in queue.deadlines.keys() - {name for name, place in live if place == number}:
                self.masters.plain.zadd(PARTITIONS[number].workers, {name: PAST_MS}, xx=True)
            for entry, (name, _) in queue.held.items():
                if entry not in live.get((name, number), ()):
                    self._end_lease(number, entry, name)

    def _end_lease(self, number: int, entry: bytes, name: str) -> None:
        entry_id, _, lane = entry.partition(b" ")
        stream = PARTITIONS[number].lane(lane) if lane else PARTITIONS[number].jobs
        self.masters.plain.xclaim(stream, GROUP, name, 0, [entry_id], idle=2 * LEASE_MS, justid=True)

    async def evict(self) -> None:
        """Let the server evict all rows."""
        self.rows.stored.clear()

    async def lose_records(self, number: int) -> None:
        """Let the records of a partition expire."""
        if records := self._look()[number].records:
            self.seen["records lost"] += len(records)
            self.free |= records.keys()
            self.masters.plain.delete(*(PARTITIONS[number].partition + digest for digest in records))

    async def lose_jobs(self, number: int) -> None:
        """Let a server lose the jobs of the shared stream: clients that wait for a lease submit these prompts again."""
        keys, queue = PARTITIONS[number], self._look()[number]
        for digest, entries in queue.jobs.items():
            for entry in entries:
                if entry != b"later" and b" " not in entry:
                    self.masters.plain.xack(keys.jobs, GROUP, entry)
                    self.masters.plain.xdel(keys.jobs, entry)
                    self.lost.add(digest)
                    self.seen["jobs lost"] += 1

    async def go_down(self, number: int, is_late: bool) -> None:
        """A master does not answer any more. If it fails late, it executes one more command without a reply."""
        if self.has_downs and is_late:
            self.masters.failing.add(number)
        elif self.has_downs:
            self.masters.fail(number)

    async def come_up(self, number: int) -> None:
        self.masters.down.discard(number)

    # Invariants

    def _look(self) -> list[Queue]:
        queues = [Queue() for _ in NUMBERS]
        for key, value, held in self.look_up(args=[GROUP]):
            for queue, keys in zip(queues, PARTITIONS, strict=True):
                if key.startswith(keys.base + b":"):
                    kind, _, name = key[len(keys.base) + 1 :].partition(b":")
                    queue.add(key, kind, name, value, held)
        return queues

    @invariant()
    def check(self) -> None:
        self.is_sound = False
        before, self.queues = self.queues, self._look()
        self._check_waits()
        self._check_single_flight(before)
        self._check_members()
        for queue in self.queues:
            lengths = {name: len(queue.lanes.get(name, ())) for name in queue.counted if name}
            counted = {name: count for name, count in queue.counted.items() if name}
            assert counted == lengths, f"lanes count {counted} and have {lengths}"
            assert queue.counted.get("", 0) == sum(lengths.values()), f"the sum of {queue.counted} is wrong"
            assert not any(entries for name, entries in queue.lanes.items() if name not in queue.counted)
            self.seen["jobs in backlogs"] += sum(jobs.count(b"later") for jobs in queue.jobs.values())
        self.masters.was_down = set(self.masters.down)
        self.seen["steps"] += 1
        self.seen["steps with a master down"] += bool(self.masters.down)
        self.is_sound = True

    def _check_waits(self) -> None:
        """Each client that waits in a partition has a job there, or a message that it has not read."""
        self.lost = {digest for digest in self.lost if any(c.requests.get(digest) for c in self.clients.values())}
        for name, client in self.clients.items():
            for request in client.at(Stage.WAITING):
                assert request.partition is not None
                digest, partition = request.prompt.digest, client.partitions[request.partition]
                queue = self.queues[partition.number]
                messages = queue.messages.get(partition.reply, [])
                if any(digest in digests and client.is_unread(partition, at) for at, digests in messages):
                    continue
                if digest in self.lost:
                    continue
                job, replies = queue.waiting.get(digest, (b"", set[bytes]()))
                where = f"{PROMPTS.index(request.prompt)} in partition {partition.number}"
                assert partition.reply in replies, f"{name} waits for {where}, and only {replies} are known"
                assert job in queue.jobs.get(digest, []), f"{name} waits for {where}, whose job {job!r} does not exist"

    def _check_single_flight(self, before: list[Queue]) -> None:
        """A prompt has one job, unless a client could not use the partition of the job or of the record."""
        queues, jobs = self.queues, Counter[bytes]()
        for queue in queues:
            jobs.update({digest: len(entries) for digest, entries in queue.jobs.items()})
        for client in self.clients.values():
            for digest, usable in client.submitter.views:
                registry = _of_digest(digest, client.partitions.current).number
                known = {number for number in NUMBERS if digest in queues[number].jobs}
                recorded = {each[registry].records.get(digest) for each in (before, queues)} - {None}
                if not known | recorded <= usable:
                    self.free.add(digest)
                record = queues[registry].records.get(digest)
                is_agreed = record in usable or record is None or not usable
                is_certain = self.is_alone and not self.masters.was_down
                assert is_agreed or not is_certain, f"a client has sent {digest!r} elsewhere than to {record}"
            client.submitter.views.clear()
        for prompt in PROMPTS:
            digest = prompt.digest
            is_open = jobs[digest] or any(client.requests.get(digest) for client in self.clients.values())
            if self.masters.was_down:
                self.free.add(digest)
            elif not is_open:
                self.free.discard(digest)
            places = [queue.jobs.get(digest, []) for queue in queues]
            assert jobs[digest] <= 1 or digest in self.free, f"{PROMPTS.index(prompt)} has several jobs: {places}"
            self.seen["prompts with several jobs"] += jobs[digest] > 1
            self.seen["prompts that may have one job only"] += bool(is_open) and digest not in self.free

    def _check_members(self) -> None:
        """A worker takes jobs in its partition only, and other workers may claim what it left in another one."""
        for worker in self.workers:
            name = worker.name
            if worker.has_moved and self.is_alone and not self.masters.was_down:
                assert name in self.queues[worker.partition].serving, f"{name} has moved and takes no jobs"
            worker.has_moved = False
            for number, queue in enumerate(self.queues):
                if name not in queue.serving | queue.deadlines.keys():
                    worker.left.discard(number)
                if number == worker.partition or number in worker.left:
                    continue
                assert name not in queue.serving, f"{name} has left partition {number} and takes jobs there"
                assert queue.deadlines.get(name, 0) <= PAST_MS, (
                    f"{name} has left partition {number}, and is listed there"
                )
                left = [entry for entry in queue.lanes.get(name, []) if entry not in queue.held]
                assert not left, f"{name} has left partition {number}, and {left} stay in its lane"
                late = [idle for holder, idle in queue.held.values() if holder == name and idle < LEASE_MS]
                assert not late, f"{name} has left partition {number}, and holds jobs that no worker claims"

    # The end of a run

    def teardown(self) -> None:
        """Bring all masters up, and check that each client gets a message for each prompt that it waits for."""
        try:
            if self.is_sound and self.clients:
                self.loop.run_until_complete(self._end())
                self.seen["examples"] += 1
        finally:
            self.masters.plain.close()

    async def _end(self) -> None:
        self.masters.down.clear()
        self.masters.failing.clear()
        self.rows.stored.clear()
        await self.start(0, most=1)
        for worker in self.workers:
            # A worker that could not join the partition, because the master failed, joins when it takes jobs.
            await worker.take(100)
            await worker.heartbeat.register()
        for client in self.clients.values():
            await client.poll()
            await client.resend()
            await client.ask_again(fetches=False)
        self.lost.clear()
        for _ in range(MAX_ROUNDS):
            await self.lapse()
            for worker in self.workers:
                await worker.heartbeat.sweep(is_complete=True)
                await worker.finish(100)
                while await worker.claim() or await worker.take(100):
                    await worker.finish(100)
                await worker.balance()
            for client in self.clients.values():
                await client.read()
            self.check()
            is_empty = not any(queue.jobs or any(queue.lanes.values()) for queue in self.queues)
            if is_empty and not any(map(len, (client.requests for client in self.clients.values()))):
                return
        pending = {name: len(client.requests) for name, client in self.clients.items()}
        left = [(queue.jobs, queue.lanes) for queue in self.queues]
        raise AssertionError(f"jobs or clients are left: {pending}, {left}")

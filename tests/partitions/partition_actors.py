"""The real clients and workers of a model with three partitions, on one server that stands for three masters."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from lmpool.broker import scripts
from lmpool.broker.scripts import Load, read_loads
from lmpool.errors import LMPoolError, ServerError, ServerUnreachable, WorkerError
from lmpool.producer.client.discovery import TROUBLE
from lmpool.producer.client.partitions import Partition, Partitions, Placed
from lmpool.producer.client.requests import PendingRequest, PendingRequests, RowLRU, Stage
from lmpool.producer.client.submit import Submitter
from lmpool.producer.metrics import Counters, ProducerStats
from lmpool.protocol.job import DIGEST_SIZE, encode_prompt
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import ModelInfo
from lmpool.workers.execution.in_flight import StreamEntry
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.membership.partitions import PartitionMover
from lmpool.workers.metrics.counters import WorkerCounters
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.jobs import JobReader, Taken
from lmpool.workers.queue.leases import Leases
from tests.producer.client.tables import row
from tests.shared.broker.scripts.script_calls import FAILURE, finish_args
from tests.support.pool import PATIENCE

KEYS, MODEL, NUMBERS = Keys("test"), "m", (0, 1, 2)
INFO = ModelInfo(MODEL, "synthetic", 3000, 100, "seed", "float32", lease_s=3600.0, partitions=NUMBERS)
PARTITIONS = [KEYS.model(MODEL, number) for number in NUMBERS]
# Prompts of 24 tokens. Each block of 16 tokens begins three prompts, so prompts have homes (`Homes`).
PROMPTS = [
    encode_prompt([number % 4] * 16 + [number] * 8, vocab_size=INFO.vocab_size, max_tokens=INFO.max_prompt_tokens)
    for number in range(12)
]
_SCRIPTS = {value.sha: value.name for value in vars(scripts).values() if isinstance(value, scripts.Script)}
_KEY = re.compile(rb"test:\{m(?:\{(\d))?\}")
_MARK_MS = 7_200_000  # Lifetime of the mark that a finished job leaves.
_MAX_DELIVERIES = 1000  # No job becomes a dead letter.


class Masters(redis.asyncio.Redis):
    """A client of the server. Each partition has a master of its own, which may be down.

    Attributes:
        down: partitions whose masters do not answer.
        failing: partitions whose masters execute one more command, and fail before they reply.
        was_down: partitions whose masters did not answer at some time in the current step.
        seen: counts events of each kind.
    """

    def __init__(self, url: str, seen: Counter[str]) -> None:
        super().__init__()
        self.plain, self._raw = (redis.Redis.from_url(url, protocol=2, **PATIENCE) for _ in range(2))
        self._raw.response_callbacks.clear()
        self.down, self.failing, self.was_down, self.seen = set[int](), set[int](), set[int](), seen

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self.run(self.plain.execute_command, args, options)

    async def call(self, *args: Any) -> Any:
        """Run a command as `CommandConnection.call`; a read does not block."""
        if args[0] == b"XREADGROUP":
            block = args.index(b"BLOCK")
            args = args[:block] + args[block + 2 :]
        try:
            return await self.run(self._raw.execute_command, args, {})
        except NoScriptError:
            raise
        except ResponseError as error:
            raise ServerError(str(error)) from error
        except redis.ConnectionError as error:
            raise ServerUnreachable(str(error)) from error

    async def run(self, execute: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a command after a random delay, so that the calls of clients and workers interleave."""
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        number = next((int(key[1] or 0) for arg in args if isinstance(arg, bytes) and (key := _KEY.match(arg))), None)
        if number in self.down:
            raise redis.ConnectionError("the master is down")
        if args[0] == "EVALSHA":
            self.seen[f"{_SCRIPTS[args[1]]}.lua"] += 1
        reply = execute(*args, **options)
        if number in self.failing:
            self.failing.discard(number)
            self.fail(number)
            self.seen["replies lost"] += 1
            raise redis.ConnectionError("the master has failed")
        await asyncio.sleep(0)
        return reply

    def fail(self, number: int) -> None:
        self.down.add(number)
        self.was_down.add(number)


def _stand_in(**parts: Any) -> Any:
    """An object with these attributes, for a part of the product that needs no server."""
    return SimpleNamespace(**parts)


_SERVER = _stand_in(explain=lambda error: ServerUnreachable(str(error)))


class Rows:
    """The cache of rows, which has no master that can be down. Scripts do not see rows, as on a cluster."""

    is_seen = False

    def __init__(self) -> None:
        self.stored: set[bytes] = set()

    async def get_many(self, digests: Sequence[bytes], resolve: Callable[..., None], _: object) -> int:
        resolve(digests, [row() if digest in self.stored else None for digest in digests])
        return 0

    async def existing(self, digests: Sequence[bytes]) -> list[bytes]:
        return [digest for digest in digests if digest in self.stored]


class RecordingSubmitter(Submitter):
    """Records the view of the client at each submission. The steps of the test send refused requests again.

    Attributes:
        views: digest of a submitted prompt, and the partitions that the client used; none if a master did not answer.
    """

    views: list[tuple[bytes, set[int]]]

    def retry_soon(self) -> None:
        pass

    async def _submit_to(self, placed: Placed, again: bool) -> list[bytes]:
        partitions = self._connections.partitions
        is_complete = len(partitions.reachable) == len(partitions.current)
        usable = {partition.number for partition in partitions.usable} if is_complete else set[int]()
        self.views += [(request.prompt.digest, usable) for request in placed.requests]
        return await super()._submit_to(placed, again)

    async def _call_script(
        self, partition: Partition, requests: Sequence[PendingRequest], homes: Sequence[bytes], again: str
    ) -> bytes:
        outcome = await super()._call_script(partition, requests, homes, again)
        cast(Masters, self._connections.redis).seen.update(f"submit {code}" for code in outcome.decode() or ["refers"])
        return outcome


class Client:
    """A client: the real `Partitions`, `PendingRequests` and `Submitter`. Create it within the event loop."""

    def __init__(self, name: str, masters: Masters, rows: Rows) -> None:
        self._masters, self._tasks, self._since = masters, list[asyncio.Task[None]](), dict[bytes, bytes]()
        self.lock = asyncio.Lock()
        self.requests = PendingRequests(Counters(ProducerStats(), RowLRU(0)))
        self.partitions = Partitions(_SERVER, KEYS)
        self.partitions.poll = self.poll
        self.partitions.adopt(INFO, name, is_bulk=name.startswith("bulk"))
        for partition in self.partitions.current:
            partition.commands = cast(Any, masters)
        loop = asyncio.get_running_loop()
        connections = _stand_in(
            partitions=self.partitions,
            redis=masters,
            loop=loop,
            spawn=lambda work: self._tasks.append(loop.create_task(work)),
            model=_stand_in(rows=rows, info=INFO, fingerprint=INFO.fingerprint, reads=b""),
            segments=_stand_in(has_any=False),
            datagrams=_stand_in(name=b""),
            direct=None,
            note=lambda error: None,
            noting=lambda: suppress(*TROUBLE),
        )
        self.submitter = RecordingSubmitter(connections, self.requests)
        self.submitter.views, self.submitter.homes.has_choice = [], True

    def at(self, stage: Stage) -> list[PendingRequest]:
        return [request for request in self.requests if request.stage is stage]

    async def submit(self, numbers: Sequence[int]) -> None:
        """Request the prompts for which the client does not wait yet."""
        new = [prompt for prompt in (PROMPTS[number] for number in numbers) if self.requests.get(prompt.digest) is None]
        added = deque(self.requests.add(prompt, lambda answer: None)[0] for prompt in dict.fromkeys(new))
        await self.submitter._send(self.requests.admit(added))

    async def resend(self) -> None:
        await self.submitter._send(self.at(Stage.UNSENT))

    async def ask_again(self, *, fetches: bool = True) -> None:
        """Act as after a lease without a reply (`Session._recheck`)."""
        waiting = self.at(Stage.WAITING)
        if fetches:
            await self.submitter.fetch([request.prompt.digest for request in waiting])
        if late := [request for request in waiting if self.requests.is_open(request)]:
            await self.submitter.submit(late, again=True)

    async def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (request := self.requests.get(PROMPTS[number].digest)) is not None:
                for waiter in list(request.waiters):
                    self.requests.remove_waiter(request, waiter)
                self.submitter.cancel(request)
        await asyncio.sleep(0)  # The submitter spawns one task for all cancelled requests.
        await asyncio.gather(*self._tasks)
        self._tasks.clear()

    async def poll(self) -> None:
        """Read the load of each partition, as `Discovery` does."""
        for number, load in zip(NUMBERS, await read_loads(self._masters, PARTITIONS), strict=True):
            self.partitions.note_load(number, load if isinstance(load, Load) else None)

    async def read(self) -> None:
        """Read the messages in all reply streams that can be read."""
        for partition in self.partitions.used:
            messages: Any = []
            with suppress(LMPoolError):
                since = self._since.get(partition.reply, b"0-0")
                messages = await self._masters.call(b"XRANGE", partition.reply, b"(" + since, b"+")
            for message_id, flat in messages:
                self._since[partition.reply] = message_id
                await self._on_message(partition, dict(zip(flat[::2], flat[1::2], strict=True)))

    async def _on_message(self, partition: Partition, fields: dict[bytes, bytes]) -> None:
        digests = split(fields[b"d"])
        requests = [request for request in map(self.requests.get, digests) if request is not None]
        partition.count(-len(digests))
        if b"e" in fields:
            for request in requests:
                self.requests.resolve(request, WorkerError("failed"))
        else:
            self.submitter.homes.note([request.prompt for request in requests], fields[b"w"], partition.number)
            await self.submitter.fetch_announced(requests)

    def is_unread(self, partition: Partition, message_id: bytes) -> bool:
        return _order(message_id) > _order(self._since.get(partition.reply, b"0-0"))


class Worker:
    """A worker: the real `PartitionMover`, `Heartbeat`, `Consumer` and `Leases`.

    Attributes:
        held: id of an entry that the worker computes -> the entry.
        has_moved: whether the worker has moved in the current step.
        left: partitions that the worker has left while their masters were down, so that it is still registered there.
    """

    def __init__(self, name: str, masters: Masters, rows: Rows, batch: int) -> None:
        self.name, self._masters, self._rows = name, masters, rows
        self.has_moved = False
        self.held, self.left, self.lock = dict[bytes, StreamEntry](), set[int](), asyncio.Lock()
        connection = cast(Any, _stand_in(call=masters.call, hang_up=lambda error: None))
        self.reader = JobReader(masters, PARTITIONS[0], INFO, name, WorkerCounters())
        self.heartbeat = Heartbeat(masters, KEYS, INFO, name, batch)
        self.consumer, self.leases = Consumer(self.reader, connection), Leases(self.reader, _MAX_DELIVERIES)
        queue = _stand_in(use_queue=lambda key: None)
        self.mover = PartitionMover(_SERVER, self.heartbeat, self.consumer, self.leases, queue, None)

    @property
    def partition(self) -> int:
        return self.heartbeat.partition

    async def start(self, number: int) -> None:
        self.mover._use(number)
        await self.consumer.ensure_group()
        await self.heartbeat.register()
        await self.consumer.open_lane()

    async def move(self, number: int) -> None:
        """Move, as an idle worker does, to a partition whose master answers."""
        own, masters = self.partition, self._masters
        if self.held or number == own or number in masters.down:
            return
        masters.seen["moves"] += 1
        self.has_moved = True
        try:
            await self.mover.move(number)
        finally:
            self.left.discard(number)
            if own in masters.was_down:
                masters.seen["moves away from a master that was down"] += 1
                self.left.add(own)

    async def balance(self) -> None:
        """Move if the loads of the partitions require a move (`PartitionMover.better_partition`)."""
        loads = await self.mover.read_loads()
        if not self.held and (number := self.mover.better_partition(loads, was_idle=True)) is not None:
            self._masters.seen["moves by load"] += 1
            await self.move(number)

    def wait_for_a_lease(self) -> None:
        """Let a lease pass for the decisions of the worker about moves."""
        self.mover._moved_at -= 2 * INFO.lease_s
        self.mover._silent_since -= 2 * INFO.lease_s

    async def beat(self) -> None:
        """Register again, as a worker does at times."""
        await self.heartbeat.register()

    async def sweep(self, is_complete: bool) -> None:
        await self.heartbeat.sweep(is_complete=is_complete)

    async def drop(self) -> None:
        """Drop the held jobs for which no client waits."""
        for entry in await self.reader.remove_unwanted(list(self.held.values())):
            del self.held[entry]
            self._masters.seen["dropped"] += 1

    async def take(self, count: int, is_lost: bool = False) -> int:
        """Take new jobs; without a new job, an idle worker finds work. If the reply is lost, the worker holds none."""
        taken = await self.consumer.take(count, 0)
        if not is_lost:
            self._hold(taken)
        if not taken and not self.held:
            await self.consumer.find_work(count, 0.0)
        self._masters.seen["taken"] += len(taken.prompts)
        return len(taken.prompts)

    async def claim(self) -> int:
        taken, _, _ = await self.leases.claim(2, self.held)
        self._hold(taken)
        self._masters.seen["claimed"] += len(taken.prompts)
        return len(taken.prompts)

    def _hold(self, taken: Taken) -> None:
        assert not taken.refused
        for prompt in taken.prompts:
            self.held |= prompt.entries

    async def finish(self, count: int, has_failed: bool = False) -> None:
        """End some of the held jobs, each with a row or with a failure."""
        if not (ended := dict(list(self.held.items())[:count])):
            return
        if not has_failed:
            self._rows.stored |= {entry.digest for entry in ended.values()}
        keys = [self.reader.keys.jobs, self.reader.keys.dead]
        keys += [self.reader.keys.waiting + entry.digest for entry in ended.values()]
        endings = [(entry, FAILURE if has_failed else b"", False) for entry in ended]
        args = finish_args(*endings, mark_ms=_MARK_MS, consumer=self.name)
        await scripts.FINISH.on(self._masters.call, keys, args)
        for entry in ended:
            del self.held[entry]


def split(digests: bytes) -> list[bytes]:
    """The digests in a field of a message."""
    return [digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE)]


def _order(message_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, message_id.split(b"-")))

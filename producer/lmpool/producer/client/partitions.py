"""The partitions of a model's queue: a client's connections to them, and the choice of a partition for each prompt.

Workers publish the numbers of the partitions in the model info. See "Partitions" in docs/design/many-workers.md.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmpool.broker import scripts
from lmpool.broker.connection import Argument, CommandConnection, reply_timeout
from lmpool.broker.scripts import Load
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError, ServerUnreachable
from lmpool.producer.client.requests import PendingRequest
from lmpool.protocol.job import Prompt
from lmpool.protocol.keys import Keys, ModelKeys
from lmpool.protocol.model_info import ModelInfo

# A prompt leaves its partition if this has more than `_FACTOR` times the batches of another one, and `_SLACK` more.
_FACTOR, _SLACK = 1.25, 1.0
# Lifetime of the record of a prompt's partition, in leases: waiting clients renew the record once per lease.
_MEETING_LEASES = 2
# Additional lifetime of this record in seconds, because a client on a busy machine may renew it late.
_MEETING_MARGIN_S = 5.0
# Seconds after which the loads are polled before prompts are sent: the session polls them while requests are pending.
_OLD_S = 10.0
_UNKNOWN = Load(0, 0, 0)  # The load of a partition before its first poll.

FindHome = Callable[[Prompt], tuple[int | None, int]]
"""Returns the partition of a prompt's home (None without a home), and the key of the prefix that the home computed."""


@dataclass(slots=True, eq=False)
class Partition:
    """One partition of a model's queue, as one client uses it.

    Attributes:
        number: see `Keys.model`.
        commands: connection for the scripts of requests.
        reader: connection for the blocking reads of the reply stream only.
        keys: keys of the partition.
        reply: key of this client's reply stream in the partition.
        load: how busy the partition was at the last poll.
        jobs: estimate of the jobs in the partition now: those of the last poll, and this client's changes since then.
        refused_until: loop time until which the client sends no prompts, because the master did not answer.
        is_read: whether the session reads the reply stream.
    """

    number: int
    commands: CommandConnection
    reader: CommandConnection
    keys: ModelKeys
    reply: bytes = b""
    load: Load = _UNKNOWN
    jobs: int = 0
    refused_until: float = -math.inf
    is_read: bool = False

    @property
    def batches(self) -> float:
        """The partition's jobs, in batches of all its workers."""
        return self.jobs / max(1, self.load.batch)

    def count(self, more: int) -> None:
        """Count jobs that this client has added, or that have ended (negative)."""
        self.jobs = max(0, self.jobs + more)


class Placed(NamedTuple):
    """Requests for one partition.

    Attributes:
        must_check: whether `submit.lua` must check that clients do not wait for these prompts in another partition.
    """

    partition: Partition
    requests: Sequence[PendingRequest]
    must_check: bool


class Partitions:
    """The partitions of a session's model. `adopt` adds them.

    Attributes:
        current: the partitions that the model info names; the first is partition 0.
        opened: queue of the partitions whose reply streams the session must begin to read.
        poll: records the load of each partition; it raises no error of the server.
    """

    poll: Callable[[], Awaitable[None]]

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server, self._keys, self._loop = server, keys, asyncio.get_running_loop()
        self._known: dict[int, Partition] = {}
        self._lease_s = 0.0
        self.current: list[Partition] = []
        self.opened: asyncio.Queue[Partition] = asyncio.Queue()
        self._polled_at = -math.inf  # Loop time of the last poll.

    def adopt(self, info: ModelInfo, reply_name: str, *, is_bulk: bool) -> None:
        """Use the partitions of a model; `reply_name` is the name of this client's reply streams."""
        self._lease_s = info.lease_s
        for number in dict.fromkeys([*info.partitions, *self._known]):
            keys = self._keys.model(info.name, number)
            if number not in self._known:
                commands, reader = CommandConnection(self._server), CommandConnection(self._server)
                self._known[number] = Partition(number, commands, reader, keys)
            partition = self._known[number]
            partition.keys, partition.reply = keys, keys.reply(reply_name, is_bulk=is_bulk)
            for connection in (partition.commands, partition.reader):
                connection.key, connection.reply_timeout_s = keys.jobs, reply_timeout(info.lease_s)
        self.current = [self._known[number] for number in info.partitions]
        self.read(self.current[0])

    def hang_up(self) -> None:
        """End the reads of the reply streams, because the client changes its reply key."""
        for partition in self.used:
            partition.reader.hang_up(ServerUnreachable("the client changes its reply key"))

    def leave(self) -> None:
        """End the reads of the reply streams, because the client changes to another version of the model's weights."""
        self.hang_up()
        for partition in self._known.values():
            partition.load, partition.jobs = _UNKNOWN, 0

    def __getitem__(self, number: int) -> Partition:
        return self._known[number]

    @property
    def used(self) -> list[Partition]:
        """The partitions to which this client has sent prompts."""
        return [partition for partition in self._known.values() if partition.is_read]

    def read(self, partition: Partition) -> None:
        """Have the session read the reply stream of a partition, unless it does."""
        if not partition.is_read:
            partition.is_read = True
            self.opened.put_nowait(partition)

    def close(self) -> None:
        """Close all connections."""
        for partition in self._known.values():
            partition.commands.close()
            partition.reader.close()

    # The choice of a partition

    def note_load(self, number: int, load: Load | None) -> None:
        """Record how busy a partition is; None if its master did not answer."""
        partition = self._known[number]
        if load is None:
            self.refuse(partition)
        else:
            partition.load, partition.jobs, partition.refused_until = load, load.jobs, -math.inf
        self._polled_at = self._loop.time()

    def refuse(self, partition: Partition) -> None:
        """Send no prompts to a partition for a lease, or until its master answers a poll."""
        partition.refused_until = self._loop.time() + self._lease_s

    @property
    def reachable(self) -> list[Partition]:
        """The current partitions whose masters answered last; all if no master answered."""
        now = self._loop.time()
        return [partition for partition in self.current if partition.refused_until <= now] or self.current

    @property
    def usable(self) -> list[Partition]:
        """The partitions that get prompts: those with live workers; without any worker, the first one."""
        reachable = self.reachable
        return [partition for partition in reachable if partition.load.workers] or reachable[:1]

    async def place(self, requests: Sequence[PendingRequest], find_home: FindHome) -> list[Placed]:
        """Choose a partition for each request, so that all clients that request a prompt choose the same partition."""
        if len(self.current) == 1:
            return [Placed(self.current[0], requests, False)]
        if self._loop.time() - self._polled_at > _OLD_S:
            self._polled_at = self._loop.time()
            await self.poll()
        usable = self.usable
        own, others, families = defaultdict(list), dict[PendingRequest, Partition](), dict[int, Partition]()
        for request in requests:
            registry = _of_digest(request.prompt.digest, self.current)
            before = self._known.get(request.partition) if request.partition is not None else None
            home, family = (before.number, 0) if before in usable else find_home(request.prompt)
            if before in usable:
                chosen = before
            elif home is None or self._known[home] not in usable:
                chosen = self._unless_busy(registry, usable)
            else:
                # Prompts that continue the same prompt go to the same partition: its worker computes it only once.
                if family not in families:
                    families[family] = self._unless_busy(self._known[home], usable)
                chosen = families[family]
            if chosen is registry:
                own[registry].append(request)
            else:
                others[request] = chosen
        placed = [Placed(partition, part, True) for partition, part in own.items()]
        return placed + (await self.meet(others) if others else [])

    async def meet(self, chosen: dict[PendingRequest, Partition]) -> list[Placed]:
        """Agree with other clients on the partitions of prompts; `chosen` has the partitions to propose."""
        await self._meet([request for request in chosen if not request.is_private], chosen, self.usable)
        placed: dict[Partition, list[PendingRequest]] = defaultdict(list)
        for request, partition in chosen.items():
            placed[partition].append(request)
        return [Placed(partition, part, False) for partition, part in placed.items()]

    def _unless_busy(self, own: Partition, usable: Sequence[Partition]) -> Partition:
        """A partition that gets prompts, or one drawn at random if that is much less busy or the first gets none."""
        other = random.choice(usable)
        return own if own in usable and own.batches <= _FACTOR * other.batches + _SLACK else other

    async def _meet(
        self, requests: Iterable[PendingRequest], chosen: dict[PendingRequest, Partition], usable: Sequence[Partition]
    ) -> None:
        """Replace the partitions in `chosen` by those that other clients have chosen earlier for the same prompts."""
        by_record: dict[Partition, list[PendingRequest]] = defaultdict(list)
        reachable = self.reachable
        for request in requests:
            place = _of_digest(request.prompt.digest, self.current)
            # If the master does not answer, all clients use the same other partition for the record.
            by_record[place if place in reachable else _of_digest(request.prompt.digest, reachable)].append(request)
        unusable = " ".join(str(each.number) for each in self.current if each not in usable)
        lifetime_ms = int(1000 * (_MEETING_LEASES * self._lease_s + _MEETING_MARGIN_S))

        async def agree(record: Partition, requests: Sequence[PendingRequest]) -> None:
            for at in range(0, len(requests), scripts.MAX_AT_ONCE):
                part = requests[at : at + scripts.MAX_AT_ONCE]
                keys = [record.keys.jobs, *(record.keys.partition + request.prompt.digest for request in part)]
                args: list[Argument] = [
                    lifetime_ms,
                    f" {unusable} ",
                    record.number,
                    *(chosen[request].number for request in part),
                ]
                try:
                    numbers = await scripts.MEET.on(record.commands.call, keys, args)
                    if not isinstance(numbers, list) or [bytes] * len(part) != list(map(type, numbers)):
                        raise record.commands.distrust(numbers)
                except LMPoolError:
                    # Without the record, another client may send a prompt to another partition: it is computed twice.
                    self.refuse(record)
                    return
                by_number: dict[object, Partition] = {b"%d" % each.number: each for each in usable}
                for request, number in zip(part, numbers, strict=True):
                    chosen[request] = by_number.get(number, chosen[request])

        await asyncio.gather(*(agree(record, part) for record, part in by_record.items()))


def _of_digest(digest: bytes, partitions: Sequence[Partition]) -> Partition:
    return partitions[int.from_bytes(digest[:4]) % len(partitions)]

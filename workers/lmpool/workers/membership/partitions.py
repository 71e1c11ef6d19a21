"""The partition of the model's queue that a worker serves: the choice at the start, and moves to other partitions.

See "Partitions" in docs/design/many-workers.md.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from redis.exceptions import RedisError

from lmpool.broker.scripts import Load, read_alive, read_loads
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError
from lmpool.protocol.keys import Keys
from lmpool.protocol.model_info import MAX_PARTITIONS, ModelInfo, partitions_in
from lmpool.rows.cache import RowCache
from lmpool.workers.membership.heartbeat import Heartbeat
from lmpool.workers.queue.consumer import Consumer
from lmpool.workers.queue.leases import Leases

_log = logging.getLogger("lmpool.worker")

# Batches of jobs per worker that wait in a partition before workers of an idle partition move there.
_STARVED_BATCHES = 2.0
# Leases between two moves of a worker: long enough that clients have seen the last move and send their prompts there.
_REST_LEASES = 1.0
_RESCUERS = 2.0  # Workers that move, on average, at one decision to a partition that has jobs and no worker.
_SINGLE_CHECKS = 12  # Checks, three per lease, after which a worker reads whether the queue has got a second partition.
# Max other partitions whose loads an idle worker compares with its own, so that a check costs the same with many.
_COMPARED = 2
_MOVING_SHARE = 0.5  # Share of the idle workers that move at one decision to a partition in which jobs wait.


async def grown(server: Server, keys: Keys, model: str, numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Add partitions to `numbers` up to `count`, each on the master that has the fewest partitions of the model."""
    masters = await server.masters()
    used = Counter([await server.at(keys.model(model, number).jobs) for number in numbers])
    number = max(numbers)
    while len(numbers) < count:
        number += 1
        master = await server.at(keys.model(model, number).jobs)
        if used[master] <= min(used[other] for other in masters):
            used[master] += 1
            numbers = (*numbers, number)
    return numbers


class PartitionMover:
    """Chooses the partition that a worker serves. A worker serves one partition at a time.

    Args:
        server: the pool's server.
        heartbeat: registers the worker in its partition.
        consumer: reads the jobs of the partition.
        leases: releases the jobs of the partition.
        rows: calls the scripts that end jobs.
        count: min partitions of the model's queue, or None for one on each master.
    """

    def __init__(
        self,
        server: Server,
        heartbeat: Heartbeat,
        consumer: Consumer,
        leases: Leases,
        rows: RowCache,
        count: int | None,
    ) -> None:
        self._server, self._heartbeat, self._consumer, self._leases = server, heartbeat, consumer, leases
        self._rows = rows
        self._redis, self._keys, self._count = heartbeat.redis, heartbeat.keys, count
        self._checks = 0
        self._moved_at = -math.inf  # Monotonic time of the last move.
        self._silent_since = math.inf  # Monotonic time since when the master of the worker's partition did not answer.

    @property
    def _info(self) -> ModelInfo:
        return self._heartbeat.info

    @property
    def is_single(self) -> bool:
        """Whether the model's queue has only the partition that this worker serves."""
        return self._info.partitions == (self._heartbeat.partition,)

    async def follow(self) -> bool:
        """Add the partitions that other workers have added; returns whether there is a choice of partitions."""
        self._checks += 1
        # A growing queue is rare: a queue with one partition is checked less often.
        if not self.is_single or self._checks % _SINGLE_CHECKS == 0:
            # While the master of the infos is down, workers move between the partitions that they have read.
            with suppress(RedisError, OSError, LMPoolError):
                await self._heartbeat.adopt_partitions()
        return not self.is_single

    async def choose_first(self) -> None:
        """Choose the partitions of the queue, and the one that this worker serves: the one with the fewest workers."""
        if self._info.is_trie:
            return
        seen, name = await self._heartbeat.read_info(), self._info.name
        count = self._count
        if count is None:
            count = min(len(await self._server.masters()), MAX_PARTITIONS)
        # The partitions of an info stay, because clients may use them. The last worker that stops removes the info.
        numbers = await grown(self._server, self._keys, name, partitions_in(seen), count)
        self._heartbeat.info = replace(self._info, partitions=numbers)
        loads = await self.read_loads(MAX_PARTITIONS) if len(numbers) > 1 else {}
        if not loads:
            return
        # If several workers start together, let them start in different partitions.
        others_start = bool((await read_alive(self._redis, self._keys.model(name))).loading)
        order = {number: random.random() if others_start else at for at, number in enumerate(numbers)}
        reachable = [number for number in numbers if number in loads]
        fewest = min(reachable, key=lambda number: (loads[number].workers, -loads[number].jobs, order[number]))
        self._use(fewest)

    async def read_loads(self, others: int = _COMPARED) -> dict[int, Load]:
        """How busy this worker's partition is, and up to `others` partitions, which are drawn at random.

        Leaves out partitions whose masters do not answer.
        """
        now, own = time.monotonic(), self._heartbeat.partition
        rest = [number for number in self._info.partitions if number != own]
        numbers = [own, *random.sample(rest, min(others, len(rest)))]
        queues = [self._keys.model(self._info.name, number) for number in numbers]
        loads = await read_loads(self._redis, queues, self._info.lease_s)
        known = {number: load for number, load in zip(numbers, loads, strict=True) if isinstance(load, Load)}
        self._silent_since = math.inf if own in known else min(self._silent_since, now)
        return known

    def better_partition(self, loads: Mapping[int, Load], *, was_idle: bool) -> int | None:
        """The partition to which this worker, which holds no job, moves now; None if it stays.

        Idle workers decide alone and at the same time, so most decisions are random: on average, the right number of
        workers moves. `was_idle` means that the worker has computed nothing since the last decision.
        """
        now, own = time.monotonic(), self._heartbeat.partition
        others = {number: load for number, load in loads.items() if number != own}
        if not others or now - self._moved_at < _REST_LEASES * self._info.lease_s:
            return None
        emptiest = min(others, key=lambda number: (others[number].workers, -others[number].jobs))
        if own not in self._info.partitions or now - self._silent_since > self._info.lease_s:
            return emptiest
        if (here := loads.get(own)) is None:
            return None
        left = others[emptiest]
        if not left.workers and left.jobs and (here.workers > 1 or not here.jobs):
            return emptiest if random.random() * here.workers < _RESCUERS else None
        if not was_idle:
            return None
        if here.workers >= left.workers + 2:
            return emptiest if random.random() < (here.workers - left.workers) / (2 * here.workers) else None
        busiest = max(others, key=lambda number: others[number].jobs / max(1, others[number].batch))
        is_starved = others[busiest].jobs > _STARVED_BATCHES * others[busiest].batch
        # Every partition keeps a worker, unless there are fewer workers than partitions.
        is_free = here.workers > 1 or sum(load.workers for load in loads.values()) < len(loads)
        return busiest if is_starved and is_free and random.random() < _MOVING_SHARE else None

    async def move(self, number: int) -> None:
        """Leave this worker's partition and join another one. The worker holds no job, takes no job, and sends none of
        its heartbeats during this call.
        """
        own = self._heartbeat.partition
        self._moved_at = time.monotonic()
        try:
            await self._consumer.close_lane()
            # Jobs of this worker that it never received, because the connection broke, go to other workers.
            await self._leases.release_all("its worker moved to another partition", ())
        except (RedisError, OSError, LMPoolError) as error:
            # The master does not answer. After a lease, other workers remove this worker and take over its jobs.
            _log.warning("cannot deregister: %s", self._server.explain(error))
        self._use(number)
        _log.info("moved from partition %d of the queue to partition %d", own, number)
        try:
            await self._consumer.ensure_group()
            await self._heartbeat.register()
            await self._consumer.open_lane()
        finally:
            # Leave last: a worker that is registered nowhere counts as dead, and others would remove the model's info.
            # If that fails, other workers remove this worker from its partition after a lease.
            with suppress(RedisError, OSError, LMPoolError):
                await self._heartbeat.leave_partition(own)

    def _use(self, number: int) -> None:
        """Use the keys and the master of a partition from now on."""
        keys = self._keys.model(self._info.name, number)
        self._heartbeat.partition, self._consumer.reader.keys = number, keys
        self._consumer.connection.key = keys.jobs
        self._consumer.connection.hang_up(ConnectionError("the worker serves another partition"))
        self._rows.use_queue(keys.jobs)

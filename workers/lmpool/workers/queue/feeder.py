"""Taking jobs as long as the backend has room: new ones, and those of workers that fell silent."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from lmpool.backoff import delays
from lmpool.broker.server import Server
from lmpool.errors import LMPoolError
from lmpool.workers.backend.engine_thread import Stepper
from lmpool.workers.dispatch import Delivery
from lmpool.workers.duty import Duty
from lmpool.workers.held import Holdings
from lmpool.workers.metrics.counters import Figures
from lmpool.workers.queue.consumer import Intake

_log = logging.getLogger("lmpool.worker")

_BLOCK_MS = 500
_GIVE_WAY_S = 0.001
_UNPUBLISHED_BATCHES = 4


class Feeder:
    """Brings jobs from the queue to the backend.

    Args:
        server: the pool's Redis, for what its errors mean.
        duty: whether to go on.
        held: what the worker holds.
        stepper: the backend.
        intake: where jobs are taken.
        delivery: where they go.
        figures: count what is done.
    """

    def __init__(
        self,
        server: Server,
        duty: Duty,
        held: Holdings,
        stepper: Stepper,
        intake: Intake,
        delivery: Delivery,
        figures: Figures,
    ) -> None:
        self._server = server
        self._duty = duty
        self._held = held
        self._stepper = stepper
        self._intake = intake
        self._delivery = delivery
        self._figures = figures
        # Held from taking jobs until they are in `_held`: what is not there is neither renewed nor counted.
        self._taking = asyncio.Lock()

    async def fetch(self) -> None:
        """Take jobs whenever the backend has room, until the worker stops: a batch when it is idle, the next one while
        it computes.
        """
        waits, duty = delays(), self._duty
        while not duty.stopping.is_set():
            await duty.until(lambda: duty.stopping.is_set() or self._room_for_new() > 0)
            if duty.stopping.is_set():
                return
            try:
                async with self._taking:
                    # Waiting for the lock may have taken long: a suspect job may have run alone meanwhile.
                    if duty.stopping.is_set() or (room := self._room_for_new()) <= 0:
                        continue
                    taken = await self._intake.take(min(room, self._stepper.batch), _BLOCK_MS)
                    was_idle = not self._held
                    await self._delivery.accept(taken)
            except (RedisError, OSError, LMPoolError) as error:
                self._figures.server_errors += 1
                _log.warning("cannot fetch, will try again: %s", self._server.explain(error))
                await asyncio.sleep(next(waits))
                continue
            waits = delays()
            if was_idle and self._held:
                # An idle backend is to begin: its thread needs the interpreter that the next fetch would occupy.
                await duty.change(_GIVE_WAY_S)

    async def claim(self) -> None:
        """Take over jobs of silent workers, as long as there are some and this one has room.

        Raises:
            RedisError, OSError, LMPoolError: the server cannot be used.
        """
        duty = self._duty
        async with self._taking:
            alone, looks = False, 0
            while not duty.stopping.is_set() and (self._room() > 0 or alone):
                count = max(1, min(self._room(), self._stepper.batch))
                claimed = await self._intake.claim(count, self._held.all_entries())
                self._figures.claimed += len(claimed.taken)
                if claimed.taken:
                    _log.info("took over %d prompts of workers that fell silent", len(claimed.taken))
                elif not claimed.alone and looks >= claimed.further:
                    break
                looks += 1
                await self._delivery.accept(claimed.taken)
                alone = claimed.alone
                if alone:
                    # What may have killed the others runs with nothing else in this worker: until it has
                    # ended, nothing can be fetched.
                    await duty.until(lambda: not self._held)

    def _room(self) -> int:
        """How many prompts may be held more."""
        if self._duty.broken is not None:
            return 0
        return min(self._stepper.room, self._free())

    def _room_for_new(self) -> int:
        # None for a part of a batch: it would be published as a part, and the room that it leaves be one again.
        return self._room() if self._free() >= self._stepper.batch else 0

    def _free(self) -> int:
        return _UNPUBLISHED_BATCHES * self._stepper.batch - len(self._held)

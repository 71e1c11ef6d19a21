"""Sending: look in the cache, ask workers for the rest, and take back what nobody waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

from lmpool.aio import Tasks, delays
from lmpool.broker import scripts
from lmpool.errors import QueueFull
from lmpool.producer.client.connections import TROUBLE, Connections
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage
from lmpool.protocol.job import Job, pack_jobs
from lmpool.protocol.keys import GROUP

_FEW = 8
_SENT = (Stage.SENDING, Stage.WAITING)
_HARDLY_ANY = 0.02
_LIKELY = 0.5
_HIT_RATE_WINDOW = 8
_LEAST_PATIENCE_S = 5.0
_MOST_PATIENCE_S = 3600.0
_UPLOAD_BYTES = 4 * 1024 * 1024
_MOST_IDS_BYTES = 512 * 1024
_IN_THE_WAY = b"+"


class Submitter:
    """Sends the flights of one session.

    Args:
        connections: the connections.
        requests: all flights of the session.
        tasks: where background work runs.
        waits_when_full: whether requests that the queue has no room for wait for it, or end.
    """

    def __init__(
        self, connections: Connections, requests: PendingRequests, tasks: Tasks, *, waits_when_full: bool = True
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._waits_when_full = waits_when_full
        self._unsent: deque[PendingRequest] = deque()
        self._flushing = False
        self._left: set[bytes] = set()
        self._spent: list[bytes] = []
        self._leaving = False
        self._retrying = False
        self._hit_rate = _LIKELY

    @property
    def is_retrying(self) -> bool:
        """Whether there are requests that could not be sent."""
        return self._retrying

    def add(self, request: PendingRequest) -> None:
        """Send a new request, together with all that are added in this tick of the event loop."""
        self._unsent.append(request)
        if not self._flushing:
            # Runs after everything that is ready in this tick has added its requests.
            self._flush_soon()

    def take_back(self, request: PendingRequest) -> None:
        """Take this client off a prompt that nobody here waits for any more."""
        self.discard([request])
        if len(self._unsent) > 2 * len(self._requests) + _FEW:
            # Of those that wait here most have been given up.
            self._unsent = deque(one for one in self._unsent if one.waiters)
        if request.stage in _SENT:
            self._left.add(request.prompt.digest)
            if not self._leaving:
                self._leaving = True
                self._tasks.loop.call_soon(self._flush_left)

    def retry_soon(self) -> None:
        """Send what could not be sent, until the server takes it."""
        if not self._retrying:
            self._retrying = True
            self._tasks.spawn(self._retry())

    async def submit(self, requests: Sequence[PendingRequest], *, again: bool = False) -> None:
        """Register for prompts and queue those that nobody computes yet.

        Args:
            requests: who asks.
            again: they have waited long; make sure that their jobs still exist.

        Raises:
            ServerError or an error of redis-py: the server cannot be used.
        """
        connections = self._connections
        # Whether the row of a touch is there the script can tell, if it sees rows.
        if not connections.model.rows.is_seen:
            touched = [one.prompt.digest for one in requests if one.is_touch and not one.damaged]
            await connections.settle(await connections.model.rows.there(touched))
        stored = await self._submit_parts(requests, again)
        connections.trouble = None
        if stored:
            await connections.settle(stored)
            damaged = [request for request in requests if request.damaged and self._requests.is_open(request)]
            if damaged:
                await self.submit(damaged)
            gone = [one for digest in stored if (one := self._requests.get(digest)) and not one.damaged]
            if gone and not again:
                # Evicted since: a row is a pure function, so ask for it once more.
                await self.submit(gone, again=True)

    async def _submit_parts(self, requests: Sequence[PendingRequest], again: bool) -> list[bytes]:
        """Returns the digests whose rows have appeared in the cache meanwhile."""
        stored: list[bytes] = []
        is_full = False
        for part in _parts(requests):
            left = [request for request in part if request.waiters]
            if is_full and self._waits_when_full:
                # They would be sent to be refused, and so whenever they are tried again.
                for request in left:
                    request.stage = Stage.REFUSED
            elif left:
                if await self._connections.upload(left):
                    left = [request for request in left if request.waiters]
                found, is_full = await self._submit_part(left, again)
                stored += found
        return stored

    def discard(self, requests: Sequence[PendingRequest]) -> None:
        """Remove what nobody needs once these requests have ended: private answers, and the weights of trie jobs."""
        if keys := self._connections.spent(requests):
            if not self._spent:
                # For all that end in this tick.
                self._tasks.loop.call_soon(self._flush_spent)
            self._spent += keys

    def _flush_spent(self) -> None:
        if self._spent:
            self._tasks.spawn(self._unlink())

    async def _unlink(self) -> None:
        keys, self._spent = self._spent, []
        try:
            await self._connections.unlink(keys)
        except TROUBLE as error:
            self._connections.note(error)  # They expire.

    async def cancel_all(self) -> None:
        """Take this client off everything that it waits for, and its weights off the server: the session ends."""
        self.discard(list(self._requests))
        await self._unlink()
        waiting = [request.prompt.digest for request in self._requests if request.stage in _SENT]
        # On the line of the submissions, so behind any that is under way.
        await self._cancel([*waiting, *self._left])

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._tasks.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what has been added, as far as the server is to have so much of one client at once.

        The rest waits here, where it costs the server nothing, until something that the server has comes back.
        """
        self._flushing = False
        batch = self._requests.send(self._unsent)
        self._requests.on_end = self._flush_soon if self._unsent else None
        if batch:
            self._tasks.spawn(self._send(batch))

    async def _send(self, requests: Sequence[PendingRequest]) -> None:
        """Look for rows in the cache; ask workers for the rest."""
        sending = Stage.SENDING
        for request in requests:
            request.stage = sending
        # A look finds no others: rows that only need to be there, answers that nobody else can have asked for.
        sought = [request for request in requests if not (request.damaged or request.is_touch or request.is_private)]
        try:
            if sought and self._is_worth_a_look(len(sought)):
                await self._connections.fetch([request.prompt.digest for request in sought])
            await self.submit([request for request in requests if request.waiters])
            self._learn(sought)
        except TROUBLE as error:
            self._connections.note(error)
            for request in requests:
                if request.stage is Stage.SENDING:
                    request.stage = Stage.UNSENT
            self.retry_soon()

    def _is_worth_a_look(self, count: int) -> bool:
        """Whether to look for rows before asking for them, although the script sees those that exist too."""
        # A look costs less than the call of the script that it spares, or than the part of one for many prompts.
        least = _HARDLY_ANY if count > _FEW else _LIKELY
        return self._hit_rate > least or not self._connections.model.rows.is_seen

    def _learn(self, requests: Sequence[PendingRequest]) -> None:
        # Who was cancelled or refused has met neither the cache nor a job.
        known = [one.origin for one in requests if one.origin is not None and one.stage is not Stage.REFUSED]
        if known:
            self._hit_rate += (known.count("cache_hits") / len(known) - self._hit_rate) / _HIT_RATE_WINDOW

    async def _submit_part(self, requests: Sequence[PendingRequest], again: bool) -> tuple[list[bytes], bool]:
        """Returns the digests whose rows have appeared in the cache meanwhile, and whether the queue is full."""
        if not requests:
            return [], False
        connections, model = self._connections, self._connections.model
        is_damaged = any(request.damaged for request in requests)
        look = "" if is_damaged else "rows" if model.rows.is_seen else "marks"
        keys, prefix = [model.keys.jobs, model.reply], model.keys.waiting
        keys += [prefix + request.prompt.digest for request in requests]
        if look == "rows":
            keys += model.rows.keys_of(request.prompt.digest for request in requests)
        patience_ms = self._patience_ms(requests)
        args: list[bytes | str | int] = [model.info.queue_limit, patience_ms, look, int(again)]
        prompts = [(request.prompt, request.damaged) for request in requests]
        fingerprint = model.fingerprint
        args += pack_jobs(Job(one.ids, one.adapter, fingerprint, damaged, one.query) for one, damaged in prompts)
        outcome = await scripts.SUBMIT.on(connections.line.call, keys, args)
        if not isinstance(outcome, bytes) or len(outcome.removesuffix(_IN_THE_WAY)) != len(requests):
            raise connections.line.distrust(outcome)
        is_in_the_way, outcome = outcome.endswith(_IN_THE_WAY), outcome.removesuffix(_IN_THE_WAY)
        is_full = b"F" in outcome
        if is_full and self._waits_when_full:
            self.retry_soon()
        stored, abandoned, lost = [], [], []
        now = self._tasks.loop.time()
        waiting = Stage.WAITING
        for request, code in zip(requests, outcome.decode("ascii", "replace"), strict=True):
            digest = request.prompt.digest
            request.since = now
            request.stage = waiting
            if is_damaged:
                request.overwrites += request.damaged
            if code == "Q":
                request.origin = "computed"
                if again:  # Its job has ended, and what came of it is not there.
                    lost.append(request)
            elif code == "J" and request.origin != "computed":
                request.origin = "joined"
            elif code == "R":
                request.origin = request.origin or "cache_hits"
                if self._requests.get(digest) is not None:
                    stored.append(digest)
            elif code == "F":
                request.stage = Stage.REFUSED
                if not self._waits_when_full:
                    self._requests.land(request, QueueFull(connections.full()))
            if not request.waiters and code in "QJ" and self._requests.get(digest) is None:
                abandoned.append(digest)
        await self._cancel(abandoned)
        if connections.note_lost(lost):
            self._tasks.spawn(connections.look_at_memory())
        if is_in_the_way:
            self._tasks.spawn(self._clear_the_way())
        return stored, is_full

    async def _clear_the_way(self) -> None:
        """Have what another client has in the stream go behind these prompts, a part of it in each call."""
        try:
            while await scripts.REFILL.on(self._connections.line.call, [self._connections.model.keys.jobs], []):
                pass
        except TROUBLE as error:
            self._connections.note(error)  # Workers go on with it.

    def _patience_ms(self, requests: Sequence[PendingRequest]) -> int:
        """For how long the server is to believe that these are waited for.

        Until the last deadline among them, and some more: who waits after that says so again every lease.
        """
        patience = max([request.until for request in requests]) - self._tasks.loop.time()
        patience += max(2 * self._connections.model.info.lease_s, _LEAST_PATIENCE_S)
        return int(1000 * min(max(patience, _LEAST_PATIENCE_S), _MOST_PATIENCE_S))

    async def _retry(self) -> None:
        waits = delays()
        try:
            while pending := self._pending():
                await asyncio.sleep(next(waits))
                before = len(pending)
                await self._send(self._pending())
                if len(self._pending()) < before:
                    waits = delays()  # The queue moves: keep it full.
        finally:
            self._retrying = False

    def _pending(self) -> list[PendingRequest]:
        return [one for one in self._requests if one.is_away and one.stage in (Stage.UNSENT, Stage.REFUSED)]

    def _flush_left(self) -> None:
        self._tasks.spawn(self._cancel_left())

    async def _cancel_left(self) -> None:
        self._leaving = False
        digests = set(self._left)
        try:
            await self._cancel([digest for digest in digests if self._requests.get(digest) is None])
            # Only now: when the session ends before, what is left here is cancelled then.
            self._left -= digests
        except TROUBLE as error:
            self._connections.note(error)  # What stays registered expires.

    async def _cancel(self, digests: Sequence[bytes]) -> None:
        model = self._connections.model
        for at in range(0, len(digests), scripts.MOST_AT_ONCE):
            part = digests[at : at + scripts.MOST_AT_ONCE]
            keys = [model.keys.jobs, model.reply, *(model.keys.waiting + digest for digest in part)]
            await scripts.CANCEL.on(self._connections.line.call, keys, [GROUP])


def _parts(requests: Sequence[PendingRequest]) -> Iterator[Sequence[PendingRequest]]:
    """Flights in portions for one call of a script: no more of them, and of their ids, than it handles in a few ms; few
    where weights go along, so that workers can begin."""
    begin = weights = ids = 0
    for at, request in enumerate(requests):
        own_weights = 0 if request.weights is None else request.weights.values.nbytes
        own_ids = len(request.prompt.ids)
        is_much = weights + own_weights > _UPLOAD_BYTES or ids + own_ids > _MOST_IDS_BYTES
        if at > begin and (is_much or at - begin == scripts.MOST_AT_ONCE):
            yield requests[begin:at]
            begin, weights, ids = at, 0, 0
        weights, ids = weights + own_weights, ids + own_ids
    if begin < len(requests):
        yield requests[begin:]

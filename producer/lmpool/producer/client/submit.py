"""Asking: rows of the pool's cache, jobs for the rest, with their homes; and cancelling what nobody waits for."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np
from redis.exceptions import ResponseError

from lmpool.aio import delays
from lmpool.broker import scripts
from lmpool.errors import QueueFull
from lmpool.producer.client.connections import TROUBLE, Connections, Tasks
from lmpool.producer.client.requests import PendingRequest, PendingRequests, Stage
from lmpool.protocol.job import Job, pack_jobs
from lmpool.protocol.keys import GROUP
from lmpool.protocol.prompt import Prompt
from lmpool.rows.cache import Found

_FEW = 8
# Requests that are sent while rows still come that others wait for.
_ENOUGH = 64
_SENDING = (Stage.SENDING, Stage.SENDING_AGAIN)
_SENT = (*_SENDING, Stage.WAITING)
_HARDLY_ANY, _LIKELY = 0.02, 0.5
_HIT_RATE_WINDOW = 8
_MIN_PATIENCE_S, _MAX_PATIENCE_S = 5.0, 3600.0
_UPLOAD_BYTES = 4 * 1024 * 1024
_MAX_IDS_BYTES = 512 * 1024
_IN_THE_WAY = b"+"
_NO_ROW = np.empty(0, np.float32)
# Of what is known about homes: prompts, most blocks that are looked for, and tokens, of 4 bytes each.
_MAX_HOMES = 65_536
_MAX_BLOCKS = 8
_BLOCK_BYTES = 16 * 4
_END_BYTES = 64 * 4
_FEWER_BYTES = (4, 0, 8, 12, 16)
_NO_HOME = b"", 0
_SAME = b"="


class CacheClient:
    """Uses the pool's cache for the requests of one session.

    Attributes:
        is_looking: `find_here` is under way.
    """

    def __init__(self, connections: Connections, requests: PendingRequests, tasks: Tasks) -> None:
        self._connections = connections
        self._requests = requests
        self._tasks = tasks
        self._disposable: list[bytes] = []
        self.is_looking = False

    async def fetch(self, digests: Sequence[bytes]) -> None:
        """Look for rows in the cache and give those that are there to the requests.

        Raises:
            ServerError: the server cannot be used.
        """
        lengths, wanted = {}, []
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and not request.warm:
                wanted.append(digest)
                if request.prompt.length:
                    lengths[digest] = request.prompt.length
        if not wanted:
            return
        rows = self._connections.model.rows

        def resolve(digests: Sequence[bytes], results: Sequence[Found]) -> None:
            # Rows from the namespace of other weights answer nothing after the change.
            if self._connections.model.rows is rows:
                self._requests.resolve_found(digests, results)

        self._requests.counters.fetched_bytes += await rows.get_many(wanted, resolve, lengths)
        self._connections.trouble = None

    async def find_here(self, requests: Sequence[PendingRequest]) -> set[PendingRequest]:
        """Give the requests the rows that are in shared memory; returns those that had one."""
        segments, found = self._connections.segments, set[PendingRequest]()
        if segments.has_any:
            find = partial(segments.find, vocab_size=self._connections.model.info.vocab_size)
            wanted = {request.prompt.digest: request for request in requests}
            self.is_looking = True
            try:
                async for digests in self._requests.resolve_by(list(wanted), find):
                    found.update(map(wanted.__getitem__, digests))
            finally:
                self.is_looking = False
        return found

    async def fetch_stored(self, digests: Sequence[bytes]) -> None:
        """As `fetch`, for rows that the server says are there: requests that only warm the cache end at once.

        Raises:
            ServerError: the server cannot be used.
        """
        for digest in digests:
            request = self._requests.get(digest)
            if request is not None and request.warm:
                self._requests.resolve(request, _NO_ROW)
        await self.fetch(digests)

    async def store_weights(self, requests: Sequence[PendingRequest]) -> bool:
        """Store the weights of those requests that have some and are still under way; returns whether there were any.

        Raises:
            ServerError: the server cannot be used, or refuses.
        """
        weights = [request.weights for request in requests if request.weights is not None and request.waiters]
        if not weights:
            return False
        refused = await self._connections.model.rows.put_weights(weights)
        if refused:
            raise self._connections.explain(ResponseError(next(iter(refused.values()))))
        for request in requests:
            request.weights = None
        return True

    def discard(self, requests: Sequence[PendingRequest]) -> None:
        """Remove what nobody needs once these requests have ended: private answers, and the weights of trie jobs."""
        keys: list[bytes] = []
        for request in requests:
            if request.is_private:
                keys += self._connections.model.rows.keys_of([request.prompt.digest])
                request.is_private = False
            if request.weights_name:
                keys += self._connections.model.rows.keys_of_weights([request.weights_name])
                request.weights_name = b""
        if keys and not self._disposable:
            # For all that end in this tick.
            self._tasks.loop.call_soon(self._flush)
        self._disposable += keys

    def _flush(self) -> None:
        if self._disposable:
            self._tasks.spawn(self.drop_discarded())

    async def drop_discarded(self) -> None:
        """Remove now what was discarded in this tick of the event loop."""
        keys, self._disposable = self._disposable, []
        if keys:
            try:
                await self._connections.model.rows.drop(keys)
            except TROUBLE as error:
                self._connections.note(error)  # They expire.


class Homes:
    """Which worker has computed which prompts: the home of what continues them, whose beginning it may still have.

    Prompts are known by their lengths and the tokens at both ends. Two that are alike in these share a home, which
    costs time at most: where a prompt is computed does not change its row.

    Attributes:
        has_choice: several workers live; with one alone nothing is remembered.
        workers: the workers that are known.
    """

    def __init__(self) -> None:
        # Ordered: of a dict the first takes the longer to find, the more have been removed before it.
        self._workers: OrderedDict[int, bytes] = OrderedDict()
        self._lengths: set[int] = set()
        # How prompts of more than a block that are known begin: most that are unknown begin otherwise.
        self._heads: OrderedDict[int, None] = OrderedDict()
        self.has_choice = False
        self.workers: set[bytes] = set()

    def note(self, prompts: Sequence[Prompt], worker: bytes) -> None:
        """Remember that a worker has computed prompts."""
        self.workers.add(worker)
        if self.has_choice:
            for prompt in prompts:
                self._note(prompt, worker)

    def _note(self, prompt: Prompt, worker: bytes) -> None:
        known, ids = self._workers, prompt.ids
        size = len(ids)
        for end in {size, size // _BLOCK_BYTES * _BLOCK_BYTES} - {0}:
            key = _key(ids, end, prompt.adapter)
            known[key] = worker
            known.move_to_end(key)
            self._lengths.add(end)
        if size >= _BLOCK_BYTES:
            head = hash((ids[:_BLOCK_BYTES], prompt.adapter))
            self._heads[head] = None
            self._heads.move_to_end(head)
        if prompt.adapter:
            known[key := hash(prompt.adapter)] = worker
            known.move_to_end(key)
        for entries in (known, self._heads):
            while len(entries) > _MAX_HOMES:
                entries.popitem(last=False)

    def find(self, prompt: Prompt) -> tuple[bytes, int]:
        """The worker that has computed the longest known beginning of a prompt, or b"", and the key of that beginning.

        First its tokens less the last, for most prompts continue another by one, then all of them, less a few more, and
        then at the boundaries of blocks before these.
        """
        ids, lengths, adapter = prompt.ids, self._lengths, prompt.adapter
        size = len(ids)
        # The worker that has used the adapter last: most likely it still has the adapter loaded.
        no_home = (self._workers.get(hash(adapter), b""), hash(adapter)) if adapter else _NO_HOME
        if size >= _BLOCK_BYTES + _FEWER_BYTES[-1] and hash((ids[:_BLOCK_BYTES], adapter)) not in self._heads:
            return no_home
        for less in _FEWER_BYTES:
            end = size - less
            if end in lengths and (home := self._workers.get(key := _key(ids, end, adapter))):
                return home, key
        last = (size - _FEWER_BYTES[-1] - 1) // _BLOCK_BYTES * _BLOCK_BYTES
        for end in range(last, max(0, last - _MAX_BLOCKS * _BLOCK_BYTES), -_BLOCK_BYTES):
            if end in lengths and (home := self._workers.get(key := _key(ids, end, adapter))):
                return home, key
        return no_home

    def arrange(self, requests: Sequence[PendingRequest]) -> tuple[Sequence[PendingRequest], list[bytes]]:
        """The homes of several requests, as `submit.lua` wants them; none when none is known.

        Those that continue the same prompt come one after the other, the more the earlier, and all but the first with
        "=". When a worker has too many, they go to another one together, where that prompt is computed once then.
        """
        if not self._workers:
            return requests, []
        found = [self.find(request.prompt) for request in requests]
        if len(found) == 1:
            home, _ = found[0]
            return requests, [home] if home else []
        families = Counter(key for home, key in found if home)
        if not families:
            return requests, []
        pairs = zip(requests, found, strict=True)
        arranged = sorted(pairs, key=lambda pair: (pair[1][0], -families[pair[1][1]], pair[1][1]))
        homes, before = [], _NO_HOME
        for _, place in arranged:
            homes.append(_SAME if place == before and place[0] else place[0])
            before = place
        return [request for request, _ in arranged], homes

    def forget(self, workers: Collection[bytes]) -> None:
        """Forget workers that are gone."""
        if workers:
            self.workers.difference_update(workers)
            self._workers = OrderedDict(known for known in self._workers.items() if known[1] not in workers)

    def clear(self) -> None:
        """Forget all: the model has changed."""
        self._workers.clear()
        self._lengths.clear()
        self._heads.clear()
        self.workers.clear()


def _key(ids: bytes, end: int, adapter: str) -> int:
    if end <= _END_BYTES:
        return hash((ids[:end], adapter))
    return hash((ids[:_END_BYTES], ids[end - _END_BYTES : end], end, adapter))


class Submitter:
    """Sends the requests of one session, and cancels them.

    Args:
        connections: the connections.
        requests: all requests of the session.
        cache: uses the pool's cache for them.
        tasks: where background work runs.
        homes: which workers their prompts are best computed by.
        waits_when_full: whether requests that the queue has no room for wait for it, or end.

    Attributes:
        is_full: whether the queue had no room for a prompt when prompts were sent last.
    """

    def __init__(
        self,
        connections: Connections,
        requests: PendingRequests,
        cache: CacheClient,
        tasks: Tasks,
        homes: Homes,
        *,
        waits_when_full: bool = True,
    ) -> None:
        self._connections = connections
        self._requests = requests
        self._cache = cache
        self._tasks = tasks
        self._homes = homes
        self._waits_when_full = waits_when_full
        self._unsent: deque[PendingRequest] = deque()
        self._flushing = False
        self._cancelled: set[bytes] = set()
        self._cancelling = False
        self._retrying = self.is_full = False
        self._hit_rate = _LIKELY

    @property
    def is_retrying(self) -> bool:
        """Whether there are requests that could not be sent."""
        return self._retrying

    def add(self, request: PendingRequest) -> None:
        """Send a new request, together with all that are added in this tick of the event loop."""
        self._unsent.append(request)
        if not self._flushing:
            self._flush_soon()

    def cancel(self, request: PendingRequest) -> None:
        """Take this client off a prompt that nobody here waits for any more."""
        self._cache.discard([request])
        if len(self._unsent) > 2 * len(self._requests) + _FEW:
            # Of those that wait here most have been given up.
            self._unsent = deque(request for request in self._unsent if request.waiters)
        if request.stage in _SENT:
            self._cancelled.add(request.prompt.digest)
            if not self._cancelling:
                self._cancelling = True
                self._tasks.loop.call_soon(lambda: self._tasks.spawn(self._send_cancelled()))

    def retry_soon(self) -> None:
        """Send what could not be sent, until the server takes it."""
        if not self._retrying:
            self._retrying = True
            self._tasks.spawn(self._retry())

    async def submit(self, requests: Sequence[PendingRequest], *, again: bool = False) -> None:
        """Register for prompts and queue those that nobody computes yet.

        Args:
            requests: which requests.
            again: they have waited long; make sure that their jobs still exist.

        Raises:
            ServerError or an error of redis-py: the server cannot be used.
        """
        connections, cache = self._connections, self._cache
        if whole := [request.prompt.digest for request in requests if request.whole and not again]:
            # Nobody needs what is there: a reference, most likely.
            await connections.model.rows.drop(connections.model.rows.keys_of(whole))
        # Whether a row is there that need not be sent the script can tell, if it sees rows.
        if not connections.model.rows.is_seen:
            warmed = [request.prompt.digest for request in requests if request.warm and not request.damaged]
            await cache.fetch_stored(await connections.model.rows.there(warmed))
        stored = await self._submit_portions(requests, again)
        connections.trouble = None
        if stored:
            await cache.fetch_stored(stored)
            damaged = [request for request in requests if request.damaged and self._requests.is_open(request)]
            if damaged:
                await self.submit(damaged)
            pending = (self._requests.get(digest) for digest in stored)
            gone = [request for request in pending if request is not None and not request.damaged]
            if gone and not again:
                # Evicted since: a row is a pure function, so ask for it once more.
                await self.submit(gone, again=True)

    async def fetch_announced(self, digests: Sequence[bytes]) -> None:
        """Fetch rows that workers have announced; those that are gone or damaged since are asked for again.

        Raises:
            ServerError or an error of redis-py: the server cannot be used.
        """
        announced = [request for digest in digests if (request := self._requests.get(digest)) is not None]
        await self._cache.fetch_stored(digests)
        # Not those that have begun meanwhile: they look for themselves.
        lost = [request for request in announced if request.in_flight and self._requests.is_open(request)]
        if lost:
            # Evicted or damaged since: a row is a pure function, so ask again.
            await self.submit(lost, again=True)

    async def cancel_all(self) -> None:
        """Take this client off everything that it waits for, and its weights off the server: the session ends."""
        self._cache.discard(list(self._requests))
        await self._cache.drop_discarded()
        waiting = [request.prompt.digest for request in self._requests if request.stage in _SENT]
        # On the connection of the submissions, so behind any that is under way.
        await self._cancel([*waiting, *self._cancelled])

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            # Runs after everything that is ready in this tick has added its requests, and said what they are.
            self._tasks.loop.call_soon(lambda: self._tasks.spawn(self._flush()))

    async def _flush(self) -> None:
        """Send what has been added, as far as the server is to have so much of one client at once."""
        # Who has got a row asks for the next: those of rows that come together are sent together, and nobody overtakes
        # those whose rows are being looked for.
        while self._cache.is_looking or (self._requests.is_resolving and len(self._unsent) < _ENOUGH):  # noqa: ASYNC110
            await asyncio.sleep(0)
        self._flushing = False
        batch = self._requests.admit(self._unsent)
        self._requests.on_end = self._flush_soon if self._unsent else None
        if batch:
            await self._send(batch)

    async def _send(self, requests: Sequence[PendingRequest]) -> None:
        """Look for rows in the cache; ask workers for the rest."""
        sending, again, refused = *_SENDING, Stage.REFUSED
        for request in requests:
            request.stage = again if request.stage is refused else sending
        # A look finds no others: rows that only need to be there, answers that nobody else can have asked for.
        sought = [request for request in requests if not (request.damaged or request.warm or request.is_private)]
        if sought and (found := await self._cache.find_here(sought)):
            sought = [request for request in sought if request not in found]
            requests = [request for request in requests if request not in found]
        try:
            if sought and self._is_worth_a_look(len(sought)):
                await self._cache.fetch([request.prompt.digest for request in sought])
            await self.submit([request for request in requests if request.waiters])
            self._learn(sought)
        except TROUBLE as error:
            self._connections.note(error)
            for request in requests:
                if request.stage in _SENDING:
                    request.stage = refused if request.stage is again else Stage.UNSENT
            self.retry_soon()

    def _is_worth_a_look(self, count: int) -> bool:
        """Whether to look for rows before asking for them, although the script sees those that exist too."""
        # A look costs less than the call of the script that it spares, or than the part of one for many prompts.
        least = _HARDLY_ANY if count > _FEW else _LIKELY
        return self._hit_rate > least or not self._connections.model.rows.is_seen

    def _learn(self, requests: Sequence[PendingRequest]) -> None:
        # Who was cancelled or refused has met neither the cache nor a job.
        answered = (request for request in requests if request.stage is not Stage.REFUSED)
        origins = [request.origin for request in answered if request.origin is not None]
        if origins:
            self._hit_rate += (origins.count("cache_hits") / len(origins) - self._hit_rate) / _HIT_RATE_WINDOW

    async def _submit_portions(self, requests: Sequence[PendingRequest], again: bool) -> list[bytes]:
        """Returns the digests whose rows have appeared in the cache meanwhile."""
        stored, is_full = list[bytes](), False
        # In portions of their own, for the script counts their tokens.
        continuations = [request for request in requests if request.prompt.generated]
        others = [request for request in requests if not request.prompt.generated] if continuations else requests
        for portion in (*_portions(others), *_portions(continuations)):
            waited_for = [request for request in portion if request.waiters]
            if is_full and self._waits_when_full:
                # They would be sent to be refused, and so whenever they are tried again.
                for request in waited_for:
                    request.stage = Stage.REFUSED
            elif waited_for:
                if await self._cache.store_weights(waited_for):
                    waited_for = [request for request in waited_for if request.waiters]
                stored += await self._submit_portion(waited_for, again)
                is_full = self.is_full
        return stored

    async def _submit_portion(self, requests: Sequence[PendingRequest], again: bool) -> list[bytes]:
        """Returns the digests whose rows have appeared in the cache meanwhile."""
        if not requests:
            return []
        connections = self._connections
        is_damaged = any(request.damaged for request in requests)
        requests, homes = self._homes.arrange(requests)
        outcome = await self._call_script(requests, homes, is_damaged, again)
        is_in_the_way, outcome = outcome.endswith(_IN_THE_WAY), outcome.removesuffix(_IN_THE_WAY)
        self.is_full = b"F" in outcome
        if self.is_full and self._waits_when_full:
            self.retry_soon()
        stored, abandoned, lost = [], [], []
        now, waiting = self._tasks.loop.time(), Stage.WAITING
        for request, code in zip(requests, outcome.decode("ascii", "replace"), strict=True):
            digest = request.prompt.digest
            request.since, request.stage = now, waiting
            if is_damaged:
                request.overwrites += request.damaged
            if code == "Q":
                request.origin = "computed"
                if again and not request.damaged:  # Its job has ended, and what came of it is not there.
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
                    self._requests.resolve(request, QueueFull(connections.describe_full_queue()))
            if not request.waiters and code in "QJ" and self._requests.get(digest) is None:
                abandoned.append(digest)
        await self._cancel(abandoned)
        if lost := [request for request in lost if self._requests.is_open(request)]:
            self._requests.count_lost(lost)
            self._tasks.spawn(connections.look_at_memory(len(self._requests)))
        if is_in_the_way:
            self._tasks.spawn(self._refill())
        return stored

    async def _call_script(
        self, requests: Sequence[PendingRequest], homes: Sequence[bytes], is_damaged: bool, again: bool
    ) -> bytes:
        """Returns a letter for each request, and `_IN_THE_WAY` when jobs of another client are before these."""
        connections, model = self._connections, self._connections.model
        is_unfit = is_damaged or any(request.whole for request in requests)
        look = "" if is_unfit else "rows" if model.rows.is_seen else "marks"
        keys, prefix = [model.keys.jobs, model.reply], model.keys.waiting
        keys += [prefix + request.prompt.digest for request in requests]
        if look == "rows":
            keys += model.rows.keys_of(request.prompt.digest for request in requests)
        patience_ms, fingerprint, host = self._patience_ms(requests), model.fingerprint, model.host
        args: list[bytes | str | int] = [model.info.queue_limit, patience_ms, look, int(again), len(requests)]
        jobs = pack_jobs(
            Job(
                request.prompt.ids,
                request.prompt.adapter,
                fingerprint,
                request.damaged,
                request.prompt.query,
                # Where its row was not to be read from shared memory it is to come itself.
                b"" if request.whole or self._requests.times_lost(request) else host,
            )
            for request in requests
        )
        args += jobs if connections.traces is None else connections.traces.mark(requests, jobs)
        generated = [request.prompt.generated for request in requests if request.prompt.generated]
        args += [*(homes or [b""] * len(requests)), *generated] if generated else homes
        outcome = await scripts.SUBMIT.on(connections.commands.call, keys, args)
        if not isinstance(outcome, bytes) or len(outcome.removesuffix(_IN_THE_WAY)) != len(requests):
            raise connections.commands.distrust(outcome)
        return outcome

    async def _refill(self) -> None:
        """Have what another client has in the stream go behind these prompts, a part of it in each call."""
        try:
            while await scripts.REFILL.on(self._connections.commands.call, [self._connections.model.keys.jobs], []):
                pass
        except TROUBLE as error:
            self._connections.note(error)  # Workers go on with it.

    def _patience_ms(self, requests: Sequence[PendingRequest]) -> int:
        """For how long the server is to believe that these are waited for.

        Until the last deadline among them, and some more: who waits after that says so again every lease.
        """
        patience = max([request.until for request in requests]) - self._tasks.loop.time()
        patience += max(2 * self._connections.model.info.lease_s, _MIN_PATIENCE_S)
        return int(1000 * min(max(patience, _MIN_PATIENCE_S), _MAX_PATIENCE_S))

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
        return [
            request
            for request in self._requests
            if request.in_flight and request.stage in (Stage.UNSENT, Stage.REFUSED)
        ]

    async def _send_cancelled(self) -> None:
        self._cancelling = False
        digests = set(self._cancelled)
        try:
            await self._cancel([digest for digest in digests if self._requests.get(digest) is None])
            # Only now: when the session ends before, what is left here is cancelled then.
            self._cancelled -= digests
        except TROUBLE as error:
            self._connections.note(error)  # What stays registered expires.

    async def _cancel(self, digests: Sequence[bytes]) -> None:
        model = self._connections.model
        for at in range(0, len(digests), scripts.MAX_AT_ONCE):
            portion = digests[at : at + scripts.MAX_AT_ONCE]
            keys = [model.keys.jobs, model.reply, *(model.keys.waiting + digest for digest in portion)]
            await scripts.CANCEL.on(self._connections.commands.call, keys, [GROUP])


def _portions(requests: Sequence[PendingRequest]) -> Iterator[Sequence[PendingRequest]]:
    """Requests in portions that a script handles in a few ms; few with weights, so that workers can begin."""
    begin = weights_bytes = ids_bytes = 0
    for at, request in enumerate(requests):
        more_weights = 0 if request.weights is None else request.weights.values.nbytes
        more_ids = len(request.prompt.ids)
        is_much = weights_bytes + more_weights > _UPLOAD_BYTES or ids_bytes + more_ids > _MAX_IDS_BYTES
        if at > begin and (is_much or at - begin == scripts.MAX_AT_ONCE):
            yield requests[begin:at]
            begin, weights_bytes, ids_bytes = at, 0, 0
        weights_bytes, ids_bytes = weights_bytes + more_weights, ids_bytes + more_ids
    if begin < len(requests):
        yield requests[begin:]
